"""In what order the parts of an `AnyOrder` may come: sums over sets, one bit for each part.

parts      a  b* c  d* e     * required; ordered = 4: up to d the order is kept
left       1  1  1  1  1     a or b
           1  0  1  1  1     c or d        a was left out: its turn is behind d
           1  0  1  0  1     a, c, e, other parts, the end
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Arrangement:
    """What `language.AnyOrder` says, without the parts themselves.

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
        """How many parts have to come still; None when there are not so many. Other parts are one towards `least`."""
        due = (left & self.required).bit_count()
        due_others = max(0, self.others_least - others)
        if due_others and not self.others:
            return None
        short = self.least - (self.parts - left.bit_count()) - min(others, 1) - due - due_others
        if short <= 0:
            return due + due_others
        return due + due_others + short if short <= self.spare(left, others) else None

    def spare(self, left: int, others: int) -> int:
        """Parts that need not come, and that would count towards `least`."""
        another = self.others and not others and not self.others_least
        return (left & ~self.required).bit_count() + another

    def reaches_the_end(self, left: int, others: int) -> bool:
        missing = self.missing(left, others)
        return missing is not None and (self.most is None or self.written(left, others) + missing <= self.most)

    def written(self, left: int, others: int) -> int:
        return self.parts - left.bit_count() + others

    @property
    def required_only(self) -> bool:
        """Behind any part, an end is reached with those that are required, and no number is in the way."""
        return self.most is None and not self.others_least and self.least <= max(1, self.required.bit_count())

    def following(self, left: int, others: int) -> Iterator[tuple[int, int, int]]:
        """(part, left, others) for each part that may come now, with the place behind it; `parts` for another one."""
        certain = self.required_only
        for index in self._candidates(left):
            behind = self._place(left & ~(1 << index), others)
            if certain or self.reaches_the_end(*behind):
                yield index, *behind
        if self.others and not self._keeps_order(left):
            behind = self._place(left, others + 1)
            if certain or self.reaches_the_end(*behind):
                yield self.parts, *behind

    def in_order(self, left: int) -> Iterator[int]:
        """All that is left, in an order in which it may come."""
        first = self._behind_the_last(left) if self._keeps_order(left) else 0
        yield from (index for index in range(first, self.parts) if left >> index & 1)
        yield from (index for index in range(first) if left >> index & 1)

    def _keeps_order(self, left: int) -> bool:
        return self.ordered > 0 and bool(left >> (self.ordered - 1) & 1)

    def _behind_the_last(self, left: int) -> int:
        """The first part behind all that have come; while the order is kept."""
        return (((1 << self.parts) - 1) & ~left).bit_length()

    def _candidates(self, left: int) -> Iterator[int]:
        if not self._keeps_order(left):
            yield from (index for index in range(self.parts) if left >> index & 1)
            return
        for index in range(self._behind_the_last(left), self.ordered):
            yield index
            if self.required >> index & 1:
                return

    def _place(self, left: int, others: int) -> tuple[int, int]:
        """Equal for places with the same texts behind them."""
        if self.most is not None:
            return left, others
        begun = left.bit_count() < self.parts
        enough = not self.others_least and self.parts - left.bit_count() >= self.least
        return left, 0 if begun and enough else min(others, 1)
