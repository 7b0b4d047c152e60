"""One run of one workload on one system, and what it tells.

The order is that in which the peers of the record were measured: the first programs of the file one at a time (their
mean is the latency), then the whole file with 32 programs in flight, on the same server and with the cache that the
first phase left behind. The cache is emptied before.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from umbel.srt.simulator.workload import Ops, Program, Text, Workload
from umbel.srt.tokenizer.prompt import PromptEncoder

from .replay.recorder import Call
from .replay.reuse import least_computed, prompt_tokens, sequences_of
from .replay.validity import Validity, of_programs
from .systems import Counters, System

CONCURRENCY = 32
WARM = 3  # programs of the latency phase

Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Reuse:
    """Prompt tokens of the batch phase: of all calls, computed (hints included), and the fewest possible."""

    prompt: int
    computed: int
    least: int

    @property
    def achieved(self) -> float:
        """The paper's cache hit rate."""
        return 1 - self.computed / self.prompt

    @property
    def optimal(self) -> float:
        """What Theorem 3.1 allows."""
        return 1 - self.least / self.prompt


@dataclass(frozen=True, slots=True)
class Measurement:
    workload: str
    system: str
    repeat: int
    programs: int
    concurrency: int
    seconds: float  # of the batch phase
    latencies: tuple[float, ...]  # one for each program of the latency phase
    failures: tuple[str, ...]  # what failed in either phase
    resident_bytes: int
    reuse: Reuse | None  # of systems that count
    counters: dict[str, float]  # what they grew by in the batch phase
    validity: Validity | None = None  # of the values of the batch phase; None without constraints

    @property
    def rate(self) -> float:
        """Programs per second."""
        return self.programs / self.seconds

    @property
    def latency(self) -> float:
        """Mean seconds of a program when nothing else runs."""
        return sum(self.latencies) / len(self.latencies)

    def share(self, counter: str) -> float | None:
        """Of the batch phase's time, by a counter of seconds."""
        return self.counters[counter] / self.seconds if counter in self.counters else None


def measure(
    system: System,
    workload: Workload,
    *,
    repeat: int = 0,
    concurrency: int = CONCURRENCY,
    warm: int = WARM,
    encoder: PromptEncoder | None = None,
    clock: Clock = time.perf_counter,
) -> Measurement:
    """Run the file once. `encoder` is the one of the system's model; without it reuse is not computed."""
    failures: list[str] = []
    system.flush()
    system.take_calls()
    latencies = []
    for program in workload.programs[:warm]:
        started = clock()
        try:
            system.one(program)
        except Exception as error:
            failures.append(f"{program.id}: {type(error).__name__}: {error}")
        latencies.append(clock() - started)
    before, counters = system.take_calls(), system.counters()
    started = clock()
    results = system.many(workload.programs, concurrency)
    seconds = clock() - started
    grown = _grown(counters, system.counters())
    failures += [
        f"{program.id}: {type(result).__name__}: {result}"
        for program, result in zip(workload.programs, results, strict=True)
        if isinstance(result, Exception)
    ]
    return Measurement(
        workload=workload.name,
        system=system.name,
        repeat=repeat,
        programs=len(workload.programs),
        concurrency=concurrency,
        seconds=seconds,
        latencies=tuple(latencies),
        failures=tuple(failures),
        resident_bytes=system.resident_bytes(),
        reuse=_reuse(before, system.take_calls(), grown, encoder),
        counters=grown,
        validity=of_programs(workload.programs, results),
    )


def marked(workload: Workload, mark: str) -> Workload:
    """The same programs behind a mark of their own, so that a cache that cannot be emptied is of no use to them."""

    def behind(ops: Ops) -> Ops:
        return (Text(mark), *ops)

    programs = tuple(Program(program.id, behind(program.ops)) for program in workload.programs)
    return replace(workload, programs=programs)


def _grown(before: Counters, after: Counters) -> dict[str, float]:
    return {name: value - before.get(name, 0) for name, value in after.items() if value != before.get(name, 0)}


def _reuse(
    before: Sequence[Call], calls: Sequence[Call], counters: Counters, encoder: PromptEncoder | None
) -> Reuse | None:
    if encoder is None or not calls:
        return None
    sequences = sequences_of(calls, encoder)
    return Reuse(
        prompt=prompt_tokens(sequences),
        computed=round(counters.get("computed_prompt_tokens", 0)),
        least=least_computed(sequences, sequences_of(before, encoder)),
    )
