"""Regular expressions to languages: the syntax of Python's `re`, or what JSON Schema uses of ECMAScript's.

Nothing is matched by backtracking. Greedy and lazy quantifiers are the same language, groups capture nothing.
A full match is meant (`parse_regex`, as `re.fullmatch`) or a match somewhere in the text (`search_regex`).
"""

import string

from ..algebra import characters
from ..boolean.lengths import lengths
from ..charset import ANY, CharSet
from ..errors import LimitExceeded
from ..language import Language
from ..limits import Limits
from . import unicode_classes as classes
from .classes import bracketed
from .escapes import character_escape, class_escape, folded
from .groups import GroupKind, opening
from .reading import found_in, whole
from .source import Dialect, Flags, Source, exceeded, refused, unsupported
from .tree import Ahead, Assertive, Begin, End, Ending, Item, choice, repetition, sequence

QUANTIFIERS = "*+?{"
_VERBOSE_BLANKS = " \t\n\r\v\f"
_LARGEST_BOUND = 1 << 20  # of a repeat, and characters of the shortest text: nothing that is generated comes near


def parse_regex(pattern: str, limits: Limits = Limits(), dialect: Dialect = "python") -> Language:  # noqa: B008
    """The texts that the expression matches from end to end.

    Raises:
        ConstraintRefused: not an expression; `where` is the position that is wrong.
        Unsupported: a valid construct that is not honoured: backreferences, lookbehind, \\b, possessive quantifiers.
        LimitExceeded: longer, deeper or larger than the limits.
    """
    return _checked(whole(_Parser(pattern, limits, dialect).expression(), limits))


def search_regex(pattern: str, limits: Limits = Limits(), dialect: Dialect = "ecma") -> Language:  # noqa: B008
    """The texts in which the expression matches somewhere, as `pattern` of JSON Schema asks; raises as above."""
    return _checked(found_in(_Parser(pattern, limits, dialect).expression(), limits))


def plain_regex(pattern: str, limits: Limits = Limits(), dialect: Dialect = "python") -> Language:  # noqa: B008
    """As `parse_regex`, of an expression that looks at nothing but the characters it takes.

    Raises:
        Unsupported: an anchor or a lookahead; else as `parse_regex`.
    """
    item = _Parser(pattern, limits, dialect).expression()
    if isinstance(item, Assertive):
        raise unsupported("anchor or lookahead", "leave it out: what stands around a match is not looked at", 0)
    return _checked(item)


def _checked(language: Language) -> Language:
    bounds = lengths(language)
    if bounds is not None and bounds[0] > _LARGEST_BOUND:
        raise LimitExceeded(f"the shortest text has {bounds[0]} characters, at most {_LARGEST_BOUND} are allowed")
    return language


class _Parser:
    """Recursive descent; depth is limited by counting groups."""

    def __init__(self, pattern: str, limits: Limits, dialect: Dialect) -> None:
        length = len(pattern.encode("utf-8", "surrogatepass"))
        if length > limits.pattern_bytes:
            raise LimitExceeded(f"the expression has {length} bytes, at most {limits.pattern_bytes} are allowed")
        self.source = Source(pattern, dialect)
        self.limits = limits
        self.names: set[str] = set()

    def expression(self) -> Item:
        item = self.choice(self.leading_flags(), 0)
        if self.source.next:
            raise refused("this ')' closes no group; write '\\)' for a literal one", self.source.position)
        return item

    def leading_flags(self) -> Flags:
        """(?i) and the like at the very beginning hold for the whole expression."""
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

    def choice(self, flags: Flags, depth: int) -> Item:
        options = [self.sequence(flags, depth)]
        while self.source.accept("|"):
            options.append(self.sequence(flags, depth))
        return choice(options)

    def sequence(self, flags: Flags, depth: int) -> Item:
        items: list[Item] = []
        while True:
            self.skip_blanks(flags)
            if self.source.next in ("", "|", ")"):
                return sequence(items)
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
                return Begin(flags.lines, start)
            case "$":
                return End(self.line_ending(flags))
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
        return ANY - (classes.ECMA_LINE_ENDS if self.source.ecma else classes.LINE_END)

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
                return Begin(False, start) if letter == "A" else End(Ending.TEXT)
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
        body = self.choice(group.flags, depth + 1)
        if not source.accept(")"):
            raise refused("this '(' is not closed; write ')' at its end, or '\\(' for a literal one", start)
        match group.kind:
            case GroupKind.AHEAD:
                return Ahead(body, False, start)
            case GroupKind.NOT_AHEAD:
                return Ahead(body, True, start)
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
        """Least and most of the quantifier that comes next, which is passed; None where none does.

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
