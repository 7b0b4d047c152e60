"""Regular expressions with assertions, as a tree, and the languages that they come to.

What holds no assertion is a Language already when it is parsed. An assertion looks at the text around it, so a tree is
read with what lies before it and what follows: `following(item, left, rest)` is every text that can come from here to
the end, when `rest` is every text that can come after the item.

    (?=X)   both of rest and X followed by anything            $ \\Z   what of rest is empty (or one line feed)
    (?!X)   rest without that                                 ^ \\A   rest where nothing lies before, else nothing
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import assert_never

from ..algebra import ANY_TEXT, admits_newline, concat, difference, intersection, nullable, repeat, size, union
from ..boolean.guarded import Guard, guarded_automaton, mark
from ..boolean.resolution import settled
from ..errors import Limits
from ..language import EMPTY_TEXT, NOTHING, Chars, CharSet, Concat, Language, Literal, Repeat, Union
from .classes import exceeded, unsupported


@dataclass(frozen=True, slots=True)
class BeginAnchor:
    """The anchors ^ and \\A; `lines`: after a line feed as well."""

    lines: bool
    position: int


class Ending(Enum):
    """The text that may follow an end anchor."""

    TEXT = "the end"  # \Z, and $ of ECMAScript
    LAST_LINE = "the end, or one line feed and the end"  # $ of Python
    LINE = "the end, or a line feed and anything"  # $ under the flag m


@dataclass(frozen=True, slots=True)
class EndAnchor:
    ending: Ending


@dataclass(frozen=True, slots=True)
class LookaheadAssertion:
    """A lookahead: (?=body) and, negative, (?!body)."""

    body: Item
    negative: bool
    position: int


@dataclass(frozen=True, slots=True)
class Concatenation:
    parts: tuple[Item, ...]


@dataclass(frozen=True, slots=True)
class Alternation:
    options: tuple[Item, ...]


@dataclass(frozen=True, slots=True)
class Repetition:
    body: Item
    least: int
    most: int | None
    position: int


Assertive = BeginAnchor | EndAnchor | LookaheadAssertion | Concatenation | Alternation | Repetition
Item = Language | Assertive


def concatenation(items: Iterable[Item]) -> Item:
    """Concatenates; neighbours without assertions become one language."""
    parts: list[Item] = []
    plain: list[Language] = []
    for item in items:
        for each in item.parts if isinstance(item, Concatenation) else (item,):
            if isinstance(each, Assertive):
                if plain:
                    parts.append(concat(plain))
                    plain = []
                parts.append(each)
            else:
                plain.append(each)
    if plain or not parts:
        parts.append(concat(plain))
    return parts[0] if len(parts) == 1 else Concatenation(tuple(parts))


def alternation(items: Iterable[Item]) -> Item:
    options = tuple(items)
    plain = [option for option in options if not isinstance(option, Assertive)]
    if len(plain) == len(options):
        return union(plain)
    return options[0] if len(options) == 1 else Alternation(options)


def repetition(body: Item, least: int, most: int | None, position: int) -> Item:
    """Makes repeats of repeats that leave no gap between their counts one."""
    if not isinstance(body, Assertive):
        return repeat(body, least, most)
    if most == 0:
        return EMPTY_TEXT
    if isinstance(body, Repetition) and body.least <= 1:
        together = None if most is None or body.most is None else most * body.most
        return Repetition(body.body, least * body.least, together, position)
    return Repetition(body, least, most, position)


def walk(item: Item) -> Iterable[Item]:
    yield item
    match item:
        case Concatenation(parts):
            inner = parts
        case Alternation(options):
            inner = options
        case LookaheadAssertion(body) | Repetition(body):
            inner = (body,)
        case _:
            inner = ()
    for each in inner:
        yield from walk(each)


def looks_back(item: Item) -> bool:
    return isinstance(item, Assertive) and any(isinstance(each, BeginAnchor) for each in walk(item))


def is_empty(item: Item) -> bool:
    """Tells whether an item takes no text."""
    return isinstance(item, BeginAnchor | EndAnchor | LookaheadAssertion)


def may_be_empty(item: Item) -> bool:
    match item:
        case BeginAnchor() | EndAnchor() | LookaheadAssertion():
            return True
        case Concatenation(parts):
            return all(map(may_be_empty, parts))
        case Alternation(options):
            return any(map(may_be_empty, options))
        case Repetition(body, least):
            return not least or may_be_empty(body)
        case _:
            return nullable(item)


def inside(item: Item) -> Language:
    """Returns the texts that the item matches where text lies before and after it: anchors match nothing."""
    match item:
        case BeginAnchor() | EndAnchor() | LookaheadAssertion():
            return NOTHING
        case Concatenation(parts):
            return concat(map(inside, parts))
        case Alternation(options):
            return union(map(inside, options))
        case Repetition(body, least, most):
            return repeat(inside(body), least, most)
        case _:
            return item


NEWLINE = Literal(b"\n")
_COPIES = 50_000  # nodes written again because alternatives look around; a tenth of a second of work


class Left(Enum):
    """The character before a place, as far as anchors ask for it."""

    NOTHING = "nothing"
    NEWLINE = "a line feed"
    OTHER = "another character"
    UNKNOWN = "some character"


def full_match(item: Item, limits: Limits) -> Language:
    """Returns the texts that the expression matches from end to end.

    Raises:
        Unsupported: an assertion where what it means depends on how often something around it was repeated.
        LimitExceeded: assertions in alternatives that multiply the expression.
    """
    lookaheads = (
        [each for each in walk(item) if isinstance(each, LookaheadAssertion)] if isinstance(item, Assertive) else []
    )
    if len(lookaheads) > limits.depth:  # they nest in each other in the language, though not in the expression
        raise exceeded(f"more than {limits.depth} lookaheads", lookaheads[limits.depth].position)
    return _AssertionReader(limits).following(item, Left.NOTHING, EMPTY_TEXT)


def search_match(item: Item, limits: Limits) -> Language:
    """Returns the texts in which the expression matches somewhere."""
    return full_match(concatenation((ANY_TEXT, item, ANY_TEXT)), limits)


class _AssertionReader:
    """Reads a tree to a language. Counts what is written more than once, so that nested alternatives end."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.copies = 0

    def copy(self, rest: Language, times: int) -> None:
        self.copies += (size(rest) + 1) * max(times, 0)
        if self.copies > _COPIES:
            raise exceeded("anchors and lookaheads within alternatives multiply this expression; write fewer", 0)

    def following(self, item: Item, left: Left, rest: Language) -> Language:
        match item:
            case BeginAnchor():
                return self.begin(item, left, rest)
            case EndAnchor(ending):
                return _ended(ending, rest)
            case LookaheadAssertion(body, negative, position):
                if negative and left is not Left.NOTHING and looks_back(body):
                    way_out = "write it at the beginning of the expression, or leave the anchor out"
                    raise unsupported("a negative lookahead with ^ inside, after other text,", way_out, position)
                seen = self.following(body, left, ANY_TEXT)
                return difference(rest, seen) if negative else intersection(rest, seen)
            case Concatenation(parts):
                return self.concatenation(parts, left, rest)
            case Alternation(options):
                plain = [option for option in options if not isinstance(option, Assertive)]
                others = [option for option in options if isinstance(option, Assertive)]
                self.copy(rest, len(others) - (not plain))
                return union((concat((union(plain), rest)), *(self.following(each, left, rest) for each in others)))
            case Repetition():
                return self.repetition(item, left, rest)
            case _:
                return concat((item, rest))

    def begin(self, item: BeginAnchor, left: Left, rest: Language) -> Language:
        if left is Left.NOTHING or (item.lines and left is Left.NEWLINE):
            return rest
        if item.lines and left is Left.UNKNOWN:
            way_out = "write \\n directly before it, or leave the flag m out"
            raise unsupported("^ of the flag m after text that may or may not end a line", way_out, item.position)
        return NOTHING

    def concatenation(self, parts: tuple[Item, ...], left: Left, rest: Language) -> Language:
        """Reads from the last part to the first, each for what may lie before it.

        Where a later part asks whether anything lies before it, a first part that may be empty is read twice: as
        empty, with nothing before what follows, and as it is, with a character before what follows.
        """
        asked = [False]  # does anything from this part on look back?
        for part in reversed(parts):
            asked.append(asked[-1] or looks_back(part))
        asked.reverse()
        lefts = [[left]]
        for at, part in enumerate(parts):
            lefts.append(_lefts_after(part, lefts[at]) if asked[at + 1] else [Left.UNKNOWN])
        rests = {Left.UNKNOWN: rest}
        for at in range(len(parts) - 1, -1, -1):
            part, after = parts[at], rests
            rests = {}
            for before in lefts[at]:
                beyond = _after(part, before) if asked[at + 1] else Left.UNKNOWN
                texts = self.following(part, before, after[beyond])
                if beyond is not before is Left.NOTHING and asked[at + 1] and may_be_empty(part):
                    self.copy(after[before], 1)
                    texts = union((self.empty(part, before, after[before]), texts))
                rests[before] = texts
        return rests[left]

    def empty(self, item: Item, left: Left, rest: Language) -> Language:
        """Returns the texts of `rest` before which the item matches the empty text."""
        match item:
            case BeginAnchor() | EndAnchor() | LookaheadAssertion():
                return self.following(item, left, rest)
            case Concatenation(parts):
                for part in reversed(parts):
                    rest = self.empty(part, left, rest)
                return rest
            case Alternation(options):
                self.copy(rest, len(options) - 1)
                return union(self.empty(option, left, rest) for option in options)
            case Repetition(body, least):
                return self.empty(body, left, rest) if least else rest
            case _:
                return rest if nullable(item) else NOTHING

    def repetition(self, item: Repetition, left: Left, rest: Language) -> Language:
        """Reads the first and the last rounds for themselves; between them anchors match nothing.

            first  ─▶  between ... between  ─▶  last ... last  ─▶  rest

        A round that is empty need not be counted when one round is enough, so those that are counted are not empty.
        """
        body, least, most = item.body, item.least, item.most
        if most != 1 and self.needs_guards(item):
            return self.guarded(item, rest)
        last_rounds = _last_rounds(body) if most is None else min(_last_rounds(body), most - 1)
        self.copy(rest, 1 + last_rounds)
        ends = [rest]  # [rounds after the first]
        for _ in range(last_rounds):
            ends.append(self.following(body, Left.OTHER, ends[-1]))
        between = repeat(
            inside(body), max(least - 1 - last_rounds, 0), None if most is None else most - 1 - last_rounds
        )
        after_first = [concat((between, ends[-1])), *ends[max(least - 1, 0) : -1]]
        texts = self.following(body, left, union(after_first))
        return texts if least else union((rest, texts))

    def needs_guards(self, item: Repetition) -> bool:
        """Tells whether a round between others can look ahead, or an empty one counts.

        Raises:
            Unsupported: it does, and ^ is repeated as well; or ^ of the flag m is.
        """
        inner = list(walk(item.body))
        begins = [each for each in inner if isinstance(each, BeginAnchor)]
        ahead = any(isinstance(each, LookaheadAssertion) or each == EndAnchor(Ending.LINE) for each in inner)
        guards = ahead or (item.least > 1 and may_be_empty(item.body))
        if begins and (guards or any(begin.lines for begin in begins)):
            way_out = "write it before the repeat, or the line feed where lines begin"
            raise unsupported("^ in a repeat", way_out, begins[0].position)
        return guards

    def guarded(self, item: Repetition, rest: Language) -> Language:
        """Builds an automaton for what looks ahead at a place that is passed any number of times."""
        guards: list[Guard] = []
        marked = self.marked(item, guards)
        return guarded_automaton(Concat((marked, settled(rest, self.limits))), guards, self.limits)

    def marked(self, item: Item, guards: list[Guard]) -> Language:
        """Returns the item with marks where it looks ahead."""
        match item:
            case LookaheadAssertion(body, negative):
                seen = self.following(body, Left.OTHER, ANY_TEXT)
                guards.append(Guard(settled(seen, self.limits), negative))
                return mark(len(guards) - 1)
            case EndAnchor(ending):
                lines: dict[Ending, Language] = {
                    Ending.TEXT: NOTHING,
                    Ending.LAST_LINE: NEWLINE,
                    Ending.LINE: concat((NEWLINE, ANY_TEXT)),
                }
                guards.append(Guard(union((EMPTY_TEXT, lines[ending])), negative=False))
                return mark(len(guards) - 1)
            case Concatenation(parts):
                return Concat(tuple(self.marked(part, guards) for part in parts))
            case Alternation(options):
                return Union(tuple(self.marked(option, guards) for option in options))
            case Repetition(body, least, most):
                return Repeat(self.marked(body, guards), least, most)
            case BeginAnchor():
                raise AssertionError("^ with a guard was refused")
            case _:
                return item


