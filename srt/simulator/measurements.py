"""Measures a simulation: tokens found and computed, waiting, first tokens, and the load of each replica."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np
from numpy.typing import NDArray

from ...lang.protocol import RequestTimes
from .optimum import optimal_cached_tokens

BUSY_CALLS = 4  # calls in flight for each replica, on average, from which on loads are compared


class Spread(msgspec.Struct, frozen=True):
    """Seconds: the mean, the median, and what 99 of 100 are below."""

    mean: float
    p50: float
    p99: float


class ReplicaResult(msgspec.Struct, frozen=True):
    """The work of one replica.

    Attributes:
        calls, prompt_tokens, cached_tokens, answer_tokens: of the calls that were placed there.
        busy: the share of the time in which it computed.
    """

    calls: int
    prompt_tokens: int
    cached_tokens: int
    answer_tokens: int
    busy: float


class SimulationResult(msgspec.Struct, frozen=True):
    """The figures of a simulation.

    Attributes:
        seconds: virtual time from the first arrival to the last answer.
        calls: engine requests; a select is one.
        computed_tokens: prompt_tokens − cached_tokens.
        optimal_cached_tokens: the most that one unlimited cache could have found (Theorem 3.1); None: not counted.
        waiting, first_token, call: from the arrival at the replica to admission, to the first token, to the end; the
            first two of generations that made tokens. None: there was none.
        most_over_mean: how many times the mean load a replica had while another had no call, with `BUSY_CALLS` or more
            calls in flight for each replica, until the last call was placed; 0: no replica was without a call then.
            None: not counted.
        tier_tokens: tokens that slower tiers brought, by tier.
    """

    kind: str
    replicas: int
    policy: str
    seconds: float
    calls: int
    prompt_tokens: int
    cached_tokens: int
    computed_tokens: int
    answer_tokens: int
    optimal_cached_tokens: int | None
    waiting: Spread | None
    first_token: Spread | None
    call: Spread | None
    most_over_mean: float | None
    tier_tokens: dict[str, int]
    by_replica: list[ReplicaResult]

    @property
    def hit_rate(self) -> float:
        return self.cached_tokens / max(1, self.prompt_tokens)

    @property
    def optimal_hit_rate(self) -> float | None:
        cached = self.optimal_cached_tokens
        return None if cached is None else cached / max(1, self.prompt_tokens)

    @property
    def calls_per_second(self) -> float:
        return self.calls / max(self.seconds, 1e-9)


@dataclass(slots=True)
class _ReplicaSums:
    calls: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    answer_tokens: int = 0
    busy: float = 0.0


@dataclass(slots=True)
class _InFlight:
    replica: int
    sent: float
    sequences: Sequence[Sequence[int]]


@dataclass(slots=True, eq=False)
class Measurements:
    """Collects the facts of a simulation.

    `keeps_sequences`: keeps all tokens, from which the optimum is counted.
    """

    replicas: int
    keeps_sequences: bool = True
    counters: dict[str, float] = field(default_factory=dict)  # of all schedulers, added up
    tier_tokens: dict[str, int] = field(default_factory=dict)
    found: int = 0  # prompt tokens that calls have found, as their answers say
    forced: int = 0  # tokens at the ends of answers that no step has chosen
    _sums: list[_ReplicaSums] = field(init=False)
    _in_flight: dict[int, _InFlight] = field(default_factory=dict, init=False)
    _waiting: array[float] = field(default_factory=lambda: array("d"), init=False)
    _first_token: array[float] = field(default_factory=lambda: array("d"), init=False)
    _call: array[float] = field(default_factory=lambda: array("d"), init=False)
    # Changes of the loads: when, of which replica (its number + 1, below 0 for an end).
    _change_times: array[float] = field(default_factory=lambda: array("d"), init=False)
    _changes: array[int] = field(default_factory=lambda: array("l"), init=False)
    _prompts: list[Sequence[int]] = field(default_factory=list, init=False)
    _answers: list[Sequence[int]] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        self._sums = [_ReplicaSums() for _ in range(self.replicas)]

    def sent(self, call: int, replica: int, now: float, sequences: Sequence[Sequence[int]] = ()) -> None:
        """Notes that a call was sent to a replica. sequences: its prompt, of a select with each choice."""
        self._in_flight[call] = _InFlight(replica, now, sequences if self.keeps_sequences else ())
        self._sums[replica].calls += 1
        self._change_times.append(now)
        self._changes.append(replica + 1)

    def ended(
        self,
        call: int,
        now: float,
        prompt_tokens: int,
        answer: Sequence[int] = (),
        times: RequestTimes | None = None,
    ) -> None:
        """Notes the end of a call. times: of a generation."""
        known = self._in_flight.pop(call)
        sums = self._sums[known.replica]
        sums.prompt_tokens += prompt_tokens
        sums.answer_tokens += len(answer)
        self._call.append(now - known.sent)
        if times is not None and times.first_token is not None:
            self._waiting.append(times.queued)
            self._first_token.append(times.first_token)
        self._change_times.append(now)
        self._changes.append(-known.replica - 1)
        for sequence in known.sequences:
            self._prompts.append(sequence)
            self._answers.append(answer)

    def worked(self, replica: int, busy: float, counters: Mapping[str, float]) -> None:
        """Notes at the end how long a replica computed, and its counters.

        What hints have computed counts as not found: otherwise they would turn misses of calls into hits for nothing.
        """
        sums = self._sums[replica]
        sums.busy = busy
        sums.cached_tokens = sums.prompt_tokens - int(counters["computed_prompt_tokens"])
        for name, value in counters.items():
            self.counters[name] = self.counters.get(name, 0) + value

    def optimum(self) -> int | None:
        """Counts what one unlimited cache could have found; None without the sequences."""
        return optimal_cached_tokens(self._prompts, self._answers) if self.keeps_sequences else None

    @property
    def _first_arrival(self) -> float:
        return min(self._change_times, default=0.0)

    def loads(self, points: int) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
        """Counts the calls in flight at each replica at evenly spaced times: times [P], loads [replicas, P].

        Times are seconds after the first arrival.
        """
        times, changes = np.array(self._change_times) - self._first_arrival, np.array(self._changes)
        at = np.linspace(0.0, float(times.max(initial=0.0)), points)
        loads = np.zeros((self.replicas, points), dtype=np.int64)
        owners, steps = np.abs(changes) - 1, np.sign(changes)
        order = np.lexsort((times, owners))
        owners, steps, times = owners[order], steps[order], times[order]
        bounds = np.searchsorted(owners, np.arange(self.replicas + 1))
        for replica in range(self.replicas):
            mine = slice(bounds[replica], bounds[replica + 1])
            sums = np.concatenate([[0], np.cumsum(steps[mine])])
            loads[replica] = sums[np.searchsorted(times[mine], at, side="right")]
        return at, loads

    def most_over_mean(self) -> float | None:
        """Returns SimulationResult.most_over_mean; None for more replicas than are compared at every change."""
        if self.replicas > 64 or len(self._changes) > 4_000_000:
            return None
        loads = [0] * self.replicas
        total, most = 0, 0.0
        times, changes = self._change_times, self._changes
        last_arrival = max((index for index, change in enumerate(changes) if change > 0), default=-1)
        for index, change in enumerate(changes[: last_arrival + 1]):
            loads[abs(change) - 1] += 1 if change > 0 else -1
            total += 1 if change > 0 else -1
            if index + 1 < len(times) and times[index + 1] == times[index]:
                continue  # all changes of one moment count together
            if total >= BUSY_CALLS * self.replicas and min(loads) == 0:
                most = max(most, max(loads) * self.replicas / total)
        return most

    def result(self, kind: str, policy: str, optimum: int | None) -> SimulationResult:
        """Returns all figures. optimum: tokens."""
        seconds = max(self._change_times, default=0.0) - self._first_arrival
        prompt_tokens = sum(sums.prompt_tokens for sums in self._sums)
        cached_tokens = sum(sums.cached_tokens for sums in self._sums)
        return SimulationResult(
            kind=kind,
            replicas=self.replicas,
            policy=policy,
            seconds=seconds,
            calls=len(self._call),
            prompt_tokens=prompt_tokens,
            cached_tokens=cached_tokens,
            computed_tokens=prompt_tokens - cached_tokens,
            answer_tokens=sum(sums.answer_tokens for sums in self._sums),
            optimal_cached_tokens=optimum,
            waiting=_durations(self._waiting),
            first_token=_durations(self._first_token),
            call=_durations(self._call),
            most_over_mean=self.most_over_mean(),
            tier_tokens=self.tier_tokens,
            by_replica=[
                ReplicaResult(
                    sums.calls,
                    sums.prompt_tokens,
                    sums.cached_tokens,
                    sums.answer_tokens,
                    sums.busy / max(seconds, 1e-9),
                )
                for sums in self._sums
            ],
        )


def _durations(seconds: array[float]) -> Spread | None:
    if not seconds:
        return None
    values = np.array(seconds)
    return Spread(float(values.mean()), float(np.median(values)), float(np.percentile(values, 99)))
