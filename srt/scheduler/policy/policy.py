"""Orders waiting requests for admission.

    policy   order within a priority, after the requests that have aged (priority.py)
    lpm      called siblings of a fork, then longest cached prefix, then least usage of the program; among the equal
             calls of one program the longest remaining critical path (program_fairness.py)
    fcfs     arrival; ageing changes nothing

An `Order` is made for one step. The planner asks it for one request at a time, because an admission may change which
comes next. The AdmissionPolicy makes orders and keeps the state that outlives a step.
"""

from collections.abc import Sequence
from typing import Protocol, assert_never

from ...core.counters import Counters
from ..config import PolicyName, SchedulerConfig
from ..request import Request
from .fork_siblings import ForkSiblings
from .longest_prefix import LongestPrefix, Peek
from .priority import Ageing
from .program_fairness import CriticalPath, ProgramUsage


class Order(Protocol):
    """Returns the waiting requests of one step, each once."""

    def next(self) -> Request | None: ...

    def admitted(self, request: Request) -> None:
        """Updates the order after `request` was planned: its tokens before kv_length are in the tree now."""


class FixedOrder:
    """Keeps its order after admissions."""

    def __init__(self, in_order: Sequence[Request], ageing: Ageing) -> None:
        self._left = list(reversed(in_order))
        self._ageing = ageing

    def next(self) -> Request | None:
        return self._left.pop() if self._left else None

    def admitted(self, request: Request) -> None:
        self._ageing.admitted(request)


class AdmissionPolicy:
    """Makes the orders of one scheduler."""

    def __init__(self, config: SchedulerConfig, peek: Peek, counters: Counters) -> None:
        self.usage = ProgramUsage()
        self._config = config
        self._peek = peek
        self._counters = counters
        self._siblings = ForkSiblings()
        self._critical_path = CriticalPath()

    def order(self, waiting: Sequence[Request], now: float) -> Order:
        """Makes the order of a step, by priority first. Requests outside the window come last, by arrival."""
        oldest_first = sorted(waiting, key=lambda request: request.rank)
        ageing = Ageing(now - self._config.max_wait, self._counters)
        match self._config.policy:
            case PolicyName.FCFS:
                return FixedOrder(oldest_first, ageing)
            case PolicyName.LPM:
                window = oldest_first[: self._config.policy_window]
                return LongestPrefix(
                    window,
                    oldest_first[self._config.policy_window :],
                    self._peek,
                    ageing,
                    self._counters,
                    siblings=self._siblings,
                    usage=self.usage,
                    places=self._critical_path.arrange(window),
                )
            case _:
                assert_never(self._config.policy)
