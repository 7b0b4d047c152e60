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

from ...lang.protocol import PlaceKind
from ...srt.placement.placement import Placement
from ...srt.placement.policies import Placing
from .keys import RoutingKey

LOST_SECONDS = 5.0  # Ray finds out about a replica that died within one or two


class NoReplicaError(Exception):
    """No replica is there that could take the call."""


class Call:
    """One request on its way.

    Attributes:
        key: what placement knows of it.
        excluded: replicas that have refused it or were lost with it.
        replica: the one that it was placed on last; "" before.
        said: the replica and the reason, in words; a client reads it, so it has no load of others.
    """

    def __init__(self, key: RoutingKey) -> None:
        self.key = key
        self.excluded: frozenset[str] = frozenset()
        self.replica = ""
        self.said = ""
        self._at: tuple[Placements, int] | None = None

    def placed(self, at: "Placements", replica: str, kind: PlaceKind, number: int) -> None:
        """Notes where it goes. An earlier placement ends."""
        self.end()
        self.replica, self.said = replica, f"{replica}: {kind.words}"
        self._at = at, number

    def refused(self, unreachable: bool = False) -> None:
        """Says that its replica does not take it, or cannot be reached, by this call or another."""
        self.excluded |= {self.replica}
        if self._at is not None and unreachable:
            self._at[0].lost(self.replica)
        self.end()

    def begin(self) -> None:
        """Says that its replica has begun to answer."""
        if self._at is not None:
            self._at[0].began(self._at[1])

    def end(self) -> None:
        """Says that its replica has no more to do with it. Once more does nothing."""
        at, self._at = self._at, None
        if at is not None:
            at[0].ended(at[1])


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
        self._told: Mapping[str, Mapping[str, float]] = {}
        self._lost: dict[str, float] = {}  # until when

    def set_replicas(self, stats: Mapping[str, Mapping[str, float]]) -> None:
        """Takes the replicas that take calls now, and what each has told of itself last."""
        with self._lock:
            for gone in self._numbers.keys() - stats.keys():
                self._down(gone)
            self._told = stats
            self._lost = {name: until for name, until in self._lost.items() if name in stats}
            self._admit()
            for replica, told in stats.items():
                if replica in self._numbers:
                    self._learn(replica, told)

    def lost(self, replica: str) -> None:
        """Says that a replica cannot be reached, before its absence from `set_replicas` does. It gets no calls, as long
        as it is there, for LOST_SECONDS."""
        with self._lock:
            self._lost[replica] = self._clock() + LOST_SECONDS
            if replica in self._numbers:
                self._down(replica)

    def place(self, call: Call) -> str:
        """Chooses a replica for a call, and counts it there until it ends. Raises NoReplicaError."""
        key = call.key
        placing = Placing(key.units, key.salt, (), key.group, key.program, key.work)
        with self._lock:
            if self._lost:
                self._admit()
            excluded = {self._numbers[each] for each in call.excluded if each in self._numbers}
            placed = self._placement.place(placing, self._clock(), excluded)
            replica = "" if placed is None else self._names[placed.replica]
        if placed is None:
            call.end()
            raise NoReplicaError("no replica takes the call")
        call.placed(self, replica, placed.kind, placed.number)
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

    def began(self, number: int) -> None:
        """Says that the prompt of a call is computed."""
        with self._lock:
            self._placement.began(number, self._clock())

    def ended(self, number: int) -> None:
        """Says that a call is no load any more."""
        with self._lock:
            self._placement.ended(number, self._clock())

    def _admit(self) -> None:
        """Lets replicas take calls: new ones, and those that were lost and are still there after a while."""
        now = self._clock()
        self._lost = {name: until for name, until in self._lost.items() if until > now}
        for replica in self._told.keys() - self._numbers.keys() - self._lost.keys():
            self._up(replica)

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
