"""The texts of a search for choices, sorted: those that go on behind some bytes are a range.

A   A+   A++   B          "A" is chosen when the text goes on with it and not with "A+", the next longer choice
└────┴────┘
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Log = NDArray[np.float64]  # natural logarithms
NOTHING = -np.inf


class Texts:
    """Each text once, in order; a place is an index into them.

    Args:
        choices: what each spells; several may spell the same.
        condition: a text that is no choice and that all choices begin with; b"" for none.
    """

    def __init__(self, choices: Sequence[bytes], condition: bytes = b"") -> None:
        self._texts = sorted({*choices, condition} - {b""})
        self.of_choices = [bisect.bisect_left(self._texts, text) for text in choices]
        self.of_condition = bisect.bisect_left(self._texts, condition) if condition else None
        self._longer = self._next_longer(set(self.of_choices))

    def __len__(self) -> int:
        return len(self._texts)

    def __getitem__(self, place: int) -> bytes:
        return self._texts[place]

    def behind(self, done: bytes) -> tuple[int, int]:
        """The texts [first, last) that begin with these bytes and are longer."""
        first = bisect.bisect_right(self._texts, done)
        return first, bisect.bisect_left(self._texts, True, lo=first, key=lambda text: not text.startswith(done))

    def exclusive(self, lower: Log, upper: Log) -> tuple[Log, Log]:
        """Bounds for "begins with it" → bounds for "and with no longer choice". Both: [texts]"""
        if not self._longer:
            return lower, upper
        only_lower, only_upper = lower.copy(), upper.copy()
        for place, longer in self._longer.items():
            only_lower[place] = _less(lower[place], np.logaddexp.reduce(upper[longer]))
            only_upper[place] = _less(upper[place], np.logaddexp.reduce(lower[longer]))
        return only_lower, only_upper

    def _next_longer(self, choices: set[int]) -> dict[int, list[int]]:
        """Choice → the choices that begin with it, and with no other choice between; only where there are some."""
        longer: dict[int, list[int]] = {}
        stack: list[int] = []  # each begins with the one before it
        for place in sorted(choices):
            while stack and not self._texts[place].startswith(self._texts[stack[-1]]):
                stack.pop()
            if stack:
                longer.setdefault(stack[-1], []).append(place)
            stack.append(place)
        return longer


def _less(whole: float, part: float) -> float:
    """log(exp(whole) − exp(part)); nothing when that is not positive."""
    return whole + float(np.log1p(-np.exp(part - whole))) if part < whole else NOTHING
