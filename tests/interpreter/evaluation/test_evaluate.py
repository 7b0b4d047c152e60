"""`umbel.evaluate`: rows in, figures out; failures of programs and of metrics lose nothing."""

import json
import math
from collections.abc import Iterator
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import umbel as ul
from umbel.interpreter.evaluation.metrics import agrees

CHOICES = [" A", " B", " C"]


@ul.function
def quiz(s, question: str):
    if question == "broken":
        raise ValueError("no such question")
    s += f"Question: {question}\nAnswer:" + ul.select("answer", choices=CHOICES)


def rows(count: int = 6) -> list[dict[str, str]]:
    return [{"question": f"q{number}", "label": "ABC"[number % 3]} for number in range(count)]


def always(choice: str = " A") -> ul.Echo:
    return ul.Echo(scores={name: -0.1 if name == choice else -3.0 for name in CHOICES})


MATCH = ul.exact_match("answer", "label")


def test_the_report_counts_right_rows() -> None:
    report = ul.evaluate(quiz, rows(), MATCH, backend=always())
    figure = report.figure
    assert (figure.name, figure.mean, figure.count, figure.is_share) == ("exact_match", pytest.approx(2 / 6), 6, True)
    assert report.accuracy == report.mean == figure.mean
    assert (round(figure.low, 3), round(figure.high, 3), figure.method) == (0.097, 0.7, "Wilson")
    assert report.cost.usage.calls == 6
    assert [row.variables["answer"] for row in report.results] == [" A"] * 6


def test_a_failed_program_counts_as_wrong_and_is_told_by_kind() -> None:
    data = [*rows(3), {"question": "broken", "label": "A"}]
    report = ul.evaluate(quiz, data, MATCH, backend=always())
    assert report.mean == pytest.approx(1 / 4)
    assert report.errors == {"ValueError": 1}
    assert [row.row for row in report.failed] == [3]
    assert "1 program, counted as wrong: ValueError 1" in str(report)
    assert "row 3: ValueError: no such question" in str(report)


def test_a_failed_program_has_the_error_score_where_the_metric_gives_numbers() -> None:
    data = [*rows(3), {"question": "broken", "label": "A"}]
    metric = lambda state, row: 0.5  # noqa: E731
    assert ul.evaluate(quiz, data, metric, backend=always()).mean == pytest.approx(1.5 / 4)
    assert ul.evaluate(quiz, data, metric, backend=always(), error_score=-1).mean == pytest.approx(0.5 / 4)


def test_a_metric_that_raises_leaves_its_row_out_and_names_what_the_row_has() -> None:
    def metric(state: ul.State, row: dict[str, Any]) -> bool:
        return row["labl" if row["question"] == "q2" else "label"] == "A"

    report = ul.evaluate(quiz, rows(), metric, backend=always())
    assert report.figure.count == 5
    assert [(row.row, row.metric_error) for row in report.unmeasured] == [(2, "KeyError")]
    assert "'labl'; the row has the columns 'question', 'label'" in report.unmeasured[0].message
    assert report.errors == {}
    assert "not measured" in str(report)


@pytest.mark.parametrize("given", [None, "yes", float("nan"), {}, [1]])
def test_a_metric_that_gives_no_figure_is_told(given: object) -> None:
    report = ul.evaluate(quiz, rows(2), lambda state, row: given, backend=always())
    assert [row.metric_error for row in report.results] == ["ParameterError"] * 2
    assert "return" in report.results[0].message
    assert "not measured: no row has it" in str(report)


def test_a_metric_may_give_several_figures() -> None:
    def metric(state: ul.State, row: dict[str, Any]) -> dict[str, Any]:
        return {"right": state["answer"].strip() == row["label"], "length": Decimal(len(row["question"]))}

    report = ul.evaluate(quiz, rows(), metric, backend=always())
    assert list(report.figures) == ["right", "length"]
    assert report.figures["length"].mean == 2.0
    assert report.mean == pytest.approx(2 / 6)
    with pytest.raises(ul.ParameterError, match="name='f1' is not known; write one of 'right', 'length'"):
        report.values("f1")


def test_worst_rows_are_the_wrong_ones_with_the_most_certain_first() -> None:
    scores = {" A": -0.1, " B": -3.0, " C": -3.0}
    data = [{"question": "easy", "label": "A"}, *rows(3)[1:]]
    report = ul.evaluate(quiz, data, MATCH, backend=ul.Echo(scores=scores))
    assert [row.row for row in report.worst()] == [1, 2]
    assert report.worst(1)[0].row == 1
    assert len(report.slowest(2)) == 2
    assert report.results[0].probabilities["answer"][" A"] > 0.8


