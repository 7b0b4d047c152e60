"""Finds the statement that produced a text, and the expression that produced a given character of it.

    s += f"Today is {datetime.now()}.\\n" + question          "Today is 2026-01-05 …\\n"
            const     hole             const  hole                      ^ datetime.now()

The statement's constants are located in the text; the text between them is values. Nothing is evaluated.
"""

import ast
import linecache
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache

from ...lang.prompt import Place

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
        "cache_point",
        "fork",
        "gen",
        "gen_int",
        "gen_string",
        "image",
        "private",
        "role",
        "select",
        "separate_reasoning",
        "system",
        "user",
        "video",
    ]
)


def code_at(place: Place) -> str:
    """Returns the statement on one line; "" without its source."""
    statement = _statement(place.file, place.number)
    if statement is None:
        return " ".join(linecache.getline(place.file, place.number).split())
    code = " ".join(_source(place.file, statement).split())
    return code if len(code) <= _LONGEST_CODE else code[: _LONGEST_CODE - 1] + "…"


def value_at(place: Place, text: str, offset: int) -> Value | None:
    """Finds the expression that produced `text[offset]`; None where the statement leaves it open.

    Args:
        text: one piece that the statement appended.
    """
    statement = _statement(place.file, place.number)
    if statement is None:
        return None
    texts = [run for run in _runs(statement, bare=True) if run]
    matches = _best(place.file, texts, text)
    if not matches:  # a sum may have parts that are operations and do not look it: `header() + "Q: " + question`
        stretches = (stretch for run in texts for stretch in _stretches(run))
        matches = _best(place.file, stretches, text)
    return next((value for value in matches if value.start <= offset < value.end), None)


def _best(file: str, candidates: Iterable[list[Item]], text: str) -> list[Value]:
    """Matches the candidates with a text and returns the values of the best one: most constant text, then fewest
    values. None for a tie."""
    best: tuple[int, int] | None = None
    found: list[Value] = []
    for items in candidates:
        sure = (sum(len(item) for item in items if isinstance(item, str)), -len(items))
        if best is not None and sure < best:
            continue
        values = _matched(file, items, text)
        if values is None:
            continue
        found = values if best is None or sure > best or values == found else []
        best = sure
    return found


# ------------------------------------------------------------------------------------------ source


def _statement(file: str, number: int) -> ast.stmt | None:
    """Finds the innermost statement on this line."""
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
    """Returns the source of a node; of a block only its first line."""
    lines = linecache.getlines(file)
    body = getattr(node, "body", None)
    if isinstance(body, list) and body:
        lines = lines[: max(node.lineno, body[0].lineno - 1)]
        return "".join(lines[node.lineno - 1 :])
    return ast.get_source_segment("".join(lines), node) or ""


# ------------------------------------------------------------------------------------------ constants and values


def _runs(node: ast.AST, *, bare: bool) -> Iterator[list[Item]]:
    """Yields the texts a statement may append, each as its items in order. `bare`: also texts without a constant;
    a lone expression inside a value is no text of the prompt."""
    for child in _inside(node):
        operands = list(_operands(child))
        inner: list[ast.expr] = []
        said: list[Item] = []  # up to the first operation Python joins the texts, after it each is one of its own
        joins = True
        for operand in operands:
            if _is_operation(operand):
                joins = False
                yield from _runs(operand, bare=bare)
                continue
            items = list(_items(operand))
            inner += [item for item in items if isinstance(item, ast.expr)]
            if joins:
                said += items
            elif bare or _has_constant(items):
                yield items
        if bare or _has_constant(said):
            yield said
        for value in inner:
            yield from _runs(value, bare=bare and isinstance(value, _TRANSPARENT))


def _operands(node: ast.expr) -> Iterator[ast.expr]:
    """Yields the operands of a sum, from the left."""
    chain: list[ast.expr] = []
    while isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        chain.append(node.right)
        node = node.left
    yield node
    yield from reversed(chain)


def _has_constant(items: list[Item]) -> bool:
    return any(isinstance(item, str) for item in items)


def _inside(node: ast.AST) -> Iterator[ast.expr]:
    """Yields a node's child expressions: no nested statements, assignment targets or called functions."""
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


def _stretches(run: list[Item]) -> Iterator[list[Item]]:
    """Yields the parts of a sum that have a constant."""
    for start in range(len(run) if len(run) <= _MOST_ITEMS else 0):
        for end in range(start + 1, len(run) + 1):
            if _has_constant(run[start:end]):
                yield run[start:end]


def _matched(file: str, items: list[Item], text: str) -> list[Value] | None:
    """Locates the values in the text; None if the items cannot produce it.

    A chat template may have stripped white space at the ends. Adjacent values are one.
    """
    values: list[Value] = []
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
            values.append(_value(file, holes, place, found))
            holes = []
        place = found + len(constant)
    if holes:
        values.append(_value(file, holes, place, len(text)))
        place = len(text)
    return values if place == len(text) else None


def _value(file: str, holes: list[ast.expr], start: int, end: int) -> Value:
    return Value(" + ".join(" ".join(_source(file, hole).split()) for hole in holes), start, end)
