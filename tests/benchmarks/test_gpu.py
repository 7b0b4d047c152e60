"""`make gpu` without a GPU: the dry run end to end, and the parts that decide what a figure says."""

import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from umbel.srt.attention.backend import AttentionGeometry
from umbel.srt.launch import LoadedModel
from umbel.srt.simulator.workload import Fork, Gen, Program, Select, Text, Workload
from umbel.srt.testing.oracle import OracleRunner
from umbel.srt.testing.random_weights import RandomTensors
from umbel.srt.tokenizer.tokenizer import ByteTokenizer

from benchmarks import workload
from benchmarks.configuration import ALL, Configuration
from benchmarks.gpu import packages
from benchmarks.gpu.__main__ import prepare
from benchmarks.gpu.engine.shapes import LLAMA_2_7B, LLAMA_3_8B, TINY
from benchmarks.gpu.engine.soak import DeviceSqueeze
from benchmarks.gpu.engine.texts import shortened, texts_of
from benchmarks.gpu.engine.words import WordTokenizer
from benchmarks.gpu.engine.workloads import DECISIVE, ON_HOST, Engine, earlier_results, jobs, text_record
from benchmarks.gpu.figures import Figure, PendingFigure, Record, Unit, markdown, number
from benchmarks.gpu.groups import GROUPS, PARTS, Run, take
from benchmarks.gpu.hardware import Hardware, Limits, limits_of
from benchmarks.gpu.kernel_tests import (
    BENCHMARK_TESTS,
    ENGINE_TESTS,
    KERNEL_TESTS,
    NoTests,
    Progress,
    Report,
    run_tests,
)
from benchmarks.gpu.outcomes import Outcomes, order
from benchmarks.gpu.resume import take_over
from benchmarks.gpu.stopwatch import Budget, DeviceStopwatch
from benchmarks.gpu.subjects.batches import Rows, forked_step, pool_for, step_of
from benchmarks.gpu.subjects.sizes import TINY as SIZES
from benchmarks.gpu.subjects.subject import Subject
from benchmarks.measure import Measurement

ROOT = Path(__file__).resolve().parents[2]
LIMITS = Limits(bandwidth=2e12, rate=1e15, stated=True)
HARDWARE = Hardware(
    "Toy 5000", LIMITS, 1e12, 1.1e12, 5e14, 8, 1 << 34, 1 << 24, {}, {}, {"torch": "2"}, "abc", "2026-01-02T03:04"
)


def figure(unit: Unit, measured: float, must: float | None = None, stretch: float | None = None) -> Figure:
    return Figure("group", "name", unit, measured, must=must, stretch=stretch)


# ------------------------------------------------------------------------------------------ the whole


def dry_run(folder: Path, *arguments: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "benchmarks.gpu", "--dry-run", "--output", str(folder), *arguments]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.nightly
def test_a_dry_run_writes_what_a_run_on_a_gpu_would_and_goes_on_where_it_was_stopped(tmp_path: Path) -> None:
    groups = ["attention", "passes", "experts", "sampling", "steps", "engine", "compiled"]
    arguments = ["--minutes", "6", "--workload", "json_decode_regex", "--groups", *groups]

    stopped = dry_run(tmp_path, *arguments)
    while stopped.poll() is None and not (figures_in(tmp_path) if (tmp_path / "results.json").exists() else []):
        time.sleep(0.05)
    stopped.send_signal(signal.SIGTERM)
    _, said = stopped.communicate()
    assert stopped.returncode == 128 + signal.SIGTERM, said
    assert "stopped by SIGTERM; the same call goes on from here" in said
    first = figures_in(tmp_path)
    assert {one["group"] for one in first} <= set(groups[:3])

    second = dry_run(tmp_path, *arguments)
    page, said = second.communicate()
    assert second.returncode == 0, said
    assert f": {len(first)} figures: attention" in said
    record = json.loads((tmp_path / "results.json").read_text())
    assert record["dry"]
    assert record["broken"] == record["left_out"] == {}
    assert set(record["seconds"]) == set(groups)
    figures = record["figures"]
    assert figures[: len(first)] == first
    assert {one["group"] for one in figures} == set(groups) - {"compiled"}
    assert all(one["measured"] > 0 for one in figures if one["unit"] != "%")
    shares = [one["name"] for one in figures if one["unit"] == "%"]
    assert "tiny, json_decode_regex: steps launched while the one before ran" in shares
    assert any("device busy" in name for name in shares)
    assert (tmp_path / "results.md").read_text() in page
    assert "**A dry run**" in page
    runs = json.loads((tmp_path / "engine-tiny.json").read_text())["measurements"]
    assert [(run["system"], run["failures"]) for run in runs] == [("full", []), ("no-cache", [])]
    assert "norm" in (tmp_path / "ptx.md").read_text()

    began = time.monotonic()
    third = dry_run(tmp_path, *arguments)
    _, said = third.communicate()
    assert third.returncode == 0, said
    assert time.monotonic() - began < 60, "imports alone take most of it"
    assert f": {len(figures)} figures: " in said
    assert "engine: tiny: 2 runs are taken over" in said
    assert re.findall("^(?:attention|passes|experts|sampling|steps): .*", said, re.MULTILINE) == []
    assert figures_in(tmp_path) == figures
    assert [call["figures"] for call in json.loads((tmp_path / "results.json").read_text())["calls"]] == [
        *(len(first), len(figures) - len(first), 0)
    ]


