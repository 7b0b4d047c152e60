"""Sets of characters as sorted ranges of code points.

Surrogates are not characters: no set holds them, and complements are taken within the scalar values.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable
from dataclasses import dataclass

from .language import Ranges

SCALARS: Ranges = ((0, 0xD7FF), (0xE000, 0x10FFFF))


def normal(ranges: Iterable[tuple[int, int]]) -> Ranges:
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


def common(left: Ranges, right: Ranges) -> Ranges:
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
        return CharSet(common(normal(ranges), SCALARS))

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
        return CharSet(normal((*self.ranges, *other.ranges)))

    def __and__(self, other: CharSet) -> CharSet:
        return CharSet(common(self.ranges, other.ranges))

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
