"""`make gpu`, `python -m benchmarks.gpu`: whether the kernels are right, and how near they are to a device's limits.

Exit status 0: everything that ran is right. 1: a kernel, test or program gave what it should not; slow is not wrong.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from .figures import Record, markdown
from .groups import GROUPS, Group, Run
from .hardware import describe
from .packages import left_out
from .stopwatch import Budget, DeviceStopwatch, HostStopwatch, Stopwatch, give_memory_back
from .subjects.sizes import FULL, TINY

RESULTS = Path(__file__).resolve().parents[1] / "results" / "gpu"
MINUTES, DRY_MINUTES = 7.5, 2.5
PROGRAMS, DRY_PROGRAMS = 16, 2
DRY_WORKLOADS = ("mmlu_5shot", "json_decode_regex")


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--dry-run", action="store_true", help="tiny shapes in Triton's interpreter, on the CPU")
    names = ", ".join(group.name for group in GROUPS)
    parser.add_argument("--groups", nargs="+", metavar="NAME", help=f"of {names}; all but `compiled` if left out")
    parser.add_argument("--minutes", type=float, metavar="N", help=f"{MINUTES:g} if left out, {DRY_MINUTES:g} when dry")
    parser.add_argument("--large", type=Path, metavar="DIR", help="take workload files from this folder")
    parser.add_argument("--workload", nargs="+", default=[], metavar="NAME", help="for the engine; all if left out")
    parser.add_argument("--programs", type=int, metavar="N", help=f"the first N of each file; {PROGRAMS} if left out")
    parser.add_argument("--output", type=Path, metavar="DIR", help="benchmarks/results/gpu/DATE-DEVICE if left out")
    return parser


def main(arguments: Sequence[str]) -> int:
    options = parser().parse_args(arguments)
    dry = bool(options.dry_run)
    groups = _groups(options.groups, dry=dry)
    for name in ("minutes", "programs"):
        value = getattr(options, name)
        if value is not None and not value > 0:
            parser().error(f"--{name} {value}; write a number above 0")
    if options.large is not None and not options.large.is_dir():
        parser().error(f"--large {options.large} is no folder; give the one that the workload files lie in")
    budget = Budget(60 * (options.minutes or (DRY_MINUTES if dry else MINUTES)))
    sizes = TINY if dry else FULL
    stopwatch: Stopwatch = HostStopwatch() if dry else DeviceStopwatch(torch.device("cuda"))
    if dry:
        torch.set_num_threads(1)  # shapes are tiny: threads would only wait for each other
    hardware = describe(stopwatch.device, stopwatch.seconds, elements=sizes.copied, width=sizes.multiplied)
    give_memory_back()
    record = Record(hardware, dry)
    folder = options.output or (Path(tempfile.mkdtemp(prefix="umbel-gpu-")) if dry else RESULTS / hardware.slug)
    run = Run(
        record=record,
        stopwatch=stopwatch,
        sizes=sizes,
        dry=dry,
        large=options.large,
        workloads=tuple(options.workload) or (DRY_WORKLOADS if dry and options.large is None else ()),
        programs=options.programs or (DRY_PROGRAMS if dry else PROGRAMS),
        say=_say,
    )
    for group in groups:
        _run_group(group, run, budget, folder)
    print(markdown(record))
    print(f"written to {folder}")
    for line in record.failed:
        _say(f"WRONG: {line}")
    return 1 if record.failed else 0


def _groups(names: Sequence[str] | None, *, dry: bool) -> list[Group]:
    known = {group.name: group for group in GROUPS}
    for name in names or ():
        if name not in known:
            parser().error(f"--groups {name}; there are {', '.join(known)}")
    return [known[name] for name in names] if names else [group for group in GROUPS if group.usual[dry]]


def _run_group(group: Group, run: Run, budget: Budget, folder: Path) -> None:
    """A group that breaks is named, and those behind it run. What was found is written at once."""
    record = run.record
    reason = left_out(group.name, group.needs)
    if reason is None and budget.is_up:
        reason = f"{group.name} left out: the time was up; write a larger --minutes, or --groups {group.name}"
    if reason is not None:
        record.left_out.append(reason)
        _say(reason)
    else:
        _say(f"{group.name} ...")
        began = time.monotonic()
        try:
            group.run(run, budget.part(group.share))
        except Exception as error:
            record.broken.append(f"{group.name}: {type(error).__name__}: {error}")
            _say(record.broken[-1])
        record.seconds[group.name] = time.monotonic() - began
        give_memory_back()
    record.write(folder)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