def figures_in(folder: Path) -> list[dict[str, object]]:
    found: list[dict[str, object]] = json.loads((folder / "results.json").read_text())["figures"]
    return found


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--groups", "speed"], "--groups speed; there are tests, equality"),
        (["--minutes", "0"], "--minutes 0.0; write a number above 0"),
        (["--large", "/nowhere"], "--large /nowhere is no folder"),
        (
            ["--part", "5"],
            "--part 5; there are 1 tests; 2 equality, attention, peers, passes, experts, sampling; 3 steps, soak; 4",
        ),
        (["--part", "1", "--groups", "steps"], "--part and --groups both say what runs; leave one of them out"),
        (["--resume", "/nowhere"], "--resume /nowhere holds no results.json; give a folder that an earlier call wrote"),
        (["--resume", ".", "--afresh"], "--resume takes figures over and --afresh takes none; leave one of them out"),
    ],
)
def test_wrong_options_are_answered_with_right_ones(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from benchmarks.gpu.command import main

    with pytest.raises(SystemExit):
        main(["--dry-run", *arguments])
    assert said in capsys.readouterr().err


def test_without_a_gpu_the_run_says_so_and_is_dry(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(packages, "install", list)
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    assert prepare(["--minutes", "1"]) == ["--dry-run", "--minutes", "1"]
    assert os.environ["TRITON_INTERPRET"] == "1"
    assert "this is a dry run" in capsys.readouterr().err


# ------------------------------------------------------------------------------------------ figures


@pytest.mark.parametrize(
    ("unit", "measured", "met"),
    [
        (Unit.BANDWIDTH, 90.0, "stretch"),
        (Unit.BANDWIDTH, 80.0, "must"),
        (Unit.BANDWIDTH, 74.9, "NO"),
        (Unit.BANDWIDTH, math.nan, "NO"),
        (Unit.MICROSECONDS, 80.0, "stretch"),
        (Unit.MICROSECONDS, 90.0, "NO"),
    ],
)
def test_goals_are_met_upwards_or_downwards(unit: Unit, measured: float, met: str) -> None:
    assert figure(unit, measured, must=75.0, stretch=88.0).met == met


def test_what_is_wrong_fails_a_run_and_what_is_slow_does_not() -> None:
    slow, wrong = figure(Unit.RATE, 1.0, must=300.0), figure(Unit.ERROR, math.nan, must=1e-2)
    record = Record(HARDWARE, dry=False, figures=[slow, figure(Unit.ERROR, 1e-3, must=1e-2)])
    assert record.failed == []
    record.figures.append(wrong)
    record.broke("engine", "engine: it broke")
    assert record.failed == ["group: name", "engine: it broke"]
    assert record.met(slow) == "NO"
    assert replace(record, dry=True).met(slow) == ""


def test_a_record_is_read_back_from_json_and_names_what_was_left_out(tmp_path: Path) -> None:
    record = Record(HARDWARE, dry=False, figures=[figure(Unit.ERROR, math.nan, must=1.0)], more={"more.md": "more"})
    record.leave_out("engine", "engine left out: no time")
    record.write(tmp_path / "new")
    read = json.loads((tmp_path / "new" / "results.json").read_text())
    assert read["hardware"]["limits"]["bandwidth"] == 2e12
    assert read["figures"][0]["measured"] is None
    assert (tmp_path / "new" / "more.md").read_text() == "more"
    page = markdown(record)
    assert "| group | name | relative error |  | 1 |  | nan |  | NO |  |" in page
    assert "## Left out\n\n* engine left out: no time" in page
    assert "2.00 TB/s" in page
    assert HARDWARE.slug == "2026-01-02-toy-5000"


def test_parts_are_the_groups_of_a_usual_run() -> None:
    assert [name for part in PARTS for name in part] == [group.name for group in GROUPS if group.usual[False]]


# ------------------------------------------------------------------------------------------ what is taken over


def kept(folder: Path, *figures: Figure, hardware: Hardware = HARDWARE, dry: bool = False) -> Record:
    record = Record(hardware, dry, sizes="some", folder=folder)
    record.add(*figures)
    return record


def named(name: str, measured: float, unit: Unit = Unit.ERROR) -> Figure:
    return Figure("equality", name, unit, measured, must=1e-2 if unit is Unit.ERROR else None)


def test_each_figure_is_written_at_once(tmp_path: Path) -> None:
    record = kept(tmp_path)
    for count in (1, 2, 3):
        record.add(named(str(count), 1e-3))
        assert len(figures_in(tmp_path)) == count
        assert f"| equality | {count} |" in (tmp_path / "results.md").read_text()
    record.add(named("2", 5e-3))
    assert [one["measured"] for one in figures_in(tmp_path)] == [1e-3, 5e-3, 1e-3]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["results.json", "results.md"]


def test_figures_are_taken_over_and_those_that_are_wrong_are_taken_again(tmp_path: Path) -> None:
    earlier = kept(tmp_path, named("right", 1e-3), named("wrong", 1.0), named("lost", math.nan, Unit.RATE))
    earlier.more["ptx.md"] = "norm"
    earlier.broke("equality", "equality: broken: RuntimeError: it broke")
    record = Record(replace(HARDWARE, date="2026-01-03T00:00"), dry=False, sizes="some", folder=tmp_path)
    assert take_over(record, tmp_path, any_commit=False) == [
        f"taken over from {tmp_path}, 2026-01-02T03:04, commit abc: 3 figures: equality 3",
        "1 of them are wrong, and taken again",
    ]
    assert record.more == {"ptx.md": "norm"}
    assert record.failed == ["equality: wrong", "equality: broken: RuntimeError: it broke"]
    taken: list[str] = []

    def pending(name: str) -> PendingFigure:
        def take() -> Figure:
            taken.append(name)
            if name == "broken":
                raise RuntimeError("it broke again")
            return named(name, 2e-3)

        return PendingFigure(name, take)

    run = run_of(record)
    record.begin("equality")
    names = ["right", "wrong", "lost", "broken", "new"]
    take(run, Budget(60.0, lambda: 0.0), "equality", map(pending, names))
    assert taken == ["wrong", "lost", "broken", "new"]
    assert record.failed == ["equality: broken: RuntimeError: it broke again"]
    assert {one.name: one.measured for one in record.figures} == {
        "right": 1e-3,
        "wrong": 2e-3,
        "lost": 2e-3,
        "new": 2e-3,
    }
    assert [(call.date, call.figures) for call in record.calls] == [("2026-01-02T03:04", 3), ("2026-01-03T00:00", 3)]
    assert "Calls: 2026-01-02T03:04 3 figures at abc, 2026-01-03T00:00 3 figures at abc." in markdown(record)


def run_of(record: Record) -> Run:
    return Run(record, Outcomes("toy", "abc"), Always(), SIZES, False, None, (), 1, 1.0, lambda line: None)


def test_figures_that_there_is_no_time_for_are_named_from_the_first_on() -> None:
    record = Record(HARDWARE, dry=False, figures=[named("there", 1e-3)])
    run = run_of(record)
    names = ("there", "missing", "later")
    take(run, Budget(0.0), "equality", (PendingFigure(name, lambda: named("never", 0.0)) for name in names))
    assert record.left_out == {
        "equality": ["equality: 'missing' and what follows it; the time was up, call again"],
    }


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"name": "Toy 6000"}, "its device is Toy 6000, this one is Toy 5000"),
        ({"commit": "def"}, "its commit is def, this one is abc; write --resume and the folder to mix them"),
        ({"commit": "unknown"}, "the commit is unknown; write --resume and the folder, if the code is the same"),
    ],
)
def test_figures_of_another_device_or_commit_are_not_taken_over(
    changes: dict[str, str], said: str, tmp_path: Path
) -> None:
    kept(tmp_path, named("there", 1e-3), hardware=replace(HARDWARE, **changes))  # type: ignore[arg-type]
    record = Record(HARDWARE, dry=False, sizes="some")
    assert take_over(record, tmp_path, any_commit=False) == [f"nothing is taken over from {tmp_path}: {said}"]
    assert record.figures == []


