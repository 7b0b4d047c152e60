"""Stops: what ends a text by what it says. Stop strings, regular expressions, or both.

Tokens end where they like, stops too: a stop may begin inside one token and end inside a later one. Feeding bytes finds
the first stop however the tokens fall, and says how many of the bytes seen so far could still become the beginning of a
stop and must not be shown yet.

Strings are one automaton over bytes (Aho and Corasick, 1975). Of an expression every place is tried as a beginning, in
one pass:

    text      a b 1 2          stop_regex = [a-z] ?[0-9]
    threads   a                 one per state of the automaton that is alive, with the earliest place that leads there
                b
                b 1             accepted: the text ends here, and is kept up to where this thread began

These automata are over characters and built ahead, with few states: what is refused is refused before a text begins,
and a character costs at most one step per state.
"""

from __future__ import annotations

import codecs
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

from .algebra import nullable
from .boolean.character_automata import determinised
from .errors import ConstraintRefused, LimitExceeded, Limits
from .language import Dfa, Ranges
from .regex.parser import plain_regex


@dataclass(frozen=True, slots=True)
class StopMatch:
    """A found stop. `start` and `end` are byte offsets in all that was fed; `stop` is the string or expression."""

    start: int
    end: int
    stop: str


class StopMatcher(Protocol):
    """The cursor of one stream. Feed bytes until a match; to go on after one, set `match` to None."""

    match: StopMatch | None

    @property
    def pending(self) -> int:
        """Counts the last bytes that could be the beginning of a stop."""

    def feed(self, data: bytes) -> StopMatch | None:
        """The first stop that ends in `data`, or None; what follows it is not looked at. The longest of those that
        end together."""


class Stops(Protocol):
    """Compiled stops, shared by every request with the same stops."""

    def matcher(self) -> StopMatcher: ...


def stops_of(strings: Iterable[str], patterns: Iterable[str]) -> Stops | None:
    """Compiles stops; None when there is nothing to look for.

    Raises:
        ConstraintRefused: an expression that cannot be used; the message names it.
    """
    stops, expressions = tuple(strings), tuple(patterns)
    if stops and expressions:
        return _AnyStops(StopAutomaton(stops), StopPatterns(expressions))
    if expressions:
        return StopPatterns(expressions)
    return StopAutomaton(stops) if stops else None


class _AnyStops:
    """Strings and expressions: whichever ends first."""

    def __init__(self, strings: StopAutomaton, patterns: StopPatterns) -> None:
        self._strings = strings
        self._patterns = patterns

    def matcher(self) -> StopMatcher:
        return _AnyMatcher(self._strings.matcher(), self._patterns.matcher())


class _AnyMatcher:
    """Feeds both byte by byte, so that neither has seen more than the other when one of them matches."""

    def __init__(self, strings: StringMatcher, patterns: PatternMatcher) -> None:
        self._matchers: tuple[StopMatcher, ...] = (strings, patterns)
        self.match: StopMatch | None = None

    @property
    def pending(self) -> int:
        return 0 if self.match else max(matcher.pending for matcher in self._matchers)

    def feed(self, data: bytes) -> StopMatch | None:
        assert self.match is None, "the stream has ended"
        for index in range(len(data)):
            found = [match for each in self._matchers if (match := each.feed(data[index : index + 1])) is not None]
            if found:
                for matcher in self._matchers:
                    matcher.match = None
                self.match = min(found, key=lambda match: match.start)
                return self.match
        return None


