"""States that short texts cannot tell apart.

A token has at most some dozens of bytes. Whether a string may still have 3000 characters or 2999 makes no difference to
it, so all such states have one mask. Counts beyond the reach of a token are blurred:

    Again(loop, 0, 3000, parent)  ~  Again(loop, 0, reach + 1, parent)

Every turn of a loop takes at least one byte (lowering sees to that), so a text of `reach` bytes neither uses up more
than `reach` turns nor gets through as many that are still due.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from .frames import Again, Frame, Position, Rest


class Outlooks:
    """Numbers for what states admit within `reach` bytes; states of one automaton with the same number admit the same.

    The reverse does not hold: the numbers tell more states apart than they need to.
    """

    def __init__(self, reach: int) -> None:
        self.reach = reach
        self._frames: dict[Frame, int] = {}
        self._numbers: dict[Hashable, int] = {}

    def of(self, positions: Sequence[Position], *, accepting: bool) -> int:
        seen = frozenset([(place, self._blurred(frame)) for place, frame in positions])
        return self._number((accepting, seen))

    def _blurred(self, frame: Frame) -> int:
        above: list[Rest | Again] = []
        while frame not in self._frames and isinstance(frame, Rest | Again):
            above.append(frame)
            frame = frame.parent
        number = self._frames.get(frame)
        if number is None:
            number = self._frames[frame] = self._number(frame)
        for current in reversed(above):
            number = self._frames[current] = self._number(self._key(current, number))
        return number

    def _key(self, frame: Rest | Again, parent: int) -> Hashable:
        if isinstance(frame, Rest):
            return (frame.sequence, frame.index, parent)
        beyond = self.reach + 1
        return (frame.loop, min(frame.least, beyond), min(frame.most, beyond), parent)

    def _number(self, key: Hashable) -> int:
        return self._numbers.setdefault(key, len(self._numbers))