def test_figures_of_other_sizes_are_not_taken_over_and_those_of_another_commit_are_noted(tmp_path: Path) -> None:
    kept(tmp_path, named("there", 1e-3), hardware=replace(HARDWARE, commit="def"))
    other = Record(HARDWARE, dry=False, sizes="others")
    assert "its figures are of other sizes" in take_over(other, tmp_path, any_commit=True)[0]
    record = Record(HARDWARE, dry=False, sizes="some")
    take_over(record, tmp_path, any_commit=True)
    assert [one.note for one in record.figures] == ["at commit def"]


def test_a_record_of_another_version_is_replaced(tmp_path: Path) -> None:
    record = Record(HARDWARE, dry=False)
    assert take_over(record, tmp_path, any_commit=True) == []
    (tmp_path / "results.json").write_text('{"hardware": {}}')
    assert "is of another version" in take_over(record, tmp_path, any_commit=True)[0]


def test_numbers_have_three_digits_that_count() -> None:
    assert [number(value) for value in (None, 0.0, 3e-5, 1.234, 98.76, 12345.6)] == [
        *("", "0", "3.0e-05", "1.23", "98.8", "12,346")
    ]


def test_limits_are_the_makers_where_the_device_is_known() -> None:
    assert limits_of("NVIDIA H200", read=1.0, multiplied=2.0) == Limits(4.8e12, 989e12, stated=True)
    assert limits_of("NVIDIA H100 80GB HBM3", read=1.0, multiplied=2.0).bandwidth == 3.35e12
    assert limits_of("Toy 5000", read=1.0, multiplied=2.0) == Limits(1.0, 2.0, stated=False)
    assert LIMITS.seconds(4e12, 1e15) == 2.0


