"""The engine on every workload, with every switch of the ablation, on random weights.

`Engine` runs it in this process: a configuration of the scheduler costs no start. `two_processes.py` runs the decisive
workloads as users do, in processes of their own.

`ORDER` says which runs come first: a device is rented by the minute. The decisive workloads run with everything on and
without a cache, the paper's ratios, then with each other switch; then the other workloads. Runs of an earlier call are
taken over. Every run is traced, and `gaps.py` says what the device waited for.

A configuration of the scheduler runs on the model that is loaded; one of the kernels needs a model of its own, so those
come last of their stage. Texts of random weights mean nothing, but their lengths are those of the files: what has no
constraint and no stop ends at its `max_tokens`.
"""

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec
import torch
import umbel as ul
from umbel.interpreter import loop
from umbel.lang.errors import UmbelError
from umbel.srt.in_process import LocalBackend
from umbel.srt.launch import LoadedModel
from umbel.srt.runners.cuda.device import StepLimits
from umbel.srt.scheduler.trace import read_trace
from umbel.srt.simulator.workload import Program, Values, Workload
from umbel.srt.tokenizer.prompt import PromptEncoder

from ...configuration import ALL, FULL, Configuration
from ...measure import Measurement, measure
from ...record.machine import describe
from ...record.report import markdown
from ...record.results import Results, Spread
from ...systems import Umbel
from ..figures import Figure, Unit
from ..goals import DEVICE_BUSY, MEDIAN_OF_CACHE
from ..stopwatch import Budget, give_memory_back
from .gaps import Idle, idle_of, page
from .shapes import Shape
from .steps import random_runner
from .texts import texts_of
from .timeline import timeline
from .words import WordTokenizer

BASE = ALL["no-cache"]
LARGEST_RATIO = 6.4  # what the paper reports at most, against the systems of its time
ELSEWHERE = {
    "no-screened-head": "the CPU's kernels screen the head, those for GPUs do not",
    "int8": "weights in 8 bits are the CPU's",
}
OF_KERNELS = ("tree_attention", "cuda_graphs", "kv_dtype", "kernels")  # options that need a runner of their own
# The first words of files' names, in the order in which they run.
DECISIVE = ("json_schema_extract", "json_decode_regex", "hellaswag_20shot", "tree_of_thought_gsm8k")
BUSY = "device_busy"  # among the counters of a run: the part of the batch phase in which a step ran
BUSY_MUST = 90.0  # %
SHARING = 0.5  # prompts of a workload share so much, by the optimum: the cache is to be worth something there
SHARING_MUST = 3.0
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Stage:
    """Runs that come together.

    Attributes:
        decisive: on these workloads, or on all others.
        ablation: with each of the other switches; if not, with everything on and without a cache.
        again: one more turn, the other one first: what one run says may be chance.
    """

    decisive: bool
    ablation: bool = False
    again: bool = False


ORDER = (
    Stage(decisive=True),
    Stage(decisive=True, ablation=True),
    Stage(decisive=False),
    Stage(decisive=True, again=True),
    Stage(decisive=False, ablation=True),
)


@dataclass(frozen=True, slots=True)
class EngineSizes:
    """How much is run.

    Attributes:
        pool_tokens: at most; less where memory holds less.
        pool_share: of the device's memory that keys may take.
        warm: programs that are run one at a time, for their latency.
        compiling: programs of each workload that run before it is measured: kernels are compiled, caches made.
        turns: of the decisive workloads, with everything on and without a cache.
        options: of every runtime.
    """

    dtype: str
    pool_tokens: int
    pool_share: float
    concurrency: int
    warm: int
    compiling: int
    turns: int
    options: Mapping[str, int] = field(default_factory=dict)


ON_DEVICE = EngineSizes("bfloat16", 131_072, 0.45, 32, 1, 2, 2, {"max_running": 128, "chunk_size": 2048})
ON_HOST = EngineSizes("float32", 2048, 0.0, 2, 1, 0, 1, {"max_running": 4, "chunk_size": 64})


