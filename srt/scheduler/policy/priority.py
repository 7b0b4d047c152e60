"""Puts priority and age before every cache-aware order.

    aged         has waited longer than max_wait: first within its priority, by arrival
    not aged     the policy's order

The bound on waiting. Once a request is aged, no later request of its priority is admitted before it, only aged ones
that came earlier. A request that does not fit blocks all requests after it until running requests have released their
slots. So the wait is at most max_wait plus the time in which the running requests, and the earlier ones that still
wait, drain. Running requests drain because the one of the highest rank advances in every step. Neither cache hits nor
forks prolong the wait.
"""

from ...core.counters import Counters
from ..request import Request

PriorityKey = tuple[int, bool]  # (−priority, not aged): smaller goes first


class Ageing:
    """Decides which waiting requests are aged in one step.

    Args:
        aged_before: requests that arrived at or before this time have waited too long.
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