class Always:
    """A stopwatch: work that says how long it takes."""

    device = torch.device("cpu")

    def seconds(self, work: Callable[[], object]) -> float:
        taken = work()
        assert isinstance(taken, float)
        return taken

    def seconds_of_calls(self, work: Callable[[], object]) -> float:
        return self.seconds(work)


def test_a_figure_is_made_of_time_and_of_what_the_work_costs() -> None:
    subject = Subject("group", "name", Unit.BANDWIDTH, lambda: 1e-3, size=1e9, operations=4e11, beside=lambda: 2e-3)
    stream = subject.figure(Always(), LIMITS)
    assert (stream.measured, stream.beside, stream.limit) == (50.0, 25.0, 100.0)
    rate = replace(subject, unit=Unit.RATE, beside=None).figure(Always(), LIMITS)
    assert (rate.measured, rate.limit) == (pytest.approx(400.0), 1000.0)
    single = replace(subject, unit=Unit.MICROSECONDS, times=10, beside=None).figure(Always(), LIMITS)
    assert (single.measured, single.limit) == (pytest.approx(100.0), pytest.approx(500.0))
    ratio = replace(subject, unit=Unit.TIMES, base=lambda: 4e-3, most=7.0, beside=None).figure(Always(), LIMITS)
    assert (ratio.measured, ratio.limit) == (4.0, 7.0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason=f"torch {torch.__version__} finds no GPU")
def test_work_on_a_device_is_timed_again_and_again() -> None:
    stopwatch = DeviceStopwatch(torch.device("cuda"), enough=0.01)
    source = torch.randn(1 << 20, device="cuda")
    taken = [stopwatch.seconds(lambda: source + 1) for _ in range(3)]
    assert all(0 < seconds < 1 for seconds in taken)
    assert stopwatch.seconds_of_calls(lambda: source + 1) > 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason=f"torch {torch.__version__} finds no GPU")
def test_memory_of_a_device_is_taken_and_given_back() -> None:
    device = torch.device("cuda")
    free, _ = torch.cuda.mem_get_info(device)
    for block in DeviceSqueeze(device).turns():
        with block:
            assert torch.cuda.mem_get_info(device)[0] < free / 2
    assert torch.cuda.mem_get_info(device)[0] > 0.9 * free


def test_a_budget_gives_what_groups_left_to_those_behind_them() -> None:
    now = 0.0
    budget = Budget(100.0, lambda: now)
    assert budget.part(0.25).left == 25.0
    now = 5.0
    assert budget.part(0.2).left == 19.0
    now = 200.0
    assert budget.is_up
    assert budget.part(0.5).is_up


# ------------------------------------------------------------------------------------------ packages


