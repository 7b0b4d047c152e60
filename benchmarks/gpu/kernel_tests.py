"""The tests that need a GPU, run by pytest in processes of its own, for so many seconds.

Most of their time is Triton's compiler, which has one core in each process: so several share the tests out among them.
Each process writes a line for each test as it begins and ends. The parent reads them once a second, so that a call
that is killed loses a second of outcomes at most.

`python -m benchmarks.gpu.kernel_tests SECONDS FILE KNOWN PART OF MARKERS PATH...` runs part PART (from 0) of OF, leaves
out and puts off the tests that the file KNOWN names, and appends what becomes of them to FILE.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TextIO

from . import packages
from .outcomes import FAILED, PASSED, SKIPPED, WAITING, Outcomes, order
from .packages import ROOT, environment

MARKER = "gpu"
KERNEL_TESTS = ("tests/srt/kernels/triton", "tests/srt/sampling/test_sampler.py")
BENCHMARK_TESTS = "tests/benchmarks/test_gpu.py"  # needs what the engine needs
ENGINE_TESTS = "tests/srt/runners/cuda"  # needs transformers, which makes their models
ON_HOST = ("not gpu", "tests/srt/kernels/triton/test_norm.py")
GRACE = (
    45.0  # seconds for importing, collecting, and the test that was running when the time was up; less of a short time
)
MOST_PROCESSES = 12  # each holds a context of the device
EVERY = 1.0  # seconds between looks at what processes have written
_RUNNING = "running"
_USUAL = (0, 1, 2, 5)  # exit codes of pytest: passed, failed, interrupted, no tests


class NoTests(Exception):
    """Nothing is known of them."""


def processes_here() -> int:
    """How many compile at once on this machine."""
    return max(1, min(MOST_PROCESSES, (os.cpu_count() or 1) * 3 // 4))


def tests_on_device() -> tuple[tuple[str, ...], list[str]]:
    """Returns the marker and paths of all tests that need a GPU, and what is left out for want of a package."""
    chosen, left_out = [MARKER], []
    if packages.is_here("transformers"):
        chosen.append(ENGINE_TESTS)  # first: they go through all kernels
    else:
        left_out.append(f"{ENGINE_TESTS}: transformers is not installed, which makes their models")
    chosen += KERNEL_TESTS
    absent = packages.left_out(BENCHMARK_TESTS, packages.ENGINE)
    if absent is None:
        chosen.append(BENCHMARK_TESTS)
    else:
        left_out.append(absent)
    return tuple(chosen), left_out


def run_tests(
    outcomes: Outcomes,
    seconds: float,
    chosen: Sequence[str],
    *,
    processes: int = 1,
    changed: Callable[[], None] = lambda: None,
) -> None:
    """Runs the chosen tests that are not done. changed: told when outcomes are new, and were saved.

    Raises:
        NoTests: a process of pytest did not begin, or there is no test.
    """
    if outcomes.is_complete(chosen):
        return
    grace = min(GRACE, seconds / 4)
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        known = {"done": outcomes.done, "later": sorted(outcomes.before)}
        (folder / "known.json").write_text(json.dumps(known))
        running = []
        for part in range(processes):
            (folder / f"{part}.jsonl").touch()
            output = stack.enter_context((folder / f"{part}.txt").open("wb"))
            places = [str(folder / f"{part}.jsonl"), str(folder / "known.json")]
            words = [str(seconds - grace), *places, str(part), str(processes), *chosen]
            command = [sys.executable, "-m", __name__, *words]
            running.append(
                stack.enter_context(
                    subprocess.Popen(command, cwd=ROOT, env=environment(), stdout=output, stderr=subprocess.STDOUT)
                )
            )
        reports = [Report(folder / f"{part}.jsonl", outcomes) for part in range(processes)]
        try:
            _wait(running, reports, time.monotonic() + seconds, outcomes, changed)
        finally:
            codes = [process.poll() for process in running]  # None: the time was up, or this call is stopped
            for process in running:
                process.kill()  # does nothing to one that has ended
            for report, code in zip(reports, codes, strict=True):
                report.read()
                report.end(code)
            outcomes.save()
            for part in range(processes):
                sys.stderr.write((folder / f"{part}.txt").read_text(errors="replace"))
    if any(report.ended_early for report in reports):
        raise NoTests("pytest ended before the tests began, and says why above")
    if not all(report.collected for report in reports):
        return  # the time was up before
    if not outcomes.now:
        raise NoTests(f"no test is marked {chosen[0]!r} in {', '.join(chosen[1:])}")
    outcomes.forget_others(set().union(*(report.names for report in reports)))
    outcomes.collected = list(chosen)
    outcomes.save()
    changed()


def _wait(
    running: Sequence["subprocess.Popen[bytes]"],
    reports: Sequence["Report"],
    end: float,
    outcomes: Outcomes,
    changed: Callable[[], None],
) -> None:
    """Until all processes have ended, or the time is up."""
    while any(process.poll() is None for process in running) and time.monotonic() < end:
        new = [report.read() for report in reports]
        if any(new):
            outcomes.save()
            changed()
        time.sleep(min(EVERY, max(0.0, end - time.monotonic())))


class Report:
    """Reads what one process writes, as it comes."""

    def __init__(self, path: Path, outcomes: Outcomes) -> None:
        self._path = path
        self._outcomes = outcomes
        self._at = 0
        self._under_way: str | None = None
        self.collected = False
        self.ended_early = False  # and no test is to blame
        self.names: set[str] = set()  # of all tests that were met, and of files that cannot be imported

    def read(self) -> bool:
        """Whether anything is new."""
        with self._path.open("rb") as file:
            file.seek(self._at)
            whole, _, _ = file.read().rpartition(b"\n")
        lines = whole.splitlines()
        self._at += len(whole) + bool(lines)
        for line in lines:
            self._take(json.loads(line))
        return bool(lines)

    def end(self, code: int | None) -> None:
        """A test that took its process with it has failed; one that the time cut off waits.

        code: with which the process ended; None: the time was up.
        """
        if code is None or (code in _USUAL and self.collected):
            return
        if self._under_way is None:
            self.ended_early = True
        else:
            self._outcomes.now[self._under_way] = FAILED

    def _take(self, said: dict[str, Any]) -> None:  # Any: what `Progress` has written
        if "collected" in said:
            self.collected = True
            self.names.update(said["collected"])
            self._outcomes.meet(said["collected"])
        elif said["outcome"] == _RUNNING:
            self._under_way = said["test"]
        else:
            self._under_way = None
            self.names.add(said["test"])
            self._outcomes.now[said["test"]] = said["outcome"]


class Progress:
    """A plugin of pytest: leaves the tests of other processes and those that are done out, writes a line for each test,
    and ends the session when the time is up.

    Args:
        out: gets a line of JSON each time.
        part, of: this process, from 0, and how many there are.
        paths: of tests; those of the first one run first.
        done, later: ids of tests that do not run, and that run last.
    """

    def __init__(
        self,
        seconds: float,
        out: TextIO,
        *,
        part: int = 0,
        of: int = 1,
        paths: Sequence[str] = (),
        done: frozenset[str] = frozenset(),
        later: frozenset[str] = frozenset(),
    ) -> None:
        self._end = time.monotonic() + seconds
        self._out = out
        self._part = part
        self._of = of
        self._paths = paths
        self._done = done
        self._later = later
        self._worst: dict[str, str] = {}  # of the phases of a test

    def pytest_collection_finish(self, session: object) -> None:
        """Shares by path and name: each process decides the same, whatever order the tests come in."""
        items = {item.nodeid: item for item in session.items}  # type: ignore[attr-defined]  # pytest.Session
        sorted_names = order(list(items), paths=self._paths, done=self._done, later=self._later)
        mine = sorted_names[self._part :: self._of]
        session.items[:] = [items[name] for name in mine]  # type: ignore[attr-defined]
        self._write(collected=list(items))

    def pytest_collectreport(self, report: object) -> None:
        if report.failed:  # type: ignore[attr-defined]  # pytest.CollectReport
            self._write(test=report.nodeid or "collection", outcome=FAILED)  # type: ignore[attr-defined]

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._write(test=nodeid, outcome=_RUNNING)

    def pytest_runtest_logreport(self, report: object) -> None:
        name, outcome = report.nodeid, report.outcome  # type: ignore[attr-defined]  # pytest.TestReport
        self._worst[name] = max(self._worst.get(name, PASSED), outcome, key=(PASSED, SKIPPED, FAILED).index)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self._write(test=nodeid, outcome=self._worst.pop(nodeid, WAITING))
        if time.monotonic() > self._end:
            self.session.shouldstop = "the time is up"  # type: ignore[attr-defined]

    def pytest_sessionstart(self, session: object) -> None:
        self.session = session

    def _write(self, **said: object) -> None:
        print(json.dumps(said), file=self._out, flush=True)


def main(seconds: str, target: str, known: str, part: str, of: str, markers: str, *paths: str) -> int:
    import pytest

    met = json.loads(Path(known).read_text())
    options = ["-q", "-p", "no:cacheprovider", "--tb=short", "--continue-on-collection-errors", "-m", markers]
    with Path(target).open("a") as out:
        progress = Progress(
            float(seconds),
            out,
            part=int(part),
            of=int(of),
            paths=paths,
            done=frozenset(met["done"]),
            later=frozenset(met["later"]),
        )
        return int(pytest.main([*options, *paths], plugins=[progress]))


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
