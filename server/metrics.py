"""Numbers about the server for machines: `/metrics` for Prometheus, `/v1/loads` for gateways in front.

Both read one `RuntimeStatus`, which the gateway answers at once, and the counts of this process. Counters of the
runtime add up over restarts of its engine and its gateway (`lang/status.py`); those of HTTP begin with the process.
They say how much, never what: no label holds a text of a client but the name of a refused field. They are of all keys
together, so the routes are the administrator's.
"""

import datetime
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal

import msgspec
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector, CollectorRegistry

from ..lang import __version__
from ..lang.protocol import PlaceKind
from ..lang.status import EngineState, ReplicaStatus, RuntimeStatus
from .activity import read_status
from .bodies import refused_fields
from .front import Front
from .http import Asked, Endpoint, Reply

# ------------------------------------------------------------------------------------------------- /metrics

# Name of the metric → counter of the runtime, and its meaning.
_COUNTERS: Mapping[str, tuple[str, str]] = {
    "umbel_prompt_tokens": ("prompt_tokens", "Tokens of prompts, when they are first admitted."),
    "umbel_cached_tokens": ("cached_tokens", "Tokens of prompts whose keys were in the cache."),
    "umbel_loaded_host_tokens": ("loaded_host_tokens", "Cached tokens that came from host memory."),
    "umbel_loaded_disk_tokens": ("loaded_disk_tokens", "Cached tokens that came from the disk."),
    "umbel_loaded_shared_tokens": ("loaded_shared_tokens", "Cached tokens that came from the shared store."),
    "umbel_computed_prompt_tokens": ("computed_prompt_tokens", "Tokens of prompts that were computed."),
    "umbel_generated_tokens": ("completion_tokens", "Tokens that were generated."),
    "umbel_forced_tokens": ("forced_tokens", "Generated tokens that a constraint left no choice about."),
    "umbel_evicted_tokens": ("evicted_tokens", "Tokens that were evicted from the cache."),
    "umbel_retractions": ("retractions", "Requests that gave their slots back and waited again."),
    "umbel_programs": ("gateway_programs", "Programs that were run as one request each."),
    "umbel_steps": ("steps", "Forward passes."),
    "umbel_engine_losses": ("gateway_engine_losses", "Engines that ended although they were ready."),
    "umbel_retried_requests": ("gateway_retried_requests", "Requests that were sent again after an engine was lost."),
}
_ENDINGS = ("finished", "failed", "aborted", "expired")
_Durations = Literal["queue_seconds", "first_token_seconds", "token_seconds"]
_HISTOGRAMS: Mapping[str, tuple[_Durations, str]] = {
    "umbel_queue_seconds": ("queue_seconds", "From the arrival at the engine until the first admission."),
    "umbel_time_to_first_token_seconds": ("first_token_seconds", "From the arrival at the engine to the first token."),
    "umbel_time_per_token_seconds": ("token_seconds", "Between two tokens of one text."),
}


class Snapshot(Collector):
    """Gives one reading of a server to prometheus_client.

    Args:
        status: None where the runtime is not ready: then only the counts of this process are known.
    """

    def __init__(self, front: Front, status: RuntimeStatus | None) -> None:
        self._front = front
        self._status = status

    def collect(self) -> Iterator[Metric]:
        ready = self._status is not None and self._status.engine is EngineState.READY
        yield GaugeMetricFamily("umbel_ready", "Whether the engine takes requests.", value=float(ready))
        yield from self._http()
        if self._status is not None:
            yield from self._counters(self._status)
            yield from self._gauges(self._status)
            if self._status.replicas:
                yield from self._replicas(self._status)

    def _http(self) -> Iterator[Metric]:
        """Yields the counts of all processes of the server, and the refused fields of this one."""
        front, total = self._front, self._front.counts.total
        yield GaugeMetricFamily("umbel_http_in_flight", "Requests over HTTP that run or wait.", total("in_flight"))
        yield CounterMetricFamily("umbel_http_refused", "Requests refused for want of room.", total("refused"))
        yield CounterMetricFamily("umbel_http_disconnects", "Clients that left before the end.", total("disconnects"))
        yield CounterMetricFamily("umbel_http_malformed", "Connections that ended with no HTTP.", total("malformed"))
        names, values = (["process"], [str(os.getpid())]) if front.workers > 1 else ([], [])
        fields = CounterMetricFamily(
            "umbel_refused_fields", "Fields of bodies that are not offered.", labels=[*names, "field"]
        )
        for name, times in sorted(refused_fields.items()):
            fields.add_metric([*values, name], times)
        yield fields

    @staticmethod
    def _counters(status: RuntimeStatus) -> Iterator[Metric]:
        for name, (counter, meaning) in _COUNTERS.items():
            yield CounterMetricFamily(name, meaning, value=status.counters.get(counter, 0))
        endings = CounterMetricFamily("umbel_requests", "Requests of the engine, by how they ended.", labels=["ending"])
        for ending in _ENDINGS:
            endings.add_metric([ending], status.counters.get(ending, 0))
        yield endings
        for name, (durations, meaning) in _HISTOGRAMS.items():
            found = status.histogram(durations)
            buckets = [*((f"{bound:g}", count) for bound, count in found.up_to), ("+Inf", found.count)]
            yield HistogramMetricFamily(name, meaning, buckets=buckets, sum_value=found.seconds)

    @staticmethod
    def _gauges(status: RuntimeStatus) -> Iterator[Metric]:
        pool = status.pool
        slots = GaugeMetricFamily("umbel_pool_slots", "Slots of the KV pool; pinned ones are cached.", labels=["state"])
        for state, count in (("free", pool.free), ("cached", pool.cached), ("pinned", pool.pinned)):
            slots.add_metric([state], count)
        yield slots
        windows = GaugeMetricFamily(
            "umbel_window_slots",
            "Slots of layers that see a window of tokens; none: they have no own.",
            labels=["state"],
        )
        for state, count in (("free", pool.window_free), ("used", pool.window_total - pool.window_free)):
            windows.add_metric([state], count)
        yield windows
        yield GaugeMetricFamily("umbel_pool_size", "All slots of the KV pool.", value=pool.total)
        yield GaugeMetricFamily("umbel_running", "Requests that the engine computes.", value=status.running)
        yield GaugeMetricFamily("umbel_waiting", "Requests that wait in the engine.", value=status.waiting)
        yield GaugeMetricFamily("umbel_in_flight", "Calls without an ending, of all clients.", value=status.in_flight)

    @staticmethod
    def _replicas(status: RuntimeStatus) -> Iterator[Metric]:
        """Yields the figures of several engines one by one."""
        placed = CounterMetricFamily("umbel_placed", "Calls by why their engine was chosen.", labels=["reason"])
        for reason in PlaceKind:
            placed.add_metric([reason], status.counters.get(f"gateway_placed_{reason}", 0))
        yield placed
        for name, meaning, read in _OF_REPLICAS:
            gauge = GaugeMetricFamily(f"umbel_replica_{name}", meaning, labels=["replica"])
            for index, replica in enumerate(status.replicas):
                gauge.add_metric([str(index)], read(replica))
            yield gauge
        for name, meaning in (("prompt_tokens", "Tokens of prompts."), ("cached_tokens", "Of these, from the cache.")):
            counter = CounterMetricFamily(f"umbel_replica_{name}", meaning, labels=["replica"])
            for index, replica in enumerate(status.replicas):
                counter.add_metric([str(index)], replica.counters.get(name, 0))
            yield counter


