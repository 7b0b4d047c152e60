"""Describes the state of a runtime: its health, its gauges and its counters.

    backend.health()          from the caller's own memory: at once, without a message
    await backend.status()    from the gateway, which asks no engine: a step of a minute delays it by nothing

Counters begin at 0 with the process that counts. `RisingCounters` adds them up over several lives of a process, so that
a reader sees sums that never fall. There is one for each border that such a life ends at:

    engine ── heartbeats ──▶ gateway ── StatusRead ──▶ Runtime ──▶ reader
      counts of its life       sums over its engines     sums over its gateways

Work that an engine did after its last heartbeat, at most a second before its end, is in none of the sums.
"""

from collections.abc import Hashable, Mapping, Sequence
from enum import StrEnum
from typing import Literal, Protocol, Self, runtime_checkable

import msgspec


class EngineState(StrEnum):
    STARTING = "starting"  # calls are held
    READY = "ready"
    FAILED = "failed"  # given up: calls fail at once, with the cause


class RuntimeState(StrEnum):
    STOPPED = "stopped"  # not started yet, or closed
    STARTING = "starting"  # the gateway and its engines
    READY = "ready"
    RESTARTING = "restarting"  # an engine is gone, and the gateway starts another; calls are held
    FAILED = "failed"  # no engine can be started; calls fail at once
    BROKEN = "broken"  # the gateway is gone or hangs; the next call, or `start`, starts another


class RuntimeHealth(msgspec.Struct, frozen=True):
    """Tells whether a runtime answers calls, as far as it is known without asking.

    A gateway or an engine that is gone shows at once, one that is stopped or hangs within 5 s on a quiet machine. One
    that computes is healthy, however long its step takes.

    Attributes:
        cause: why it is not ready, in words; "" for a runtime that is.
        silence: seconds since a word of the gateway, which says one every second; None without a gateway.
        heartbeat_age: seconds since the last heartbeat of the engine, which sends two every second, also during a step;
            of several engines the latest; None while no engine is ready.
        replicas: the states of several engines, one of which is enough; () where there is one.
    """

    state: RuntimeState
    cause: str = ""
    silence: float | None = None
    heartbeat_age: float | None = None
    replicas: tuple[EngineState, ...] = ()

    @property
    def healthy(self) -> bool:
        return self.state is RuntimeState.READY


class PoolGauges(msgspec.Struct, frozen=True, omit_defaults=True):
    """Counts the slots of the KV pool, one for each token. Slots neither free nor cached belong to a running request.

    Attributes:
        cached: in the radix tree, those that running requests use among them.
        pinned: of the cached ones, those kept from eviction by a pin.
        pins: how many pins there are.
        kept: of the pinned ones, those that explicit caching keeps; they never give way.
        window_total, window_free: the slots of window layers, where these have a pool of their own; else 0.
    """

    total: int = 0
    free: int = 0
    cached: int = 0
    pinned: int = 0
    pins: int = 0
    kept: int = 0
    window_total: int = 0
    window_free: int = 0

    @classmethod
    def sum_of(cls, pools: Sequence[Self]) -> Self:
        """Returns the gauges of several pools together."""
        return cls(*(sum(counts) for counts in zip(*map(msgspec.structs.astuple, pools), strict=True)))


# Upper bounds of the buckets in which durations are counted, in seconds.
BOUNDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0)


def bucket_name(name: str, bound: float) -> str:
    """Returns the counter of the durations of at most `bound` seconds; the counter `name` is the sum of all."""
    return f"{name}_le_{bound:g}"


def count_name(name: str) -> str:
    """Returns the counter of all durations whose sum is the counter `name`."""
    return f"{name}_count"


class Histogram(msgspec.Struct, frozen=True):
    """Counts durations by their length.

    Attributes:
        seconds: their sum.
        count: how many there were.
        up_to: (a bound in seconds, how many were at most that long), ascending.
    """

    seconds: float
    count: int
    up_to: tuple[tuple[float, int], ...]


class ReplicaStatus(msgspec.Struct, frozen=True, omit_defaults=True):
    """Reads of one of several engines: see RuntimeStatus, which has the same of all of them.

    Attributes:
        cause: why it cannot be started; "" otherwise.
        generation: how many engines in this place have become ready.
        in_flight: calls that were sent to it and have no ending.
        rates: tokens a second that it prefills, decodes and loads from tiers, as far as they were measured; placement
            reckons with them.
    """

    engine: EngineState
    cause: str = ""
    generation: int = 0
    heartbeat_age: float | None = None
    in_flight: int = 0
    running: int = 0
    waiting: int = 0
    pool: PoolGauges = PoolGauges()
    counters: dict[str, float] = {}
    rates: dict[str, float] = {}


