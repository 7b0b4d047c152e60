"""The order of what happens in a simulation: events at virtual times, run one after the other."""

import gc
import heapq
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Action = Callable[[], None]


@contextmanager
def rare_collections() -> Iterator[None]:
    """Lets Python look for garbage in cycles rarely: a simulation has millions of objects that live, and few cycles."""
    before = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(500_000, 50, 100)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()


class EventClock:
    """A clock that is set. Implements `instruments.Clock`."""

    def __init__(self) -> None:
        self._now = 0.0

    def now(self) -> float:
        return self._now

    def move_to(self, time: float) -> None:
        assert time >= self._now, "time does not go back"
        self._now = time


class Events:
    """A queue of actions by time, and the clock that they move. Actions of one time run in the order of `at`."""

    def __init__(self) -> None:
        self.clock = EventClock()
        self._queue: list[tuple[float, int, Action]] = []
        self._count = 0

    @property
    def now(self) -> float:
        return self.clock.now()

    def at(self, time: float, action: Action) -> None:
        """Runs an action at a time, which is not before now."""
        self._count += 1
        heapq.heappush(self._queue, (max(time, self.now), self._count, action))

    def run(self) -> None:
        """Runs actions until none is left."""
        while self._queue:
            time, _, action = heapq.heappop(self._queue)
            self.clock.move_to(time)
            action()