class TimedSystem(Umbel):
    """A system that notes when its batch phase ran, on the clock of traces."""

    ran = 0.0, 0.0

    def many(self, programs: Sequence[Program], concurrency: int) -> list[Values | Exception]:
        began = time.monotonic()
        results = super().many(programs, concurrency)
        self.ran = began, time.monotonic()
        return results


class Engine:
    """One shape of model, and what becomes of it.

    Attributes:
        group: of its figures, and the beginning of its files' names.
        process: in which it runs, for the record.
        idles: what the device waited for with everything on, by workload, of this call.

    Args:
        workloads: cut to the programs that are run.
        budget: no run begins when it is up.
        say: told each run.
        changed: called after each run.
    """

    group = "engine"
    process = "one, with interpreter, gateway and engine"

    def __init__(
        self,
        shape: Shape,
        workloads: Sequence[Workload],
        sizes: EngineSizes,
        device: torch.device,
        budget: Budget,
        say: Say,
        changed: Callable[[], None] = lambda: None,
    ) -> None:
        self.shape = shape
        self._workloads = workloads
        self._sizes = sizes
        self._device = device
        self._budget = budget
        self._say = say
        self._changed = changed
        self._tokenizer = WordTokenizer(texts_of(workloads), shape.vocab)
        self._encoder = PromptEncoder(self._tokenizer)
        self.left_out: list[str] = []
        self.idles: dict[str, Idle] = {}
        self._folder = tempfile.TemporaryDirectory(prefix="umbel-gpu-engine-")  # of traces
        self.results = Results(describe(), self._facts(), missing=dict(ELSEWHERE))
        self.results.about |= {one.name: one.about for one in ALL.values()}

    def take_over(self, earlier: Results) -> int:
        """Adds the runs of an earlier call that were set up alike; returns how many there are."""
        if earlier.settings != self.results.settings:
            return 0
        names = {file.name for file in self._workloads}
        runs = [run for run in earlier.measurements if run.workload in names]
        self.results.measurements += runs
        return len(runs)

    def run(self, configurations: Sequence[Configuration]) -> None:
        """Runs what is missing or failed, in the order of `ORDER`, while there is time. Configurations whose runner
        cannot be had are named."""
        done = {_key(run) for run in self.results.measurements if not run.failures}
        loaded: Loaded | None = None
        key = ""
        refused: set[str] = set()  # keys of runners that cannot be had
        skipped: dict[str, list[str]] = {}
        warm: set[str] = set()  # names of workloads that the runner has seen
        for configuration, file, repeat in self._jobs(configurations):
            if (file.name, configuration.name, repeat) in done:
                continue
            if self._budget.is_up:
                if not repeat:
                    skipped.setdefault(configuration.name, []).append(file.name)
                continue
            wanted = self._key(configuration)
            if wanted in refused:
                continue
            if loaded is None or wanted != key:
                self._end(loaded)
                loaded, key = None, wanted
                give_memory_back()  # two models may not fit
                try:
                    loaded = self._load(configuration)
                except (UmbelError, RuntimeError) as error:  # of torch: too little memory, or a kernel that it lacks
                    refused.add(wanted)
                    self.results.missing[configuration.name] = f"{type(error).__name__}: {error}"
                    self.left_out.append(f"{self.shape.name}, {configuration.name}: {type(error).__name__}: {error}")
                    continue
                warm.clear()
            if self._sizes.compiling and file.name not in warm:
                self._warm_up(configuration, file, loaded)
                warm.add(file.name)
            self._measure(configuration, file, loaded, repeat)
            self._changed()
        self.left_out += self._skipped_lines(skipped)
        self._end(loaded)
        loaded = None
        give_memory_back()

    def figures(self) -> Iterator[Figure]:
        """How fast programs are, which share of steps overlaps, what the cache is worth, workload by workload, and what
        each other switch is worth: programs per second with everything on, as many times those with it off. The record
        has them all."""
        yield from self._rates()
        yield from self._busy()
        yield from self._overlaps()
        by_system = {name: self._ratios(name) for name in self.results.systems if name != FULL.name}
        of_cache = by_system.pop(BASE.name, {})
        for name, ratio in of_cache.items():
            label = f"{self.shape.name}, {name}: all on against {BASE.name}"
            yield Figure(self.group, label, Unit.TIMES, ratio)
        if of_cache:
            label = f"{self.shape.name}, most that the cache gives"
            most = max(of_cache.values())
            yield Figure(self.group, label, Unit.TIMES, most, stretch=LARGEST_RATIO, note="stretch: the paper's")
        if sharing := [of_cache[name] for name in self._sharing() if name in of_cache]:
            label = f"{self.shape.name}, {MEDIAN_OF_CACHE}"
            note = f"{len(sharing)} workloads whose prompts share {SHARING:.0%} and more"
            yield Figure(self.group, label, Unit.TIMES, statistics.median(sharing), must=SHARING_MUST, note=note)
        for system, ratios in by_system.items():
            spread = Spread.of(ratios.values())
            if spread is not None:
                label = f"{self.shape.name}, all on against {system}"
                note = f"median of {len(ratios)} workloads, {spread.low:.2f} to {spread.high:.2f}"
                yield Figure(self.group, label, Unit.TIMES, spread.median, note=note)

    def failures(self) -> list[str]:
        """Programs that failed, the first of each run."""
        return [
            f"{self.shape.name}, {run.workload}, {run.system}: {len(run.failures)} failed, {run.failures[0]}"
            for run in self.results.measurements
            if run.failures
        ]

    # ------------------------------------------------------------------------------------ how

    def _rates(self) -> Iterator[Figure]:
        """The limit is what the steps of the device allow: programs per second if nobody else took any time."""
        for workload, run in self._usual_runs():
            busy = run.counters.get("device_seconds", 0.0)
            limit = run.programs / busy if busy else None
            said = [f"{run.counters.get('completion_tokens', 0) / run.seconds:,.0f} tokens/s"]
            if busy:
                said.append(f"a step runs {busy / run.seconds:.0%} of the time")
            label = f"{self.shape.name}, {workload}"
            yield Figure(self.group, label, Unit.PROGRAMS, run.rate, limit=limit, note=", ".join(said))

    def _busy(self) -> Iterator[Figure]:
        """Of the time between the first step and the last."""
        for workload, run in self._usual_runs():
            if BUSY in run.counters:
                label = f"{self.shape.name}, {workload}: {DEVICE_BUSY}"
                share = 100 * run.counters[BUSY]
                yield Figure(self.group, label, Unit.SHARE, share, limit=100.0, must=BUSY_MUST)

    def _sharing(self) -> list[str]:
        """Workloads whose prompts share much, by the optimum of a run with everything on."""
        return [name for name, run in self._usual_runs() if run.reuse is not None and run.reuse.optimal >= SHARING]

    def _overlaps(self) -> Iterator[Figure]:
        """A step after one that ran is planned while that one runs; a first step has none before it."""
        for workload, run in self._usual_runs():
            steps = run.counters.get("steps", 0) - run.counters.get("first_steps", 0)
            if steps > 0:
                label = f"{self.shape.name}, {workload}: steps launched while the one before ran"
                share = 100 * run.counters.get("overlapped_steps", 0) / steps
                yield Figure(self.group, label, Unit.SHARE, share, limit=100.0, note=f"of {steps:.0f} steps")

    def _usual_runs(self) -> Iterator[tuple[str, Measurement]]:
        """Yields for each workload its run with everything on; of several the one of the median rate."""
        for workload in self.results.workloads:
            runs = self.results.of(workload, FULL.name)
            if runs:
                yield workload, sorted(runs, key=lambda one: one.rate)[len(runs) // 2]

    def _ratios(self, system: str) -> dict[str, float]:
        """Workload → how many times faster the full configuration is."""
        found = {
            workload: self.results.against(workload, FULL.name, system, lambda run: run.rate)
            for workload in self.results.workloads
        }
        return {workload: spread.median for workload, spread in found.items() if spread is not None}

    def _skipped_lines(self, skipped: Mapping[str, Sequence[str]]) -> Iterator[str]:
        """Configurations that missed the same workloads in one line."""
        together: dict[tuple[str, ...], list[str]] = {}
        for name, files in skipped.items():
            together.setdefault(tuple(files), []).append(name)
        for files, names in together.items():
            what = "all workloads" if len(files) == len(self._workloads) else ", ".join(files)
            yield f"{self.shape.name}, {', '.join(names)} on {what}: the time was up; write a larger --minutes"

    def _jobs(self, configurations: Sequence[Configuration]) -> "list[Job]":
        return jobs(configurations, self._workloads, self._sizes.turns)

    def _key(self, configuration: Configuration) -> str:
        """Equal for configurations that run on what one call of `_load` returns."""
        return _runner_key(configuration)

    def _end(self, loaded: "Loaded | None") -> None:
        """Ends what `_load` has returned. Does nothing: a model in this process ends when nothing holds it."""

    def _load(self, configuration: Configuration) -> "Loaded":
        options = {name: configuration.options[name] for name in OF_KERNELS if name in configuration.options}
        sizes = self._sizes
        most_rows = sizes.options["chunk_size"] + sizes.options["max_running"]
        runner = random_runner(
            self.shape,
            self._device,
            slots=1 + self._pool_tokens(),
            limits=StepLimits(most_rows, sizes.options["max_running"], max(256, sizes.options["max_running"])),
            dtype=sizes.dtype,
            **{"kernels": "triton", **options},  # type: ignore[arg-type]  # checked by build_runner
        )
        return LoadedModel(self.shape.name, self._tokenizer, runner)

    def _pool_tokens(self) -> int:
        if self._device.type != "cuda":
            return self._sizes.pool_tokens
        memory = torch.cuda.get_device_properties(self._device).total_memory
        of_token = self.shape.kv_numbers * torch.bfloat16.itemsize
        return min(self._sizes.pool_tokens, int(self._sizes.pool_share * memory) // of_token)

    def _warm_up(self, configuration: Configuration, file: Workload, loaded: "Loaded") -> None:
        """What is compiled and made once is no part of a run: the first one was a fifth slower."""
        with suppress(UmbelError):  # the run will have it, too
            self._run(configuration, file.first(self._sizes.compiling), loaded)

    def _measure(self, configuration: Configuration, file: Workload, loaded: "Loaded", repeat: int) -> None:
        try:
            run = replace(self._run(configuration, file, loaded), repeat=repeat)
        except UmbelError as error:
            self.results.missing[f"{file.name} on {configuration.name}"] = f"{type(error).__name__}: {error}"
            return
        others = [one for one in self.results.measurements if _key(one) != _key(run)]
        self.results.measurements = [*others, run]
        self._say(_line(self.shape, run))

    def _run(self, configuration: Configuration, file: Workload, loaded: "Loaded") -> Measurement:
        assert isinstance(loaded, LoadedModel), "as this class loads it"
        options = configuration.runtime_options({**self._sizes.options, "device": self._device.type})
        debug = {"trace": str(self._trace)}
        backend = LocalBackend(loaded=loaded, seed=1, debug=debug, **options)  # type: ignore[arg-type]  # checked above
        system = TimedSystem(configuration, backend)  # type: ignore[arg-type]  # a backend like the runtime's
        try:
            run = self._measured(system, file)
        finally:
            loop.streams.run(backend.close())
        return self._with_idle(configuration, run, system.ran)

    def _measured(self, system: TimedSystem, file: Workload) -> Measurement:
        sizes = self._sizes
        return measure(system, file, concurrency=sizes.concurrency, warm=sizes.warm, encoder=self._encoder)

    @property
    def _trace(self) -> Path:
        return Path(self._folder.name) / "trace.jsonl"

    def _with_idle(self, configuration: Configuration, run: Measurement, ran: tuple[float, float]) -> Measurement:
        """Adds to a run how busy the device was, and keeps what it waited for with everything on. ran: see
        `TimedSystem`."""
        idle = idle_of(*read_trace(self._trace), begin=ran[0], end=ran[1])
        if idle is None:
            return run
        if configuration is FULL:
            self.idles[run.workload] = idle
        return replace(run, counters={**run.counters, BUSY: idle.busy})

    def _facts(self) -> dict[str, str | int | float | bool | None]:
        return {
            "model": f"{self.shape.name}, random weights",
            "tokenizer": WordTokenizer.name,
            "process": self.process,
            "dtype": self._sizes.dtype,
            "pool_tokens": self._pool_tokens(),
            "workloads": ", ".join(f"{file.name} {len(file.programs)}" for file in self._workloads),
            "concurrency": self._sizes.concurrency,
            "warm": self._sizes.warm,
            **{f"option_{name}": value for name, value in self._sizes.options.items()},
        }


Job = tuple[Configuration, Workload, int]  # the last: the turn, from 0
Loaded = LoadedModel | ul.Runtime


def jobs(configurations: Sequence[Configuration], files: Sequence[Workload], turns: int) -> list[Job]:
    """Returns all runs, in order. turns: of the decisive workloads."""
    others = sorted(
        (one for one in configurations if one not in (FULL, BASE) and one.name not in ELSEWHERE), key=_runner_key
    )
    decisive = [file for name in DECISIVE for file in files if file.name.startswith(name)]
    rest = [file for file in files if file not in decisive]
    found: list[Job] = []
    for stage in ORDER:
        chosen = decisive if stage.decisive else rest
        if stage.ablation:
            found += [(one, file, 0) for one in others for file in chosen]
        elif stage.again:
            found += [(one, file, turn) for turn in range(1, turns) for file in chosen for one in (BASE, FULL)]
        else:
            found += [(one, file, 0) for file in chosen for one in (FULL, BASE)]
    return found


def _runner_key(configuration: Configuration) -> str:
    """Equal for configurations that run on the same runner; the usual one comes first."""
    return ", ".join(f"{name}={value}" for name, value in configuration.options.items() if name in OF_KERNELS)


def _key(run: Measurement) -> tuple[str, str, int]:
    return run.workload, run.system, run.repeat


def _line(shape: Shape, run: Measurement) -> str:
    hits = f", hit rate {run.reuse.achieved:.1%} of {run.reuse.optimal:.1%}" if run.reuse else ""
    failed = f", {len(run.failures)} failed: {run.failures[0]}" if run.failures else ""
    return f"{shape.name}, {run.workload}, {run.system}: {run.rate:.3g} programs/s{hits}{failed}"


def text_record(engine: Engine) -> dict[str, str]:
    """What `python -m benchmarks` would write: file name → text."""
    name = record_name(engine.shape, engine.group)
    record = msgspec.json.format(msgspec.json.encode(engine.results), indent=1).decode()
    texts = {f"{name}.md": markdown(engine.results), f"{name}.json": record + "\n"}
    for workload, idle in engine.idles.items():
        title = f"{engine.shape.name}, {workload}"
        texts[f"{name}-gaps-{workload}.md"] = page(title, {workload: idle})
        texts[f"{name}-gaps-{workload}.svg"] = timeline(title, idle)
    return texts


def record_name(shape: Shape, group: str = Engine.group) -> str:
    """The beginning of the names of all files."""
    return f"{group}-" + shape.name.lower().replace(" ", "-")


def earlier_results(text: str) -> Results | None:
    """Returns what `text_record` wrote as JSON; None if another version did."""
    try:
        return msgspec.json.decode(text, type=Results)
    except msgspec.DecodeError:
        return None
