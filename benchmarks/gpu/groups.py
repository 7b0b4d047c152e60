"""The groups of `make gpu`: what each needs, which part of the time it gets, and what it adds to the record."""

import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from . import packages
from .figures import Figure, Record
from .kernel_tests import ENGINE_TESTS, ON_DEVICE, ON_HOST, figures_of_tests, processes_here
from .packages import ROOT
from .stopwatch import Budget, Stopwatch
from .subjects.attention import attention_subjects
from .subjects.comparisons import comparisons
from .subjects.experts import expert_subjects, packed_experts
from .subjects.packed import packed_products
from .subjects.sizes import Sizes
from .subjects.small import small_subjects
from .subjects.subject import Subject

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Run:
    """What all groups share.

    Attributes:
        dry: tiny shapes on the CPU.
        large: the folder of the workload files; None: those of the repository.
        workloads: names of files; none: all of the folder.
        programs: of each file, from its start.
        say: told what is found.
    """

    record: Record
    stopwatch: Stopwatch
    sizes: Sizes
    dry: bool
    large: Path | None
    workloads: tuple[str, ...]
    programs: int
    say: Say


@dataclass(frozen=True, slots=True)
class Group:
    """
    Attributes:
        share: of the time that is left when its turn comes.
        needs: packages.
        usual: it runs when no group is asked for by name, on a GPU and in a dry run.
    """

    name: str
    share: float
    needs: tuple[str, ...]
    run: Callable[[Run, Budget], None]
    usual: tuple[bool, bool] = (True, True)


def tests(run: Run, budget: Budget) -> None:
    chosen: tuple[str, ...] = ON_HOST if run.dry else ON_DEVICE
    if not run.dry and packages.is_here("transformers"):
        chosen = (chosen[0], ENGINE_TESTS, *chosen[1:])  # first: they go through all kernels
    elif not run.dry:
        run.record.left_out.append(f"{ENGINE_TESTS}: transformers is not installed, which makes their models")
    figures, left_out = figures_of_tests(budget.left, chosen, processes=1 if run.dry else processes_here())
    run.record.figures += figures
    run.record.left_out += left_out


def equality(run: Run, budget: Budget) -> None:
    _add(run, budget, "equality", comparisons(run.sizes, run.stopwatch.device))


def attention(run: Run, budget: Budget) -> None:
    limits = run.record.hardware.limits
    _time(run, budget, "attention", attention_subjects(run.sizes, limits, run.stopwatch.device))


def passes(run: Run, budget: Budget) -> None:
    sizes, device = run.sizes, run.stopwatch.device
    _time(run, budget, "passes", chain(small_subjects(sizes, device), packed_products(sizes, device)))


def experts(run: Run, budget: Budget) -> None:
    sizes, device = run.sizes, run.stopwatch.device
    _time(run, budget, "experts", chain(expert_subjects(sizes, device), packed_experts(sizes, device)))


def sampling(run: Run, budget: Budget) -> None:
    from .subjects.sampling import sampling_subjects

    _time(run, budget, "sampling", sampling_subjects(run.sizes, run.stopwatch.device))


def steps(run: Run, budget: Budget) -> None:
    from .engine.steps import FULL, SMALL, borrowed_figures, step_figures

    sizes, limits = SMALL if run.dry else FULL, run.record.hardware.limits
    figures = step_figures(sizes, run.stopwatch, limits)
    if packages.is_here("transformers"):
        figures = chain(figures, borrowed_figures(sizes, run.stopwatch, limits))
    else:
        run.record.left_out.append("steps through transformers: transformers is not installed")
    _add(run, budget, "steps", figures)


def engine(run: Run, budget: Budget) -> None:
    from .. import workload
    from ..configuration import ALL, FULL
    from .engine.shapes import LLAMA_2_7B, LLAMA_3_8B, TINY
    from .engine.texts import shortened
    from .engine.workloads import BASE, ON_DEVICE, ON_HOST, Engine, text_record

    folder = run.large or workload.FOLDER
    names = run.workloads or workload.available(folder)
    files = [workload.read(name, folder).first(run.programs) for name in names]
    configurations = [FULL, BASE] if run.dry else list(ALL.values())
    if run.dry:
        files = [shortened(file, characters=24, tokens=2) for file in files]
    shapes = [TINY] if run.dry else [LLAMA_2_7B, LLAMA_3_8B]
    for number, shape in enumerate(shapes):
        share = budget.part(1 / (len(shapes) - number))
        one = Engine(shape, files, ON_HOST if run.dry else ON_DEVICE, run.stopwatch.device, share, run.say)
        one.run(configurations)
        run.record.figures += one.figures()
        run.record.left_out += one.left_out
        run.record.broken += one.failures()
        run.record.more |= text_record(one)


def compiled(run: Run, budget: Budget) -> None:
    """What the compiler makes of the kernels here, in a process of its own: this one may interpret them."""
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
            run.record.left_out.append("compiled: the time was up; write a larger --minutes")
            return
        if page.is_file():
            run.record.more["ptx.md"] = page.read_text()
        run.record.broken += [f"compiled: {line}" for line in finished.stderr.splitlines() if finished.returncode]


GROUPS = (
    Group("tests", 0.2, packages.TESTS, tests),
    Group("equality", 0.2, (), equality),
    Group("attention", 0.35, (), attention),
    Group("passes", 0.15, (), passes),
    Group("experts", 0.15, (), experts),
    Group("sampling", 0.15, packages.SAMPLING, sampling),
    Group("steps", 0.3, packages.SAMPLING, steps),
    Group("engine", 1.0, packages.ENGINE, engine),
    Group("compiled", 1.0, (), compiled, usual=(False, True)),
)


def _time(run: Run, budget: Budget, group: str, subjects: Iterable[Subject]) -> None:
    """A subject that breaks is named, and those behind it are timed."""
    limits = run.record.hardware.limits

    def figures() -> Iterator[Figure]:
        for subject in subjects:
            try:
                yield subject.figure(run.stopwatch, limits)
            except Exception as error:
                run.record.broken.append(f"{group}: {subject.name}: {type(error).__name__}: {error}")

    _add(run, budget, group, figures())


def _add(run: Run, budget: Budget, group: str, figures: Iterator[Figure]) -> None:
    """Each as it comes. How many there will be is not known before they are made."""
    for figure in figures:
        run.record.figures.append(figure)
        run.say(f"{group}: {figure.name}: {figure.measured:.3g} {figure.unit.value} {run.record.met(figure)}")
        if budget.is_up:
            run.record.left_out.append(f"{group}: what comes behind {figure.name!r}, if anything; the time was up")
            return
