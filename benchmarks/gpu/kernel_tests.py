"""The tests that need a GPU, run by pytest in processes of its own, for so many seconds.

Most of their time is Triton's compiler, which has one core in each process: so several share the tests out among them.

`python -m benchmarks.gpu.kernel_tests SECONDS FILE PART OF MARKERS PATH...` runs part PART (from 0) of OF, and writes
what became of it to FILE.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from zlib import crc32

from .figures import Figure, Unit
from .packages import ROOT, environment

GROUP = "tests"
ON_DEVICE = ("gpu", "tests/srt/kernels/triton")  # the marker, and where
ENGINE_TESTS = "tests/srt/runners/cuda"  # of the same marker
ON_HOST = ("not gpu", "tests/srt/kernels/triton/test_norm.py")
GRACE = 45.0  # seconds for importing, collecting, and the test that was running when the time was up
MOST_PROCESSES = 12  # each holds a context of the device


class NoTests(Exception):
    """Nothing is known of them."""


def processes_here() -> int:
    """How many compile at once on this machine."""
    return max(1, min(MOST_PROCESSES, (os.cpu_count() or 1) * 3 // 4))


def figures_of_tests(seconds: float, chosen: Sequence[str], *, processes: int = 1) -> tuple[list[Figure], list[str]]:
    """For each file how many of its tests passed, of how many; and what was left out, and why.

    Raises:
        NoTests: a process of pytest did not begin, or did not end, or there is no test.
    """
    files: dict[str, Counter[str]] = {}
    first: dict[str, str] = {}
    waiting = 0
    for record in _records(seconds, chosen, processes):
        for path, counts in record["files"].items():
            files.setdefault(path, Counter()).update(counts)
        first = record["first"] | first
        waiting += record["waiting"]
    if not files and not waiting:
        raise NoTests(f"no test is marked {chosen[0]!r} in {', '.join(chosen[1:])}")
    figures = []
    for path, counts in sorted(files.items()):
        passed = counts["passed"]
        ran = passed + counts["failed"]
        if ran:
            note = f"first: {first[path]}" if passed < ran else ""
            figures.append(Figure(GROUP, path, Unit.PASSED, passed, limit=ran, must=ran, note=note))
    left_out = [f"{waiting} tests: their time was up; write a larger --minutes"] if waiting else []
    skipped = sum(counts["skipped"] for counts in files.values())
    return figures, left_out + ([f"{skipped} tests that skip themselves here"] if skipped else [])


# Any: what `Counting.record` has written.
def _records(seconds: float, chosen: Sequence[str], processes: int) -> list[dict[str, Any]]:
    """Of each process. What they print follows when they have ended, one behind the other."""
    end = time.monotonic() + seconds + GRACE
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        running: list[subprocess.Popen[bytes]] = []
        for part in range(processes):
            output = stack.enter_context((folder / f"{part}.txt").open("wb"))
            words = [str(seconds), str(folder / f"{part}.json"), str(part), str(processes), *chosen]
            command = [sys.executable, "-m", __name__, *words]
            running.append(
                stack.enter_context(
                    subprocess.Popen(command, cwd=ROOT, env=environment(), stdout=output, stderr=subprocess.STDOUT)
                )
            )
        try:
            for process in running:
                process.wait(max(0.0, end - time.monotonic()))
        except subprocess.TimeoutExpired as error:
            raise NoTests(f"pytest did not end {GRACE:.0f} s after the time was up") from error
        finally:
            for part, process in enumerate(running):
                process.kill()  # does nothing to one that has ended
                sys.stderr.write((folder / f"{part}.txt").read_text(errors="replace"))
        found = [folder / f"{part}.json" for part in range(processes)]
        if not all(path.is_file() for path in found):
            raise NoTests("pytest ended before the tests began, and says why above")
        return [json.loads(path.read_text()) for path in found]


class Counting:
    """A plugin of pytest: leaves the tests of other processes out, counts outcomes by file, and ends the session when
    the time is up.

    Args:
        part, of: this process, from 0, and how many there are.
    """

    def __init__(self, seconds: float, *, part: int = 0, of: int = 1) -> None:
        self._end = time.monotonic() + seconds
        self._part = part
        self._of = of
        self._outcomes: dict[str, str] = {}  # of each test: the worst of its phases
        self._first: dict[str, str] = {}  # of each file: what failed first
        self._collected = 0

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:  # Any: pytest.Item
        """By name: each process decides the same, whatever order the tests come in."""
        items[:] = [item for item in items if crc32(item.nodeid.encode()) % self._of == self._part]

    def pytest_collection_finish(self, session: object) -> None:
        self._collected = len(session.items)  # type: ignore[attr-defined]  # pytest.Session

    def pytest_collectreport(self, report: object) -> None:
        if report.failed:  # type: ignore[attr-defined]  # pytest.CollectReport
            name = report.nodeid or "collection"  # type: ignore[attr-defined]
            self._outcomes[name] = "failed"
            self._first[name] = "it cannot be imported"

    def pytest_runtest_logreport(self, report: object) -> None:
        name, outcome = report.nodeid, report.outcome  # type: ignore[attr-defined]  # pytest.TestReport
        worst = max(self._outcomes.get(name, "passed"), outcome, key=("passed", "skipped", "failed").index)
        self._outcomes[name] = worst
        if outcome == "failed":
            self._first.setdefault(name.split("::")[0], name.split("::")[-1])

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        del nodeid
        if time.monotonic() > self._end:
            self.session.shouldstop = "the time is up"  # type: ignore[attr-defined]

    def pytest_sessionstart(self, session: object) -> None:
        self.session = session

    def record(self) -> dict[str, object]:
        files: dict[str, Counter[str]] = {}
        for name, outcome in self._outcomes.items():
            files.setdefault(name.split("::")[0], Counter())[outcome] += 1
        waiting = max(0, self._collected - sum("::" in name for name in self._outcomes))
        return {"files": files, "first": self._first, "waiting": waiting}


def main(seconds: str, target: str, part: str, of: str, markers: str, *paths: str) -> int:
    import pytest

    counting = Counting(float(seconds), part=int(part), of=int(of))
    options = ["-q", "-p", "no:cacheprovider", "--tb=short", "--continue-on-collection-errors", "-m", markers]
    code = pytest.main([*options, *paths], plugins=[counting])
    ended = (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.INTERRUPTED)
    if code in (*ended, pytest.ExitCode.NO_TESTS_COLLECTED):
        Path(target).write_text(json.dumps(counting.record()))
    return int(code)


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
