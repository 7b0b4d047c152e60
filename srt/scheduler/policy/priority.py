"""What goes before every cache-aware or random order: priority, age, and deadlines that would be missed.

    lane       who                                                     order inside
    AGED       has waited longer than max_wait                         arrival
    URGENT     ends in time if it is next, and too late in its turn    earliest deadline
    ORDERED    everybody else                                          the policy's

Lanes divide the requests of one priority; a higher priority goes before all lanes of a lower one.

The bound on waiting. Once a request is AGED, no request of its priority that came later is admitted before it: in
front of it are only the aged that came earlier, and a request that does not fit holds up all behind it until what
runs has given its slots back. So it is admitted at most max_wait after its arrival plus the time in which the
running requests, and those that came before it and still wait, drain; and running requests drain, because the one
of the highest rank advances in every step. Neither cache hits, nor forks, nor deadlines of others prolong this.
"""

from collections.abc import Sequence
from enum import IntEnum

from ...core.counters import Counters
from ..request import Request
from .pace import Pace


class Lane(IntEnum):
    AGED = 0
    URGENT = 1
    ORDERED = 2


LaneKey = tuple[int, int, float]


class Lanes:
    """The lane of each waiting request, decided once per step.

    Args:
        aged_before: requests that arrived until then have waited too long.
    """

    def __init__(self, aged_before: float, counters: Counters) -> None:
        self._aged_before = aged_before
        self._counters = counters
        self._urgent: dict[int, float] = {}  # number → deadline

    def lane(self, request: Request) -> Lane:
        if request.arrival <= self._aged_before:
            return Lane.AGED
        return Lane.URGENT if request.number in self._urgent else Lane.ORDERED

    def key(self, request: Request) -> LaneKey:
        """Smaller goes first."""
        return (-request.schedule.priority, self.lane(request), self._urgent.get(request.number, 0.0))

    def press(self, in_order: Sequence[Request], pace: Pace, now: float) -> list[Request]:
        """Moves requests that would be late in this order to the urgent lane; says which."""
        moved = [
            request
            for ahead, request in enumerate(in_order)
            if self.lane(request) is Lane.ORDERED and pace.needs_help(request, ahead, now)
        ]
        self._urgent.update((request.number, request.deadline or 0.0) for request in moved)
        return moved

    def admitted(self, request: Request) -> None:
        self._counters.aged_admissions += self.lane(request) is Lane.AGED
        self._counters.urgent_admissions += self.lane(request) is Lane.URGENT
