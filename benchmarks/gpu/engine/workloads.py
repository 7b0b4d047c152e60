"""The engine on every workload, with every switch of the ablation, in this process and on random weights.

`ORDER` says which runs come first: a device is rented by the minute. The decisive workloads run with everything on and
without a cache, the paper's ratios, then with each other switch; then the other workloads. Runs of an earlier call are
taken over.

A configuration of the scheduler runs on the model that is loaded; one of the kernels needs a model of its own, so those
come last of their stage. Texts of random weights mean nothing, but their lengths are those of the files: what has no
constraint and no stop ends at its `max_tokens`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

import msgspec
import torch
from umbel.interpreter import loop
from umbel.lang.errors import UmbelError
from umbel.srt.in_process import LocalBackend
from umbel.srt.launch import LoadedModel
from umbel.srt.runners.cuda.device import StepLimits
from umbel.srt.simulator.workload import Workload
from umbel.srt.tokenizer.prompt import PromptEncoder

from ...configuration import ALL, FULL, Configuration
from ...measure import Measurement, measure
from ...record.machine import describe
from ...record.report import markdown
from ...record.results import Results, Spread
from ...systems import Umbel
from ..figures import Figure, Unit
from ..stopwatch import Budget, give_memory_back
from .shapes import Shape
from .steps import random_runner
from .texts import texts_of
from .words import WordTokenizer

GROUP = "engine"
BASE = ALL["no-cache"]
LARGEST_RATIO = 6.4  # what the paper reports at most, against the systems of its time
ELSEWHERE = {
    "no-screened-head": "the CPU's kernels screen the head, those for GPUs do not",
    "int8": "weights in 8 bits are the CPU's",
}
OF_KERNELS = ("tree_attention", "cuda_graphs", "kv_dtype", "kernels")  # options that need a runner of their own
# The first words of files' names, in the order in which they run.
DECISIVE = ("tree_of_thought_gsm8k", "json_schema_extract", "hellaswag_20shot", "llm_judge_bsm")
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


class Engine:
    """One shape of model, and what becomes of it.

    Args:
        workloads: cut to the programs that are run.
        budget: no run begins when it is up.
        say: told each run.
        changed: called after each run.
    """

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
        loaded: LoadedModel | None = None
        key = ""
        refused: set[str] = set()  # keys of runners that cannot be had
        skipped: dict[str, list[str]] = {}
        warm: set[str] = set()  # names of workloads that the runner has seen
        for configuration, file, repeat in jobs(configurations, self._workloads, self._sizes.turns):
            if (file.name, configuration.name, repeat) in done:
                continue
            if self._budget.is_up:
                if not repeat:
                    skipped.setdefault(configuration.name, []).append(file.name)
                continue
            wanted = _runner_key(configuration)
            if wanted in refused:
                continue
            if loaded is None or wanted != key:
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
        loaded = None
        give_memory_back()

    def figures(self) -> Iterator[Figure]:
        """How fast programs are, which share of steps overlaps, what the cache is worth, workload by workload, and what
        each other switch is worth: programs per second with everything on, as many times those with it off. The record
        has them all."""
        yield from self._rates()
        yield from self._overlaps()
        by_system = {name: self._ratios(name) for name in self.results.systems if name != FULL.name}
        of_cache = by_system.pop(BASE.name, {})
        for name, ratio in of_cache.items():
            label = f"{self.shape.name}, {name}: all on against {BASE.name}"
            yield Figure(GROUP, label, Unit.TIMES, ratio)
        if of_cache:
            label = f"{self.shape.name}, most that the cache gives"
            most = max(of_cache.values())
            yield Figure(GROUP, label, Unit.TIMES, most, stretch=LARGEST_RATIO, note="stretch: the paper's")
        for system, ratios in by_system.items():
            spread = Spread.of(ratios.values())
            if spread is not None:
                label = f"{self.shape.name}, all on against {system}"
                note = f"median of {len(ratios)} workloads, {spread.low:.2f} to {spread.high:.2f}"
                yield Figure(GROUP, label, Unit.TIMES, spread.median, note=note)

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
            yield Figure(GROUP, label, Unit.PROGRAMS, run.rate, limit=limit, note=", ".join(said))

    def _overlaps(self) -> Iterator[Figure]:
        """A step after one that ran is planned while that one runs; a first step has none before it."""
        for workload, run in self._usual_runs():
            steps = run.counters.get("steps", 0) - run.counters.get("first_steps", 0)
            if steps > 0:
                label = f"{self.shape.name}, {workload}: steps launched while the one before ran"
                share = 100 * run.counters.get("overlapped_steps", 0) / steps
                yield Figure(GROUP, label, Unit.SHARE, share, limit=100.0, note=f"of {steps:.0f} steps")

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

    def _load(self, configuration: Configuration) -> LoadedModel:
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

    def _warm_up(self, configuration: Configuration, file: Workload, loaded: LoadedModel) -> None:
        """What is compiled and made once is no part of a run: the first one was a fifth slower."""
        with suppress(UmbelError):  # the run will have it, too
            self._run(configuration, file.first(self._sizes.compiling), loaded)

    def _measure(self, configuration: Configuration, file: Workload, loaded: LoadedModel, repeat: int) -> None:
        try:
            run = replace(self._run(configuration, file, loaded), repeat=repeat)
        except UmbelError as error:
            self.results.missing[f"{file.name} on {configuration.name}"] = f"{type(error).__name__}: {error}"
            return
        others = [one for one in self.results.measurements if _key(one) != _key(run)]
        self.results.measurements = [*others, run]
        self._say(_line(self.shape, run))

    def _run(self, configuration: Configuration, file: Workload, loaded: LoadedModel) -> Measurement:
        options = configuration.runtime_options({**self._sizes.options, "device": self._device.type})
        backend = LocalBackend(loaded=loaded, seed=1, **options)  # type: ignore[arg-type]  # checked by runtime_options
        try:
            return measure(
                Umbel(configuration, backend),  # type: ignore[arg-type]  # a backend like the runtime's
                file,
                concurrency=self._sizes.concurrency,
                warm=self._sizes.warm,
                encoder=self._encoder,
            )
        finally:
            loop.streams.run(backend.close())

    def _facts(self) -> dict[str, str | int | float | bool | None]:
        return {
            "model": f"{self.shape.name}, random weights",
            "tokenizer": WordTokenizer.name,
            "process": "one, with interpreter, gateway and engine",
            "dtype": self._sizes.dtype,
            "pool_tokens": self._pool_tokens(),
            "workloads": ", ".join(f"{file.name} {len(file.programs)}" for file in self._workloads),
            "concurrency": self._sizes.concurrency,
            "warm": self._sizes.warm,
            **{f"option_{name}": value for name, value in self._sizes.options.items()},
        }


Job = tuple[Configuration, Workload, int]  # the last: the turn, from 0


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
    name = record_name(engine.shape)
    record = msgspec.json.format(msgspec.json.encode(engine.results), indent=1).decode()
    return {f"{name}.md": markdown(engine.results), f"{name}.json": record + "\n"}


def record_name(shape: Shape) -> str:
    """The name of both files, without what follows the point."""
    return "engine-" + shape.name.lower().replace(" ", "-")


def earlier_results(text: str) -> Results | None:
    """Returns what `text_record` wrote as JSON; None if another version did."""
    try:
        return msgspec.json.decode(text, type=Results)
    except msgspec.DecodeError:
        return None
