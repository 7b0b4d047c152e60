"""`umbel lint`."""

import json
import re
from pathlib import Path

import pytest
from umbel.interpreter.cli import main

BAD = """\
import umbel as ul


@ul.function
def ask(s, question):
    s += f"Question: {question}\\n"
    s += "You answer for a library. Be polite and cite the shelf, and say so when you do not know the answer.\\n"
    s += ul.gen("answer")


@ul.function
def loop(s, n, question):
    for _ in range(n):
        s += question + ul.gen("answer")


@ul.function
def good(s, question):
    s += "Be polite.\\n" + question + ul.gen("answer")
"""


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("programs.py").write_text(BAD)
    return Path("programs.py")


def test_findings_give_status_1_with_the_line_and_the_gain(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lint", "programs.py"]) == 1
    out, err = capsys.readouterr()
    assert out.startswith("programs.py:6: constants-late: ask: question stands in front of")
    assert "tokens of the first call's prompt" in out
    assert "say these first" in out
    assert "programs.py:12: only the source was looked at: loop:" in err


def test_no_finding_gives_status_0(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lint", "programs.py:good"]) == 0
    assert capsys.readouterr() == ("umbel lint: programs.py: no findings in 1 program\n", "")


def test_what_was_looked_at_is_counted(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lint", "programs.py"]) == 1
    assert re.search(
        r"^umbel lint: programs\.py: [0-9]+ findings? in [2-9] programs\n\Z", capsys.readouterr().out, re.M
    )
    file.write_text("import umbel\n")
    assert main(["lint", "programs.py"]) == 0
    assert capsys.readouterr().out.startswith("umbel lint: programs.py: no programs; write a function")


def test_static_arguments_let_a_program_be_traced(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lint", "programs.py:loop", "--static", "n=2"]) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("question * 1.5", "TypeError: "),
        ("question[0].nothing", "AttributeError: "),
        ("raise KeyError(question)", "KeyError: "),
        ("raise SystemExit(3)", "the program ends Python, by SystemExit(3)"),
    ],
)
def test_a_program_that_fails_is_looked_at_by_its_source(
    file: Path, capsys: pytest.CaptureFixture[str], line: str, told: str
) -> None:
    file.write_text(f"from umbel import function, gen\n\n\n@function\ndef ask(s, question):\n    {line}\n")
    assert main(["lint", "programs.py"]) == 0
    err = capsys.readouterr().err
    assert err.startswith("umbel lint: programs.py:5: only the source was looked at: ask: ")
    assert told in err or "question" in err
    assert "programs.py:6" in err or "SystemExit" in err


def test_json_has_everything(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["lint", "--json", "programs.py:ask"])
    report = json.loads(capsys.readouterr().out)
    (finding,) = report["findings"]
    assert (finding["rule"], finding["file"], finding["line"], finding["program"]) == (
        "constants-late",
        "programs.py",
        6,
        "ask",
    )
    assert finding["gain"]["first_call"] > 15
    assert report["counted_by"]


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("missing.py", "'missing.py': No such file"),
        ("programs.py:other", "has no program 'other'; its programs are ask, loop, good"),
        ("broken.py", "'broken.py' is no Python file"),
    ],
)
def test_what_cannot_be_looked_at_gives_status_2(
    file: Path, capsys: pytest.CaptureFixture[str], argument: str, message: str
) -> None:
    Path("broken.py").write_text("def (")
    assert main(["lint", argument]) == 2
    assert message in capsys.readouterr().err


def test_a_wrong_static_argument_is_refused(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_status:
        main(["lint", "programs.py", "--static", "n:3"])
    assert exit_status.value.code == 2
    assert "write --static n=3" in capsys.readouterr().err
