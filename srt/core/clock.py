"""Time as an argument: the system clock in production, a virtual one in tests and simulations."""

import time
from typing import Protocol


class Clock(Protocol):
    def now(self) -> float:
        """Returns monotonic seconds from an arbitrary zero."""


class SystemClock:
    """Reads `time.monotonic`: deadlines do not move when the wall clock is set."""

    def now(self) -> float:
        return time.monotonic()


class VirtualClock:
    """A clock that moves only when told to."""

    def __init__(self, start: float = 0.0) -> None:
        self._now = start

    def now(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        assert seconds >= 0, "time does not go back"
        self._now += seconds
