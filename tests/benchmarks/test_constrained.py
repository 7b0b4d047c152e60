"""The comparison of engines that enforce constraints, on toys."""

import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from umbel.fsm.tokens.masks import Masks
from umbel.fsm.tokens.vocabulary import Vocabulary

from benchmarks.constrained.compare import Outcome, Row, compare, measure, measure_apart, table
from benchmarks.constrained.data import Item, read_items
from benchmarks.constrained.engines import Cursor, Subject, subjects

TABLE = [bytes([byte]) for byte in range(256)]
ITEMS = [
    Item("digits", "regex", "[0-9]{2}(-[0-9])?", ("12", "12-3"), ("1", "12-", "x")),
    Item("flag", "json_schema", '{"type": "array", "items": {"type": "boolean"}}', ([True, False],), ([1], "true")),
    Item("word boundary", "regex", r"a\b.*", ("a b",), ("ab",)),
]


def encode(text: str) -> list[int]:
    return list(text.encode())


@pytest.fixture(scope="module")
def engines() -> list[Subject]:
    found, missing = subjects(["umbel", "llguidance"], Masks(Vocabulary([*TABLE, b""], [256])), encode)
    assert missing == []
    return found


def test_an_engine_is_measured_on_a_constraint(engines: list[Subject]) -> None:
    for subject in engines:
        outcome = measure(subject, ITEMS[0], encode)
        assert outcome.refused == ""
        assert outcome.accepted == (2, 2)
        assert outcome.rejected == (3, 3)
        assert len(outcome.masks) == len("1212-3")
        assert measure(subject, ITEMS[2], encode).refused


@pytest.mark.processes
def test_engines_stand_beside_each_other(engines: list[Subject]) -> None:
    rows = compare(engines, ITEMS[:2], encode, seconds=60)
    assert [row.name for row in rows] == ["umbel", "umbel, warm", "llguidance", "llguidance, warm"]
    for row in rows:
        cells = row.cells(60)
        assert cells[1:5] == ["2", "2", "0", "0"]
        assert cells[-2:] == ["3/3", "5/5"]


class Stuck:
    name = "stuck"
    separators = (",", ":")

    def compile(self, item: Item) -> Callable[[], Cursor]:
        if item.kind == "regex":
            raise SystemExit(1)
        while True:
            time.sleep(1)


@pytest.mark.processes
def test_an_engine_that_hangs_is_ended_and_one_that_dies_has_refused() -> None:
    assert measure_apart(Stuck(), ITEMS[1], encode, 0.05) is None
    died = measure_apart(Stuck(), ITEMS[0], encode, 60)
    assert died is not None
    assert died.refused


def test_the_table_counts_the_late_at_their_limit() -> None:
    refused = Outcome(refused="why")
    fine = Outcome(compile=0.5, masks=(1e-5,), jumps=(2e-5,), forced=1, accepted=(1, 2), rejected=(3, 3))
    lines = table([Row("one", [refused, fine], late=1)], 2.0).splitlines()
    assert lines[2] == (
        "| one | 3 | 1 | 1 | 1 | 1,250.0 / 1,925.0 / 2,000.0 "
        "| 10 / 10 / 10 / 10 | 20 / 20 / 20 / 20 | 30 / 30 | 100% | 1/2 | 3/3 |"
    )


def test_the_files_are_read(tmp_path: Path) -> None:
    schema = {"id": "one", "schema": {"const": 1}, "valid": [1], "invalid": [{"data": 2, "format_only": False}]}
    group = {"file": "const.json", "description": "a const", "schema": {"const": 1},
             "tests": [{"data": 1, "valid": True}, {"data": 2, "valid": False}]}  # fmt: skip
    regex = {"id": "two", "pattern": "a+", "match": ["a"], "nomatch": ["b"]}
    for name, row in (("schemas", schema), ("json_schema_test_suite", group), ("regexes", regex)):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(row) + "\n")
    assert read_items(tmp_path, "schemas") == [Item("one", "json_schema", '{"const": 1}', (1,), (2,))]
    assert read_items(tmp_path, "suite") == [Item("const.json a const", "json_schema", '{"const": 1}', (1,), (2,))]
    assert read_items(tmp_path, "regexes") == [Item("two", "regex", "a+", ("a",), ("b",))]


def test_an_engine_that_nobody_knows_is_refused() -> None:
    with pytest.raises(ValueError, match="write some of umbel"):
        subjects(["outlines"], Masks(Vocabulary([b"a", b""], [1])), encode)
