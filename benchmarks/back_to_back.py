"""`python -m benchmarks.back_to_back`: how many steps a device would begin at once after the one before.

A runtime whose steps compute nothing and take 5 ms (`debug={"pretend_step": 0.005}`) runs the workloads in two
processes. A step is back to back if the device did not wait for the host before it. Steps before which no request was
there are left out: their device waits for programs.
"""

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass

import umbel as ul

from . import workload
from .configuration import FULL, option
from .measure import CONCURRENCY
from .systems import Umbel

SECONDS = 0.005
PROGRAMS = 32


@dataclass(frozen=True, slots=True)
class Row:
    """One workload: its steps, without first ones, and how many of them were back to back."""

    name: str
    steps: int
    back_to_back: int
    busy: float  # the part of the time in which a step ran
    late: int  # rows that chose later
    dropped: int  # rows that ran in vain
    failures: int

    @property
    def share(self) -> float:
        return self.back_to_back / self.steps if self.steps else 1.0

    def __str__(self) -> str:
        shares = f"{self.share:.1%} | {self.busy:.1%}"
        return f"| {self.name} | {self.steps} | {shares} | {self.late} | {self.dropped} | {self.failures} |"


def measured(name: str, options: dict[str, object], step: float, *, programs: int, concurrency: int) -> Row:
    """Runs the first programs of a workload on a runtime of its own. step: seconds of one."""
    loaded = workload.read(name)
    with ul.Runtime(**options, debug={"pretend_step": step}) as runtime:  # type: ignore[arg-type]  # checked there
        system = Umbel(FULL, runtime.wait_ready())
        system.many(loaded.programs[:2], 2)  # opens constraints, and what else comes first
        system.flush()
        before, began = system.counters(), time.perf_counter()
        results = system.many(loaded.programs[:programs], concurrency)
        seconds, after = time.perf_counter() - began, system.counters()
    grown = {key: int(after[key] - before[key]) for key in after if key in before}
    return Row(
        name,
        steps=grown["device_steps"] - grown["first_steps"],
        back_to_back=grown["back_to_back_steps"],
        busy=grown["device_steps"] * step / seconds,
        late=grown["late_rows"],
        dropped=grown["dropped_rows"],
        failures=sum(isinstance(result, Exception) for result in results),
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints a row for each workload; returns 1 if a program failed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.back_to_back", description=__doc__)
    parser.add_argument("--workload", nargs="+", default=workload.available(), metavar="NAME")
    parser.add_argument("--programs", type=int, default=PROGRAMS, metavar="N", help="the first N of each file")
    parser.add_argument("--concurrency", type=int, default=CONCURRENCY, metavar="N", help="programs in flight")
    parser.add_argument("--seconds", type=float, default=SECONDS, metavar="S", help="of a step")
    parser.add_argument("--option", action="append", default=[], metavar="NAME=VALUE", help="of the runtime")
    asked = parser.parse_args(arguments)
    options = {
        "overlap": True,
        "chunk_size": 2048,
        "max_running": 128,
        **dict(map(option, asked.option)),
    }
    print("| workload | steps | back to back | busy | late rows | dropped | failed |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    rows = []
    for name in asked.workload:
        rows.append(measured(name, options, asked.seconds, programs=asked.programs, concurrency=asked.concurrency))
        print(rows[-1], flush=True)
    return 1 if any(row.failures for row in rows) else 0


if __name__ == "__main__":
    raise SystemExit(main())
