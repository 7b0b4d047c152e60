"""The documentation is true: its code runs, the files it names exist."""

import contextlib
import io
import itertools
import os
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import umbel as ul
from umbel.interpreter.cli import COMMANDS, main

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]


# Blocks of `python` run, blocks of `py` are only shown: code of other libraries, and what needs a model that is not
# here. A block whose title is the name of a file is written to it, too. A block of text titled "Output", right after
# one that ran, is what it has printed; a line `...` there stands for anything.
BLOCK = re.compile(
    r"```python(?: title=\"(?P<file>[^\"]+)\")?\n(?P<code>.*?)```(?:\s+```text title=\"Output\"\n(?P<output>.*?)```)?",
    re.DOTALL,
)


@pytest.fixture
def default_backend() -> Iterator[None]:
    """Runs that name no backend go to Echo, until the page sets another default."""
    ul.set_default_backend(ul.Echo())
    yield
    ul.set_default_backend(None)


@pytest.mark.usefixtures("default_backend")
@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_code_blocks_run(
    page: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # for the files that they write
    monkeypatch.syspath_prepend(tmp_path)  # for the files that they are
    blocks = list(BLOCK.finditer(page.read_text(encoding="utf-8")))
    names = {"__name__": "documentation"}  # a block may use what an earlier one of its page has made
    printed = ""
    for block in blocks:
        if "." in (block["file"] or ""):
            (tmp_path / block["file"]).write_text(block["code"], encoding="utf-8")
        exec(compile(block["code"], str(page), "exec"), names)
        out = capsys.readouterr().out
        printed += out
        if block["output"] is not None:
            lines = block["output"].rstrip().splitlines()
            pattern = "".join(r"(?:.*\n)*?" if line == "..." else re.escape(line) + r"\n" for line in lines)
            assert re.fullmatch(pattern, out.rstrip() + "\n"), out
    assert bool(blocks) == bool(printed)


@pytest.mark.parametrize("page", PAGES[2:], ids=NAMES[2:])
def test_prose_has_lines_of_at_most_120_characters(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert [line for line in text.splitlines() if len(line) > 120 and not line.lstrip().startswith(("|", "["))] == []


# Of the site at 1280 pixels: longer lines would need sideways scrolling. Outputs wrap.
CODE_LINE = 112


@pytest.mark.parametrize("page", PAGES[2:], ids=NAMES[2:])
def test_lines_of_code_fit_the_site(page: Path) -> None:
    text = re.sub(r"```text title=\"Output\"\n.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    fenced = re.findall(r"^ *```\w*[^\n]*\n(.*?)^ *```$", text, re.DOTALL | re.MULTILINE)
    indented = re.findall(r"^ {4}(.*)$", re.sub(r"```.*?```", "", text, flags=re.DOTALL), re.MULTILINE)
    lines = [line for block in fenced for line in block.splitlines()] + indented
    assert [line for line in lines if len(line) > CODE_LINE] == []


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_tables_end_with_an_empty_line(page: Path) -> None:
    """Otherwise the site shows all that follows as rows of the table."""
    lines = [line.strip() for line in page.read_text(encoding="utf-8").splitlines()]
    follows = [after for line, after in itertools.pairwise(lines) if line.startswith("|") and after]
    assert [line for line in follows if not line.startswith("|")] == []


@cache
def files() -> frozenset[str]:
    """Returns the paths in the repository. Walking through an environment as well would take a second a page."""
    found = set()
    for folder, folders, names in os.walk(ROOT):
        folders[:] = [name for name in folders if name not in (".git", ".venv")]
        found.update(str((Path(folder) / name).relative_to(ROOT)) for name in names)
    return frozenset(found)


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_files_that_are_named_exist(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    links = re.findall(r"\]\((?!http)([^)#]+)\)", text)
    missing = [link for link in links if not (page.parent / link).exists()]
    named = re.findall(r"`((?:[\w]+/)*[\w]+\.(?:py|md|toml))`", text)
    missing += [name for name in named if not any(path == name or path.endswith("/" + name) for path in files())]
    assert missing == []


@pytest.mark.nightly  # seven seconds: the parsers of some commands import all of the runtime
@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_commands_have_the_options_that_are_shown(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    lines = re.findall(r"^( {4}|\$ |)(?:[A-Z_]+=\S+ )*umbel ([a-z]+)(?![a-z:])(.*)$", text, re.MULTILINE)
    wrong = [command for shown, command, _ in lines if shown and command not in COMMANDS]
    for _, command, rest in lines:
        options = re.findall(r"--[a-z][a-z-]*", re.split("#| -- ", rest)[0]) if command in COMMANDS else []
        wrong += [f"umbel {command} {option}" for option in options if not has(command, option)]
    assert wrong == []


@cache
def help_of(command: str) -> str:
    """Returns what `umbel COMMAND --help` prints."""
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.suppress(SystemExit):
        main([command, "--help"])
    return out.getvalue()


def has(command: str, option: str) -> bool:
    """Says whether a command has an option, such as `--model`."""
    return re.search(rf"{option}(?![a-z-])", help_of(command)) is not None


def test_the_readme_gives_the_two_commands() -> None:
    text = (ROOT / "README.md").read_text()
    assert "    make demo " in text
    assert "    make test " in text
