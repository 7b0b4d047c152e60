"""The statement that said a text, and the expression in it that a character of the text is the value of.

    s += f"Today is {datetime.now()}.\\n" + question          "Today is 2026-01-05 …\\n"
            const     hole             const  hole                      ^ datetime.now()

The constants of the statement are found in the text; what stands between them are the values. Nothing is evaluated.
"""

import ast
import linecache
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from ...lang.source import Place

_LONGEST_CODE = 160  # characters that are shown
_MOST_ITEMS = 64  # of one sum; longer ones are not looked into

_TRANSPARENT = (ast.Lambda, ast.List, ast.Tuple, ast.IfExp)  # what is inside of them may be the text itself
_NO_TEXTS = ("target", "targets", "func", "optional_vars", "iter", "test")


@dataclass(frozen=True, slots=True)
class Value:
    """An expression, and the characters of the text that are its value."""

    expression: str
    start: int
    end: int


Item = str | ast.expr  # constant text, or an expression whose text is not known

# Calls of the language: what they give is no text, what they are given may be.
_OPERATIONS = frozenset(
    [
        "assistant",
        "fork",
        "gen",
        "gen_int",
        "gen_string",
        "image",
        "role",
        "select",
        "separate_reasoning",
        "system",
        "user",
        "video",
    ]
)


def code_at(place: Place) -> str:
    """The statement, on one line; "" without its source."""
    statement = _statement(place.file, place.number)
    if statement is None:
        return " ".join(linecache.getline(place.file, place.number).split())
    code = " ".join(_source(place.file, statement).split())
    return code if len(code) <= _LONGEST_CODE else code[: _LONGEST_CODE - 1] + "…"


def value_at(place: Place, text: str, offset: int) -> Value | None:
    """The expression that `text[offset]` comes from; None where the statement does not tell.

    Args:
        text: one piece that the statement appended.
    """
    statement = _statement(place.file, place.number)
    if statement is None:
        return None
    best: tuple[tuple[int, int], list[tuple[Value, ast.expr]]] | None = None
    unsure = False
    for run in _runs(statement, bare=True):
        for items in _slices(run):
            matched = _matched(place.file, items, text)
            if matched is None:
                continue
            # The more of the text is constant and the fewer values it takes, the surer it is.
            known = (sum(len(item) for item in items if isinstance(item, str)), -len(items))
            if best is None or known > best[0]:
                best, unsure = (known, matched), False
            elif known == best[0] and {id(node) for _, node in matched} != {id(node) for _, node in best[1]}:
                unsure = True
    if best is None or unsure:
        return None
    return next((value for value, _ in best[1] if value.start <= offset < value.end), None)


# ------------------------------------------------------------------------------------------ source


def _statement(file: str, number: int) -> ast.stmt | None:
    """The innermost statement on this line."""
    lines = linecache.getlines(file)
    tree = _tree("".join(lines)) if lines else None
    found: ast.stmt | None = None
    for node in ast.walk(tree) if tree is not None else ():
        inside = isinstance(node, ast.stmt) and node.lineno <= number <= (node.end_lineno or node.lineno)
        if inside and (found is None or node.lineno >= found.lineno):  # type: ignore[attr-defined]  # it is a statement
            found = node  # type: ignore[assignment]
    return found


@lru_cache(maxsize=16)
def _tree(source: str) -> ast.Module | None:
    try:
        return ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # not Python, or changed since
        return None


def _source(file: str, node: ast.expr | ast.stmt) -> str:
    """What is written. Of a block only its first line: what it holds is said elsewhere."""
    lines = linecache.getlines(file)
    body = getattr(node, "body", None)
    if isinstance(body, list) and body:
        lines = lines[: max(node.lineno, body[0].lineno - 1)]
        return "".join(lines[node.lineno - 1 :])
    return ast.get_source_segment("".join(lines), node) or ""


# ------------------------------------------------------------------------------------------ constants and values


def _runs(node: ast.AST, *, bare: bool) -> Iterator[list[Item]]:
    """Sums of texts in a statement: each as its items in order. `bare`: also those without a constant. Inside of a
    value a lone expression is no text of the prompt."""
    for child in _inside(node):
        run: list[Item] = []
        values: list[ast.expr] = []
        operations: list[ast.expr] = []
        for item in _items(child):
            if isinstance(item, ast.expr) and _is_operation(item):
                operations.append(item)
                yield run
                run = []
                continue
            run.append(item)
            if isinstance(item, ast.expr):
                values.append(item)
        yield run if bare or any(isinstance(item, str) for item in run) else []
        for operation in operations:
            yield from _runs(operation, bare=bare)
        for value in values:
            yield from _runs(value, bare=bare and isinstance(value, _TRANSPARENT))


def _inside(node: ast.AST) -> Iterator[ast.expr]:
    """Expressions that a node is made of: no statements inside of it, no targets, no functions that are called."""
    for name, field in ast.iter_fields(node):
        for member in field if isinstance(field, list) else [field]:
            if isinstance(member, ast.keyword | ast.withitem):
                yield from _inside(member)
            elif isinstance(member, ast.expr) and name not in _NO_TEXTS:
                yield member


def _is_operation(node: ast.expr) -> bool:
    if not isinstance(node, ast.Call):
        return False
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    return name in _OPERATIONS


def _items(node: ast.expr) -> Iterator[Item]:
    match node:
        case ast.Constant(value=str(text)):
            yield text
        case ast.JoinedStr(values=values):
            for value in values:
                if isinstance(value, ast.FormattedValue):
                    yield value.value
                else:
                    yield from _items(value)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            yield from _items(left)
            yield from _items(right)
        case _:
            yield node


def _slices(run: list[Item]) -> Iterator[list[Item]]:
    """A text may be any stretch of a sum: `gen(...)` in it ends one and begins another."""
    for start in range(len(run) if len(run) <= _MOST_ITEMS else 0):
        for end in range(start + 1, len(run) + 1):
            yield run[start:end]


def _matched(file: str, items: list[Item], text: str) -> list[tuple[Value, ast.expr]] | None:
    """Where the values stand in the text; None where it cannot be these items.

    A chat template may have cut white space at the ends off. Values side by side are one.
    """
    values: list[tuple[Value, ast.expr]] = []
    place = 0
    holes: list[ast.expr] = []
    last = len(items) - 1
    for index, item in enumerate(items):
        if not isinstance(item, str):
            holes.append(item)
            continue
        constant = item.lstrip() if index == 0 and not text.startswith(item) else item
        if index == last and not text.endswith(constant):
            constant = constant.rstrip()
        if not holes:
            found = place if text.startswith(constant, place) else -1
        elif index == last:
            found = len(text) - len(constant) if text.endswith(constant) else -1
        else:
            found = text.find(constant, place)
        if found < place:
            return None
        if holes:
            values.append((_value(file, holes, place, found), holes[0]))
            holes = []
        place = found + len(constant)
    if holes:
        values.append((_value(file, holes, place, len(text)), holes[0]))
        place = len(text)
    return values if place == len(text) else None


def _value(file: str, holes: list[ast.expr], start: int, end: int) -> Value:
    return Value(" + ".join(" ".join(_source(file, hole).split()) for hole in holes), start, end)