class RuntimeStatus(msgspec.Struct, frozen=True, omit_defaults=True):
    """Reads of a runtime at one moment: gauges of now, counters since its start.

    The engine's part is as of the beginning of the step that runs, in its last heartbeat; without an engine it is 0. So
    a request that the step has admitted is still among those that wait. Of several engines it is the sum.

    Attributes:
        model: the model's name.
        gateway: names the gateway's start; another gateway has another.
        engine: the state of the engine; of several "ready" when one is, and "failed" when all have.
        engine_cause: why no engine can be started; "" otherwise.
        generation: how many engines of this gateway have become ready.
        heartbeat_age: seconds since the last heartbeat, of several engines the latest; None while none is ready.
        in_flight: calls without an ending, of all clients.
        max_queue: the most of them; the next one is refused.
        running, waiting: requests in the engine. A call of n continuations is n requests.
        pool: the slots of the KV pool.
        counters: cumulative; the names are those of `get_server_info()`. Those of the gateway begin with "gateway_".
            `histogram` reads those of durations.
        replicas: the engines one by one; () where there is one.
    """

    model: str
    gateway: str
    engine: EngineState
    engine_cause: str = ""
    generation: int = 0
    heartbeat_age: float | None = None
    in_flight: int = 0
    max_queue: int = 0
    running: int = 0
    waiting: int = 0
    pool: PoolGauges = PoolGauges()
    counters: dict[str, float] = {}
    replicas: tuple[ReplicaStatus, ...] = ()

    @property
    def engine_losses(self) -> int:
        """Engines that ended although they were ready."""
        return int(self.counters.get("gateway_engine_losses", 0))

    def histogram(self, name: Literal["queue_seconds", "first_token_seconds", "token_seconds"]) -> Histogram:
        """Returns the durations of generations in the engine: until admission, until the first token, between tokens.

        The gap before several tokens that came together counts for each of them, in equal parts.
        """
        counters = self.counters
        return Histogram(
            counters.get(name, 0.0),
            int(counters.get(count_name(name), 0)),
            tuple((bound, int(counters.get(bucket_name(name, bound), 0))) for bound in BOUNDS),
        )


MOST_NODES = 5_000  # of one survey
MOST_SHOWN = 200  # characters of a node


class TreeNode(msgspec.Struct, frozen=True, array_like=True):
    """One node of the radix tree: a run of cached tokens that follows its parent's.

    Attributes:
        id: stays the same as long as the node is cached; a split gives its beginning to a new node.
        parent: its id; None for a node that begins a prompt.
        tokens: how many it has.
        locks, pins, keeps: running requests, pins and kept prefixes that hold it.
        age: how many uses of the cache there have been since its last one.
        salt: names its namespace by a number, which is the same in all engines: 48 bits of a digest.
        text: the beginning of its text, if it was asked for.
        replica: the engine that has it.
    """

    id: int
    parent: int | None
    tokens: int
    locks: int
    pins: int
    keeps: int
    age: int
    salt: int
    text: str = ""
    replica: int = 0


class TreeSurvey(msgspec.Struct, frozen=True):
    """The radix tree between two steps; of several engines each one's tree.

    Attributes:
        nodes: parents before their children; the most recently used branches, and of those the largest nodes. Those
            of the first engine come first.
        total_nodes: how many the tree has; more than `nodes` where it was cut.
        pool: the slots of the pool at the same moment.
    """

    nodes: tuple[TreeNode, ...]
    total_nodes: int
    pool: PoolGauges


class RisingCounters:
    """Adds up the counters of a source over its lives, each of which begins at 0: the sums never fall."""

    def __init__(self) -> None:
        self._life: Hashable = None
        self._base: dict[str, float] = {}  # sums of the lives that are over
        self._latest: Mapping[str, float] = {}  # of this life

    def note(self, life: Hashable, counters: Mapping[str, float]) -> None:
        """Takes the latest counters of one life. Another life than before begins at 0, and the one before is over."""
        if life != self._life:
            self._base, self._latest, self._life = self.sums, {}, life
        self._latest = {name: max(count, self._latest.get(name, 0)) for name, count in counters.items()}

    @property
    def sums(self) -> dict[str, float]:
        """Returns the counters of all lives together."""
        names = {**self._base, **self._latest}
        return {name: self._base.get(name, 0) + self._latest.get(name, 0) for name in names}


@runtime_checkable
class Observable(Protocol):
    """A backend that tells its state while it computes."""

    def health(self) -> RuntimeHealth:
        """Returns at once, and starts nothing."""

    async def status(self) -> RuntimeStatus:
        """Reads gauges and counters; waits for no step, and starts nothing.

        Raises:
            BackendError: it is not ready; `health` has the reason.
            ConnectionLostError, DeadlineError: it ended, or hangs.
        """

    async def survey(self, most: int = 1_000, text: int = 0) -> TreeSurvey:
        """Reads the radix tree after the step that runs.

        Args:
            most: nodes of all engines together, up to MOST_NODES.
            text: characters of the text of each node, up to MOST_SHOWN. Prompts are private: 0 shows none.

        Raises:
            ParameterError: a number out of its range.
        """
