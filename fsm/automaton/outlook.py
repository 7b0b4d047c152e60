"""States as short texts see them: counts that are out of reach have no end.

A token has at most some dozens of bytes. Whether a string may still have 3000 characters or 2999 makes no difference to
it, so both are one state for it, and so are all states that it passes inside:

    Again(loop, 0, 3000, parent)     ~  Again(loop, 0, ENDLESS, parent)
    Again(loop, 100, 200, parent)    ~  Again(loop, ENDLESS, ENDLESS, parent)      the turns that are due never end

Every turn of a loop takes at least one byte (lowering sees to that), so a text of `reach` bytes neither uses up more
than `reach` turns nor gets through as many that are still due.
"""

from __future__ import annotations

from collections.abc import Iterable

from .frames import Again, Frame, Frames, Position, Rest
from .places import ENDLESS


class Outlook:
    """What is left, as texts of at most `reach` bytes see it."""

    def __init__(self, frames: Frames, reach: int) -> None:
        self.reach = reach
        self._frames = frames
        self._seen: dict[Frame, Frame] = {}

    def of(self, positions: Iterable[Position]) -> tuple[Position, ...]:
        """Positions that go on with the same short texts."""
        return tuple(dict.fromkeys((place, self._frame(frame)) for place, frame in positions))

    def _frame(self, frame: Frame) -> Frame:
        above: list[Rest | Again] = []
        while frame not in self._seen and isinstance(frame, Rest | Again):
            above.append(frame)
            frame = frame.parent
        seen = self._seen.setdefault(frame, frame)  # a Root or a Return is what it is
        for current in reversed(above):
            if isinstance(current, Rest):
                seen = self._frames.rest(current.sequence, current.index, seen)
            else:
                seen = self._frames.again(current.loop, self._count(current.least), self._count(current.most), seen)
            self._seen[current] = seen
        return seen

    def _count(self, turns: int) -> int:
        return turns if turns <= self.reach else ENDLESS
