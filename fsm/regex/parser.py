"""Parses regular expressions to languages: the syntax of Python's `re`, or what JSON Schema uses of ECMAScript's.

Nothing is matched by backtracking. Greedy and lazy quantifiers are the same language, groups capture nothing.
A full match is meant (`parse_regex`, as `re.fullmatch`) or a match somewhere in the text (`search_regex`).
"""

import string
from dataclasses import dataclass, replace
from enum import Enum

from ..algebra import characters
from ..boolean.resolution import lengths
from ..errors import LimitExceeded, Limits
from ..language import ANY, CharSet, Language
from .assertions import (
    Assertive,
    BeginAnchor,
    EndAnchor,
    Ending,
    Item,
    LookaheadAssertion,
    alternation,
    concatenation,
    full_match,
    repetition,
    search_match,
)
from .classes import (
    ECMA_LINE_ENDS,
    LINE_END,
    Dialect,
    Flags,
    PatternReader,
    bracketed,
    character_escape,
    class_escape,
    exceeded,
    folded,
    refused,
    unsupported,
)


class GroupKind(Enum):
    PLAIN = "(...)"
    AHEAD = "(?=...)"
    NOT_AHEAD = "(?!...)"
    FLAGS = "(?i)"


@dataclass(frozen=True, slots=True)
class GroupOpening:
    """The opening of a group. `flags` hold inside it; for FLAGS, which has no inside, from here on."""

    kind: GroupKind
    flags: Flags
    name: str = ""


_FIELDS = {"i": "ignore_case", "m": "lines", "s": "dot_all", "x": "verbose", "a": "ascii"}
_LOOKBEHIND = "an automaton reads forward: write what comes before as part of the expression"
_REFUSED = {
    "<=": ("lookbehind", _LOOKBEHIND),
    "<!": ("lookbehind", _LOOKBEHIND),
    ">": ("atomic group", "write (?:...) where what follows cannot begin with what the group matches"),
    "(": ("conditional group", "write both cases out, separated by '|'"),
    "P=": ("backreference", "no automaton remembers what a group held: write the alternatives out"),
}


def opening(source: PatternReader, flags: Flags, start: int) -> GroupOpening:
    """Returns the group whose "(" at `start` has been read; the cursor ends where its inside begins.

    Raises:
        ConstraintRefused: not a group.
        Unsupported: lookbehind, atomic and conditional groups, references to groups.
    """
    if not source.accept("?"):
        return GroupOpening(GroupKind.PLAIN, flags)
    for symbol, (keyword, way_out) in _REFUSED.items():
        if source.accept(symbol):
            raise unsupported(keyword, way_out, start)
    if source.accept(":"):
        return GroupOpening(GroupKind.PLAIN, flags)
    if source.accept("="):
        return GroupOpening(GroupKind.AHEAD, flags)
    if source.accept("!"):
        return GroupOpening(GroupKind.NOT_AHEAD, flags)
    if source.accept("P<") or (source.ecma and source.accept("<")):
        name = source.take_until(">", "the name of a group", start)
        if not name.isidentifier():
            raise refused(f"{name!r} cannot name a group; write a word, as in (?P<year>...)", start)
        return GroupOpening(GroupKind.PLAIN, flags, name)
    if source.next == "<":
        raise refused("groups are named (?P<name>...) here", start)
    return _flagged(source, flags, start)


def _flagged(source: PatternReader, flags: Flags, start: int) -> GroupOpening:
    """Reads (?i) (?i:...) (?i-s:...) (?-s:...)."""
    on = source.take_while(string.ascii_letters, len(source.pattern))
    off = source.take_while(string.ascii_letters, len(source.pattern)) if (minus := source.accept("-")) else ""
    closing = source.take()
    if not (on or off) or closing not in (":", ")") or (minus and (closing == ")" or not off)):
        written = source.pattern[start : source.position]
        raise refused(f"{written!r} begins no group; write '(?:' for a group, '\\(' for a parenthesis", start)
    for flag in on + off:
        if flag not in _FIELDS and (flag != "u" or flag in off):
            raise refused(f"no flag {flag!r} exists here; i, m, s, x and a do", start)
    if ("a" in on and "u" in on) or set(on) & set(off) or "a" in off:
        raise refused("these flags contradict each other, or one of them cannot be turned off", start)
    changed = {_FIELDS[flag]: True for flag in on if flag != "u"} | {_FIELDS[flag]: False for flag in off}
    if "u" in on:
        changed["ascii"] = False
    return GroupOpening(GroupKind.FLAGS if closing == ")" else GroupKind.PLAIN, replace(flags, **changed))


