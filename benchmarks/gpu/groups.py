"""The groups of `make gpu`: what each needs, which part of the time it gets, and what it adds to the record."""

import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from . import packages
from .figures import PendingFigure, Record
from .kernel_tests import ON_HOST, processes_here, run_tests, tests_on_device
from .outcomes import Outcomes
from .packages import ROOT
from .stopwatch import Budget, Stopwatch
from .subjects.attention import attention_subjects
from .subjects.comparisons import comparisons
from .subjects.experts import expert_subjects, packed_experts
from .subjects.packed import packed_products
from .subjects.peers import cases, installed_peers, peer_figures
from .subjects.sizes import Sizes
from .subjects.small import small_subjects
from .subjects.subject import Subject

if TYPE_CHECKING:  # they need packages that a machine with a GPU may lack
    from umbel.srt.simulator.workload import Workload

    from ..configuration import Configuration
    from .engine.shapes import Shape
    from .engine.workloads import Engine

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Run:
    """What all groups share.

    Attributes:
        outcomes: of tests, in this call and earlier ones.
        dry: tiny shapes on the CPU.
        large: the folder of the workload files; None: those of the repository.
        workloads: names of files; none: all of the folder.
        programs: of each file, from its start.
        soak: seconds in which calls are sent.
        say: told what is found.
    """

    record: Record
    outcomes: Outcomes
    stopwatch: Stopwatch
    sizes: Sizes
    dry: bool
    large: Path | None
    workloads: tuple[str, ...]
    programs: int
    soak: float
    say: Say


@dataclass(frozen=True, slots=True)
class Group:
    """
    Attributes:
        share: of the time that is left when its turn comes; the last group gets all of it.
        needs: packages.
        usual: it runs when no group is asked for by name, on a GPU and in a dry run.
    """

    name: str
    share: float
    needs: tuple[str, ...]
    run: Callable[[Run, Budget], None]
    usual: tuple[bool, bool] = (True, True)


def tests(run: Run, budget: Budget) -> None:
    record, outcomes = run.record, run.outcomes
    chosen, absent = (ON_HOST, []) if run.dry else tests_on_device()

    def changed() -> None:
        record.left_out.pop("tests", None)
        record.leave_out("tests", *absent, *outcomes.left_out())
        record.add(*outcomes.figures())

    changed()
    try:
        run_tests(outcomes, budget.left, chosen, processes=1 if run.dry else processes_here(), changed=changed)
    finally:
        changed()


def equality(run: Run, budget: Budget) -> None:
    take(run, budget, "equality", comparisons(run.sizes, run.stopwatch.device))


def attention(run: Run, budget: Budget) -> None:
    limits = run.record.hardware.limits
    _time(run, budget, "attention", attention_subjects(run.sizes, limits, run.stopwatch.device))


def passes(run: Run, budget: Budget) -> None:
    sizes, device = run.sizes, run.stopwatch.device
    _time(run, budget, "passes", chain(small_subjects(sizes, device), packed_products(sizes, device)))


def peers(run: Run, budget: Budget) -> None:
    """Kernels of others: what is missing or refuses is left out, and is no mistake of ours."""
    here, absent = installed_peers()
    run.record.leave_out("peers", *absent)

    def refused(line: str) -> None:
        run.record.leave_out("peers", f"peers: {line}")

    found = cases(run.sizes, run.stopwatch.device)
    take(run, budget, "peers", peer_figures(found, here, run.stopwatch, refused))


def experts(run: Run, budget: Budget) -> None:
    sizes, device = run.sizes, run.stopwatch.device
    _time(run, budget, "experts", chain(expert_subjects(sizes, device), packed_experts(sizes, device)))


def sampling(run: Run, budget: Budget) -> None:
    from .subjects.sampling import sampling_subjects

    _time(run, budget, "sampling", sampling_subjects(run.sizes, run.stopwatch.device))


def steps(run: Run, budget: Budget) -> None:
    from .engine.steps import FULL, SMALL, borrowed_figures, step_figures

    sizes, limits = SMALL if run.dry else FULL, run.record.hardware.limits
    figures: Iterable[PendingFigure] = step_figures(sizes, run.stopwatch, limits)
    if packages.is_here("transformers"):
        figures = chain(figures, borrowed_figures(sizes, run.stopwatch, limits))
    else:
        run.record.leave_out("steps", "steps through transformers: transformers is not installed")
    take(run, budget, "steps", figures)


def soak(run: Run, budget: Budget) -> None:
    from .engine.soaking import soak_on_device, soak_on_host

    if run.record.has("soak", "pool whole"):
        return
    seconds = min(run.soak, budget.left / 2)  # the rest is for starts and checks
    if run.dry:
        soak_on_host(run.record, seconds)
    else:
        soak_on_device(run.record, run.stopwatch.device, seconds)


