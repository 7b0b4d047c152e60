"""`make gpu`, `python -m benchmarks.gpu`: whether the kernels are right, and how near they are to a device's limits.

    make gpu GPU="--part 2"     a quarter of it, in eight minutes at most; the same again goes on where a call ended

The record is written after each figure. Figures of one device, commit and size that the output folder has are taken
over, and what is missing or wrong runs. Exit status 0: everything that ran is right. 1: a kernel, test or program gave
what it should not; slow is not wrong. 128 and the signal's number: the call was stopped by it.
"""

import argparse
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import torch

from .figures import Record, markdown
from .goals import front_page
from .groups import GROUPS, PARTS, Group, Run
from .hardware import describe
from .outcomes import Outcomes
from .packages import left_out
from .resume import take_over
from .stopwatch import Budget, DeviceStopwatch, HostStopwatch, Stopwatch, give_memory_back
from .subjects.sizes import FULL, TINY, Sizes
from .sweep import sweep

RESULTS = Path(__file__).resolve().parents[1] / "results" / "gpu"
MINUTES, DRY_MINUTES = 7.5, 2.5
PROGRAMS, DRY_PROGRAMS = 16, 1
SOAK, DRY_SOAK = 60.0, 1.0  # seconds
DRY_WORKLOADS = ("mmlu_5shot", "json_decode_regex")


class Stopped(SystemExit):
    """A signal asks the call to end."""

    def __init__(self, number: int) -> None:
        super().__init__(128 + number)
        self.name = signal.Signals(number).name


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--dry-run", action="store_true", help="tiny shapes in Triton's interpreter, on the CPU")
    names = ", ".join(group.name for group in GROUPS)
    parser.add_argument("--groups", nargs="+", metavar="NAME", help=f"of {names}; all but `compiled` if left out")
    parser.add_argument("--part", type=int, metavar="N", help=f"instead of --groups: {_parts()}")
    parser.add_argument(
        "--sweep",
        nargs="*",
        metavar="KERNEL",
        help="in place of all groups: choose the tuning numbers of these kernels, or of all, and write the tables",
    )
    parser.add_argument("--minutes", type=float, metavar="N", help=f"{MINUTES:g} if left out, {DRY_MINUTES:g} when dry")
    parser.add_argument("--large", type=Path, metavar="DIR", help="take workload files from this folder")
    parser.add_argument("--workload", nargs="+", default=[], metavar="NAME", help="for the engine; all if left out")
    parser.add_argument("--programs", type=int, metavar="N", help=f"the first N of each file; {PROGRAMS} if left out")
    parser.add_argument("--soak", type=float, metavar="SECONDS", help=f"of the soak; {SOAK:g} if left out")
    parser.add_argument(
        "--output",
        type=Path,
        metavar="DIR",
        help="benchmarks/results/gpu/DATE-DEVICE if left out; with --sweep the tables are copied here first",
    )
    parser.add_argument(
        "--resume", type=Path, metavar="DIR", help="take over the figures of this folder, of any commit; also --output"
    )
    parser.add_argument("--afresh", action="store_true", help="take nothing over from the output folder")
    return parser


def main(arguments: Sequence[str]) -> int:
    options = parser().parse_args(arguments)
    groups = _checked(options)
    dry = bool(options.dry_run)
    budget = Budget(60 * (options.minutes or (DRY_MINUTES if dry else MINUTES)))
    sizes = TINY if dry else FULL
    stopwatch: Stopwatch = HostStopwatch() if dry else DeviceStopwatch(torch.device("cuda"))
    if dry:
        torch.set_num_threads(1)  # shapes are tiny: threads would only wait for each other
    if options.sweep is not None:
        return _sweep(options, stopwatch, sizes, budget)
    record, outcomes = _opened(options, stopwatch, sizes)
    run = Run(
        record=record,
        outcomes=outcomes,
        stopwatch=stopwatch,
        sizes=sizes,
        dry=dry,
        large=options.large,
        workloads=tuple(options.workload) or (DRY_WORKLOADS if dry and options.large is None else ()),
        programs=options.programs or (DRY_PROGRAMS if dry else PROGRAMS),
        soak=options.soak or (DRY_SOAK if dry else SOAK),
        say=_say,
    )
    status = None
    try:
        with _signals():
            for group in groups:
                share = 1.0 if group is groups[-1] else group.share
                _run_group(group, run, budget, share)
    except Stopped as stopped:
        _say(f"stopped by {stopped.name}; the same call goes on from here")
        status = int(stopped.code or 0)
    print(markdown(record))
    print(f"written to {record.folder}")
    for line in record.failed:
        _say(f"WRONG: {line}")
    return status or (1 if record.failed else 0)


