"""Finds looks that no symbol sees: at the kind of a value, and by code in C that reads its characters.

hint is None                 in the source: a symbol is never None, whatever the argument will be
isinstance(docs, list)       in the source: a symbol is a str
match answer: ...            in the source: patterns ask for types
answer in "yes, no"          in the source: C code looks for the characters
re.search(r"[0-9]+", text)   by the profile hook: C code reads the characters
" one".startswith(answer)    by the profile hook, and `texts.py`
"""

import ast
import inspect
import textwrap
import tokenize
from collections.abc import Callable, Collection, Iterator
from types import FrameType
from typing import Any

from ..graph import Line
from ..operations import Argument
from .lines import is_ours
from .symbols import Opaque, Symbol
from .tape import Tape
from .texts import TextLooks

# Modules whose functions look at text through C, or at what it is of.
_LOOKING_MODULES = frozenset({"ast", "difflib", "json", "re"})
_ASKING = frozenset({"callable", "isinstance", "type"})
_FORMATTING = frozenset(
    method.__code__ for method in (Symbol.__format__, Symbol.__str__, Opaque.__format__, Opaque.__str__)
)
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


def check_source(
    tape: Tape, function: Callable[..., Any], state: int, symbols: Collection[str], unknown: Collection[str]
) -> None:
    """Raises TraceError for a function that looks at arguments or variables where no symbol sees it.

    Args:
        state: the place of the parameter for the state.
        symbols: names of the arguments that are symbols. One that the function has set before the look is another.
        unknown: those among them that may be of any type.
    """
    tree, first = _source(function)
    if tree is None:
        return
    file = inspect.getfile(inspect.unwrap(function))
    stored = _first_stores(tree)
    for name, how, number in _looks(tree, frozenset(unknown)):
        if stored.get(name, number) >= number:
            line = Line(file, first + number - 1, function.__name__)
            node = tape.builder.node(Argument(name))
            raise tape.unknown(line, node, f"{how} asks what argument {name!r} is, and a symbol is a str")
    parameters = [*tree.args.posonlyargs, *tree.args.args]
    states = [parameter.arg for parameter in parameters[state : state + 1]]  # none where a decorator hides it
    searched = _Searched(function, "".join(states), frozenset(symbols))
    for value, number in searched.looks(tree):
        name = value.id if isinstance(value, ast.Name) else ""
        if stored.get(name, number) >= number:
            line = Line(file, first + number - 1, function.__name__)
            raise tape.unknown(
                line,
                tape.builder.node(Argument(name)) if name else None,
                f"in asks whether {ast.unparse(value)} is part of a text, and no symbol sees that",
            )


class _Searched:
    """`value in text`, where the value is a symbol and the text is one that is known.

    Args:
        state: the name of the state.
        symbols: names of arguments.
    """

    def __init__(self, function: Callable[..., Any], state: str, symbols: frozenset[str]) -> None:
        known = inspect.getclosurevars(inspect.unwrap(function))
        self._known = {**known.globals, **known.nonlocals}
        self._state = state
        self._symbols = symbols

    def looks(self, tree: ast.AST) -> Iterator[tuple[ast.expr, int]]:
        for node in ast.walk(tree):
            match node:
                case ast.Compare(left=value, ops=[ast.In() | ast.NotIn()], comparators=[text]):
                    if self._is_symbol(value) and self._is_text(text):
                        yield value, node.lineno

    def _is_symbol(self, value: ast.expr) -> bool:
        match value:
            case ast.Name(id=name):
                return name in self._symbols
            case ast.Subscript(value=ast.Name(id=name)) | ast.Await(value=ast.Subscript(value=ast.Name(id=name))):
                return name == self._state
            case _:
                return False

    def _is_text(self, text: ast.expr) -> bool:
        match text:
            case ast.Constant(value=str()) | ast.JoinedStr():
                return True
            case ast.Name(id=name):
                return isinstance(self._known.get(name), str)
            case _:
                return False


def check_call(tape: Tape, texts: TextLooks, frame: FrameType) -> None:
    """Raises TraceError when a function of `_LOOKING_MODULES` has just been called with a symbol, or a symbol is put
    into a text that is compared."""
    if frame.f_code in _FORMATTING and frame.f_back is not None:
        texts.check_formatted(frame.f_back, frame.f_locals["self"])
    if frame.f_globals.get("__name__") in _LOOKING_MODULES and frame.f_back is not None and not is_ours(frame.f_back):
        for value in tuple(frame.f_locals.values()):
            node = tape.inside(value)
            if node is not None:
                tape.looked_at(node, f"{frame.f_globals['__name__']}.{frame.f_code.co_name}()")


def _source(function: Callable[..., Any]) -> tuple[ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | None, int]:
    """Returns the function's tree and its first line; no tree where there is no source to read."""
    try:
        lines, first = inspect.getsourcelines(function)
        tree = ast.parse(textwrap.dedent("".join(lines)))
    except (OSError, TypeError, SyntaxError, tokenize.TokenError):  # the last from Python 3.12 on, for foreign text
        return None, 0
    functions = (node for node in ast.walk(tree) if isinstance(node, _FUNCTIONS))
    return next(functions, None), first


def _first_stores(tree: ast.AST) -> dict[str, int]:
    """Maps names to the first line that sets them."""
    lines: dict[str, int] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            lines[node.id] = min(node.lineno, lines.get(node.id, node.lineno))
    return lines


def _looks(function: ast.AST, unknown: frozenset[str]) -> Iterator[tuple[str, str, int]]:
    """Returns names whose kind is asked for, how, and the line, counted from 1. A function inside has parameters of its
    own."""
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