def test_worst_rows_are_ordered_by_the_variable_that_the_metric_compares() -> None:
    @ul.function
    def twice(s, question):
        s += question + ul.select("topic", choices=[" x", " y"]) + ul.select("answer", choices=CHOICES)

    class Scored(ul.Echo):
        async def score(self, request: Any) -> Any:
            is_certain = ("q1" in str(request.prompt)) == (" x" in request.choices)  # in q1 of the topic alone
            self._scores = dict.fromkeys(request.choices, -5.0 if is_certain else -1.0)
            self._scores[request.choices[0]] = -0.1
            return await super().score(request)

    data = [{"question": f"q{number}", "label": "B"} for number in (1, 2)] + [{"question": "q3", "label": "A"}]
    report = ul.evaluate(twice, data, MATCH, backend=Scored(), num_threads=1)
    assert [row.row for row in report.worst()] == [1, 0]


# -------------------------------------------------------------------------------- data


def test_all_kinds_of_data_give_the_same_figures(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame(rows())
    frame.to_csv(tmp_path / "rows.csv", index=False)
    frame.to_parquet(tmp_path / "rows.parquet")
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows()))
    kinds: list[Any] = [rows(), iter(rows()), tuple(rows()), frame]
    kinds += [tmp_path / f"rows.{suffix}" for suffix in ("csv", "parquet", "jsonl")]
    reports = [ul.evaluate(quiz, data, MATCH, backend=always()) for data in kinds]
    assert [report.mean for report in reports] == [pytest.approx(2 / 6)] * len(kinds)
    assert all(report.results[3].inputs == rows()[3] for report in reports)
    assert all(not ul.compare(reports[0], report).worse for report in reports)


class Unread:
    def __iter__(self) -> Any:
        raise NotImplementedError


class NoLength(list[Any]):
    def __len__(self) -> int:
        return -1


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (
            [{"q": "x", "label": "A"}],
            r"no column 'question', which quiz\(question: str\) takes; it has the columns 'q'",
        ),
        (
            [{"question": "x", "lab": "A"}],
            r"no column 'label'; it has the columns 'question', 'lab'. Write exact_match",
        ),
        ([("x", "A")], r"row 0 is \('x', 'A'\); write a dict"),
        ({"question": "x"}, "takes an iterable of dicts"),
        (7, "takes an iterable of dicts"),
        ("rows.txt", r"evaluate\(data\)='rows.txt': write a path that ends in"),
        ([], "the data has no rows"),
        (iter([]), "the data has no rows"),
        (Unread(), r"evaluate\(data\) must be a list of dicts; reading it raised NotImplementedError"),
        (NoLength(), r"evaluate\(data\): the length of NoLength cannot be known \(ValueError\)"),
    ],
)
def test_wrong_data_is_refused_with_what_to_write(data: Any, words: str) -> None:
    with pytest.raises(ul.ParameterError, match=words):
        ul.evaluate(quiz, data, MATCH, backend=always())


def test_nothing_runs_where_a_column_is_missing() -> None:
    backend = always()
    with pytest.raises(ul.ParameterError):
        ul.evaluate(quiz, rows(), ul.exact_match("answer", "lable"), backend=backend)
    assert backend.calls == 0


def test_data_that_raises_loses_nothing_that_was_measured() -> None:
    def broken() -> Iterator[dict[str, str]]:
        yield from rows(4)
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone") as raised:
        ul.evaluate(quiz, broken(), MATCH, backend=always())
    assert [row.row for row in raised.value.report.results] == [0, 1, 2, 3]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"metric": "exact"}, "umbel.exact_match"),
        ({"metric": lambda state: True}, "takes other arguments"),
        ({"metric": quiz}, "is a program; write a function that runs it"),
        ({"metric": ul.exact_match}, r"write the call: umbel.exact_match\('answer', 'label'\)"),
        ({"metric": ul.contains_match}, r"write the call: umbel.contains_match\('answer', 'label'\)"),
        ({"program": rows}, "write a function with @umbel.function"),
        ({"seed": -1}, "seed"),
        ({"max_errors": -1}, "max_errors"),
        ({"error_score": "0"}, "error_score"),
        ({"if_exists": "append"}, "if_exists"),
        ({"output": "rows.parquet"}, "to_parquet"),
        ({"on_error": "raise"}, "takes no on_error"),
    ],
)
def test_wrong_arguments_are_refused(given: dict[str, Any], words: str) -> None:
    arguments: dict[str, Any] = {"program": quiz, "data": rows(), "metric": MATCH, **given}
    with pytest.raises(ul.ParameterError, match=words):
        ul.evaluate(**arguments, backend=always())