def _sweep(options: argparse.Namespace, stopwatch: Stopwatch, sizes: Sizes, budget: Budget) -> int:
    hardware = describe(stopwatch.device, stopwatch.seconds, elements=sizes.copied, width=sizes.multiplied)
    give_memory_back()
    try:
        with _signals():
            return sweep(
                options.sweep,
                stopwatch=stopwatch,
                sizes=sizes,
                hardware=hardware,
                budget=budget,
                output=options.output,
                dry=bool(options.dry_run),
                say=_say,
            )
    except Stopped as stopped:
        _say(f"stopped by {stopped.name}; rows that were written stay")
        return int(stopped.code or 0)


def _checked(options: argparse.Namespace) -> list[Group]:
    """Returns the groups that are asked for; wrong options end the process with the right ones."""
    if options.part is not None and options.groups:
        parser().error("--part and --groups both say what runs; leave one of them out")
    if options.sweep is not None and (options.part is not None or options.groups):
        parser().error("--sweep runs alone; leave --part and --groups out")
    if options.part is not None and not 1 <= options.part <= len(PARTS):
        parser().error(f"--part {options.part}; there are {_parts()}")
    if options.resume is not None and options.afresh:
        parser().error("--resume takes figures over and --afresh takes none; leave one of them out")
    if options.resume is not None and not (options.resume / "results.json").is_file():
        parser().error(f"--resume {options.resume} holds no results.json; give a folder that an earlier call wrote")
    for name in ("minutes", "programs", "soak"):
        value = getattr(options, name)
        if value is not None and not value > 0:
            parser().error(f"--{name} {value}; write a number above 0")
    if options.large is not None and not options.large.is_dir():
        parser().error(f"--large {options.large} is no folder; give the one that the workload files lie in")
    names = options.groups if options.part is None else PARTS[options.part - 1]
    return _groups(names, dry=bool(options.dry_run))


def _groups(names: Sequence[str] | None, *, dry: bool) -> list[Group]:
    known = {group.name: group for group in GROUPS}
    for name in names or ():
        if name not in known:
            parser().error(f"--groups {name}; there are {', '.join(known)}")
    return [known[name] for name in names] if names else [group for group in GROUPS if group.usual[dry]]


def _parts() -> str:
    return "; ".join(f"{number} {', '.join(names)}" for number, names in enumerate(PARTS, 1))


def _opened(options: argparse.Namespace, stopwatch: Stopwatch, sizes: Sizes) -> tuple[Record, Outcomes]:
    """Describes the device, and takes over what earlier calls found on it."""
    dry = bool(options.dry_run)
    hardware = describe(stopwatch.device, stopwatch.seconds, elements=sizes.copied, width=sizes.multiplied)
    give_memory_back()
    folder = options.output or options.resume
    if folder is None:
        folder = Path(tempfile.mkdtemp(prefix="umbel-gpu-")) if dry else RESULTS / hardware.slug
    record = Record(hardware, dry, sizes=sizes.key, folder=folder, front=front_page)
    outcomes = Outcomes(hardware.name, hardware.commit, folder)
    if not options.afresh:
        source, any_commit = options.resume or folder, options.resume is not None
        for line in take_over(record, source, any_commit=any_commit):
            _say(line)
        outcomes.read(source, trusted=any_commit)
        if outcomes.taken:
            _say(f"taken over from {source}: {len(outcomes.taken)} tests that need not run again")
    record.save()
    outcomes.save()
    return record, outcomes


def _run_group(group: Group, run: Run, budget: Budget, share: float) -> None:
    """A group that breaks is named, and the next ones run."""
    record = run.record
    record.begin(group.name)
    reason = left_out(group.name, group.needs)
    if reason is None and budget.is_up:
        reason = f"{group.name} left out: the time was up; call again, or write a larger --minutes"
    if reason is not None:
        record.leave_out(group.name, reason)
        _say(reason)
        return
    _say(f"{group.name} ...")
    began = time.monotonic()
    try:
        group.run(run, budget.part(share))
    except Exception as error:
        line = f"{group.name}: {type(error).__name__}: {error}"
        record.broke(group.name, line)
        _say(line)
    except Stopped as stopped:
        record.leave_out(group.name, f"{group.name}: stopped by {stopped.name}; call again")
        raise
    finally:
        record.seconds[group.name] = record.seconds.get(group.name, 0.0) + time.monotonic() - began
        record.save()
    give_memory_back()


@contextmanager
def _signals() -> Iterator[None]:
    """SIGTERM and SIGINT raise `Stopped` in the main thread."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise Stopped(number)

    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
