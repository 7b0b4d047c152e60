"""Placement of the calls of one ingress: `srt.placement` with replicas by name, and without the events of engines.

    place ──▶ counted at the replica, which is taken to have the prompt from now on
    begin ──▶ the prompt is computed
    end   ──▶ the call is no load any more

The copy of what a replica has cached is made from where calls were placed. It is cut to the pool of the replica, least
recently used first, and dropped with the replica, or when it tells that it has nothing cached any more. Imports nothing
of Ray.
"""

import itertools
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial

from ...srt.placement.placement import Placement
from ...srt.placement.policies import Placing
from .keys import RoutingKey


class NoReplicaError(Exception):
    """No replica is there that could take the call."""


class Call:
    """One request on its way.

    Attributes:
        key: what placement knows of it.
        excluded: replicas that have refused it or were lost with it.
        replica: the one that it was placed on last; "" before.
        said: the replica and the reason, in words.
    """

    def __init__(self, key: RoutingKey) -> None:
        self.key = key
        self.excluded: frozenset[str] = frozenset()
        self.replica = ""
        self.said = ""
        self._begin: Callable[[], None] | None = None
        self._end: Callable[[], None] | None = None

    def exclude(self, replica: str) -> None:
        """Says that a replica does not take it."""
        self.excluded |= {replica}

    def placed(self, replica: str, reason: str, begin: Callable[[], None], end: Callable[[], None]) -> None:
        """Notes where it goes, and what to call as it goes on. An earlier placement ends."""
        self.end()
        self.replica, self.said = replica, f"{replica}: {reason}"
        self._begin, self._end = begin, end

    def begin(self) -> None:
        """Says that its replica has begun to answer."""
        if self._begin is not None:
            self._begin()
            self._begin = None

    def end(self) -> None:
        """Says that its replica has no more to do with it. Once more does nothing."""
        ending, self._begin, self._end = self._end, None, None
        if ending is not None:
            ending()


class Placements:
    """Places calls on replicas. Threads may share it: Ray's router and the ingress run in two.

    Args:
        policy: its name; see `srt.placement`.
        clock: monotonic seconds.
    """

    def __init__(self, policy: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._placement = Placement(policy, learns="routing")
        self._numbers: dict[str, int] = {}
        self._names: dict[int, str] = {}
        self._cached: dict[str, float] = {}  # as the replicas told last

    def set_replicas(self, stats: Mapping[str, Mapping[str, float]]) -> None:
        """Takes the replicas that take calls now, and what each has told of itself last."""
        with self._lock:
            for gone in self._numbers.keys() - stats.keys():
                self._down(gone)
            for replica, told in stats.items():
                if replica not in self._numbers:
                    self._up(replica)
                self._learn(replica, told)

    def died(self, replica: str) -> None:
        """Says that a replica is gone, before its absence from `set_replicas` does."""
        with self._lock:
            if replica in self._numbers:
                self._down(replica)

    def place(self, call: Call) -> str:
        """Chooses a replica for a call, and counts it there until it ends. Raises NoReplicaError."""
        key = call.key
        placing = Placing(key.units, key.salt, (), key.group, key.program, key.work)
        with self._lock:
            excluded = {self._numbers[each] for each in call.excluded if each in self._numbers}
            placed = self._placement.place(placing, self._clock(), excluded)
            replica = "" if placed is None else self._names[placed.replica]
        if placed is None:
            call.end()
            raise NoReplicaError("no replica takes the call")
        call.placed(replica, placed.reason, partial(self._begin, placed.number), partial(self._end, placed.number))
        return replica

    def calls(self) -> dict[str, int]:
        """Returns how many calls are in flight at each replica."""
        with self._lock:
            facts = self._placement.facts().replicas
            return {self._names[each.replica]: each.running for each in facts if each.replica in self._names}

    def cached_tokens(self) -> dict[str, int]:
        """Returns how much each replica is taken to have in its cache."""
        with self._lock:
            return {replica: self._placement.tree.tokens_of(number) for replica, number in self._numbers.items()}

    def _begin(self, number: int) -> None:
        with self._lock:
            self._placement.began(number, self._clock())

    def _end(self, number: int) -> None:
        with self._lock:
            self._placement.ended(number, self._clock())

    def _up(self, replica: str) -> None:
        number = next(each for each in itertools.count() if each not in self._names)
        self._numbers[replica], self._names[number] = number, replica
        self._placement.up(number)

    def _down(self, replica: str) -> None:
        number = self._numbers.pop(replica)
        del self._names[number]
        self._cached.pop(replica, None)
        self._placement.down(number)

    def _learn(self, replica: str, told: Mapping[str, float]) -> None:
        number = self._numbers[replica]
        if (rate := told.get("prefill_rate", 0.0)) > 0:
            self._placement.rates(number, prefill=rate)
        if "cached" in told:
            if not told["cached"] and self._cached.get(replica):  # it was flushed, or has another engine
                self._placement.tree.drop(number)
            self._cached[replica] = told["cached"]
        if pool := int(told.get("pool", 0)):
            self._placement.tree.evict(number, pool)