_VERBOSE_BLANKS = " \t\n\r\v\f"
_LARGEST_BOUND = 1 << 20  # of a repeat, and characters of the shortest text: nothing that is generated comes near


def parse_regex(pattern: str, limits: Limits = Limits(), dialect: Dialect = "python") -> Language:  # noqa: B008
    """Returns the texts that the expression matches from end to end.

    Raises:
        ConstraintRefused: not an expression; `where` is the position that is wrong.
        Unsupported: a valid construct that is not honoured: backreferences, lookbehind, \\b, possessive quantifiers.
        LimitExceeded: longer, deeper or larger than the limits.
    """
    return _checked(full_match(_Parser(pattern, limits, dialect).expression(), limits))


def search_regex(pattern: str, limits: Limits = Limits(), dialect: Dialect = "ecma") -> Language:  # noqa: B008
    """Parses to the texts in which the expression matches somewhere, as `pattern` of JSON Schema; raises as above."""
    return _checked(search_match(_Parser(pattern, limits, dialect).expression(), limits))


def plain_regex(pattern: str) -> Language:
    """Parses as `parse_regex` an expression that looks at nothing but the characters it takes.

    Raises:
        Unsupported: an anchor or a lookahead; else as `parse_regex`.
    """
    item = _Parser(pattern, Limits(), "python").expression()
    if isinstance(item, Assertive):
        raise unsupported("anchor or lookahead", "leave it out: what stands around a match is not looked at", 0)
    return _checked(item)


def _checked(language: Language) -> Language:
    bounds = lengths(language)
    if bounds is not None and bounds[0] > _LARGEST_BOUND:
        raise LimitExceeded(f"the shortest text has {bounds[0]} characters, at most {_LARGEST_BOUND} are allowed")
    return language


