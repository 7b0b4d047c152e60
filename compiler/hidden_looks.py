"""Looks at a value that the value itself does not see, found in other ways.

hint is None                 in the source: a symbol is never None, whatever the argument will be
isinstance(docs, list)       in the source: a symbol is a str
match answer: ...            in the source: patterns ask for types
re.search(r"[0-9]+", text)   by the profile hook: C code reads the characters
"""

import ast
import inspect
import textwrap
from collections.abc import Callable, Collection, Iterator
from types import FrameType
from typing import Any

from .graph import Line
from .lines import is_ours
from .operations import Argument
from .tape import Tape

# Modules whose functions look at text through C, or at what it is of.
_LOOKING_MODULES = frozenset({"ast", "difflib", "json", "re"})
_ASKING = frozenset({"callable", "isinstance", "type"})
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


def check_source(tape: Tape, function: Callable[..., Any], unknown: Collection[str]) -> None:
    """Raises TraceError for a function that asks of which kind an argument is that is not known.

    Args:
        unknown: names of these arguments. One that the function has set by then is another.
    """
    if not unknown:
        return
    tree, first = _source(function)
    if tree is None:
        return
    stored = _first_stores(tree)
    for name, how, number in _looks(tree, frozenset(unknown)):
        if stored.get(name, number) >= number:
            line = Line(inspect.getfile(inspect.unwrap(function)), first + number - 1, function.__name__)
            node = tape.builder.node(Argument(name))
            raise tape.unknown(line, node, f"{how} asks what argument {name!r} is, and a symbol is a str")


def check_call(tape: Tape, frame: FrameType) -> None:
    """Raises TraceError when a function of `_LOOKING_MODULES` has just been called with a symbol."""
    if frame.f_globals.get("__name__") in _LOOKING_MODULES and frame.f_back is not None and not is_ours(frame.f_back):
        for value in tuple(frame.f_locals.values()):
            node = tape.inside(value)
            if node is not None:
                tape.looked_at(node, f"{frame.f_globals['__name__']}.{frame.f_code.co_name}()")


def _source(function: Callable[..., Any]) -> tuple[ast.AST | None, int]:
    """The function's tree and its first line; no tree where there is no source to read."""
    try:
        lines, first = inspect.getsourcelines(function)
        tree = ast.parse(textwrap.dedent("".join(lines)))
    except (OSError, TypeError, SyntaxError):
        return None, 0
    functions = (node for node in ast.walk(tree) if isinstance(node, _FUNCTIONS))
    return next(functions, None), first


def _first_stores(tree: ast.AST) -> dict[str, int]:
    """Name → the first line that sets it."""
    lines: dict[str, int] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            lines[node.id] = min(node.lineno, lines.get(node.id, node.lineno))
    return lines


def _looks(function: ast.AST, unknown: frozenset[str]) -> Iterator[tuple[str, str, int]]:
    """Names whose kind is asked for, how, and the line, counted from 1. A function inside has parameters of its own."""
    waiting = [(child, unknown) for child in ast.iter_child_nodes(function)]
    while waiting:
        node, names = waiting.pop()
        if isinstance(node, _FUNCTIONS):
            names -= {argument.arg for argument in ast.walk(node.args) if isinstance(argument, ast.arg)}
        waiting.extend((child, names) for child in ast.iter_child_nodes(node))
        match node:
            case ast.Compare(left=ast.Name(id=name), ops=[ast.Is() | ast.IsNot() as way]) if name in names:
                yield name, "is not" if isinstance(way, ast.IsNot) else "is", node.lineno
            case ast.Call(func=ast.Name(id=asked), args=[ast.Name(id=name), *_]) if asked in _ASKING and name in names:
                yield name, f"{asked}()", node.lineno
            case ast.Match(subject=ast.Name(id=name)) if name in names:
                yield name, "match", node.lineno
