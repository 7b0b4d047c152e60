"""Help is short, grouped, as wide as the terminal, and knows what is meant by a wrong word."""

import re
import subprocess
import sys

import pytest
from umbel.interpreter.cli import main
from umbel.interpreter.terminal import help as help_module
from umbel.interpreter.terminal.commands import COMMANDS, GROUPS
from umbel.interpreter.terminal.help import HelpFormatter, _examples, front_page, page_of

from ...test_house import ROOT

LIGHT = ("new", "run", "chat", "keys", "view", "replay", "completion", "lint", "compile")  # import no runtime


@pytest.fixture(params=[40, 80, 200])
def columns(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    width: int = request.param
    monkeypatch.setenv("COLUMNS", str(width))
    return width


@pytest.mark.parametrize("words", [[], ["--help"], ["-h"], ["help"]])
def test_umbel_alone_lists_every_command_in_its_group(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    assert "umbel COMMAND --help" in printed.out
    for group, commands in GROUPS.items():
        listed = printed.out.split(f"\n{group}:\n")[1].split("\n\n")[0]
        assert re.findall(r"^  (\S+)", listed, re.MULTILINE) == [command.name for command in commands]


def test_the_list_fits_the_terminal(columns: int, capsys: pytest.CaptureFixture[str]) -> None:
    main([])
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= min(columns, 100)


def test_at_80_columns_a_command_has_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    main([])
    lines = capsys.readouterr().out.splitlines()
    for command in COMMANDS.values():
        assert f"  {command.name:<12}{command.about}" in lines


def test_the_page_of_the_site_has_the_list_and_an_example_of_every_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    page = (ROOT / "docs" / "command_line.md").read_text(encoding="utf-8")
    assert front_page() in page
    assert [name for name in COMMANDS if f"\n    umbel {name}" not in page] == []


@pytest.mark.processes
@pytest.mark.parametrize(
    "line", [["pull", "--help"], ["pull"], ["models", "extra"], ["rm", "--help"], ["doctor", "--help"], ["serve", "-h"]]
)
def test_a_command_line_is_read_without_torch(line: list[str]) -> None:
    code = (
        "import sys; from umbel.interpreter.cli import main\n"
        "try: main(sys.argv[1:])\n"
        "except SystemExit: pass\n"
        "print([name for name in ('torch', 'transformers') if name in sys.modules])"
    )
    ran = subprocess.run([sys.executable, "-c", code, *line], capture_output=True, text=True, timeout=60, check=True)
    assert ran.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize("name", ["serve", "deploy"])
def test_a_usage_that_is_written_by_hand_fits_80_columns(name: str) -> None:
    pytest.importorskip("httptools", reason="the extra umbel[server] is not installed")
    assert len(f"usage: {COMMANDS[name].parser().usage}") <= 80


@pytest.mark.parametrize("name", LIGHT)
def test_a_page_has_usage_text_and_examples_before_the_arguments(
    name: str, columns: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([name, "--help"]) == 0
    page = capsys.readouterr().out
    assert page.startswith(f"usage: umbel {name}")
    assert page.index("examples:\n") < page.index("\noptions:\n")
    examples = {line for line, _ in COMMANDS[name].examples}
    assert all(line in page for line in examples)
    too_wide = [line for line in page.splitlines() if len(line) > min(columns, 100) and " " in line.strip()]
    assert [line for line in too_wide if line.split("#")[0].strip() not in examples] == []


def test_help_of_a_command_is_reached_both_ways(capsys: pytest.CaptureFixture[str]) -> None:
    main(["help", "view"])
    first = capsys.readouterr().out
    main(["view", "-h"])
    assert first == capsys.readouterr().out


def test_help_after_two_hyphens_is_for_the_file(capsys: pytest.CaptureFixture[str], tmp_path: object) -> None:
    assert main(["run", "nothing.py", "--", "--help"]) == 1
    assert "'nothing.py' is not a file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("lnit", "did you mean lint?"),
        ("generate", "umbel --help lists the commands"),
        ("download", "did you mean pull?"),
        ("init", "did you mean new?"),
        ("ls", "did you mean models?"),
        ("judge.py", "write: umbel run judge.py"),
        ("--model", "options follow a command: umbel COMMAND --model"),
    ],
)
def test_a_word_that_is_no_command_is_answered_with_what_is_meant(
    word: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([word]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"umbel: there is no command {word!r}; ")
    assert says in error


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["chat", "--max-new-tokens", "3"], "did you mean --max-tokens?"),
        (["view", "run.jsonl", "--outptu", "x"], "did you mean --output?"),
        (["lint", "x.py", "--zzz"], "umbel lint --help lists the options"),
    ],
)
def test_an_option_that_there_is_not_is_answered_with_what_is_meant(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert says in capsys.readouterr().err


def test_meant_names_are_commands() -> None:
    assert set(help_module.MEANT.values()) <= COMMANDS.keys()
    assert not help_module.MEANT.keys() & COMMANDS.keys()


class Terminal:
    def __init__(self, is_terminal: bool) -> None:
        self._is_terminal = is_terminal

    def isatty(self) -> bool:
        return self._is_terminal


@pytest.mark.parametrize(
    ("is_terminal", "variables", "coloured"),
    [
        (True, {}, True),
        (False, {}, False),
        (True, {"NO_COLOR": "1"}, False),
        (True, {"TERM": "dumb"}, False),
    ],
)
def test_colours_are_for_terminals_that_want_them(
    is_terminal: bool, variables: dict[str, str], coloured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "stdout", Terminal(is_terminal))
    assert ("\033[" in page_of(COMMANDS["view"])) == coloured
    plain = re.sub(r"\033\[\d+m", "", page_of(COMMANDS["view"]))
    monkeypatch.setattr(sys, "stdout", Terminal(False))
    assert plain == page_of(COMMANDS["view"])


def test_examples_stand_below_their_note_where_there_is_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    assert "  # a schema, drawn\n  umbel fsm schema.json --svg schema.svg" in _examples(COMMANDS["fsm"])
    monkeypatch.setenv("COLUMNS", "80")
    assert "  umbel fsm schema.json --svg schema.svg  # a schema, drawn" in _examples(COMMANDS["fsm"])
    assert HelpFormatter("umbel")._width == 80
