"""The front page of a record: goals met, not met and not measured."""

import math
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.gpu.engine.shapes import LLAMA_3_8B
from benchmarks.gpu.engine.steps import FULL as STEPS
from benchmarks.gpu.engine.steps import step_figures
from benchmarks.gpu.figures import Figure, Record, Unit
from benchmarks.gpu.goals import GOALS, H100, answers, front_page
from benchmarks.gpu.hardware import Hardware, Limits
from benchmarks.gpu.stopwatch import HostStopwatch
from benchmarks.gpu.subjects.sampling import WISHES
from benchmarks.gpu.subjects.sizes import FULL

HARDWARE = Hardware("NVIDIA H100", H100, 1e12, 1e12, 5e14, 132, 1 << 36, 1 << 25, {}, {}, {}, "abc", "2026-01-02T03:04")
H200 = replace(HARDWARE, name="NVIDIA H200", limits=Limits(4.8e12, 989e12, stated=True))


def record(*figures: Figure, hardware: Hardware = HARDWARE, dry: bool = False) -> Record:
    return Record(hardware, dry, figures=list(figures))


def step(sequences: int, share: float) -> Figure:
    return Figure("steps", f"decode, Llama 3 8B, {sequences} sequences of 512 keys", Unit.BANDWIDTH, share)


def answered(found: Record) -> dict[str, tuple[str, str, str]]:
    return {one.name: (one.asked, one.measured, one.word) for one in answers(found)}


def test_every_goal_has_a_subject_that_measures_it() -> None:
    names = [("steps", one.name) for one in step_figures(STEPS, HostStopwatch(), H100)]
    names += [("sampling", f"{wish}, {FULL.draws} rows of {FULL.vocab}") for wish in WISHES]
    for fork in FULL.forks:
        heads = f"{fork.geometry.heads}/{fork.geometry.kv_heads} heads of {fork.geometry.head_dim}"
        names.append(("attention", f"{fork.branches} branches of {fork.own} keys behind {fork.shared}, {heads}"))
    for extend in FULL.extends:
        heads = f"{extend.geometry.heads}/{extend.geometry.kv_heads} heads of {extend.geometry.head_dim}"
        behind = f" behind {extend.prefix} keys" if extend.prefix else ""
        names.append(("attention", f"prompt of {extend.rows}{behind}, {heads}"))
    figures = [Figure(group, name, Unit.RATE, 1.0) for group, name in names]
    unmeasured = [goal.name for goal in GOALS if goal.answer(record(*figures)).met is None]
    assert unmeasured == [goal.name for goal in GOALS if "engine" in goal.groups], "engines name their own"


def test_tokens_per_second_follow_from_the_share_of_the_bandwidth_and_a_faster_memory_is_asked_for_more() -> None:
    name = "whole steps, Llama 3 8B, 64 sequences of 512 keys"
    size = 2 * LLAMA_3_8B.read_numbers(64 * 512)
    share = 100 * 9_000 / (64 * H100.bandwidth / size)
    assert share == pytest.approx(80.9, abs=0.2)
    assert answered(record(step(64, share + 0.1)))[name][2] == "met"
    assert answered(record(step(64, share - 0.1)))[name] == ("at least 9,000 tokens/s", "8,989", "NOT MET")
    assert answered(record(step(64, share + 0.1), hardware=H200))[name][::2] == ("at least 12,896 tokens/s", "met")
    assert answered(record(step(64, math.nan)))[name][1:] == ("", "not measured")
    assert answered(record(step(64, 99.0), dry=True))[name][1:] == ("", "not measured")


def test_the_least_decides_and_of_times_the_most() -> None:
    busy = [Figure("runtime", f"x, {name}: device busy", Unit.SHARE, share) for name, share in [("a", 99), ("b", 91)]]
    found = answered(record(*busy))
    assert found["device busy, the least of the workloads"] == ("at least 90 %", "91 (2 figures)", "met")
    assert found["device busy, mean of the workloads"] == ("at least 95 %", "95 (2 figures)", "met")
    draw = Figure("sampling", "a draw, 64 rows of 128256", Unit.BANDWIDTH, 50.0)
    assert answered(record(draw))["a plain draw, 64 rows of 128k"] == ("at most 20 µs", "19.6", "met")
    late = replace(draw, measured=45.0)
    assert answered(record(late))["a plain draw, 64 rows of 128k"][2] == "NOT MET"


def test_tests_are_met_when_all_of_them_ran_and_passed() -> None:
    passed = Figure("tests", "test_a.py", Unit.PASSED, 4, limit=4, must=4)
    name = "all tests of GPUs"
    done = record(passed)
    done.leave_out("tests", "3 tests that skip themselves here")
    assert answered(done)[name] == ("all", "4 of 4 that ran", "met")
    done.leave_out("tests", "9 tests: their time was up; call again")
    assert answered(done)[name] == ("all", "4 of 4 that ran; others did not run", "not measured")
    assert answered(record(passed, replace(passed, name="b", measured=3)))[name][1:] == ("7 of 8 that ran", "NOT MET")


def test_the_page_is_written_with_each_figure(tmp_path: Path) -> None:
    kept = Record(HARDWARE, False, folder=tmp_path, front=front_page, more={"gaps.svg": "<svg/>", "runs.json": "{}"})
    kept.add(Figure("equality", "norm", Unit.ERROR, 1.0, must=1e-2))
    page = (tmp_path / "README.md").read_text()
    assert f"Of {len(GOALS) + 3} goals 0 are met, 1 are not, {len(GOALS) + 2} are not measured." in page
    assert "| kernels give what their references give | all | 0 of 1 | NOT MET |" in page
    assert "* [gaps.svg](gaps.svg)" in page
    assert "runs.json" not in page
    assert "## Wrong\n\n* equality: norm" in page