def test_a_coroutine_function_is_no_metric() -> None:
    async def metric(state: ul.State, row: dict[str, Any]) -> bool:
        return True

    with pytest.raises(ul.ParameterError, match="write a plain function"):
        ul.evaluate(quiz, rows(), metric, backend=always())


# -------------------------------------------------------------------------------- stopping, options, other programs


def test_max_errors_stops_the_run_and_keeps_the_report() -> None:
    data = [*rows(2), *[{"question": "broken", "label": "A"}] * 5]
    with pytest.raises(ValueError, match="no such question") as raised:
        ul.evaluate(quiz, data, MATCH, backend=always(), max_errors=1, num_threads=1)
    report = raised.value.report  # type: ignore[attr-defined]
    assert [bool(row.error) for row in report.results] == [False, False, True, True]
    assert "max_errors=1" in raised.value.__notes__[-1]
    assert ul.evaluate(quiz, data, MATCH, backend=always(), max_errors=5).errors == {"ValueError": 5}


def test_an_evaluation_that_stopped_has_left_its_journal(tmp_path: Path) -> None:
    data = [*rows(2), {"question": "broken", "label": "A"}]
    options: dict[str, Any] = {"journal": tmp_path / "run.jsonl"}
    with pytest.raises(ValueError, match="no such question") as raised:
        ul.evaluate(quiz, data, MATCH, backend=always(), max_errors=0, **options)
    assert raised.value.__traceback__ is not None  # it holds the frames of the evaluation
    again = ul.evaluate(quiz, data, MATCH, backend=always(), **options)
    assert (again.cost.read.calls, len(again.failed)) == (2, 1)


def test_errors_of_the_metric_count_for_max_errors() -> None:
    def metric(state: ul.State, row: dict[str, Any]) -> bool:
        raise RuntimeError("no judge")

    with pytest.raises(RuntimeError, match="no judge"):
        ul.evaluate(quiz, rows(), metric, backend=always(), max_errors=2)


def test_options_of_a_run_reach_the_programs() -> None:
    with pytest.raises(ul.BudgetError) as raised:
        ul.evaluate(quiz, rows(), MATCH, backend=always(), budget=ul.Budget(calls=2), max_errors=0, num_threads=1)
    assert raised.value.report.cost.usage.calls == 2  # type: ignore[attr-defined]
    numbers: list[ul.BatchProgress] = []
    ul.evaluate(quiz, rows(), MATCH, backend=always(), progress=numbers.append)
    assert (numbers[-1].done, numbers[-1].total) == (6, 6)


def test_compiled_and_async_programs_are_evaluated_as_others() -> None:
    @ul.function
    async def asynchronous(s, question: str):
        s += f"Question: {question}\nAnswer:" + ul.select("answer", choices=CHOICES)
        await s["answer"]

    @ul.function
    def plain(s, question):
        s += f"Question: {question}\nAnswer:" + ul.select("answer", choices=CHOICES)

    for program in (asynchronous, plain.compile(), plain):
        report = ul.evaluate(program, rows(), MATCH, backend=always())
        assert report.mean == pytest.approx(2 / 6)
        assert report.results[0].probabilities["answer"].keys() == set(CHOICES)


def test_a_text_that_is_not_the_object_is_an_error_of_the_program() -> None:
    @ul.function
    def count(s, name):
        s += name + ul.gen("number", dtype=list[int], max_tokens=8, validate=lambda found: sum(found) < 5, max_tries=1,
                           allow_best_effort=True)  # fmt: skip

    backend = ul.Echo({"Ada": "[1,2]", "Bob": "[4,4]"})
    report = ul.evaluate(count, [{"name": "Ada"}, {"name": "Bob"}], lambda state, row: True, backend=backend)
    assert report.errors == {"ResultError": 1}
    assert report.mean == 0.5


# -------------------------------------------------------------------------------- metrics