def engine(run: Run, budget: Budget) -> None:
    from .. import workload
    from ..configuration import ALL, FULL
    from .engine.shapes import LLAMA_2_7B, LLAMA_3_8B, TINY
    from .engine.texts import shortened
    from .engine.workloads import BASE, Engine

    folder = run.large or workload.FOLDER
    names = run.workloads or workload.available(folder)
    files = [workload.read(name, folder).first(run.programs) for name in names]
    configurations = [FULL, BASE] if run.dry else list(ALL.values())
    if run.dry:
        files = [shortened(file, characters=24, tokens=2) for file in files]
    shapes = [TINY] if run.dry else [LLAMA_2_7B, LLAMA_3_8B]
    for number, shape in enumerate(shapes):
        _engine_of(shape, files, configurations, run, budget.part(1 / (len(shapes) - number)), Engine)


def runtime(run: Run, budget: Budget) -> None:
    """The decisive workloads, in two processes."""
    from .. import workload
    from .engine.shapes import LLAMA_3_8B, TINY
    from .engine.texts import shortened
    from .engine.two_processes import BY_WORTH, TwoProcesses
    from .engine.workloads import DECISIVE

    folder = run.large or workload.FOLDER
    names = run.workloads or [name for name in DECISIVE if name in workload.available(folder)]
    files = [workload.read(name, folder).first(run.programs) for name in names]
    if run.dry:
        files = [shortened(file, characters=24, tokens=2) for file in files[:1]]
    _engine_of(TINY if run.dry else LLAMA_3_8B, files, BY_WORTH[:1] if run.dry else BY_WORTH, run, budget, TwoProcesses)


def _engine_of(
    shape: "Shape",
    files: Sequence["Workload"],
    configurations: Sequence["Configuration"],
    run: Run,
    budget: Budget,
    kind: "type[Engine]",
) -> None:
    """Runs of an earlier call are taken over; the record has each run as soon as it has ended."""
    from .engine.workloads import ON_DEVICE, ON_HOST, earlier_results, record_name, text_record

    record, group = run.record, kind.group
    broken = tuple(record.broken.get(group, ()))  # of the shapes before

    def changed() -> None:
        record.more |= text_record(one)
        if failures := one.failures():
            record.broken[group] = [*broken, *failures]
        record.add(*one.figures())

    one = kind(shape, files, ON_HOST if run.dry else ON_DEVICE, run.stopwatch.device, budget, run.say, changed)
    earlier = earlier_results(record.more.get(f"{record_name(shape, group)}.json", ""))
    if earlier is not None and (taken := one.take_over(earlier)):
        run.say(f"{group}: {shape.name}: {taken} runs are taken over")
    one.run(configurations)
    changed()
    record.leave_out(group, *one.left_out)


def compiled(run: Run, budget: Budget) -> None:
    """What the compiler makes of the kernels here, in a process of its own: this one may interpret them."""
    if "ptx.md" in run.record.more:
        return
    environment = {name: value for name, value in packages.environment().items() if name != "TRITON_INTERPRET"}
    only = ["--kernels", "small", "--only", "norm"] if run.dry else []
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "ptx.md"
        command = [sys.executable, "-m", "benchmarks.gpu.ptx", "--output", str(page), *only]
        try:
            finished = subprocess.run(
                command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=budget.left
            )
        except subprocess.TimeoutExpired:
            run.record.leave_out("compiled", "compiled: the time was up; write a larger --minutes")
            return
        if page.is_file():
            run.record.more["ptx.md"] = page.read_text()
        for line in finished.stderr.splitlines() if finished.returncode else ():
            run.record.broke("compiled", f"compiled: {line}")


GROUPS = (
    Group("tests", 0.2, packages.TESTS, tests),
    Group("equality", 0.2, (), equality),
    Group("attention", 0.35, (), attention),
    Group("peers", 0.25, (), peers),
    Group("passes", 0.15, (), passes),
    Group("experts", 0.15, (), experts),
    Group("sampling", 0.15, packages.SAMPLING, sampling),
    Group("steps", 0.5, packages.SAMPLING, steps),
    Group("soak", 0.4, packages.RUNTIME, soak),
    Group("runtime", 0.6, packages.RUNTIME, runtime),
    Group("engine", 1.0, packages.ENGINE, engine),
    Group("compiled", 1.0, (), compiled, usual=(False, True)),
)
# Each fits into one call of eight minutes on a rented device; `--part N` runs the Nth.
PARTS = (
    ("tests",),
    ("equality", "attention", "peers", "passes", "experts", "sampling"),
    ("steps", "soak"),
    ("runtime", "engine"),
)


def _time(run: Run, budget: Budget, group: str, subjects: Iterable[Subject]) -> None:
    limits = run.record.hardware.limits
    take(run, budget, group, (subject.pending(run.stopwatch, limits) for subject in subjects))


def take(run: Run, budget: Budget, group: str, figures: Iterable[PendingFigure]) -> None:
    """Takes the figures that the record lacks, while there is time. One that breaks is named, and the next ones are
    taken."""
    record = run.record
    for pending in figures:
        if record.has(group, pending.name):
            continue
        if budget.is_up:
            record.leave_out(group, f"{group}: {pending.name!r} and what follows it; the time was up, call again")
            return
        try:
            figure = pending.take()
        except Exception as error:
            record.broke(group, f"{group}: {pending.name}: {type(error).__name__}: {error}")
            continue
        record.add(figure)
        run.say(f"{group}: {figure.name}: {figure.measured:.3g} {figure.unit.value} {record.met(figure)}")
