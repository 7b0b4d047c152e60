"""The sweep: what it tries, what it writes, and a dry run of it."""

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, fields, replace
from pathlib import Path

import pytest
import torch
from umbel.srt.kernels.triton.tuning import FOLDER, Tuning, measured_of, read_tuning, rows_of, tuning_for

from benchmarks.gpu import sweep as module
from benchmarks.gpu.hardware import Hardware, Limits
from benchmarks.gpu.stopwatch import Budget
from benchmarks.gpu.subjects.sizes import TINY
from benchmarks.gpu.sweep import Sweep, candidates, cases_of, equal, sweep

ROOT = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")
SMALLEST = replace(TINY, width=4)
VERSIONS = {"torch": "2.13", "triton": "3.9", "driver": "580.65"}
HARDWARE = Hardware(
    *("Toy 5000", Limits(2e12, 1e15, stated=True), 1e12, 1.1e12, 5e14, 8, 1 << 34, 1 << 24, {}, {}),
    *(VERSIONS, "abc", "2026-01-02T03:04"),
)


class ToyCard:
    """A device on which products of one row are faster with few outputs and many warps. It runs the work once."""

    device = CPU

    def seconds(self, work: Callable[[], object]) -> float:
        work()
        row = tuning_for(CPU).linear_row
        return 1e-6 * (10 + row.outputs + 16 / row.warps)

    seconds_of_calls = seconds


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    found = tmp_path / "tuned"
    found.mkdir()
    for path in FOLDER.glob("*.json"):
        (found / path.name).write_text(path.read_text())
    return found


def sweep_of(folder: Path, said: list[str], *, dry: bool = False) -> Sweep:
    return Sweep(ToyCard(), SMALLEST, HARDWARE, folder, "ada", dry, said.append)


@pytest.mark.nightly
def test_the_winner_is_written_with_where_it_was_measured(folder: Path) -> None:
    said: list[str] = []
    found = sweep_of(folder, said).kernel("linear_row", {"outputs": [2, 4, 8], "warps": [2, 4, 8]})
    assert found == {"outputs": 2, "warps": 8}
    assert asdict(read_tuning("ada", folder).linear_row) == found
    assert measured_of("ada", folder)["linear_row"] == {
        "card": "Toy 5000",
        "driver": "580.65",
        "torch": "2.13",
        "triton": "3.9",
        "date": "2026-01-02T03:04",
        "microseconds": 14.0,
        "gain": round(18 / 14, 3),
    }
    assert said == [
        "linear_row: outputs=2: 0.889 of the time",
        "linear_row: outputs=8: 1.222 of the time",
        "linear_row: warps=2: 1.111 of the time",
        "linear_row: warps=8: 0.778 of the time",
    ]
    assert tuning_for(CPU) == read_tuning(), "what is launched here is as before"


def test_a_small_gain_is_not_written(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "GAIN", 1.5)
    before = (folder / "ada.json").read_text()
    assert sweep_of(folder, []).kernel("linear_row", {"outputs": [2]}) is None
    assert (folder / "ada.json").read_text() == before


def test_other_results_and_what_does_not_fit_are_left_out(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []

    def wrong() -> torch.Tensor:
        return torch.tensor([1.0 if tuning_for(CPU).linear_row.outputs == 4 else 1.1])

    monkeypatch.setattr(module, "cases_of", lambda *arguments: iter([lambda: wrong]))
    assert sweep_of(folder, said).kernel("linear_row", {"outputs": [2]}) is None
    replaced = iter(range(9))
    monkeypatch.setattr(module, "replaced_tiles", lambda: next(replaced))
    monkeypatch.setattr(module, "cases_of", lambda *arguments: iter([lambda: lambda: torch.ones(1)]))
    assert sweep_of(folder, said).kernel("linear_row", {"outputs": [2]}) is None

    def refused() -> torch.Tensor:
        if tuning_for(CPU).linear_row.outputs == 2:
            raise RuntimeError("no such layout\nand more")
        return torch.ones(1)

    monkeypatch.setattr(module, "cases_of", lambda *arguments: iter([lambda: refused]))
    assert sweep_of(folder, said).kernel("linear_row", {"outputs": [2]}) is None
    assert said == [
        "linear_row: outputs=2: other results",
        "linear_row: outputs=2: more than the device has",
        "linear_row: outputs=2: RuntimeError: no such layout",
    ]


def test_whole_numbers_are_the_same_and_others_as_good_as() -> None:
    assert equal(torch.tensor([1, 2]), torch.tensor([1, 2]))
    assert not equal(torch.tensor([1, 2]), torch.tensor([1, 3]))
    assert equal(torch.tensor([1.0, 2.0]), torch.tensor([1.0005, 2.0]))
    assert not equal(torch.tensor([1.0, 2.0]), torch.tensor([1.1, 2.0]))
    assert not equal(torch.tensor([torch.nan, 2.0]), torch.tensor([1.0, 2.0]))


def test_candidates_are_numbers_of_the_rows_with_the_value_in_use_among_them() -> None:
    for kernel, values in candidates().items():
        row = asdict(getattr(read_tuning(), kernel))
        assert values.keys() <= row.keys(), kernel
        for number, tried in values.items():
            assert row[number] in tried, (kernel, number)
            assert len(set(tried)) == len(tried) > 1, (kernel, number)


def test_every_candidate_has_cases_and_they_give_results() -> None:
    for kernel in candidates():
        cases = list(cases_of(kernel, TINY, CPU))
        assert cases, kernel
    for case in cases_of("linear_rows", TINY, CPU):
        assert case()().shape[1] == 2 * TINY.width


def test_kernels_without_candidates_are_named_and_time_that_is_short_is_said(folder: Path) -> None:
    said: list[str] = []

    def run(*kernels: str, seconds: float = 60.0) -> int:
        return sweep(
            kernels,
            stopwatch=ToyCard(),
            sizes=SMALLEST,
            hardware=HARDWARE,
            budget=Budget(seconds, lambda: 0.0),
            output=folder.parent,
            dry=True,
            say=said.append,
        )

    with pytest.raises(SystemExit, match="--sweep speed: no such kernel; there are attention_stream"):
        run("speed")
    assert run("linear_row", "norm", seconds=0.0) == 1
    assert said[-1] == "the time was up; go on with --sweep linear_row norm"


def test_rows_without_candidates_are_those_that_few_models_use() -> None:
    left = {field.name for field in fields(Tuning)} - candidates().keys()
    assert left == {
        *("attention_few_wide", "attention_many_widened", "attention_huge", "attention_store", "low_rank"),
        *("moe_choice", "moe_codes_middle", "moe_arrange", "moe_combine", "sampling_summary"),
    }


@pytest.mark.nightly
def test_a_dry_run_tries_a_few_values_and_writes_into_a_folder_of_its_own(tmp_path: Path) -> None:
    """What wins is chance: these times are of an interpreter."""
    command = [sys.executable, "-m", "benchmarks.gpu", "--dry-run", "--sweep", "linear_row", "sampling_scan"]
    before = {path.name: path.read_text() for path in FOLDER.glob("*.json")}
    finished = subprocess.run(
        [*command, "--output", str(tmp_path)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert finished.returncode == 0, finished.stderr
    said = finished.stderr
    assert "linear_row: outputs=2: " in said
    assert "sampling_scan: tiles=8: " in said
    assert "Error" not in said
    assert f"tables of default: {tmp_path / 'tuned'}" in said
    assert {path.name: path.read_text() for path in FOLDER.glob("*.json")} == before
    assert set(json.loads((tmp_path / "tuned" / "default.json").read_text())["numbers"]) == set(rows_of("default"))