@pytest.mark.parametrize(
    ("value", "label", "is_right"),
    [
        (" yes", "yes", True),
        ("Yes", "yes", False),
        (7, "7", True),
        ("7.0", 7, True),
        ("seven", 7, False),
        (True, "true", True),
        (False, "0", False),
        (None, "None", False),
        ([1, 2], [1, 2], True),
        ({"a": 1}, {"a": 1}, True),
        (" 7", Decimal("7.00"), True),
        (7, Decimal("7.00"), True),
        (0.1, Decimal("0.1"), True),
        ("0.1", 0.1, True),
        ("9007199254740993", 9007199254740992, False),
        ("9007199254740993", 9007199254740993, True),
        ("7" * 5000, int("7" * 4000), False),
        ("7_0", 70, False),
        ("1e400", math.inf, False),
        ("inf", 7, False),
        ("inf", math.inf, True),
        ("nan", 7, False),
        ("nan", math.nan, True),
        ("snan", 7, False),
        ("1e99999999999999999999", 7, False),
        (True, 1, True),
        ("1", True, False),
        ("1/3", Fraction(1, 3), True),
        ("7", ["6", 7], True),
        ("7", set(), False),
    ],
)
def test_values_are_compared_as_the_documentation_says(value: object, label: object, is_right: bool) -> None:
    assert agrees(value, label) is is_right


@pytest.mark.parametrize("kind", ["float16", "float32", "float64"])
def test_numbers_of_numpy_are_compared_by_their_digits(kind: str) -> None:
    numpy = pytest.importorskip("numpy")
    of = numpy.dtype(kind).type
    assert agrees(" 7", of(7))
    assert agrees("0.1", of(0.1))
    assert agrees(0.1, of(0.1))
    assert agrees("0.1", numpy.array([0.2, 0.1], kind))
    assert agrees([0.5], numpy.array([0.5], kind))
    assert not agrees("0.11", of(0.1))
    assert agrees("true", numpy.bool_(True))
    assert agrees("7", numpy.int64(7))


def test_a_list_column_of_a_frame_lists_the_right_values(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    pytest.importorskip("pyarrow")
    data = [{"question": "x", "label": ["B", "A"]}, {"question": "y", "label": ["B"]}]
    pandas.DataFrame(data).to_parquet(tmp_path / "rows.parquet")
    frame = pandas.read_parquet(tmp_path / "rows.parquet")
    assert not isinstance(frame["label"][0], list)
    for metric in (MATCH, ul.contains_match("answer", "label")):
        report = ul.evaluate(quiz, frame, metric, backend=always())
        assert (report.mean, report.results[0].inputs) == (0.5, data[0])
        assert report.calibration().unknown_labels == 0


def test_a_column_may_list_the_right_values() -> None:
    data = [{"question": "x", "label": ["B", "A"]}, {"question": "y", "label": ["B"]}]
    assert ul.evaluate(quiz, data, MATCH, backend=always()).mean == 0.5


def test_contains_match_looks_inside_the_text() -> None:
    @ul.function
    def say(s, city):
        s += city + ul.gen("answer")

    data = [{"city": "x", "label": "paris"}, {"city": "x", "label": "Rome"}]
    backend = ul.Echo(lambda prompt: "It is Paris.")
    assert ul.evaluate(say, data, ul.contains_match("answer", "label"), backend=backend).mean == 0.0
    report = ul.evaluate(say, data, ul.contains_match("answer", "label", ignore_case=True), backend=backend)
    assert (report.metric, report.mean) == ("contains_match", 0.5)


@pytest.mark.parametrize("label", ["", "  ", None, math.nan, ["A", ""], [None]])
def test_contains_match_does_not_measure_a_row_without_a_text(label: object) -> None:
    data = [{"question": "x", "label": label}, {"question": "y", "label": "B"}]
    report = ul.evaluate(quiz, data, ul.contains_match("answer", "label"), backend=always())
    assert (report.figure.count, report.mean) == (1, 0.0)
    assert report.unmeasured[0].metric_error == "ParameterError"
    assert "an empty text stands in every text; write a text" in report.unmeasured[0].message


def test_a_variable_that_the_program_never_sets_names_those_that_it_sets() -> None:
    report = ul.evaluate(quiz, rows(2), ul.exact_match("anser", "label"), backend=always())
    assert "no variable 'anser'; it has set 'answer'" in report.unmeasured[0].message


def test_a_column_that_later_rows_alone_have_is_known() -> None:
    @ul.function
    def answered(s: ul.State, question: str) -> None:
        s += question + ul.gen("answer", max_tokens=2)

    rows = [{"question": "1 + 1 ="}, {"question": "2 + 2 =", "label": "4"}]
    report = ul.evaluate(answered, rows, ul.exact_match("answer", "label"), backend=ul.Echo(lambda prompt: "4"))
    assert [row.figures for row in report.results] == [{}, {"exact_match": True}]
    assert "label" in report.results[0].message
