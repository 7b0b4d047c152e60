"""Puts priority and age before every cache-aware order.

    aged         has waited longer than max_wait: first within its priority, by arrival
    not aged     the policy's order

The bound on waiting. Once a request is aged, no request of its priority that came later is admitted before it: only
aged requests that came earlier are, and a request that does not fit holds up all that come after it until running
requests have given their slots back. So it is admitted at most max_wait after its arrival plus the time in which the
running requests, and those that came before it and still wait, drain; and running requests drain, because the one of
the highest rank advances in every step. Neither cache hits nor forks prolong this.
"""

from ...core.counters import Counters
from ..request import Request

PriorityKey = tuple[int, bool]  # (−priority, not aged): smaller goes first


class Ageing:
    """Tells which waiting requests are aged in one step.

    Args:
        aged_before: requests that arrived until then have waited too long.
    """

    def __init__(self, aged_before: float, counters: Counters) -> None:
        self._aged_before = aged_before
        self._counters = counters

    def aged(self, request: Request) -> bool:
        return request.arrival <= self._aged_before

    def key(self, request: Request) -> PriorityKey:
        return (-request.schedule.priority, not self.aged(request))

    def admitted(self, request: Request) -> None:
        self._counters.aged_admissions += self.aged(request)