def _last_rounds(body: Item) -> int:
    """Counts the rounds of a repeat that may hold an end anchor: the last one, or the two before the end of the text.

    Two, because the $ of Python holds before a last line feed, which may be a round of its own.
    """
    endings = {each.ending for each in walk(body) if isinstance(each, EndAnchor)}
    if Ending.LAST_LINE in endings:
        return 2
    return 1 if endings else 0


def _ended(ending: Ending, rest: Language) -> Language:
    options: list[Language] = [EMPTY_TEXT] if nullable(rest) else []
    match ending:
        case Ending.TEXT:
            pass
        case Ending.LAST_LINE:
            options += [NEWLINE] if admits_newline(rest) else []
        case Ending.LINE:
            options.append(intersection(rest, concat((NEWLINE, ANY_TEXT))))
        case _:
            assert_never(ending)
    return union(options)


def _after(item: Item, left: Left) -> Left:
    """Tells what lies before the place after the item, when the item is not empty (or nothing can lie before it)."""
    if is_empty(item):
        return left
    if isinstance(item, Assertive):
        return Left.UNKNOWN
    newline, other = _last(item)
    if left is not Left.NOTHING and nullable(item):
        newline |= left in (Left.NEWLINE, Left.UNKNOWN)
        other |= left in (Left.OTHER, Left.UNKNOWN)
    if newline and other:
        return Left.UNKNOWN
    return Left.NEWLINE if newline else Left.OTHER


def _lefts_after(item: Item, lefts: list[Left]) -> list[Left]:
    """Lists all that may lie before the place after the item."""
    after = [_after(item, left) for left in lefts]
    if Left.NOTHING in lefts and may_be_empty(item):
        after.append(Left.NOTHING)
    return list(dict.fromkeys(after))


def _last(node: Language) -> tuple[bool, bool]:
    """Tells whether a text of the language can end in a line feed, and in another character."""
    match node:
        case Literal(data):
            return data.endswith(b"\n"), bool(data) and not data.endswith(b"\n")
        case Chars(ranges):
            return 0x0A in CharSet(ranges), ranges != ((0x0A, 0x0A),)
        case Concat(parts):
            newline = other = False
            for part in reversed(parts):
                last = _last(part)
                newline, other = newline or last[0], other or last[1]
                if not nullable(part):
                    break
            return newline, other
        case Union(options):
            lasts = [_last(option) for option in options]
            return any(last[0] for last in lasts), any(last[1] for last in lasts)
        case Repeat(body):
            return _last(body)
        case _:
            return True, True