_OF_REPLICAS: Sequence[tuple[str, str, Callable[[ReplicaStatus], float]]] = (
    ("ready", "Whether this engine takes requests.", lambda replica: float(replica.engine is EngineState.READY)),
    ("in_flight", "Calls that this engine has.", lambda replica: replica.in_flight),
    ("running", "Requests that this engine computes.", lambda replica: replica.running),
    ("waiting", "Requests that wait in this engine.", lambda replica: replica.waiting),
    ("pool_free", "Free slots of its KV pool.", lambda replica: replica.pool.free),
    ("prefill_rate", "Tokens a second that it prefills, 0: unknown.", lambda replica: replica.rates.get("prefill", 0)),
    ("decode_rate", "Tokens a second that it decodes, 0: unknown.", lambda replica: replica.rates.get("decode", 0)),
    ("load_rate", "Tokens a second from its tiers, 0: unknown.", lambda replica: replica.rates.get("load", 0)),
)


async def metrics(asked: Asked[None]) -> Reply:
    """Returns the metrics in the text format of Prometheus, or as OpenMetrics where the client asks for it."""
    front = asked.front
    registry = CollectorRegistry(auto_describe=False)
    registry.register(Snapshot(front, await read_status(front.backend)))
    write, media = choose_encoder(asked.headers.get("accept", ""))
    return Reply(write(registry), media=media)


# ------------------------------------------------------------------------------------------------- /v1/loads


class Load(msgspec.Struct, frozen=True):
    """The load of one engine, in SGLang's words. `token_usage`: the part of the pool that is not free."""

    dp_rank: int
    num_running_reqs: int
    num_waiting_reqs: int
    num_total_reqs: int
    num_used_tokens: int
    max_total_num_tokens: int
    token_usage: float
    gen_throughput: float
    cache_hit_rate: float


class LoadSum(msgspec.Struct, frozen=True):
    """The load of all engines together, of which there is one."""

    total_running_reqs: int
    total_waiting_reqs: int
    total_reqs: int
    avg_token_usage: float
    avg_throughput: float


class Loads(msgspec.Struct, frozen=True):
    """The load of the server, for gateways that choose between several."""

    timestamp: str
    version: str
    dp_rank_count: int
    loads: list[Load]
    aggregate: LoadSum


async def loads(asked: Asked[None]) -> Reply:
    """Returns the load of the server."""
    front = asked.front
    front.check_open()
    status = await read_status(front.backend) or RuntimeStatus("", "", EngineState.STARTING)
    used = status.pool.total - status.pool.free
    usage = round(used / max(1, status.pool.total), 4)
    prompt_tokens = status.counters.get("prompt_tokens", 0)
    load = Load(
        dp_rank=0,
        num_running_reqs=status.running,
        num_waiting_reqs=status.waiting,
        num_total_reqs=status.running + status.waiting,
        num_used_tokens=used,
        max_total_num_tokens=status.pool.total,
        token_usage=usage,
        gen_throughput=round(front.activity.tokens_per_second, 2),
        cache_hit_rate=round(status.counters.get("cached_tokens", 0) / max(1, prompt_tokens), 4),
    )
    whole = LoadSum(
        load.num_running_reqs, load.num_waiting_reqs, load.num_total_reqs, load.token_usage, load.gen_throughput
    )
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
    return Reply(Loads(now, __version__, 1, [load], whole))


ENDPOINTS = (
    Endpoint("GET", "/metrics", metrics, "Counters and gauges for Prometheus", media=("text/plain",), admin=True),
    *(
        Endpoint("GET", path, loads, "The load, in SGLang's words", answer=Loads, errors=(503,), admin=True)
        for path in ("/v1/loads", "/loads")
    ),
)
