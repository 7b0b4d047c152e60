"""Rows of files and frames: matched by name, carried along, and refused where they do not fit."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas
import polars
import pyarrow
import pytest
import umbel as ul
from pyarrow import parquet

ROWS = [{"id": 7, "review": "Good."}, {"id": 8, "review": "Bad."}]


@ul.function
def label(s: ul.State, review: str, tone: str = "plain") -> None:
    s += f"{tone}: {review}" + ul.gen("label")


def jsonl(folder: Path, text: str | None = None, name: str = "reviews.jsonl") -> Path:
    path = folder / name
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS) if text is None else text)
    return path


def gzipped(folder: Path) -> Path:
    path = folder / "reviews.jsonl.gz"
    path.write_bytes(gzip.compress("".join(json.dumps(row) + "\n\n" for row in ROWS).encode()))
    return path


def csv(folder: Path) -> Path:
    return jsonl(folder, '\ufeffid,review\r\n7,Good.\r\n\r\n8,"Bad."\r\n', "reviews.csv")


def parquet_file(folder: Path) -> Path:
    path = folder / "reviews.parquet"
    parquet.write_table(pyarrow.Table.from_pylist(ROWS), path)
    return path


SOURCES: list[Callable[[Path], Any]] = [
    jsonl,
    lambda folder: str(jsonl(folder)),
    gzipped,
    csv,
    parquet_file,
    lambda folder: pandas.DataFrame(ROWS, index=[5, 5]),
    lambda folder: polars.DataFrame(ROWS),
    lambda folder: pyarrow.Table.from_pylist(ROWS),
    lambda folder: pyarrow.Table.from_pylist(ROWS).to_reader(),
    lambda folder: pyarrow.RecordBatch.from_pylist(ROWS),
]


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("compiled", [False, True])
def test_columns_are_matched_by_name_and_others_are_carried(
    source: Callable[[Path], Any], compiled: bool, tmp_path: Path
) -> None:
    program = label.compile() if compiled else label
    results = program.run_batch(source(tmp_path), backend=ul.Echo())
    assert [state["label"] for state in results] == ["plain: Good.", "plain: Bad."]
    ids = [7, 8] if source is not csv else ["7", "8"]
    assert [row["id"] for row in results.rows()] == ids
    assert list(next(results.rows())) == ["row", "id", "review", "label"]


def test_a_bound_argument_stays_and_needs_no_column() -> None:
    (state,) = label.bind(review="Fine.").run_batch(pandas.DataFrame({"review": ["x"]}), backend=ul.Echo())
    assert state["label"] == "plain: Fine."


def test_a_bound_argument_is_given_once() -> None:
    bound = label.bind(tone="dry")
    with pytest.raises(ul.ParameterError, match=r"item 0 gives 'tone', which label has bound; leave it out"):
        bound.run_batch([{"review": "Fine.", "tone": "warm"}], backend=ul.Echo())


def test_a_column_with_the_name_of_the_state_is_carried() -> None:
    @ul.function
    def loose(s: ul.State, review: str, **more: str) -> None:
        s += review + ul.gen("label")
        s["more"] = more

    rows = [{"s": "a", "review": "b", "mood": "c"}]
    for program, expected in ((loose, {"mood": "c"}), (loose.bind(mood="d"), {"mood": "d"})):
        (state,) = program.run_batch(pandas.DataFrame(rows), backend=ul.Echo())
        assert state["more"] == expected


@pytest.mark.parametrize("frame", [pandas.DataFrame, polars.DataFrame])
def test_a_gap_in_a_column_of_numbers_is_none(frame: Callable[[Any], Any]) -> None:
    @ul.function
    def count(s: ul.State, n: int | None, x: float | None) -> None:
        s["n"], s["x"] = n, x

    results = count.run_batch(frame({"n": [1, None], "x": [float("nan"), 2.5]}), backend=ul.Echo())
    assert [(state["n"], state["x"]) for state in results] == [(1, None), (None, 2.5)]


def test_columns_are_those_of_all_rows_of_a_file(tmp_path: Path) -> None:
    source = jsonl(tmp_path, '{"other": 1}\n{"review": "a", "tone": "dry"}\n')
    missing, found = label.run_batch(source, backend=ul.Echo(), on_error="return")
    assert isinstance(missing, ul.Failure)
    assert "row 0" in str(missing.error)
    assert found["label"] == "dry: a"


@pytest.mark.parametrize("name", ["reviews.jsonl", "reviews.csv"])
def test_a_text_in_another_encoding_is_said_to_be_one(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("review\nmüde\n", encoding="latin-1")
    with pytest.raises(ul.ParameterError, match=rf"{name} is no text in UTF-8 \(.*\); save it as UTF-8"):
        label.run_batch(tmp_path / name, backend=ul.Echo())


def test_a_data_set_of_dicts_is_a_table() -> None:
    class Dataset:
        column_names = ["id", "review"]

        def __len__(self) -> int:
            return len(ROWS)

        def __iter__(self) -> Any:
            return iter(ROWS)

    assert [state["label"] for state in label.run_batch(Dataset(), backend=ul.Echo())] == [
        "plain: Good.",
        "plain: Bad.",
    ]


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        (lambda f: jsonl(f, '{"text": "a"}\n'), r"reviews.jsonl has no column 'review'.*it has the columns 'text'"),
        (lambda f: jsonl(f, '{"text": "a"}\n'), r"Write the name 'review' over the column that has it, or label.bind"),
        (lambda f: pandas.DataFrame({"reviews": ["a"]}), r"frame.rename\(columns=\{'reviews': 'review'\}\)"),
        (lambda f: jsonl(f, '{"review": "a"}\n{"revi'), r"reviews.jsonl, line 2: no JSON.*torn"),
        (lambda f: jsonl(f, '{"review": "a"}\n[1]\n'), r"reviews.jsonl, line 2: \[1\] is no JSON object"),
        (lambda f: jsonl(f, '[\n{"review": "a"}]'), r"reviews.jsonl, line 1: no JSON"),
        (lambda f: jsonl(f, "{}\n", "reviews.jsonl.gz"), "reviews.jsonl.gz, line 1: no JSON lines"),
        (lambda f: jsonl(f, "{}\n", "reviews.parquet"), "reviews.parquet is no Parquet file"),
        (lambda f: jsonl(f, "review\na,b\n", "reviews.csv"), "reviews.csv, line 2: 2 fields"),
        (lambda f: jsonl(f, 'review\n"a', "reviews.csv"), "reviews.csv, line 2: no CSV"),
        (lambda f: jsonl(f, "review,review\na,b\n", "reviews.csv"), "has the column 'review' twice"),
        (lambda f: parquet_file(f).rename(f / "reviews.csv"), "reviews.csv is no text in UTF-8"),
        (lambda f: parquet_file(f).rename(f / "reviews.jsonl"), "reviews.jsonl is no text in UTF-8"),
        (lambda f: f / "none.jsonl", "none.jsonl cannot be read: No such file"),
        (lambda f: f / "reviews.xls", "ends in .jsonl"),
        (lambda f: pandas.DataFrame([[1]]), "column 0 that is no text"),
        (lambda f: polars.LazyFrame({"review": ["a"]}), "frame.collect"),
    ],
)
def test_what_cannot_be_rows_is_refused_before_any_call(
    source: Callable[[Path], Any], problem: str, tmp_path: Path
) -> None:
    echo = ul.Echo()
    with pytest.raises(ul.ParameterError, match=problem):
        label.run_batch(source(tmp_path), backend=echo, output=tmp_path / "out.jsonl")
    assert echo.calls == 0
    assert not (tmp_path / "out.jsonl").exists()


def test_a_value_of_the_wrong_type_fails_its_row_alone() -> None:
    frame = pandas.DataFrame({"review": ["Good.", None, 3]})
    good, missing, number = label.run_batch(frame, backend=ul.Echo(), on_error="return")
    assert good["label"] == "plain: Good."
    assert "row 1 of the frame: column 'review' is None, and label takes review: str" in str(missing.error)
    assert "is 3" in str(number.error)
    assert number.arguments == {"review": 3}


def test_fields_of_csv_become_what_is_annotated(tmp_path: Path) -> None:
    @ul.function
    def add(s: ul.State, one: int, two: float | None, sure: bool) -> Any:
        return [one, two, sure]

    path = jsonl(tmp_path, "one,two,sure\n1,2.5,true\n2,,false\nx,1,true\n", "numbers.csv")
    first, second, third = add.run_batch(path, backend=ul.Echo(), on_error="return")
    assert (first.ret_value, second.ret_value) == ([1, 2.5, True], [2, None, False])
    assert "row 2 of" in str(third.error)


def test_a_row_of_json_lines_without_the_key_fails_alone(tmp_path: Path) -> None:
    path = jsonl(tmp_path, '{"review": "a"}\n{"text": "b"}\n{"review": "c"}\n')
    results = label.run_batch(path, backend=ul.Echo(), on_error="return")
    assert [isinstance(result, ul.Failure) for result in results] == [False, True, False]


def test_a_large_table_is_read_as_it_is_needed() -> None:
    taken = 0

    def batches() -> Any:
        nonlocal taken
        for _ in range(100):
            taken += 1
            yield pyarrow.RecordBatch.from_pylist(ROWS)

    reader = pyarrow.RecordBatchReader.from_batches(pyarrow.Table.from_pylist(ROWS).schema, batches())
    results = label.run_batch(reader, backend=ul.Echo(), generator_style=True, num_threads=4)
    next(results)
    assert taken < 20
    results.close()