class StopAutomaton:
    """Compiled stop strings; immutable, shared by every request with the same stops.

    state = longest suffix of the input that is a prefix of some stop
    goto[state][byte] → state        fail links resolved on the way, cached in goto
    """

    __slots__ = ("_depth", "_fail", "_goto", "_output", "stops")

    def __init__(self, stops: Iterable[str]) -> None:
        self.stops = tuple(stops)
        self._goto: list[dict[int, int]] = [{}]
        self._fail = [0]
        self._depth = [0]
        self._output: list[str | None] = [None]
        for stop in self.stops:
            self._add(stop)
        self._link()

    def _add(self, stop: str) -> None:
        state = 0
        for byte in stop.encode("utf-8"):
            following = self._goto[state].get(byte)
            if following is None:
                following = len(self._goto)
                self._goto.append({})
                self._fail.append(0)
                self._depth.append(self._depth[state] + 1)
                self._output.append(None)
                self._goto[state][byte] = following
            state = following
        self._output[state] = stop

    def _link(self) -> None:
        """Makes fail links breadth first; a state inherits the longest stop that is its suffix."""
        queue = deque(self._goto[0].values())
        while queue:
            state = queue.popleft()
            for byte, following in self._goto[state].items():
                fail = self._fail[state]
                while fail and byte not in self._goto[fail]:
                    fail = self._fail[fail]
                target = self._goto[fail].get(byte, 0)
                self._fail[following] = target if target != following else 0
                if self._output[following] is None:
                    self._output[following] = self._output[self._fail[following]]
                queue.append(following)

    def matcher(self) -> StringMatcher:
        return StringMatcher(self)


class StringMatcher:
    """The cursor of one stream. Feed bytes until a match; after it, feeding is an error."""

    __slots__ = ("_automaton", "_seen", "_state", "match")

    def __init__(self, automaton: StopAutomaton) -> None:
        self._automaton = automaton
        self._state = 0
        self._seen = 0
        self.match: StopMatch | None = None

    @property
    def pending(self) -> int:
        """Counts the last bytes that could be the beginning of a stop."""
        return 0 if self.match else self._automaton._depth[self._state]

    def feed(self, data: bytes) -> StopMatch | None:
        """Returns the first stop that ends in `data`, or None. Of stops that end together the longest wins."""
        assert self.match is None, "the stream has ended"
        automaton = self._automaton
        for offset, byte in enumerate(data):
            state = self._state
            while state and byte not in automaton._goto[state]:
                state = automaton._fail[state]
            self._state = automaton._goto[state].get(byte, 0)
            stop = automaton._output[self._state]
            if stop is not None:
                end = self._seen + offset + 1
                self.match = StopMatch(end - len(stop.encode("utf-8")), end, stop)
                self._seen = end
                return self.match
        self._seen += len(data)
        return None


STATES = 256  # of one automaton, and so threads of one text; real ones have ten
DEAD = -1


class StopPattern:
    """A compiled expression; immutable but for rows that are filled when they are first needed.

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
        """Returns the state after a character; DEAD where no match goes on with it."""
        return self._rows[state].after(code)


class _Row:
    """The transitions of one state: a table for ASCII, ranges for the others."""

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

    def matcher(self) -> PatternMatcher:
        return PatternMatcher(self)


def _compiled(pattern: str) -> StopPattern:
    try:
        return StopPattern(pattern)
    except ConstraintRefused as error:
        raise ConstraintRefused(f"stop_regex {pattern!r}: {error}", keyword=error.keyword) from None


class PatternMatcher:
    """The cursor of one stream of bytes, as `StringMatcher` is for strings.

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
        """Counts the last bytes that could be the beginning of a match; those of a character that is not whole yet are
        among them."""
        starts = [next(iter(threads.values())) for threads in self._threads if threads]
        return 0 if self.match else self._seen - min([self._start, *starts])

    def feed(self, data: bytes) -> StopMatch | None:
        """Returns the first match that ends in `data`, or None. What follows it in `data` is not looked at."""
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
        """(code point, byte after it) of each character that ends in `data`."""
        for index in range(len(data)):
            self._seen += 1
            text = self._decoder.decode(data[index : index + 1])
            for place, character in enumerate(text):
                # A byte that cannot go on with what came before ends two: the broken one, and its own.
                yield ord(character), self._seen if place == len(text) - 1 else self._seen - 1

    def _advance(self, pattern: StopPattern, threads: dict[int, int], code: int) -> int | None:
        """Advances all threads of one expression by one character → where the longest match that ends here began."""
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