def test_what_is_missing_is_named_with_the_remedy() -> None:
    assert packages.left_out("engine", ("json", "os")) is None
    assert packages.missing(("json", "no_such_package", "no.such.package")) == ["no_such_package", "no.such.package"]
    assert packages.left_out("engine", ("no_such_package",)) == (
        "engine left out: no_such_package is not installed; install it"
    )


def test_missing_packages_come_from_the_folder_of_wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[tuple[str, ...]] = []
    monkeypatch.setattr(packages, "WHEELS", {"not_here": "not-here", "nor_here": "nor-here", "json": "json"})
    monkeypatch.setattr(packages, "_pip", lambda *words: said.append(words))
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert packages.left_out("engine", ("not_here", "nor_here")) == (
        "engine left out: not-here, nor-here are not installed; run `make gpu-wheels` where there is a network, and "
        "carry the folder wheels/ here"
    )
    assert packages.install(tmp_path) == []
    (tmp_path / "not_here-1.0-py3-none-any.whl").touch()
    (tmp_path / "json-1.0-py3-none-any.whl").touch()
    assert packages.install(tmp_path) == ["not_here"]
    assert said[0][:2] == ("install", "--no-index")
    assert said[0][-1] == str(tmp_path / "not_here-1.0-py3-none-any.whl")
    assert sys.path[0].startswith(str(tmp_path / "installed"))


def test_wheels_are_downloaded_for_the_python_of_the_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = tmp_path / "msgspec-0.1-cp311.whl"
    old.write_bytes(b"x" * 50)

    def pip(*words: str) -> None:
        assert words[words.index("--python-version") + 1] == "3.12"
        assert "msgspec" in words
        (tmp_path / "msgspec-0.2-cp312.whl").write_bytes(b"x" * 100)

    monkeypatch.setattr(packages, "_pip", pip)
    assert packages.download("3.12", tmp_path) == 100
    assert not old.exists()


# ------------------------------------------------------------------------------------------ tests of kernels


@pytest.mark.nightly
@pytest.mark.parametrize("processes", [1, 2])
def test_tests_are_counted_by_file_and_those_that_passed_are_not_run_again(processes: int, tmp_path: Path) -> None:
    test, broken, ran = tmp_path / "test_some.py", tmp_path / "test_none.py", tmp_path / "ran.txt"
    test.write_text(
        f"import pytest\n\ndef test_a():\n    open({str(ran)!r}, 'a').write('a')\n\n"
        "def test_b(): assert False\n\n@pytest.mark.skip\ndef test_c(): pass\n"
    )
    broken.write_text("import no_such_package\n")
    chosen = ("not gpu", str(tmp_path))
    outcomes = Outcomes("toy", "abc", tmp_path)
    run_tests(outcomes, 120.0, chosen, processes=processes)
    by_file = {Path(one.name).name: one for one in outcomes.figures()}
    assert (by_file["test_some.py"].measured, by_file["test_some.py"].limit) == (1, 2)
    assert by_file["test_some.py"].note == "first: test_b"
    assert (by_file["test_none.py"].met, by_file["test_none.py"].note) == ("NO", "first: it cannot be imported")
    assert outcomes.left_out() == ["1 tests that skip themselves here"]
    assert not outcomes.is_complete(chosen)

    test.write_text(test.read_text().replace("assert False", "pass"))
    broken.unlink()
    again = Outcomes("toy", "abc", tmp_path)
    again.read(tmp_path)
    run_tests(again, 120.0, chosen, processes=processes)
    (one,) = again.figures()
    assert (one.measured, one.limit, one.met, one.note) == (2, 2, "must", "1 in earlier calls")
    assert ran.read_text() == "a", "once, in the first call"
    assert again.is_complete(chosen)


@pytest.mark.nightly
def test_pytest_that_does_not_begin_is_no_success(tmp_path: Path) -> None:
    with pytest.raises(NoTests, match="before the tests began"):
        run_tests(Outcomes("toy", "abc"), 120.0, ("not gpu", str(tmp_path / "nowhere")))


