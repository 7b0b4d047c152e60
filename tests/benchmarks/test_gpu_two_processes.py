"""The decisive workloads in two processes: the folder of a shape, the order of runs, and one run with its trace."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from umbel.srt.simulator.workload import Gen, Program, Text, Workload
from umbel.srt.weights import open_model

from benchmarks.configuration import FULL
from benchmarks.gpu.engine.model_folder import write_model
from benchmarks.gpu.engine.shapes import TINY
from benchmarks.gpu.engine.two_processes import BY_WORTH, TwoProcesses
from benchmarks.gpu.engine.words import WordTokenizer
from benchmarks.gpu.engine.workloads import BUSY, DECISIVE, ON_HOST, text_record
from benchmarks.gpu.figures import Unit
from benchmarks.gpu.stopwatch import Budget

CPU = torch.device("cpu")
SAID = "The quick brown fox, the quick brown dog: 1234 times. "


def toy(name: str) -> Workload:
    programs = tuple(Program(f"p{number}", (Text(SAID), Gen("a", 3))) for number in range(2))
    return Workload(name, "", "", programs, serial=False)


@pytest.mark.parametrize("text", [SAID, "ünlike 12345 foxes\n\n☃ the quick"])
def test_the_folder_of_a_shape_has_its_tensors_without_their_numbers_and_cuts_texts_alike(
    text: str, tmp_path: Path
) -> None:
    words = WordTokenizer([SAID], TINY.vocab)
    source = open_model(write_model(TINY, words, tmp_path / "model"))
    assert set(source.names) == set(TINY.tensor_shapes)
    weights = tmp_path / "model" / "model.safetensors"
    assert weights.stat().st_blocks * 512 < 1 << 16, "zeros take no room"
    tokenizer = source.tokenizer()
    assert tokenizer.encode(text, first=False) == words.encode(text, first=False)
    assert tokenizer.eos_ids == words.eos_ids
    assert b"".join(map(tokenizer.token_bytes, tokenizer.encode(text, first=False))) == text.encode()


def test_configurations_run_by_their_worth_each_on_all_workloads_and_the_first_two_again() -> None:
    files = [toy("one"), toy("two")]
    engine = TwoProcesses(TINY, files, replace(ON_HOST, turns=2), CPU, Budget(60.0, lambda: 0.0), print)
    found = [(one.name, file.name, turn) for one, file, turn in engine._jobs(BY_WORTH[:3])]
    assert found == [
        *((one, file, 0) for one in ("full", "no-cache", "no-overlap") for file in ("one", "two")),
        *((one, file, 1) for one in ("no-cache", "full") for file in ("one", "two")),
    ]
    assert [one.name for one in BY_WORTH] == [
        *("full", "no-cache", "no-overlap", "no-cuda-graphs", "no-guesses", "no-tree-attention", "torch-kernels")
    ]
    assert DECISIVE == ("json_schema_extract", "json_decode_regex", "hellaswag_20shot", "tree_of_thought_gsm8k")


@pytest.mark.nightly
def test_a_workload_runs_in_two_processes_and_its_trace_becomes_a_table_and_a_picture() -> None:
    said: list[str] = []
    engine = TwoProcesses(TINY, [toy("toy")], ON_HOST, CPU, Budget(600.0), said.append)
    engine.run([FULL])
    assert engine.failures() == engine.left_out == []
    (run,) = engine.results.measurements
    assert 0 < run.counters[BUSY] <= 1
    assert run.counters["completion_tokens"] == 2 * 3
    figures = {one.name: one for one in engine.figures()}
    assert figures["tiny, toy: device busy"].unit is Unit.SHARE
    assert {one.group for one in figures.values()} == {"runtime"}
    texts = text_record(engine)
    assert "| toy |" in texts["runtime-tiny-gaps-toy.md"]
    assert texts["runtime-tiny-gaps-toy.svg"].startswith("<svg")
    assert "two, gateway and engine" in json.loads(texts["runtime-tiny.json"])["settings"]["process"]
    assert said[0].startswith("tiny, toy, full: ")
