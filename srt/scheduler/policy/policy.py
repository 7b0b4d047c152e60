"""The order in which waiting requests are admitted.

    policy       order inside a lane (lanes.py: age and deadlines go before; fcfs and random know no deadlines)
    lpm          longest cached prefix first; called siblings of a fork before; programs with less service among equals;
                 among the equal calls of one program the one with most ahead of it (critical_path.py)
    dfs-weight   depth first through the tree of the waiting requests, the subtree with most of them first
    fcfs         arrival; ageing changes nothing
    random       by a number drawn for each request from the seed, the same in every step

An `Order` is made for a step and asked for one request after the other, because an admission may change what comes
next. The Arranger makes orders, and remembers between them what outlives a step.
"""

import hashlib
from collections.abc import Sequence
from typing import Protocol, assert_never

from ...cache.radix_node import Tokens
from ...core.counters import Counters
from ..config import PolicyName, SchedulerConfig
from ..request import Request
from .critical_path import CriticalPath
from .dfs_weight import heaviest_first
from .fork_siblings import Siblings
from .longest_prefix import LongestPrefix, Peek
from .pace import Pace
from .priority import Lane, LaneKey, Lanes
from .program_fairness import Service


class Order(Protocol):
    """The waiting requests of one step, each given once."""

    def next(self) -> Request | None: ...

    def admitted(self, request: Request) -> None:
        """`request` has been planned: tokens before its kv_length are in the tree now."""

    def put_back(self, request: Request) -> None:
        """`request` was given, and does not fit: it is the next one again."""

    def upcoming(self, count: int) -> list[Request]:
        """The next ones, as things stand."""


class Sequenced:
    """An order that no admission changes."""

    def __init__(self, in_order: Sequence[Request], lanes: Lanes) -> None:
        self._left = list(reversed(in_order))
        self._lanes = lanes

    def next(self) -> Request | None:
        return self._left.pop() if self._left else None

    def admitted(self, request: Request) -> None:
        self._lanes.admitted(request)

    def put_back(self, request: Request) -> None:
        self._left.append(request)

    def upcoming(self, count: int) -> list[Request]:
        return self._left[: -count - 1 : -1]


class Arranger:
    """Makes the orders of one scheduler."""

    def __init__(self, config: SchedulerConfig, peek: Peek, counters: Counters) -> None:
        self.service = Service()
        self.pace = Pace(config.max_step_tokens)
        self._config = config
        self._peek = peek
        self._counters = counters
        self._siblings = Siblings() if config.fork_hints else None
        self._critical_path = CriticalPath()
        self._begun: dict[str, Tokens] = {}  # of the last admitted request, by salt

    def arrange(self, waiting: Sequence[Request], now: float) -> Order:
        """Higher priority first. The newest, behind the window, come last, by arrival."""
        oldest_first = sorted(waiting, key=lambda request: request.rank)
        window, behind = oldest_first[: self._config.policy_window], oldest_first[self._config.policy_window :]
        lanes = Lanes(now - self._config.max_wait, self._counters)
        match self._config.policy:
            case PolicyName.FCFS:
                return Sequenced(oldest_first, lanes)
            case PolicyName.RANDOM:
                return Sequenced(_by_lane(_shuffled(window, self._config.policy_seed), lanes) + behind, lanes)
            case PolicyName.DFS_WEIGHT:
                walk = self._walk(window)
                if self._config.deadline_pressure:
                    lanes.press(_by_lane(walk, lanes), self.pace, now)
                return Sequenced(_by_lane(walk, lanes) + behind, lanes)
            case PolicyName.LPM:
                order = LongestPrefix(
                    window,
                    behind,
                    self._peek,
                    lanes,
                    self._counters,
                    siblings=self._siblings,
                    service=self.service if self._config.fairness else None,
                    places=self._critical_path.arrange(window) if self._config.critical_path else {},
                )
                if self._config.deadline_pressure and self._somebody_may_be_late(window, now):
                    order.press(lanes.press(order.upcoming(len(window)), self.pace, now))
                return order
            case _:
                assert_never(self._config.policy)

    def admitted(self, request: Request) -> None:
        """Where the walk of dfs-weight goes on."""
        if self._config.policy is PolicyName.DFS_WEIGHT:
            self._begun = {request.schedule.salt: request.tokens}

    def _walk(self, window: Sequence[Request]) -> list[Request]:
        """Salts share no subtree; that of the oldest request first."""
        of_salt: dict[str, list[Request]] = {}
        for request in window:
            of_salt.setdefault(request.schedule.salt, []).append(request)
        walk: list[Request] = []
        for salt, requests in of_salt.items():
            walk.extend(heaviest_first(requests, self._begun.get(salt, requests[0].tokens[:0])))
        return walk

    def _somebody_may_be_late(self, window: Sequence[Request], now: float) -> bool:
        """Even the last place is in time for most queues, and then places need not be counted."""
        return any(self.pace.needs_help(request, len(window), now) for request in window)


def _by_lane(in_order: Sequence[Request], lanes: Lanes) -> list[Request]:
    """Lanes first; the aged by arrival, the others as they stand."""
    place = {request.number: i for i, request in enumerate(in_order)}

    def key(request: Request) -> tuple[LaneKey, int]:
        lane = lanes.key(request)
        return (lane, request.number if lane[1] is Lane.AGED else place[request.number])

    return sorted(in_order, key=key)


def _shuffled(waiting: Sequence[Request], seed: int) -> list[Request]:
    """Each draws a lot of its own, so its place does not depend on how often orders are made."""

    def lot(request: Request) -> bytes:
        return hashlib.blake2b(f"{seed}:{request.number}".encode(), digest_size=8).digest()

    return sorted(waiting, key=lot)
