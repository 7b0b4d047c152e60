"""The tests that need a GPU, run by pytest in a process of its own, for so many seconds.

`python -m benchmarks.gpu.kernel_tests SECONDS FILE MARKERS PATH...` writes what became of them to FILE.
"""

import json
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from .figures import Figure, Unit
from .packages import ROOT, environment

GROUP = "tests"
ON_DEVICE = ("gpu", "tests/srt/kernels/triton")  # the marker, and where
ENGINE_TESTS = "tests/srt/cuda"  # of the same marker
ON_HOST = ("not gpu", "tests/srt/kernels/triton/test_norm.py")
GRACE = 45.0  # seconds for importing, collecting, and the test that was running when the time was up


class NoTests(Exception):
    """Nothing is known of them."""


def figures_of_tests(seconds: float, chosen: Sequence[str]) -> tuple[list[Figure], list[str]]:
    """For each file how many of its tests passed, of how many; and what was left out, and why.

    Raises:
        NoTests: pytest did not begin, or did not end.
    """
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder) / "found.json"
        command = [sys.executable, "-m", __name__, str(seconds), str(found), *chosen]
        try:
            subprocess.run(
                command, cwd=ROOT, env=environment(), check=False, timeout=seconds + GRACE, stdout=sys.stderr
            )
        except subprocess.TimeoutExpired as error:
            raise NoTests(f"pytest did not end {GRACE:.0f} s after the time was up") from error
        if not found.is_file():
            raise NoTests("pytest ended before the tests began, and says why above")
        record = json.loads(found.read_text())
    figures = []
    for path, counts in record["files"].items():
        passed = counts.get("passed", 0)
        ran = passed + counts.get("failed", 0)
        if ran:
            note = f"first: {record['first'][path]}" if passed < ran else ""
            figures.append(Figure(GROUP, path, Unit.PASSED, passed, limit=ran, must=ran, note=note))
    left_out = [f"{record['waiting']} tests: their time was up; write a larger --minutes"] if record["waiting"] else []
    skipped = sum(counts.get("skipped", 0) for counts in record["files"].values())
    return figures, left_out + ([f"{skipped} tests that skip themselves here"] if skipped else [])


class Counting:
    """A plugin of pytest: counts outcomes by file, and ends the session when the time is up."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds
        self._outcomes: dict[str, str] = {}  # of each test: the worst of its phases
        self._first: dict[str, str] = {}  # of each file: what failed first
        self._collected = 0

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


def main(seconds: str, target: str, markers: str, *paths: str) -> int:
    import pytest

    counting = Counting(float(seconds))
    options = ["-q", "-p", "no:cacheprovider", "--tb=short", "--continue-on-collection-errors", "-m", markers]
    code = pytest.main([*options, *paths], plugins=[counting])
    if code in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.INTERRUPTED):
        Path(target).write_text(json.dumps(counting.record()))
    return int(code)


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