@pytest.mark.nightly
def test_a_folder_without_such_tests_is_no_success(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text("def test_a(): pass\n")
    with pytest.raises(NoTests, match="no test is marked 'gpu' in"):
        run_tests(Outcomes("toy", "abc"), 120.0, ("gpu", str(tmp_path)))


def test_all_tests_that_need_a_gpu_are_chosen() -> None:
    """Those of kernels are marked where kernels are compiled."""
    chosen = (ENGINE_TESTS, *KERNEL_TESTS, BENCHMARK_TESTS)
    marked = [
        str(path.relative_to(ROOT))
        for path in sorted((ROOT / "tests").rglob("test_*.py"))
        if "pytest.mark.gpu" in path.read_text()
    ]
    assert len(marked) > 4
    assert [path for path in marked if not path.startswith(chosen)] == []


@dataclass(frozen=True)
class Item:
    nodeid: str


class Session:
    """A session of pytest."""

    shouldstop: bool | str = False

    def __init__(self, *names: str) -> None:
        self.items = [Item(name) for name in names]


def test_processes_share_the_tests_and_each_is_of_one() -> None:
    names = [f"test_a.py::test_{index}" for index in range(100)]
    sessions = [Session(*names) for _ in range(4)]
    for index, session in enumerate(sessions):
        done, later = frozenset(names[:20]), frozenset(names[20:30])
        Progress(1.0, StringIO(), part=index, of=4, done=done, later=later).pytest_collection_finish(session)
    assert sorted(item.nodeid for session in sessions for item in session.items) == sorted(names[20:])
    assert [len(session.items) for session in sessions] == [20] * 4
    last = {item.nodeid for session in sessions for item in session.items[-3:]}
    assert last > set(names[20:30]), "what passed at another commit"


def test_tests_end_when_their_time_is_up() -> None:
    out = StringIO()
    progress, session = Progress(0.0, out), Session("a.py::test_a", "a.py::test_b")
    progress.pytest_sessionstart(session)
    progress.pytest_collection_finish(session)
    progress.pytest_runtest_logstart("a.py::test_a")
    progress.pytest_runtest_logfinish("a.py::test_a")
    assert session.shouldstop == "the time is up"
    assert [json.loads(line) for line in out.getvalue().splitlines()] == [
        {"collected": ["a.py::test_a", "a.py::test_b"]},
        {"test": "a.py::test_a", "outcome": "running"},
        {"test": "a.py::test_a", "outcome": "waiting"},
    ]


@pytest.mark.parametrize(("code", "outcome"), [(-11, "failed"), (None, "waiting")])
def test_a_test_that_ends_its_process_has_failed_and_one_that_is_cut_off_waits(
    code: int | None, outcome: str, tmp_path: Path
) -> None:
    path = tmp_path / "0.jsonl"
    lines: list[dict[str, object]] = [
        {"collected": ["a", "b", "c"]},
        {"test": "a", "outcome": "running"},
        {"test": "a", "outcome": "passed"},
        {"test": "b", "outcome": "running"},
    ]
    outcomes = Outcomes("toy", "abc")
    report = Report(path, outcomes)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"test": "b", "outc')
    assert report.read()
    assert not report.read(), "the last line is not whole"
    report.end(code)
    assert not report.ended_early
    assert outcomes.now == {"a": "passed", "b": outcome, "c": "waiting"}


def test_what_passed_is_known_on_the_same_device_and_run_last_at_another_commit(tmp_path: Path) -> None:
    first = Outcomes("toy", "abc", tmp_path, now={"f::a": "passed", "f::b": "failed", "f::c": "waiting"})
    first.save()
    same, later, unknown, elsewhere = (
        Outcomes(*which) for which in [("toy", "abc"), ("toy", "def"), ("toy", "unknown"), ("b", "abc")]
    )
    same.read(tmp_path)
    later.read(tmp_path, trusted=True)
    unknown.read(tmp_path)
    assert (unknown.now, unknown.before) == ({}, {"f::a"})
    unknown.read(tmp_path, trusted=True)
    elsewhere.read(tmp_path)
    assert (same.now, same.done) == (first.now, ["f::a"])
    assert (later.now, later.before) == ({}, {"f::a"})
    assert unknown.now == first.now
    assert (elsewhere.now, elsewhere.before) == ({}, set())
    names = ["f::d", "f::a", "g::b", "f::b"]
    assert order(names, paths=["g", "f"], later=frozenset(later.before)) == ["g::b", "f::b", "f::d", "f::a"]


# ------------------------------------------------------------------------------------------ what is run


def test_slots_of_sequences_lie_scattered_and_never_twice() -> None:
    step = step_of([Rows(5), Rows(0, 7), Rows(3, 2)])
    slots = np.concatenate(step.batch.slots)
    assert sorted(slots.tolist()) == list(range(1, step.slots))
    assert step.batch.rows == 10
    assert step.batch.logit_rows.tolist() == [0, 7, 9]
    assert step.batch.write_slots.tolist()[0] == step.batch.slots[0][5]


def test_branches_share_their_prefix_and_say_so_if_asked() -> None:
    told, untold = (forked_step(3, 4, 2, tree=tree) for tree in (True, False))
    assert told.slots == 1 + 4 + 3 * 2
    assert all((slots[:4] == told.batch.slots[0][:4]).all() for slots in told.batch.slots)
    assert told.batch.paths[2] == ((1, 0, 4), (4, 4, 1))
    assert untold.batch.paths == ()


def test_pools_are_full_of_numbers_from_a_seed() -> None:
    one, again = (pool_for(6, AttentionGeometry(2, 1, 8), torch.float32, torch.device("cpu")) for _ in range(2))
    assert torch.equal(one.keys[0], again.keys[0])
    assert float(one.values[0].std()) > 0.5


def test_shapes_have_the_bytes_of_the_models_that_they_are_named_for() -> None:
    assert LLAMA_2_7B.read_parameters * 2 / 1e9 == pytest.approx(13.2, abs=0.05)
    assert LLAMA_3_8B.read_parameters * 2 / 1e9 == pytest.approx(15.0, abs=0.05)
    assert LLAMA_2_7B.kv_numbers * 2 == 512 << 10
    assert LLAMA_3_8B.kv_numbers * 2 == 128 << 10


def test_random_weights_are_the_same_whenever_they_are_read() -> None:
    weights = RandomTensors(TINY.tensor_shapes, torch.float32, torch.device("cpu"))
    name = "model.layers.1.mlp.down_proj.weight"
    assert torch.equal(weights[name], weights[name])
    assert weights[name].shape == (TINY.hidden, TINY.width)
    assert float(weights[name].std()) == pytest.approx(TINY.width**-0.5, rel=0.1)
    assert torch.equal(weights["model.norm.weight"], torch.ones(TINY.hidden))
    assert len(weights) == 3 + 9 * TINY.layers


WORDS = WordTokenizer(["The quick brown fox, the quick brown dog. 1234 ünlike"], 300)


@settings(max_examples=60, deadline=None)
@given(st.text(alphabet=st.sampled_from("theTHE quickü.,\n 12☃"), max_size=40))
def test_words_spell_every_text_and_cuts_at_boundaries_change_nothing(text: str) -> None:
    ids = WORDS.encode(text, first=True)
    assert b"".join(map(WORDS.token_bytes, ids)) == text.encode()
    for cut in WORDS.boundary.finditer(text) if WORDS.boundary else ():
        at = cut.start()
        assert ids == WORDS.encode(text[:at], first=True) + WORDS.encode(text[at:], first=False)


def test_frequent_words_are_one_token_and_the_vocabulary_is_padded() -> None:
    assert len(WORDS.encode(" quick brown", first=False)) == 2
    assert WORDS.token_bytes(299) == b""
    assert {WORDS.token_bytes(token) for token in WORDS.special_ids.values()} == {b""}


def test_programs_are_shortened_and_lose_their_constraints() -> None:
    gen = Gen("a", 40, regex="[0-9]{30}")
    ops = (Text("a long beginning"), Fork(((Text("inner text"), gen, Select("b", ("yes", "no"))),)))
    file = Workload("toy", "", "", (Program("p", ops),), serial=False)
    assert list(texts_of([file])) == ["a long beginning", "inner text", "[0-9]{30}", "yes", "no"]
    text, fork = shortened(file, characters=4, tokens=3).programs[0].ops
    assert text == Text("ning")
    assert isinstance(fork, Fork)
    inner = fork.branches[0][1]
    assert isinstance(inner, Gen)
    assert (inner.max_tokens, inner.regex) == (3, None)


def test_prompts_of_the_workloads_have_about_as_many_tokens_as_with_a_trained_vocabulary() -> None:
    files = [workload.read(name).first(8) for name in ("mmlu_5shot", "react_agent")]
    texts = list(texts_of(files))
    tokenizer = WordTokenizer(texts, 32_000)
    tokens = sum(len(tokenizer.encode(text, first=False)) for text in texts)
    assert 3 < sum(map(len, texts)) / tokens < 6


def test_a_configuration_whose_runner_cannot_be_had_is_named_and_the_others_run() -> None:
    class Loads(Engine):
        measured: list[str] = []
        warmed: list[str] = []

        def _load(self, configuration: Configuration) -> LoadedModel:
            if configuration.options.get("tree_attention") is False:
                raise RuntimeError("out of memory")
            return LoadedModel("toy", ByteTokenizer(), OracleRunner(300, 64, 64))

        def _warm_up(self, configuration: Configuration, file: Workload, loaded: LoadedModel) -> None:
            self.warmed.append(configuration.name)

        def _measure(self, configuration: Configuration, file: Workload, loaded: LoadedModel, repeat: int) -> None:
            self.measured.append(configuration.name)

    file = Workload("toy", "", "", (Program("p", (Text("a"),)),), serial=False)
    engine = Loads(TINY, [file], replace(ON_HOST, compiling=2), torch.device("cpu"), Budget(60.0, lambda: 0.0), print)
    engine.run([ALL["no-tree-attention"], ALL["fcfs"], ALL["int8"]])
    assert engine.measured == ["full", "no-cache", "fcfs"]
    assert engine.warmed == ["full"], "once for each runner"
    assert engine.left_out == ["tiny, no-tree-attention: RuntimeError: out of memory"]
    assert "int8" in engine.results.missing


def toy(name: str) -> Workload:
    return Workload(name, "", "", (Program("p", (Text("a"),)),), serial=False)


def test_decisive_workloads_come_first_with_every_switch_and_again_the_other_way_round() -> None:
    files = [toy(name) for name in ("one", DECISIVE[1], DECISIVE[0])]
    found = [
        (file.name, one.name, turn) for one, file, turn in jobs([ALL["no-tree-attention"], ALL["fcfs"]], files, turns=2)
    ]
    second, first = DECISIVE[1], DECISIVE[0]
    assert found == [
        *((name, system, 0) for name in (first, second) for system in ("full", "no-cache")),
        *((name, system, 0) for system in ("fcfs", "no-tree-attention") for name in (first, second)),
        *(("one", system, 0) for system in ("full", "no-cache")),
        *((name, system, 1) for name in (first, second) for system in ("no-cache", "full")),
        *(("one", system, 0) for system in ("fcfs", "no-tree-attention")),
    ]


def test_the_decisive_workloads_are_files_of_the_repository() -> None:
    assert set(DECISIVE) <= set(workload.available())


def run_named(
    name: str, system: str, repeat: int = 0, failures: tuple[str, ...] = (), **counters: float
) -> Measurement:
    return Measurement(name, system, repeat, 1, 1, 2.0, (1.0,), failures, 0, None, counters)


def test_runs_of_an_earlier_call_are_taken_over_and_those_that_failed_run_again() -> None:
    class Runs(Engine):
        def _load(self, configuration: Configuration) -> LoadedModel:
            return LoadedModel("toy", ByteTokenizer(), OracleRunner(300, 64, 64))

        def _run(self, configuration: Configuration, file: Workload, loaded: LoadedModel) -> Measurement:
            ran.append((file.name, configuration.name))
            return run_named(file.name, configuration.name, steps=9, first_steps=1, overlapped_steps=6)

    def engine(files: list[Workload]) -> Engine:
        return Runs(TINY, files, ON_HOST, torch.device("cpu"), Budget(60.0, lambda: 0.0), print, lambda: kept.append(1))

    ran: list[tuple[str, str]] = []
    kept: list[int] = []
    files = [toy("one"), toy("two")]
    first = engine(files)
    first.results.measurements += [run_named("one", "full"), run_named("two", "full", failures=("p: it broke",))]
    earlier = earlier_results(text_record(first)["engine-tiny.json"])
    assert earlier is not None
    second = engine(files)
    assert second.take_over(earlier) == 2
    assert second.failures() != []
    second.run([])
    assert ran == [("one", "no-cache"), ("two", "full"), ("two", "no-cache")]
    assert len(kept) == 3, "the record is written after each"
    assert second.failures() == []
    shares = {one.name: one.measured for one in second.figures() if one.unit is Unit.SHARE}
    assert shares == {"tiny, two: steps launched while the one before ran": 75.0}
    assert engine([toy("one")]).take_over(earlier) == 0, "its tokenizer has other words"
    assert earlier_results("{}") is None


def test_what_there_was_no_time_for_is_named() -> None:
    files = [Workload(name, "", "", (Program("p", (Text("a"),)),), serial=False) for name in ("one", "two")]
    engine = Engine(TINY, files, ON_HOST, torch.device("cpu"), Budget(0.0, lambda: 0.0), print)
    engine.run([ALL["fcfs"]])
    assert engine.left_out == ["tiny, full, no-cache, fcfs on all workloads: the time was up; write a larger --minutes"]
    assert list(engine.figures()) == engine.failures() == []
