"""The expressions that say what a constraint admits: the common form of regular expressions and JSON schemas.

Front ends (`regex`, `schema`) build it, `boolean` takes intersections and differences out of it, and `automaton` reads
it as it is: nothing is expanded ahead of need. The nodes are msgpack, so an expression that was built in one process
can be used in another.

Characters are Unicode scalar values: surrogates are never part of a language. A set of them is sorted ranges of code
points (`CharSet`), and complements are taken within the scalar values.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import msgspec

Ranges = tuple[tuple[int, int], ...]  # code points, both ends included; ascending, disjoint, not adjacent


class _Node(msgspec.Struct, frozen=True, tag=True, array_like=True):
    pass


class Literal(_Node, frozen=True):
    """Exactly these bytes (UTF-8); b"" is the empty text."""

    data: bytes


class Chars(_Node, frozen=True):
    """One character of a set."""

    ranges: Ranges


class Concat(_Node, frozen=True):
    parts: tuple[Language, ...]


class Union(_Node, frozen=True):
    """Any of the options; without options nothing at all."""

    options: tuple[Language, ...]


class Repeat(_Node, frozen=True):
    """`body` at least `least` and at most `most` times; None: without end."""

    body: Language
    least: int = 0
    most: int | None = None


class AnyOrder(_Node, frozen=True):
    """Parts in any order, each at most once, those that `required` lists exactly once; never none, and none is empty.

    The first `ordered` of them keep their order until the last of these, a required one, has come: those of them that
    are not required and were left out may come after it. With it come the `others`, any number of times;
    `others_least` 1: at least once.

    `least` and `most` of all together; towards `least` the others are one part. No separator is a Call.
    """

    parts: tuple[Language, ...]
    separator: Language
    others: Language | None = None
    required: tuple[int, ...] = ()  # indexes of parts, ascending
    ordered: int = 0
    least: int = 1
    most: int | None = None
    others_least: int = 0

    @property
    def arrangement(self) -> Arrangement:
        required = sum(1 << index for index in self.required)
        others = self.others is not None
        return Arrangement(len(self.parts), required, self.ordered, self.least, self.most, others, self.others_least)


class Call(_Node, frozen=True):
    """The language of a rule of the grammar; rules may call each other and themselves."""

    rule: str


class Dfa(_Node, frozen=True):
    """A deterministic automaton over characters. State 0 starts; every state reaches an accepting one."""

    accepting: tuple[bool, ...]  # [states]
    edges: tuple[tuple[tuple[Ranges, int], ...], ...]  # [states]: (characters, next state), characters disjoint


class Spelled(_Node, frozen=True):
    """The characters of `body` as they are written inside a JSON string, without the quotes around it.

    A character has one spelling: raw UTF-8, but for `\\"`, `\\\\`, the short escapes of \\b \\t \\n \\f \\r, and
    `\\u00xx` (lower case) of the other characters below U+0020. `body` holds no Call and no AnyOrder.
    """

    body: Language


class Intersection(_Node, frozen=True):
    """The texts that both sides admit. Neither holds a Call or AnyOrder; `boolean` makes a Dfa of it."""

    left: Language
    right: Language


class Difference(_Node, frozen=True):
    """The texts of `left` that are none of `right`. Neither side holds a Call or AnyOrder; `boolean` makes it a Dfa."""

    left: Language
    right: Language


Language = Literal | Chars | Concat | Union | Repeat | AnyOrder | Call | Dfa | Spelled | Intersection | Difference

EMPTY_TEXT = Literal(b"")
NOTHING = Union(())


class Grammar(msgspec.Struct, frozen=True, array_like=True):
    """A language with the rules that it calls."""

    start: Language
    rules: dict[str, Language] = {}


@dataclass(frozen=True, slots=True)
class Arrangement:
    """Says in what order the parts of an `AnyOrder` may come, without the parts themselves: sets with a bit for each.

        parts      a  b* c  d* e     * required; ordered = 4: up to d the order is kept
        left       1  1  1  1  1     a or b
                   1  0  1  1  1     c or d        a was left out: it may come once d has
                   1  0  1  0  1     a, c, e, other parts, the end

    parts: how many there are; required: a bit for each that has to come.
    others: whether there are other parts; others_least: how many of them have to come, 0 or 1.

    A place in a text is (left, others): a bit for each part that has not come, and how many other parts have, as far as
    that makes a difference.
    """

    parts: int
    required: int
    ordered: int
    least: int
    most: int | None
    others: bool
    others_least: int

    @property
    def start(self) -> tuple[int, int]:
        return (1 << self.parts) - 1, 0

    def missing(self, left: int, others: int) -> int | None:
        """Counts the parts that have to come; None when there are not so many. Other parts are one towards `least`."""
        due = (left & self.required).bit_count()
        due_others = max(0, self.others_least - others)
        if due_others and not self.others:
            return None
        short = self.least - (self.parts - left.bit_count()) - min(others, 1) - due - due_others
        if short <= 0:
            return due + due_others
        return due + due_others + short if short <= self.spare(left, others) else None

    def spare(self, left: int, others: int) -> int:
        """Counts the parts that need not come, and that would count towards `least`."""
        another = self.others and not others and not self.others_least
        return (left & ~self.required).bit_count() + another

    def reaches_the_end(self, left: int, others: int) -> bool:
        missing = self.missing(left, others)
        return missing is not None and (self.most is None or self.written(left, others) + missing <= self.most)

    def written(self, left: int, others: int) -> int:
        return self.parts - left.bit_count() + others

    @property
    def required_only(self) -> bool:
        """After any part, an end is reached with those that are required, and no number is in the way."""
        return self.most is None and not self.others_least and self.least <= max(1, self.required.bit_count())

    def following(self, left: int, others: int) -> Iterator[tuple[int, int, int]]:
        """(part, left, others) for each part that may come now, with the place after it; `parts` for another one."""
        certain = self.required_only
        for index in self._candidates(left):
            after = self._place(left & ~(1 << index), others)
            if certain or self.reaches_the_end(*after):
                yield index, *after
        if self.others and not self._keeps_order(left):
            after = self._place(left, others + 1)
            if certain or self.reaches_the_end(*after):
                yield self.parts, *after

    def in_order(self, left: int) -> Iterator[int]:
        """Yields all that is left, in an order in which it may come."""
        first = self._after_the_last(left) if self._keeps_order(left) else 0
        yield from (index for index in range(first, self.parts) if left >> index & 1)
        yield from (index for index in range(first) if left >> index & 1)

    def _keeps_order(self, left: int) -> bool:
        return self.ordered > 0 and bool(left >> (self.ordered - 1) & 1)

    def _after_the_last(self, left: int) -> int:
        """Returns the first part after all that have come; while the order is kept."""
        return (((1 << self.parts) - 1) & ~left).bit_length()

    def _candidates(self, left: int) -> Iterator[int]:
        if not self._keeps_order(left):
            yield from (index for index in range(self.parts) if left >> index & 1)
            return
        for index in range(self._after_the_last(left), self.ordered):
            yield index
            if self.required >> index & 1:
                return

    def _place(self, left: int, others: int) -> tuple[int, int]:
        """Gives a key that is equal for places that the same texts follow."""
        if self.most is not None:
            return left, others
        begun = left.bit_count() < self.parts
        enough = not self.others_least and self.parts - left.bit_count() >= self.least
        return left, 0 if begun and enough else min(others, 1)


# ------------------------------------------------------------------------------------ sets of characters

SCALARS: Ranges = ((0, 0xD7FF), (0xE000, 0x10FFFF))


def normal_ranges(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """Normalizes ranges: ascending, disjoint, not adjacent; drops empty ones (first > last)."""
    merged: list[tuple[int, int]] = []
    for first, last in sorted(ranges):
        if last < first:
            continue
        if merged and first <= merged[-1][1] + 1:
            if last > merged[-1][1]:
                merged[-1] = (merged[-1][0], last)
        else:
            merged.append((first, last))
    return tuple(merged)


def common_ranges(left: Ranges, right: Ranges) -> Ranges:
    """Returns the intersection of two normal lists of ranges."""
    shared = []
    here = there = 0
    while here < len(left) and there < len(right):
        first = max(left[here][0], right[there][0])
        last = min(left[here][1], right[there][1])
        if first <= last:
            shared.append((first, last))
        if left[here][1] < right[there][1]:
            here += 1
        else:
            there += 1
    return tuple(shared)


@dataclass(frozen=True, slots=True)
class CharSet:
    """A set of characters. Immutable; `ranges` are normal and free of surrogates: build with `CharSet.of`."""

    ranges: Ranges = ()

    @staticmethod
    def of(ranges: Iterable[tuple[int, int]]) -> CharSet:
        """Makes a set of any ranges, in any order, overlapping or not; leaves surrogates out."""
        return CharSet(common_ranges(normal_ranges(ranges), SCALARS))

    @staticmethod
    def single(code: int) -> CharSet:
        return CharSet.of(((code, code),))

    def __bool__(self) -> bool:
        return bool(self.ranges)

    def __len__(self) -> int:
        return sum(last - first + 1 for first, last in self.ranges)

    def __contains__(self, code: int) -> bool:
        at = bisect.bisect_right(self.ranges, (code, 0x110000)) - 1
        return at >= 0 and code <= self.ranges[at][1]

    def __or__(self, other: CharSet) -> CharSet:
        return CharSet(normal_ranges((*self.ranges, *other.ranges)))

    def __and__(self, other: CharSet) -> CharSet:
        return CharSet(common_ranges(self.ranges, other.ranges))

    def __invert__(self) -> CharSet:
        gaps, begin = [], 0
        for first, last in self.ranges:
            gaps.append((begin, first - 1))
            begin = last + 1
        gaps.append((begin, 0x10FFFF))
        return CharSet.of(gaps)

    def __sub__(self, other: CharSet) -> CharSet:
        return self & ~other


ANY = CharSet(SCALARS)
