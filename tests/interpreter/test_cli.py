"""The command `umbel`, in this process and on the oracle or Echo."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import umbel as ul
from umbel.interpreter.backends.runtime_remote import make_key
from umbel.interpreter.cli import main
from umbel.interpreter.run import chosen_backend
from umbel.lang.transport.keys import read_clients, read_key


@pytest.fixture(autouse=True)
def no_default_backend_afterwards() -> Iterator[None]:
    yield
    ul.set_default_backend(None)


@pytest.mark.parametrize("word", ["--version", "-V", "version"])
def test_version(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([word]) == 0
    assert capsys.readouterr().out == f"umbel {ul.__version__}\n"


def test_python_m_umbel_is_the_command() -> None:
    command = [sys.executable, "-m", "umbel", "--version"]
    ended = subprocess.run(command, capture_output=True, text=True, check=True)
    assert ended.stdout == f"umbel {ul.__version__}\n"


@pytest.mark.parametrize("words", [["fsm", "[0-9]{4}"], ["--help"], ["serve", "--help"]], ids=" ".join)
@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.sampled(4)
def test_a_reader_that_has_seen_enough_ends_the_output_silently(words: list[str], unbuffered: str) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    command = [sys.executable, "-m", "umbel", *words]
    ended = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, env=environment, check=False)
    os.close(writing)
    assert (ended.returncode, ended.stderr) == (141, "")


def test_without_an_output_a_command_ends_well() -> None:
    command = "import sys; sys.stdout = None; from umbel.interpreter.cli import main; sys.exit(main(['--version']))"
    assert subprocess.run([sys.executable, "-c", command], check=False).returncode == 0


def test_a_pipe_that_breaks_elsewhere_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def breaking(given: object) -> int:
        raise BrokenPipeError

    monkeypatch.setattr("umbel.interpreter.cli._run", breaking)
    monkeypatch.setattr("sys.stdout", sys.__stdout__)
    with pytest.raises(BrokenPipeError):
        main(["models"])


@pytest.mark.parametrize(
    ("source", "ends"),
    [
        ("def f(:\n  pass\n", '  File "FILE", line 1\n    def f(:\n          ^\nSyntaxError: invalid syntax\n'),
        ("def f():\n    1 / 0\nf()\n", "    1 / 0\n    ~~^~~\nZeroDivisionError: division by zero\n"),
        (
            "import runpy\nopen('inner.py', 'w').write('1 / 0')\nrunpy.run_path('inner.py')\n",
            '  File "inner.py", line 1, in <module>\n    1 / 0\n    ~~^~~\nZeroDivisionError: division by zero\n',
        ),
        ("import sys\nsys.excepthook = lambda *_: print('mine', file=sys.stderr)\n1 / 0\n", "mine\n"),
    ],
)
def test_an_error_of_a_file_is_shown_as_python_shows_it(
    source: str, ends: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    file = tmp_path / "own.py"
    file.write_text(source)
    assert main(["run", str(file)]) == 1
    said = capsys.readouterr().err.replace(str(file), "FILE")
    assert said.endswith(ends)
    assert "cli.py" not in said
    assert "inner" not in source or 'File "FILE", line 3' in said


def test_a_program_that_is_named_where_a_file_runs_is_told_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "own.py"
    file.write_text("")
    assert main(["run", f"{file}:ask"]) == 1
    assert f"is not a file; umbel run runs all of a file: umbel run {file}, which calls ask itself" in (
        capsys.readouterr().err
    )


def test_an_error_of_a_command_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("umbel.interpreter.cli.page_of", lambda command: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        main(["models", "--help"])


def test_keys_are_printed_and_listed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["keys", "server.key"]) == 0
    server = capsys.readouterr().out.strip()
    assert main(["keys", "a.key", "--server", server, "--clients", "clients.toml", "--name", "laptop"]) == 0
    assert capsys.readouterr().out.strip() == read_key("a.key").public
    assert read_key("a.key").server == server
    assert read_clients("clients.toml") == {read_key("a.key").public: "laptop"}
    assert main(["keys", "a.key"]) == 1
    assert "'a.key' exists; write another path" in capsys.readouterr().err
    assert main(["keys", "b.key", "--name", "b"]) == 1
    assert "write --clients LIST, too" in capsys.readouterr().err


def test_no_key_looks_like_an_option(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = iter([(b"-" * 40, b"s" * 40), (b"-a" * 20, b"s" * 40), (b"p" * 40, b"s" * 40)])
    monkeypatch.setattr("zmq.curve_keypair", lambda: next(made))
    assert make_key(str(tmp_path / "a.key")).public == "p" * 40


def test_a_missing_file_is_the_only_thing_that_run_misses(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["run"])
    assert "required: file\n" in capsys.readouterr().err


def test_run_gives_the_file_its_arguments_and_the_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "program.py"
    file.write_text("import sys\nif __name__ == '__main__':\n    print(sys.argv[1:])\n")
    assert main(["run", "--model", "oracle", str(file), "--", "a", "--b"]) == 0
    assert capsys.readouterr().out == "['a', '--b']\n"
    backend = chosen_backend()
    assert isinstance(backend, ul.Runtime)
    assert backend.options.model == "oracle"


@pytest.mark.parametrize(
    "line",
    [
        "FILE --model oracle -- a --b",
        "FILE --model oracle a -- --b",
        "--model oracle FILE -- a --b",
        "FILE -- a --b",
        "FILE a -- --b",
    ],
)
def test_options_of_the_file_stand_behind_two_hyphens(
    line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "program.py"
    file.write_text("import sys\nif __name__ == '__main__':\n    print(sys.argv[1:])\n")
    assert main(["run", *line.replace("FILE", str(file)).split()]) == 0
    assert capsys.readouterr().out == "['a', '--b']\n"


def test_the_model_may_stand_behind_the_file(tmp_path: Path) -> None:
    file = tmp_path / "program.py"
    file.write_text("")
    assert main(["run", str(file), "--model", "oracle"]) == 0
    backend = chosen_backend()
    assert isinstance(backend, ul.Runtime)
    assert backend.options.model == "oracle"


def test_arguments_of_the_file_may_stand_behind_the_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "program.py"
    file.write_text("import sys\nprint(sys.argv[1:])\n")
    assert main(["run", str(file), "a", "--model", "oracle", "b"]) == 0
    assert capsys.readouterr().out == "['a', 'b']\n"


def test_an_unknown_option_says_where_those_of_the_file_go(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["run", "program.py", "--fast"])
    assert "there is no option --fast; write -- before the options of the file" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["keys", "file", "--json"])
    assert "there is no option --json; umbel keys --help lists the options" in capsys.readouterr().err


def test_a_missing_file_is_one_line_on_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "nothing.py"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("umbel: ParameterError: 'nothing.py' is not a file")
    assert "Traceback" not in error


def test_fsm_hands_its_own_options_on(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fsm", "--regex", "ab*", "--json"]) == 0
    assert '"kind": "regex"' in capsys.readouterr().out
    assert main(["fsm", "(a"]) == 1
    assert capsys.readouterr().err.startswith("umbel fsm: position 0: ")
