"""An evaluation that was killed goes on: with its journal no call is paid twice, with its output no row runs twice."""

import json
import re
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import umbel as ul
from umbel.interpreter.fakes.openai import FakeOpenAI

from ...test_house import ROOT
from .killed_child import AT_ONCE, ROWS, run

CHILD = "tests.interpreter.evaluation.killed_child"  # however the checkout is called
NUMBER = re.compile(r"(Question|answer: Number) (\d+)")


@ul.function
def quiz(s, question: str):
    s += f"Question: {question}\nAnswer:" + ul.select("answer", choices=[" A", " B"])


MATCH = ul.exact_match("answer", "label")


class Provider:
    """Answers questions and judges answers, and kills its client at a request that is chosen before."""

    def __init__(self, deadly: int) -> None:
        self.asked: Counter[tuple[str, str]] = Counter()
        self.child: subprocess.Popen[bytes] | None = None
        self.started = threading.Event()
        self._lock = threading.Lock()
        self._deadly = deadly

    def answer(self, text: str) -> str:
        kind, number = NUMBER.findall(text)[-1]
        with self._lock:
            self.asked[kind, number] += 1
            deadly = self.asked.total() == self._deadly
        if deadly:
            assert self.started.wait(60)
            assert self.child is not None
            self.child.kill()
        return f"Number {number}" if kind == "Question" else ("yes" if int(number) % 2 else "no")


@pytest.mark.processes
def test_a_killed_evaluation_pays_nothing_twice_its_judge_included(tmp_path: Path) -> None:
    provider, journal = Provider(deadly=20), tmp_path / "run.jsonl"
    with FakeOpenAI(provider.answer) as server:
        command = [sys.executable, "-m", CHILD, server.base_url, server.api_key, str(journal)]
        provider.child = subprocess.Popen(command, cwd=ROOT)
        provider.started.set()
        assert provider.child.wait(120) == -9
        before = provider.asked.copy()
        report = run(server.base_url, server.api_key, str(journal))
        asked = provider.asked.copy()
        again = run(server.base_url, server.api_key, str(journal))
        assert provider.asked == asked
    twice = {call for call, times in asked.items() if times > 1}
    assert len(twice) <= AT_ONCE + 1, "only calls that were in flight when the process was killed"
    assert twice <= set(before)
    assert asked.total() == 2 * ROWS + len(twice)
    assert report.mean == 0.5
    assert (report.cost.usage.calls + report.cost.read.calls, report.errors) == (ROWS, {})
    assert report.cost.read.calls >= 4
    assert (again.cost.usage.calls, again.cost.read.calls, again.mean) == (0, ROWS, 0.5)
    assert f"{ROWS} calls of" in str(again)
    assert "read from the journal" in str(again)
    assert ul.compare(report, again).main.p_value == 1.0


