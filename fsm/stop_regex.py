"""Expressions that end a text, found while it grows: every place is tried as a beginning, in one pass.

    text      a b 1 2          stop_regex = [a-z] ?[0-9]
    threads   a                 one per state of the automaton that is alive, with the earliest place that leads there
                b
                b 1             accepted: the text ends here, and is kept up to where this thread began

Automata are over characters and built ahead, with few states: what is refused is refused before a text begins, and a
character costs at most one step per state.
"""

import codecs
from bisect import bisect_right
from collections.abc import Iterable, Iterator

from .algebra import nullable
from .boolean.character_dfa import determinised
from .errors import ConstraintRefused, LimitExceeded
from .language import Dfa, Ranges
from .limits import Limits
from .regex.parser import plain_regex
from .stop import StopMatch

STATES = 256  # of one automaton, and so threads of one text; real ones have ten
DEAD = -1


class StopPattern:
    """One expression, compiled; immutable but for rows that are filled when they are first needed.

    Raises:
        ConstraintRefused: not an expression, or one that matches the empty text, or nothing.
        Unsupported: it looks at what stands around its match: anchors, lookahead, and what no expression may use.
        LimitExceeded: it takes more than `STATES` states.
    """

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern
        language = plain_regex(pattern)
        if nullable(language):
            raise ConstraintRefused("it matches the empty text, which is everywhere; write one that takes a character")
        try:
            dfa = determinised(language, Limits(dfa_states=STATES))
        except LimitExceeded as error:
            raise LimitExceeded(
                f"it takes an automaton of more than {STATES} states; write smaller repeats", keyword=error.keyword
            ) from None
        if not isinstance(dfa, Dfa):
            raise ConstraintRefused("it matches nothing; write an expression that some text satisfies")
        self.accepting = dfa.accepting
        self._rows = [_Row(edges) for edges in dfa.edges]

    def step(self, state: int, code: int) -> int:
        """The state behind a character; DEAD where the expression goes on with none such."""
        return self._rows[state].after(code)


class _Row:
    """Where a state's characters lead: a table of ASCII, ranges for the others."""

    __slots__ = ("_ascii", "_begins", "_ranges")

    def __init__(self, edges: tuple[tuple[Ranges, int], ...]) -> None:
        self._ranges = sorted((first, last, target) for ranges, target in edges for first, last in ranges)
        self._begins = [first for first, _, _ in self._ranges]
        self._ascii = [self._found(code) for code in range(128)]

    def after(self, code: int) -> int:
        return self._ascii[code] if code < 128 else self._found(code)

    def _found(self, code: int) -> int:
        place = bisect_right(self._begins, code) - 1
        if place < 0 or code > self._ranges[place][1]:
            return DEAD
        return self._ranges[place][2]


class StopPatterns:
    """Compiled expressions, shared by every request with the same ones.

    Raises:
        ConstraintRefused: as StopPattern; the message names the expression.
    """

    def __init__(self, patterns: Iterable[str]) -> None:
        self.patterns = tuple(map(_compiled, patterns))

    def matcher(self) -> "PatternMatcher":
        return PatternMatcher(self)


def _compiled(pattern: str) -> StopPattern:
    try:
        return StopPattern(pattern)
    except ConstraintRefused as error:
        raise ConstraintRefused(f"stop_regex {pattern!r}: {error}", keyword=error.keyword) from None


class PatternMatcher:
    """The cursor of one stream of bytes, as `stop.StopMatcher` is for strings.

    Of matches the first that ends counts; of those that end together the longest. Bytes that are no UTF-8 count as
    U+FFFD, as they are shown.
    """

    __slots__ = ("_decoder", "_patterns", "_seen", "_start", "_threads", "match")

    def __init__(self, patterns: StopPatterns) -> None:
        self._patterns = patterns.patterns
        # Of each expression: live state → where its earliest thread began; the earliest come first.
        self._threads: list[dict[int, int]] = [{} for _ in self._patterns]
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._seen = 0  # bytes
        self._start = 0  # of the character that is coming
        self.match: StopMatch | None = None

    @property
    def pending(self) -> int:
        """How many of the last bytes could be the beginning of a match; those of a character that is not whole yet are
        among them."""
        starts = [next(iter(threads.values())) for threads in self._threads if threads]
        return 0 if self.match else self._seen - min([self._start, *starts])

    def feed(self, data: bytes) -> StopMatch | None:
        """The first match that ends in `data`, or None. What follows it in `data` is not looked at."""
        assert self.match is None, "the stream has ended"
        for code, end in self._characters(data):
            found = [
                StopMatch(start, end, pattern.pattern)
                for pattern, threads in zip(self._patterns, self._threads, strict=True)
                if (start := self._advance(pattern, threads, code)) is not None
            ]
            self._start = end
            if found:
                self._seen = end
                self.match = min(found, key=lambda match: match.start)
                return self.match
        return None

    def _characters(self, data: bytes) -> Iterator[tuple[int, int]]:
        """(code point, byte behind it) of each character that ends in `data`."""
        for index in range(len(data)):
            self._seen += 1
            text = self._decoder.decode(data[index : index + 1])
            for place, character in enumerate(text):
                # A byte that cannot go on with what came before ends two: the broken one, and its own.
                yield ord(character), self._seen if place == len(text) - 1 else self._seen - 1

    def _advance(self, pattern: StopPattern, threads: dict[int, int], code: int) -> int | None:
        """All threads of one expression by one character → where the longest match that ends here began."""
        matched: int | None = None
        before = [*threads.items(), (0, self._start)]
        threads.clear()
        for state, start in before:
            target = pattern.step(state, code)
            if target != DEAD and target not in threads:
                threads[target] = start
                if pattern.accepting[target] and matched is None:
                    matched = start
        return matched
