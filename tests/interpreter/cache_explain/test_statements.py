"""From a character of a text to the expression that it is the value of."""

import ast
import linecache
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
from umbel.interpreter.cache_explain import statements
from umbel.interpreter.cache_explain.statements import code_at, value_at

FILE = str(Path(__file__).parent / "sample.py")


@dataclass(frozen=True)
class Line:
    number: int
    file: str = FILE
    function: str = "program"


def called(name: str) -> Line:
    """The line with this name in its comment."""
    lines = Path(FILE).read_text().splitlines()
    return Line(next(number for number, line in enumerate(lines, 1) if line.endswith(f"# {name}")))


@pytest.mark.parametrize(
    ("name", "text", "marked", "expression"),
    [
        ("sum", "It is 12:30.\nWhy?", "12:30", "now()"),
        ("sum", "It is 12:30.\nWhy?", "Why", "question"),
        ("role", "Q: Why?\nA:", "Why", "question"),
        ("name", "Why?", "y", "question"),
        ("role of a name", "Why?", "W", "question"),
        ("call", "item 7\n", "7", "str(items[0])"),
        ("lines", "several lines of Why? and [1]", "1", "items"),
        ("lines", "several lines of Why? and [1]", "Why", "question"),
        ("method", "As a method: Why?", "Why", "question"),
        ("inside", "Inside: 5!", "5", "items[1]"),
        ("looped", "apple, ", "apple", "item"),
        ("lambda", "Branch 1: ", "1", "index"),
        ("list", "<Why?>", "W", "question"),
        ("conditional", "no bread", "bread", "items[2]"),
        ("conditional", "yes Why?", "Why", "question"),
        ("side by side", "Why?[1]", "[", "question + items"),
        ("counted", "[1]Why?", "W", "items + question"),
    ],
)
def test_a_value_is_found_between_the_constants(name: str, text: str, marked: str, expression: str) -> None:
    value = value_at(called(name), text, text.index(marked))
    assert value is not None
    assert value.expression == expression
    assert value.start <= text.index(marked) < value.end


@pytest.mark.parametrize(
    ("name", "text", "offset"),
    [
        ("sum", "It is 12:30.\nWhy?", 0),  # a constant is no value
        ("constant", "nothing but a constant", 3),
        ("constant", "another text", 3),
        ("role", "not what the statement says", 3),
    ],
)
def test_what_is_no_value_has_no_expression(name: str, text: str, offset: int) -> None:
    assert value_at(called(name), text, offset) is None


def test_white_space_that_a_template_cut_off_hides_no_value() -> None:
    value = value_at(called("call"), "item 7", 5)
    assert value is not None
    assert value.expression == "str(items[0])"


def test_a_statement_is_shown_on_one_line() -> None:
    assert code_at(called("name")) == "s += question"
    assert code_at(called("lines")).startswith('s += ( "several lines "')
    assert code_at(called("block")) == "with s.copy() as branch: # block"
    assert len(code_at(called("sum"))) <= 160


def test_a_file_that_is_gone_shows_nothing() -> None:
    gone = Line(3, file="/nowhere/at/all.py")
    assert code_at(gone) == ""
    assert value_at(gone, "text", 0) is None
    assert value_at(Line(10_000), "text", 0) is None


def test_a_file_that_is_no_python_shows_its_line(tmp_path: Path) -> None:
    broken = tmp_path / "broken.py"
    broken.write_text("def (:\n  s  +=  x\n")
    assert code_at(Line(2, file=str(broken))) == "s += x"
    assert value_at(Line(2, file=str(broken)), "text", 0) is None


def test_sources_are_those_that_ast_gives() -> None:
    for file in (FILE, __file__):
        text = Path(file).read_text()
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.expr) or (isinstance(node, ast.stmt) and not getattr(node, "body", None)):
                assert statements._source(file, node) == ast.get_source_segment(text, node)


def test_a_file_is_parsed_once_and_again_when_it_has_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parsed: list[str] = []

    def parse(source: str) -> ast.Module:
        parsed.append(source)
        return ast.parse(source)

    monkeypatch.setattr(statements, "ast", SimpleNamespace(**{**vars(ast), "parse": parse}))
    file = tmp_path / "changing.py"
    for text in ("s += 'é' + name\n", "s += 'é' + other_name\n"):
        file.write_text(text)
        linecache.checkcache(str(file))
        for _ in range(3):
            assert code_at(Line(1, str(file))) == text.strip()
            value = value_at(Line(1, str(file)), "éBob", 2)
            assert value is not None
            assert value.expression == text.split(" + ")[1].strip()
    assert len(parsed) == 2
