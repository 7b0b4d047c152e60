"""Tasks made of workloads, and the line of a task; the models are compared by the command itself."""

import json
from itertools import groupby
from pathlib import Path

from benchmarks.lm_eval import Outcome, items, row, write_tasks


def test_questions_with_the_same_examples_are_neighbours() -> None:
    found = list(items("mmlu_5shot"))
    starts = [item["context"][:90] for item in found]
    assert len(list(groupby(starts))) == len(set(starts)) == 8
    assert all(item["choices"] == [" A", " B", " C", " D"] for item in found)


def test_a_question_without_examples_is_the_end_of_that_with_them() -> None:
    for long, short in zip(items("hellaswag_20shot"), items("hellaswag_20shot", examples=False), strict=True):
        assert long["context"].endswith(short["context"])
        assert len(long["context"]) > len(short["context"]) + 2_000
        assert (long["choices"], long["label"]) == (short["choices"], short["label"])


def test_a_task_has_so_many_items(tmp_path: Path) -> None:
    write_tasks(tmp_path, {"mmlu_5shot": 3, "hellaswag_0shot": 1})
    lines = (tmp_path / "mmlu_5shot.json").read_text().splitlines()
    assert [sorted(json.loads(line)) for line in lines] == [["choices", "context", "label"]] * 3
    assert str(tmp_path / "hellaswag_0shot.json") in (tmp_path / "hellaswag_0shot.yaml").read_text()


def test_a_line_has_the_largest_difference_and_ratios_of_neighbours() -> None:
    rounds = [
        (Outcome([[-1.0, -2.0]], (1.0, 0.5), 1.0, 2.0), Outcome([[-1.0, -2.5]], (1.0, 0.5), 6.0, 20.0)),
        (Outcome([[-1.0, -2.0]], (1.0, 0.5), 2.0, 2.0), Outcome([[-1.25, -2.0]], (1.0, 0.5), 8.0, 12.0)),
    ]
    line, furthest = row("some", rounds, 0.75)
    assert furthest == 0.5
    assert line == (
        "| some | 1 × 2 | 5.0e-01 | 1.000 / 0.500 = 1.000 / 0.500 | 75% | 1.5 / 7.0 | 5.0 (4.0 to 6.0) | "
        "2.0 / 16.0 | 8.0 (6.0 to 10.0) |"
    )
    other = Outcome([[-1.0, -2.0]], (0.0, 0.5), 8.0, 12.0)
    assert "≠" in row("some", [rounds[0], (rounds[1][0], other)], 0.75)[0]