def rows(count: int = 6) -> list[dict[str, str]]:
    return [{"question": f"q{number}", "label": "AB"[number % 2]} for number in range(count)]


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_an_output_has_input_variables_and_figures_of_each_row(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    report = ul.evaluate(quiz, rows(), MATCH, backend=ul.Echo(), output=path)
    found = lines(path)
    assert [line["row"] for line in found] == list(range(6))
    assert [line["exact_match"] for line in found] == [row.figures["exact_match"] for row in report.results]
    assert [line["answer"] for line in found] == [row.variables["answer"] for row in report.results]
    with pytest.raises(ul.ParameterError, match="exists; write if_exists='resume'"):
        ul.evaluate(quiz, rows(), MATCH, backend=ul.Echo(), output=path)


@pytest.mark.parametrize("journaled", [False, True])
def test_a_resumed_output_gives_the_report_of_an_undisturbed_run(journaled: bool, tmp_path: Path) -> None:
    whole = ul.evaluate(quiz, rows(), MATCH, backend=ul.Echo())
    options: dict[str, Any] = {"output": tmp_path / "out.jsonl", "if_exists": "resume"}
    if journaled:
        options["journal"] = tmp_path / "run.journal"
    ul.evaluate(quiz, rows(3), MATCH, backend=ul.Echo(), **options)
    text = (tmp_path / "out.jsonl").read_text()
    (tmp_path / "out.jsonl").write_text(text[:-5])  # the process was killed in the middle of a line
    backend = ul.Echo()
    numbers: list[ul.BatchProgress] = []
    report = ul.evaluate(quiz, rows(), MATCH, backend=backend, progress=numbers.append, **options)
    assert backend.calls == (3 if journaled else 4)
    assert (numbers[-1].resumed, numbers[-1].done) == (2, 4)
    for one, other in zip(report.results, whole.results, strict=True):
        assert (one.row, one.inputs, one.variables, one.figures) == (
            other.row,
            other.inputs,
            other.variables,
            other.figures,
        )
        assert one.probabilities == other.probabilities
    assert report.mean == whole.mean
    assert report.cost.usage.calls + report.cost.read.calls == 6


def test_failed_rows_and_rows_that_were_not_measured_run_again(tmp_path: Path) -> None:
    bad = {"q1"}

    def metric(state: ul.State, row: dict[str, Any]) -> bool:
        if row["question"] in bad:
            raise RuntimeError("no judge")
        return True

    options: dict[str, Any] = {"output": tmp_path / "out.jsonl", "if_exists": "resume"}
    ul.evaluate(quiz, rows(), metric, backend=ul.Echo(), **options)
    (failure,) = lines(tmp_path / "out.failed.jsonl")
    assert (failure["row"], failure["error"], failure["input"]["question"]) == (1, "RuntimeError", "q1")
    bad.clear()
    backend = ul.Echo()
    report = ul.evaluate(quiz, rows(), metric, backend=backend, **options)
    assert (backend.calls, report.figure.count, report.mean) == (1, 6, 1.0)


def test_columns_that_have_the_names_of_variables_and_figures_survive_an_output(tmp_path: Path) -> None:
    data = [{**row, "answer": "old", "exact_match": "old"} for row in rows(2)]
    options: dict[str, Any] = {"output": tmp_path / "out.jsonl", "if_exists": "resume", "backend": ul.Echo()}
    one = ul.evaluate(quiz, data, MATCH, **options)
    other = ul.evaluate(quiz, data, MATCH, **options)
    assert other.results == one.results
    assert other.results[0].inputs == data[0]
    assert lines(tmp_path / "out.jsonl")[0]["answer_out"] in (" A", " B")
    with pytest.raises(ul.ParameterError, match="has a column 'evaluation'"):
        ul.evaluate(quiz, [{**row, "evaluation": 1} for row in data], MATCH, **options)


def test_a_journal_serves_another_metric_without_a_call(tmp_path: Path) -> None:
    options: dict[str, Any] = {"journal": tmp_path / "run.journal"}
    ul.evaluate(quiz, rows(), MATCH, backend=ul.Echo(), **options)
    backend = ul.Echo()
    report = ul.evaluate(quiz, rows(), lambda state, row: state["answer"] == " A", backend=backend, **options)
    assert (backend.calls, report.cost.read.calls) == (0, 6)
    with pytest.raises(ul.JournalError, match="other arguments"):
        ul.evaluate(quiz, [{**row, "question": "new"} for row in rows()], MATCH, backend=backend, **options)


def test_an_output_of_other_data_or_of_another_kind_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    ul.evaluate(quiz, rows(2), MATCH, backend=ul.Echo(), output=path)
    changed = [{**row, "label": "C"} for row in rows(2)]
    with pytest.raises(ul.ParameterError, match="row 0 with label='A', and the input now has 'C'"):
        ul.evaluate(quiz, changed, MATCH, backend=ul.Echo(), output=path, if_exists="resume")
    quiz.run_batch([{"question": row["question"]} for row in rows(2)], backend=ul.Echo(), output=tmp_path / "b.jsonl")
    data = [{"question": row["question"]} for row in rows(2)]
    with pytest.raises(ul.ParameterError, match="another kind of output"):
        ul.evaluate(quiz, data, lambda s, r: 1, backend=ul.Echo(), output=tmp_path / "b.jsonl", if_exists="resume")


@pytest.mark.parametrize(
    ("metric", "words"),
    [
        (
            ul.exact_match("answer", "other"),
            "row 0 with figures of label='label', and this evaluation has label='other'",
        ),
        (ul.exact_match("draft", "label"), "figures of variable='answer', and this evaluation has variable='draft'"),
        (ul.exact_match("answer", "label", ignore_case=True), "figures of ignore_case=False"),
        (ul.contains_match("answer", "label"), "figures of metric='exact_match'"),
        (lambda state, row: True, "figures of metric='exact_match', and this evaluation has metric='score'; give the"),
    ],
)
def test_an_output_with_figures_of_another_metric_is_refused(metric: Any, words: str, tmp_path: Path) -> None:
    path, data = tmp_path / "out.jsonl", [{**row, "other": "A"} for row in rows(4)]
    ul.evaluate(quiz, data[:2], MATCH, backend=ul.Echo(), output=path)
    backend = ul.Echo()
    with pytest.raises(ul.ParameterError, match=words):
        ul.evaluate(quiz, data, metric, backend=backend, output=path, if_exists="resume")
    assert backend.calls == 0
    assert ul.evaluate(quiz, data, MATCH, backend=backend, output=path, if_exists="resume").figure.count == 4


def test_an_output_of_an_earlier_version_is_resumed(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    ul.evaluate(quiz, rows(2), MATCH, backend=ul.Echo(), output=path)
    found = lines(path)
    for line in found:
        del line["evaluation"]["measure"]
    path.write_text("".join(json.dumps(line) + "\n" for line in found))
    backend = ul.Echo()
    assert ul.evaluate(quiz, rows(4), MATCH, backend=backend, output=path, if_exists="resume").figure.count == 4
    assert backend.calls == 2


@pytest.mark.parametrize("existing", ["error", "resume", "overwrite"])
def test_an_output_is_neither_the_data_nor_the_journal(existing: Any, tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text('{"question": "Q", "label": "A"}\n')
    with pytest.raises(ul.ParameterError, match="which the input is read from"):
        ul.evaluate(quiz, data, MATCH, backend=ul.Echo(), output=data, if_exists=existing)
    assert data.read_text() == '{"question": "Q", "label": "A"}\n'
    out = tmp_path / "out.jsonl"
    with pytest.raises(ul.ParameterError, match="output= and journal= name one file"):
        ul.evaluate(quiz, data, MATCH, backend=ul.Echo(), output=out, journal=out, if_exists=existing)
