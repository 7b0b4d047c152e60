"""Replays: a program against its journal without a model, by the command and in tests."""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path

import pytest
import umbel as ul
from umbel.interpreter.cli import main
from umbel.interpreter.fakes.openai import FakeOpenAI

from ...test_house import ROOT

PLUGIN = "umbel.interpreter.journal.pytest_plugin"
PROGRAM = """\
import umbel as ul


@ul.function
def review(s, text):
    s += ul.system("Be brief.")
    s += ul.user(f"Review: {text}") + ul.assistant(ul.gen("review", max_tokens=16))
    branches = s.fork(2)
    for branch, side in zip(branches, ["good", "bad"]):
        branch += ul.user(f"What is {side}?") + ul.assistant(ul.gen("side", max_tokens=8))
    branches.join()
    s += ul.user("A mark?") + ul.assistant(ul.gen("mark", regex="[1-6]", max_tokens=2))
"""


@pytest.fixture
def replay(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    """Records PROGRAM, then replays a changed one: (from, to) → exit code and what was printed."""
    file, journal = tmp_path / "program.py", str(tmp_path / "run.jsonl")

    def replayed(*changes: tuple[str, str], backend: ul.Echo | ul.OpenAI | None = None) -> tuple[int, str]:
        file.write_text(PROGRAM)
        scope: dict[str, object] = {}
        exec(compile(PROGRAM, str(file), "exec"), scope)
        items = [{"text": "a book"}, {"text": "a film"}]
        backend = backend or ul.Echo(lambda text: "3" if text.endswith("assistant\n") and "mark?" in text else "Fine.")
        scope["review"].run_batch(items, backend=backend, journal=journal, temperature=0.5)  # type: ignore[attr-defined]
        text = PROGRAM
        for old, new in changes:
            assert old in text
            text = text.replace(old, new)
        file.write_text(text)
        capsys.readouterr()
        code = main(["replay", journal, f"{file}:review"])
        captured = capsys.readouterr()
        return code, captured.out + captured.err

    return replayed


def test_a_program_that_says_the_same_has_no_differences(replay: Callable[..., tuple[int, str]]) -> None:
    code, printed = replay(('"mark", regex', '"grade", regex'))
    assert code == 0
    assert "2 programs and 8 calls in" in printed
    assert "no differences" in printed


def test_a_changed_prompt_is_shown_with_the_line_that_says_it(
    replay: Callable[..., tuple[int, str]], tmp_path: Path
) -> None:
    code, printed = replay(('f"What is {side}?"', 'f"What exactly is {side}?"'))
    assert code == 1
    assert "item 0, gen 'side'" in printed
    assert re.search(rf"the prompt differs from that of line \d+ of {tmp_path}/run.jsonl at character", printed)
    assert "program.py:10 writes" in printed
    assert "'What ' + 'is good?" in printed.replace("user\\nWhat ' +", "'What ' +")
    assert "'exactly is good?" in printed
    assert printed.count("item 1, ") == 2  # and no more: answers are as they were, so what follows is the same
    assert "4 differences" in printed


def test_a_file_and_a_program_that_are_not_there_are_named(
    replay: Callable[..., tuple[int, str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert replay()[0] == 0
    file, journal = tmp_path / "program.py", str(tmp_path / "run.jsonl")
    for named, words in (
        (f"{file}:reviw", f"has no program 'reviw'; write {file}:review"),
        (f"{file}x:review", "is not a file; write the path of a Python file"),
        (str(file), "is no FILE.py:NAME"),
    ):
        assert main(["replay", journal, named]) == 2
        assert words in capsys.readouterr().err


def test_other_parameters_are_named(replay: Callable[..., tuple[int, str]], tmp_path: Path) -> None:
    code, printed = replay(("max_tokens=16", "max_tokens=24"))
    assert code == 1
    assert f"of {tmp_path}/run.jsonl has the same prompt with other parameters: max_tokens 16 → 24" in printed


def test_calls_that_are_new_or_gone_are_named(replay: Callable[..., tuple[int, str]]) -> None:
    code, printed = replay(
        ('    s += ul.user("A mark?") + ul.assistant(ul.gen("mark", regex="[1-6]", max_tokens=2))\n', "")
    )
    assert code == 1
    assert re.search(r"item 0, gen 'mark': recorded in line \d+ of .*run.jsonl, not called now", printed)
    code, printed = replay(("s.fork(2)", "s.fork(3)"), ('["good", "bad"]', '["good", "bad", "odd"]'))
    assert code == 1
    assert "item 0, gen 'side'" in printed
    assert "has no call at this place" in printed


def test_a_hosted_chat_model_is_replayed_without_a_network(replay: Callable[..., tuple[int, str]]) -> None:
    with FakeOpenAI(lambda text: '{"answer": "3"}' if "mark?" in text else "Fine.") as server:
        backend = ul.OpenAI("gpt-4o", base_url=server.base_url, api_key=server.api_key)
        code, printed = replay(backend=backend)
    assert (code, "no differences" in printed) == (0, True), printed


@pytest.mark.parametrize("named", ["nowhere.py:review", "program.py", "program.py:nothing"])
def test_what_is_no_program_is_said(named: str, replay: Callable[..., tuple[int, str]], tmp_path: Path) -> None:
    replay()
    assert main(["replay", str(tmp_path / "run.jsonl"), str(tmp_path / named)]) == 2


# -------------------------------------------------------------------------------- in tests

TEST = """\
import program
import umbel as ul


class Model(ul.Echo):
    made = 0

    def __init__(self):
        Model.made += 1
        super().__init__(lambda text: "3" if "mark?" in text else "Fine.")


def test_reviews(umbel_journal):
    backend = umbel_journal.backend(Model)
    states = program.review.run_batch([("a book",), ("a film",)], backend=backend)
    assert [state["mark"] for state in states] == ["3", "3"]
    assert program.review.run("a song", backend=backend)["mark"] == "3"
    print("models made:", Model.made)
"""


@pytest.fixture
def project(tmp_path: Path) -> Callable[..., tuple[int, str]]:
    """A project with a test → runs pytest in it; returns its exit code and what it printed.

    The installed plugins take pytest two seconds to import: most runs load ours by its name alone.
    """
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "test_program.py").write_text(TEST)
    installed = any(each.value == PLUGIN for each in entry_points(group="pytest11"))

    def run(*arguments: str, as_installed: bool = False) -> tuple[int, str]:
        found = as_installed and installed
        named = [] if found else ["-p", PLUGIN]
        command = [sys.executable, "-m", "pytest", "-q", "-s", "-p", "no:cacheprovider", *named, *arguments]
        environment = {**os.environ, "PYTHONPATH": f"{ROOT}/.types{os.pathsep}{tmp_path}"}
        environment["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "" if found else "1"
        ended = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
        return ended.returncode, ended.stdout + ended.stderr

    return run


@pytest.mark.processes
def test_a_test_is_recorded_once_and_replayed_from_then_on(
    project: Callable[..., tuple[int, str]], tmp_path: Path
) -> None:
    code, printed = project("--umbel-record=none", as_installed=True)
    assert (code, "record it: pytest --umbel-record=once" in printed) == (1, True), printed
    code, printed = project()
    assert (code, "models made: 1" in printed) == (0, True), printed
    assert [path.name for path in (tmp_path / "journals").iterdir()] == ["test_program.test_reviews.jsonl"]
    for record in ("--umbel-record=once", "--umbel-record=none"):
        code, printed = project(record)
        assert (code, "models made: 0" in printed) == (0, True), printed


@pytest.mark.processes
@pytest.mark.nightly
def test_a_changed_program_fails_its_test_until_it_is_recorded_again(
    project: Callable[..., tuple[int, str]], tmp_path: Path
) -> None:
    assert project()[0] == 0
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.replace("Be brief.", "Be long."))
    code, printed = project()
    assert code == 1
    assert "the prompt differs from that of line" in printed
    assert "program.py:6 writes" in printed
    assert "pytest --umbel-record=all" in printed
    for record in ("--umbel-record=new", "--umbel-record=none"):
        code, printed = project(record)
        assert code == 0, printed
    (tmp_path / "program.py").write_text(PROGRAM)
    assert project("--umbel-record=none")[0] == 0  # "new" keeps what was there
    assert project("--umbel-record=all")[0] == 0
    program.write_text(PROGRAM.replace("Be brief.", "Be long."))
    assert project("--umbel-record=none")[0] == 1


NAMES = """
import os

import pytest
import umbel as ul


@ul.function
def ask(s, question):
    s += question + ul.gen("answer", max_tokens=4)


class TestOne:
    def test_it(self, umbel_journal):
        assert ask.run("one", backend=umbel_journal.backend(ul.Echo))["answer"] == "one"


class TestTwo:
    def test_it(self, umbel_journal):
        assert ask.run("two", backend=umbel_journal.backend(ul.Echo))["answer"] == "two"


@pytest.mark.parametrize("text", ["a b", "a/b"])
def test_text(text, umbel_journal):
    assert ask.run(text, backend=umbel_journal.backend(ul.Echo))["answer"] == text


def test_model(umbel_journal):
    faults = ul.FailCall(2, ul.RequestError("no network")) if "FAULT" in os.environ else None
    backend = umbel_journal.backend(lambda: ul.Echo(faults=faults))
    assert [ask.run(each, backend=backend)["answer"] for each in ("x", "y")] == ["x", "y"]


@ul.function
def silent(s):
    s += "nothing is asked"


def test_without_a_call(umbel_journal):
    assert silent.run(backend=umbel_journal.backend(ul.Echo)).text() == "nothing is asked"
"""


@pytest.mark.processes
@pytest.mark.nightly
def test_each_test_has_a_file_of_its_own_and_a_failed_recording_leaves_none(
    project: Callable[..., tuple[int, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "test_program.py").write_text(NAMES)
    monkeypatch.setenv("FAULT", "1")
    code, printed = project()
    assert (code, "1 failed, 5 passed" in printed) == (1, True), printed
    monkeypatch.delenv("FAULT")
    for record in ("once", "all", "none"):
        code, printed = project(f"--umbel-record={record}")
        assert code == 0, printed
    names = {path.name for path in (tmp_path / "journals").iterdir()}
    assert {f"test_program.{name}.jsonl" for name in ("TestOne.test_it", "TestTwo.test_it", "test_model")} < names
    assert len(names) == 6


@pytest.mark.processes
def test_a_first_recording_that_fails_leaves_no_folder(
    project: Callable[..., tuple[int, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "test_program.py").write_text(NAMES)
    monkeypatch.setenv("FAULT", "1")
    code, printed = project("-k", "test_model")
    assert (code, "1 failed" in printed) == (1, True), printed
    assert not (tmp_path / "journals").exists()


FAILING = """
import sys

import program
import umbel as ul
from umbel.lang import checks


@ul.function
def raising(s):
    s += "a" + ul.gen("x", max_tokens=4)
    raise ValueError("of the program")


def test_an_error_of_a_model():
    program.review.run("a book", backend=ul.Echo(faults=ul.FailCall(1, ul.OverloadedError("busy"))))["mark"]


def test_an_error_of_a_program():
    raising.run(backend=ul.Echo())


def test_a_defect_of_umbel():
    eval("(lambda: 1 / 0)()", vars(checks))


def test_a_defect_that_shows_in_the_standard_library():
    eval("(lambda: __import__('json').dumps(object()))()", vars(checks))


def test_with_a_module_that_is_not_there(monkeypatch):
    monkeypatch.setitem(sys.modules, "umbel.none", None)
    raise AssertionError("of the test")
"""


@pytest.mark.processes
def test_failures_show_the_lines_of_test_and_program(project: Callable[..., tuple[int, str]], tmp_path: Path) -> None:
    (tmp_path / "test_program.py").write_text(FAILING)
    code, printed = project()
    assert code == 1
    assert "test_program.py:16: OverloadedError" in printed
    assert "test_program.py:12: ValueError" in printed
    assert "interpreter" not in printed
    assert "<string>:1: ZeroDivisionError" in printed
    assert "<string>:1: in <lambda>" in printed
    assert "AssertionError: of the test" in printed
    code, printed = project("--full-trace")
    assert "interpreter" in printed


LOOSE = """
import umbel as ul


@ul.function
def loose(s, text, /, *more, mood="plain", **other):
    s += f"{text} {more} {mood} {other}" + ul.gen("a")
    s["a"]
    if text == "b":
        raise ValueError("bad")


@ul.function
def named(s, text, **other):
    s += f"{text} {other}" + ul.gen("a")
"""


@pytest.mark.parametrize("call", ['loose.run("a", "c", mood="m", key=1,', 'named.run("a", key=[1], text2="b",'])
def test_arguments_of_all_kinds_are_given_again(call: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "app.py").write_text(LOOSE)
    scope: dict[str, object] = {"ul": ul, "path": str(tmp_path / "run.jsonl")}
    exec(compile(LOOSE, str(tmp_path / "app.py"), "exec"), scope)
    exec(f"{call} journal=path, backend=ul.Echo())", scope)
    assert main(["replay", str(tmp_path / "run.jsonl"), f"{tmp_path / 'app.py'}:{call.partition('.')[0]}"]) == 0
    assert "no differences" in capsys.readouterr().out


def test_a_program_that_had_failed_does_not_end_the_replay(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, journal = tmp_path / "app.py", str(tmp_path / "run.jsonl")
    file.write_text(LOOSE)
    scope: dict[str, object] = {}
    exec(compile(LOOSE, str(file), "exec"), scope)
    items = [("a",), ("b",), ("c",)]
    scope["loose"].run_batch(items, backend=ul.Echo(), journal=journal, on_error="return")  # type: ignore[attr-defined]
    assert main(["replay", journal, f"{file}:loose"]) == 0
    file.write_text(LOOSE.replace('"b"', '"c"'))
    assert main(["replay", journal, f"{file}:loose"]) == 1
    assert "item 2: ValueError: bad; it had ended without an error" in capsys.readouterr().out
