"""`umbel eval FILE.py:PROGRAM DATA`."""

import json
from pathlib import Path

import pytest
import umbel as ul
from umbel.interpreter import cli
from umbel.interpreter.evaluation.calibration import Calibration

APP = """
import umbel as ul

@ul.function
def quiz(s, question: str):
    s += f"Question: {question}\\nAnswer:" + ul.select("answer", choices=[" A", " B"])

@ul.function
def careful(s, question: str):
    s += f"Think well. Question: {question}\\nAnswer:" + ul.select("answer", choices=[" A", " B"])

def right(state, row):
    return {"exact_match": state["answer"].strip() == row["label"], "length": len(row["question"])}

def fails(state, row):
    return row["wrong"]

@ul.function
def raises(s, question: str):
    s += question + ul.gen("answer")
    raise KeyError("of the program")

echo = ul.Echo()
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.syspath_prepend(str(tmp_path))  # restores sys.path, which the command extends
    (tmp_path / "app.py").write_text(APP)
    (tmp_path / "d.csv").write_text("question,label\n" + "".join(f"q{n},{'AB'[n % 2]}\n" for n in range(8)))
    return tmp_path


def command(*arguments: str) -> int:
    return cli.main(["eval", *arguments, "--backend", "app.py:echo"])


def test_a_report_is_printed_saved_and_compared(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--journal", "run.jsonl", "--output", "out.jsonl", "--save", "a.json"]
    assert command("app.py:quiz", "d.csv", "--exact", "answer=label", *given) == 0
    assert "quiz on d.csv: 8 rows, Echo\nexact_match" in capsys.readouterr().out
    assert {path.name for path in folder.iterdir()} >= {"run.jsonl", "out.jsonl", "a.json"}
    assert ul.EvaluationReport.load("a.json").figure.count == 8
    assert command("app.py:careful", "d.csv", "--metric", "app.py:right", "--compare", "a.json") == 0
    assert "quiz (Echo) → careful (Echo), on d.csv: 8 rows" in capsys.readouterr().out


def test_one_json_object_has_report_calibration_and_comparison(capsys: pytest.CaptureFixture[str]) -> None:
    given = ["app.py:quiz", "d.csv", "--exact", "answer=label", "--save", "a.json"]
    assert command(*given, "--json") == 0
    capsys.readouterr()
    assert command(*given, "--json", "--compare", "a.json", "--calibration", "answer=label", "--bins", "5") == 0
    found = json.loads(capsys.readouterr().out)
    assert list(found) == ["report", "calibration", "comparison"]
    assert found["comparison"]["differences"]["exact_match"]["p_value"] == 1.0
    assert found["calibration"]["binning"].startswith("5 bins")


def test_a_figure_below_the_wanted_one_is_exit_code_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert command("app.py:quiz", "d.csv", "--contains", "answer=label", "--at-least", "0") == 0
    assert command("app.py:quiz", "d.csv", "--contains", "answer=label", "--at-least", "1.01") == 1
    assert "contains_match is" in capsys.readouterr().err


def test_calibration_is_drawn_into_a_file(folder: Path) -> None:
    pytest.importorskip("matplotlib")
    given = ["app.py:quiz", "d.csv", "--exact", "answer=label", "--calibration", "answer=label", "--plot", "c.svg"]
    assert command(*given) == 0
    assert (folder / "c.svg").read_text().startswith("<?xml")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["app.py:quiz", "d.csv"], "write one of --metric"),
        (["app.py:quiz", "d.csv", "--exact", "answer=label", "--contains", "answer=label"], "write one of --metric"),
        (["app.py", "d.csv", "--exact", "answer=label"], "no FILE.py:NAME"),
        (["app.py:quizz", "d.csv", "--exact", "answer=label"], "app.py has no program 'quizz'; write app.py:quiz"),
        (["app.py:quiz", "d.csv", "--metric", "app.py:wrong"], "app.py has no metric 'wrong'"),
        (["app.py:quiz", "d.csv", "--exact", "answer"], "write VARIABLE=COLUMN, such as --exact answer=label"),
        (["aap.py:quiz", "d.csv", "--exact", "answer=label"], "'aap.py' is not a file"),
        (["app.py:quiz", "d.csv", "--metric", "app.py:rihgt"], "app.py has no metric 'rihgt'; write app.py:right"),
        (["app.py:quiz", "d.csv", "--exact", "answer=labl"], "Write --exact answer=COLUMN with the column of right"),
        (["app.py:quiz", "d.csv", "--contains", "answer=labl"], "--contains answer=labl: d.csv has no column 'labl'"),
        (["app.py:quiz", "missing.csv", "--exact", "answer=label"], "missing.csv cannot be read"),
        (["app.py:quiz", "d.csv", "--exact", "answer=label", "--plot", "c.svg"], "write --calibration"),
        (["app.py:quiz", "d.csv", "--exact", "answer=label", "--compare", "d.csv"], "d.csv is no report"),
        (["app.py:quiz", "d.csv", "--exact", "answer=label", "--model", "default"], "write one of them"),
        (
            ["app.py:quiz", "d.csv", "--exact", "answer=label", "--save", "app.py/a.json"],
            "app.py is no folder; make it",
        ),
    ],
)
def test_wrong_command_lines_say_what_to_write(
    given: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(*given) == 2
    assert words in capsys.readouterr().err


def test_a_comparison_that_is_refused_does_not_hide_the_report(capsys: pytest.CaptureFixture[str]) -> None:
    assert command("app.py:quiz", "d.csv", "--contains", "answer=label", "--save", "a.json") == 0
    assert command("app.py:quiz", "d.csv", "--exact", "answer=label", "--compare", "a.json") == 2
    told = capsys.readouterr()
    assert "exact_match" in told.out
    assert "the first report has the figures 'contains_match'" in told.err


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["--bins", "5"], "--bins is of the calibration; write --calibration VARIABLE=COLUMN, too"),
        (["--calibration", "answer=label", "--bins", "0"], "--bins=0 is out of range; write from 1 to 100"),
        (["--calibration", "answer"], "write VARIABLE=COLUMN, such as --calibration answer=label"),
        (["--calibration", "answer=labl"], "--calibration answer=labl: d.csv has no column 'labl'; it has the columns"),
        (["--save", "nodir/a.json"], "--save 'nodir/a.json': nodir is no folder; make it, or write another path"),
        (["--save", "."], "--save '.' is a folder; write the path of a file in it"),
        (["--calibration", "answer=label", "--plot", "nodir/c.svg"], "--plot 'nodir/c.svg': nodir is no folder"),
    ],
)
def test_nothing_runs_where_something_after_it_would_be_refused(
    given: list[str], words: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command("app.py:quiz", "d.csv", "--exact", "answer=label", "--output", "out.jsonl", *given) == 2
    assert words in capsys.readouterr().err
    assert not (folder / "out.jsonl").exists()


@pytest.mark.parametrize("shown", [[], ["--json"]])
def test_a_report_that_cannot_be_written_is_printed(
    shown: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*arguments: object) -> None:
        raise ul.ParameterError("the disk is full")

    monkeypatch.setattr(ul.EvaluationReport, "save", full)
    assert command("app.py:quiz", "d.csv", "--exact", "answer=label", "--save", "a.json", *shown) == 2
    told = capsys.readouterr()
    assert "exact_match" in told.out
    assert "the disk is full" in told.err


@pytest.mark.parametrize("shown", [[], ["--json"]])
def test_a_drawing_that_fails_loses_neither_the_report_nor_its_file(
    shown: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing(*arguments: object) -> None:
        raise ul.MissingExtraError("matplotlib", "plots")

    monkeypatch.setattr(Calibration, "plot", missing)
    given = ["--save", "a.json", "--calibration", "answer=label", "--plot", "c.svg", *shown]
    assert command("app.py:quiz", "d.csv", "--exact", "answer=label", *given) == 2
    told = capsys.readouterr()
    assert "exact_match" in told.out
    assert "ECE" in told.out or json.loads(told.out)["calibration"]["ece"]
    assert "umbel[plots]" in told.err
    assert (folder / "a.json").exists()


def test_a_comparison_that_is_refused_does_not_hide_the_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert command("app.py:quiz", "d.csv", "--contains", "answer=label", "--save", "a.json") == 0
    capsys.readouterr()
    assert command("app.py:quiz", "d.csv", "--exact", "answer=label", "--compare", "a.json", "--json") == 2
    assert list(json.loads(capsys.readouterr().out)) == ["report"]


@pytest.mark.parametrize(
    ("program", "metric", "error"),
    [("quiz", "fails", "KeyError: 'wrong'"), ("raises", "right", "KeyError: 'of the program'")],
)
def test_the_error_after_which_it_stops_is_shown_in_the_lines_of_the_file(
    program: str, metric: str, error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(f"app.py:{program}", "d.csv", "--metric", f"app.py:{metric}", "--max-errors", "1") == 2
    told = capsys.readouterr()
    assert told.err.count("  File ") == 1
    assert 'File "app.py"' in told.err
    assert error in told.err
    assert "2 errors of rows, and max_errors=1" in told.err
    assert f"{program} on d.csv: 2 rows" in told.out


def test_an_output_that_is_there_is_refused_in_the_words_of_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    given = ["app.py:quiz", "d.csv", "--exact", "answer=label", "--output", "o.jsonl"]
    assert command(*given) == 0
    assert command(*given) == 2
    assert "--output 'o.jsonl' exists; write --if-exists resume" in capsys.readouterr().err
    assert command(*given, "--if-exists", "resume") == 0


def test_columns_that_a_line_of_a_row_leaves_out_are_told(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "w.csv").write_text("question,label,a,b,c,d,e\nq,none,1,2,3,4,5\n")
    assert command("app.py:quiz", "w.csv", "--exact", "answer=label") == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "right is 'none', question='q', a='1', b='2', c='3', …" in told