class _Parser:
    """Parses by recursive descent; depth is limited by counting groups."""

    def __init__(self, pattern: str, limits: Limits, dialect: Dialect) -> None:
        length = len(pattern.encode("utf-8", "surrogatepass"))
        if length > limits.pattern_bytes:
            raise LimitExceeded(f"the expression has {length} bytes, at most {limits.pattern_bytes} are allowed")
        self.source = PatternReader(pattern, dialect)
        self.limits = limits
        self.names: set[str] = set()

    def expression(self) -> Item:
        item = self.alternation(self.leading_flags(), 0)
        if self.source.next:
            raise refused("this ')' closes no group; write '\\)' for a literal one", self.source.position)
        return item

    def leading_flags(self) -> Flags:
        """Reads (?i) and the like, which at the very beginning hold for the whole expression."""
        flags, source = Flags(), self.source
        while True:
            self.skip_blanks(flags)
            start = source.position
            if not source.accept("("):
                return flags
            group = opening(source, flags, start)
            if group.kind is not GroupKind.FLAGS:
                source.position = start
                return flags
            flags = group.flags

    def alternation(self, flags: Flags, depth: int) -> Item:
        options = [self.concatenation(flags, depth)]
        while self.source.accept("|"):
            options.append(self.concatenation(flags, depth))
        return alternation(options)

    def concatenation(self, flags: Flags, depth: int) -> Item:
        items: list[Item] = []
        while True:
            self.skip_blanks(flags)
            if self.source.next in ("", "|", ")"):
                return concatenation(items)
            start = self.source.position
            item = self.atom(flags, depth)
            if item is not None:
                self.skip_blanks(flags)
                items.append(self.quantified(item, start))

    def skip_blanks(self, flags: Flags) -> None:
        """Blanks and comments under the flag x; comments in groups, (?#...), always."""
        source = self.source
        while True:
            start = source.position
            if source.accept("(?#"):
                end = source.pattern.find(")", source.position)
                if end < 0:
                    raise refused("this comment is not closed; write ')' at its end", start)
                source.position = end + 1
            elif flags.verbose and source.next and source.next in _VERBOSE_BLANKS:
                source.take()
            elif flags.verbose and source.accept("#"):
                end = source.pattern.find("\n", source.position)
                source.position = len(source.pattern) if end < 0 else end + 1
            else:
                return

    def atom(self, flags: Flags, depth: int) -> Item | None:
        source = self.source
        start = source.position
        character = source.take()
        match character:
            case "(":
                return self.group(flags, depth, start)
            case "[":
                return characters(bracketed(source, flags, start))
            case ".":
                return characters(self.dot(flags))
            case "^":
                return BeginAnchor(flags.lines, start)
            case "$":
                return EndAnchor(self.line_ending(flags))
            case "\\":
                return self.escaped(flags, start)
            case "*" | "+" | "?":
                raise refused(f"nothing to repeat before {character!r}; write '\\{character}' for a literal one", start)
            case "{":
                source.position = start
                if self.bounds() is not None:
                    raise refused("nothing to repeat before '{'; write '\\{' for a literal one", start)
                source.position = start + 1
        return characters(folded(CharSet.single(ord(character)), flags))

    def dot(self, flags: Flags) -> CharSet:
        if flags.dot_all:
            return ANY
        return ANY - (ECMA_LINE_ENDS if self.source.ecma else LINE_END)

    def line_ending(self, flags: Flags) -> Ending:
        if flags.lines:
            return Ending.LINE
        return Ending.TEXT if self.source.ecma else Ending.LAST_LINE

    def escaped(self, flags: Flags, start: int) -> Item:
        source = self.source
        letter = source.next
        if letter and letter in "bB":
            way_out = "name the characters around it: [^A-Za-z] before and after, or ^ and $ at the ends"
            raise unsupported(f"\\{letter}", way_out, start)
        if letter and letter in "AZz":
            if source.ecma:
                raise unsupported(f"\\{letter}", f"write {'^' if letter == 'A' else '$'}", start)
            if letter != "z":
                source.take()
                return BeginAnchor(False, start) if letter == "A" else EndAnchor(Ending.TEXT)
        found = class_escape(source, flags, start)
        if found is None:
            found = folded(CharSet.single(character_escape(source, False, start)), flags)
        return characters(found)

    def group(self, flags: Flags, depth: int, start: int) -> Item:
        if depth >= self.limits.depth:
            raise exceeded(f"groups are nested deeper than {self.limits.depth}", start)
        source = self.source
        group = opening(source, flags, start)
        if group.kind is GroupKind.FLAGS:
            raise refused("flags for the whole expression are written at its very beginning, or as (?i:...)", start)
        if group.name:
            if group.name in self.names:
                raise refused(f"the group name {group.name!r} is used twice", start)
            self.names.add(group.name)
        body = self.alternation(group.flags, depth + 1)
        if not source.accept(")"):
            raise refused("this '(' is not closed; write ')' at its end, or '\\(' for a literal one", start)
        match group.kind:
            case GroupKind.AHEAD:
                return LookaheadAssertion(body, False, start)
            case GroupKind.NOT_AHEAD:
                return LookaheadAssertion(body, True, start)
            case _:
                return body

    def quantified(self, item: Item, start: int) -> Item:
        source = self.source
        at = source.position
        bounds = self.bounds()
        if bounds is None:
            return item
        if self.source.pattern[start] in "^$" or self.source.pattern.startswith(("\\A", "\\Z"), start):
            raise refused("an anchor cannot be repeated; put it in a group, or leave the repeat out", at)
        least, most = bounds
        if source.next == "+" and not source.ecma:
            way_out = "leave the second '+' out where what follows cannot begin with what is repeated"
            raise unsupported("possessive quantifier", way_out, source.position)
        source.accept("?")
        again = source.position
        if self.bounds() is not None:
            raise refused("two quantifiers in a row; put what the first repeats in a group", again)
        return repetition(item, least, most, at)

    def bounds(self) -> tuple[int, int | None] | None:
        """Reads least and most of the quantifier that comes next; None where none does.

        A brace that is not {m}, {m,}, {,n} or {m,n} is a literal.
        """
        source = self.source
        start = source.position
        for symbol, bounds in (("*", (0, None)), ("+", (1, None)), ("?", (0, 1))):
            if source.accept(symbol):
                return bounds
        if not source.accept("{"):
            return None
        least = source.take_while(string.digits, len(source.pattern))
        comma = source.accept(",")
        most = source.take_while(string.digits, len(source.pattern)) if comma else least
        if not source.accept("}") or not (least or comma):
            source.position = start
            return None
        if source.ecma and not least:
            raise refused("a repeat without its least count means different things; write {0,...}", start)
        return _counts(least, most, start)


def _counts(least: str, most: str, start: int) -> tuple[int, int | None]:
    for count in (least, most):
        if len(count.lstrip("0")) > 7 or int(count or 0) > _LARGEST_BOUND:
            raise exceeded(f"a repeat of {count} is beyond {_LARGEST_BOUND}; write {{n,}} for no upper bound", start)
    bounds = int(least or 0), int(most) if most else None
    if bounds[1] is not None and bounds[1] < bounds[0]:
        raise refused(f"the repeat {{{least},{most}}} has a most below its least; write {{{most},{least}}}", start)
    return bounds
