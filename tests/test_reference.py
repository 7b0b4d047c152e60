"""The reference is whole: each public name says what its arguments are, and has an example that runs."""

import ast
import doctest
import enum
import importlib
import inspect
import itertools
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import umbel as ul
import umbel.testing

PUBLIC = {name: getattr(ul, name) for name in sorted(set(ul.__all__) - {"__version__"})} | {
    f"testing.{name}": getattr(umbel.testing, name) for name in sorted(umbel.testing.__all__)
}
NEED_A_MODEL = {"Runtime", "embed", "embed_async", "rerank", "rerank_async"}
CLASSES = sorted(name for name, value in PUBLIC.items() if inspect.isclass(value))


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)  # for the files that examples write
    ul.set_default_backend(ul.Echo())
    yield
    ul.set_default_backend(None)


@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.model] * (name in NEED_A_MODEL)) for name in PUBLIC]
)
def test_its_example_runs(name: str) -> None:
    """An example has `ul` and an Echo as the default backend."""
    finder = doctest.DocTestFinder(recurse=False, exclude_empty=False)
    value = PUBLIC[name]
    words = SimpleNamespace(__doc__=words_of_constant(name)) if isinstance(value, str) else value
    (test,) = finder.find(words, name, module=False, globs={"ul": ul})
    assert test.examples, f"the docstring of ul.{name} has no example"
    printed: list[str] = []
    doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(test, out=printed.append)
    assert printed == [], "".join(printed)


@pytest.mark.parametrize("name", PUBLIC)
def test_its_arguments_are_described(name: str) -> None:
    value = PUBLIC[name]
    if not callable(value) or (inspect.isclass(value) and issubclass(value, BaseException | enum.Enum)):
        return
    assert missing(value, inspect.getdoc(value) or "") == []


@pytest.mark.parametrize("name", CLASSES)
def test_its_methods_are_described(name: str) -> None:
    """By itself or the method that it overrides; an argument that several methods have by the class, too."""
    found = []
    of_all = inspect.getdoc(PUBLIC[name]) or ""
    for method, value in inspect.getmembers(PUBLIC[name]):
        if method.startswith("_") or not (inspect.isroutine(value) or isinstance(value, property)):
            continue
        home = getattr(value, "__module__", None) or getattr(
            getattr(value, "__objclass__", None), "__module__", "umbel"
        )
        if not home.startswith("umbel"):
            continue  # of a class of the standard library
        found += [] if inspect.getdoc(value) else [method]
        if inspect.isroutine(value):
            found += [f"{method}({argument})" for argument in missing(value, f"{inspect.getdoc(value)} {of_all}")]
    assert found == []


def words_of_constant(name: str) -> str:
    """Returns the text after the assignment of a constant, which is its docstring on the page."""
    module = importlib.import_module(f"umbel.{ul._MODULE_OF[name]}")
    for line, following in itertools.pairwise(ast.parse(inspect.getsource(module)).body):
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name) and line.target.id == name:
            match following:
                case ast.Expr(ast.Constant(str(text))):
                    return inspect.cleandoc(text)
    return ""


def missing(value: Any, text: str) -> list[str]:
    """Returns the arguments that the text does not name."""
    try:
        arguments = inspect.signature(value).parameters.values()
    except ValueError:  # of a class that takes what its base takes
        return []
    kinds = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    names = [each.name for each in arguments if each.kind not in kinds and each.name not in ("self", "cls")]
    words = set("".join(char if char.isalnum() or char == "_" else " " for char in text).split())
    return [each for each in names if not each.startswith("_") and each not in words]


@pytest.mark.parametrize(
    "name", [name for name in CLASSES if issubclass(PUBLIC[name], BaseException) and not name.startswith("testing.")]
)
def test_tracebacks_name_an_error_as_a_program_that_catches_it(name: str) -> None:
    assert f"{PUBLIC[name].__module__}.{PUBLIC[name].__qualname__}" == f"umbel.{name}"
