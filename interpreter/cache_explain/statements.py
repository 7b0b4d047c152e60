"""Finds the statement that produced a text, and the expression that produced a given character of it.

    s += f"Today is {datetime.now()}.\\n" + question          "Today is 2026-01-05 …\\n"
            const     hole             const  hole                      ^ datetime.now()

The statement's constants are located in the text; the text between them is values. Nothing is evaluated.
"""

import ast
import linecache
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

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


@dataclass(frozen=True, slots=True)
class Texts:
    """The texts that a statement may append, each as its items in order."""

    file: str
    runs: tuple[list[Item], ...]

    def values_in(self, text: str, known: Mapping[str, str]) -> list[Value] | None:
        """Finds all values in one piece that the statement appended; what is between them is constant. None unless one
        division of the text alone is possible, so it is never guessed.

        Args:
            known: expressions whose text is known, such as the names of arguments.
        """
        best = -1
        found: list[Value] | None = None
        for items in self.runs:
            sure = sum(len(item) for item in items if isinstance(item, str))
            if sure < best:
                continue
            values = _only_division(self.file, items, text, known)
            if values is None:
                continue
            found = values if sure > best or values == found else None
            best = sure
        return found


def texts_of(place: Place) -> Texts | None:
    """Reads the statement at a place; None without its source."""
    statement = _statement(place.file, place.number)
    if statement is None:
        return None
    return Texts(place.file, tuple(run for run in _runs(statement, bare=True) if run))


@dataclass(slots=True)
class _Group:
    """Constants and known values that follow each other, and the values after them, up to the next constant."""

    pieces: list[tuple[str, str]]  # text, and the expression of a known value
    holes: list[ast.expr]

    @property
    def text(self) -> str:
        return "".join(text for text, _ in self.pieces)


def _only_division(file: str, items: list[Item], text: str, known: Mapping[str, str]) -> list[Value] | None:
    """Divides a text into constants and values; None where it cannot, or can in several ways.

    Every constant is looked for from the left and from the right: the division is the only one if both find it at the
    same place.
    """
    groups = _groups(file, items, known)
    first, last = groups[0], groups[-1]
    if first.pieces and not text.startswith(first.text):  # a chat template may have stripped white space at the ends
        first.pieces[0] = (first.pieces[0][0].lstrip(), first.pieces[0][1])
    if last.pieces and not last.holes and not text.endswith(last.text):
        last.pieces[-1] = (last.pieces[-1][0].rstrip(), last.pieces[-1][1])
    starts = _from_the_left(groups, text)
    if starts is None or starts != _from_the_right(groups, text):
        return None
    values: list[Value] = []
    for group, start, following in zip(groups, starts, [*starts[1:], len(text)], strict=True):
        place = start
        for piece, expression in group.pieces:
            if expression:
                values.append(Value(expression, place, place + len(piece)))
            place += len(piece)
        if group.holes:
            values.append(_value(file, group.holes, place, following))
    return values


def _groups(file: str, items: list[Item], known: Mapping[str, str]) -> list[_Group]:
    groups = [_Group([], [])]
    for item in items:
        name = "" if isinstance(item, str) else " ".join(_source(file, item).split())
        value = item if isinstance(item, str) else known.get(name)
        if value is None:
            assert not isinstance(item, str), "constant text is its own value"
            groups[-1].holes.append(item)
            continue
        if groups[-1].holes:
            groups.append(_Group([], []))
        groups[-1].pieces.append((value, name))
    return groups


def _from_the_left(groups: list[_Group], text: str) -> list[int] | None:
    """Returns where each group begins, all of them as early as can be."""
    starts = [0]
    place = len(groups[0].text)
    if not text.startswith(groups[0].text):
        return None
    for index, group in enumerate(groups[1:], 1):
        is_end = index == len(groups) - 1 and not group.holes
        found = len(text) - len(group.text) if is_end else text.find(group.text, place)
        if found < place or not text.startswith(group.text, found):
            return None
        starts.append(found)
        place = found + len(group.text)
    return starts if groups[-1].holes or place == len(text) else None


def _from_the_right(groups: list[_Group], text: str) -> list[int] | None:
    """Returns where each group begins, all of them as late as can be."""
    starts: list[int] = []
    place = len(text)
    for index in range(len(groups) - 1, 0, -1):
        group = groups[index]
        is_end = index == len(groups) - 1 and not group.holes
        found = place - len(group.text) if is_end else text.rfind(group.text, 0, place)
        if found < 0:
            return None
        starts.append(found)
        place = found
    return [0, *reversed(starts)] if place >= len(groups[0].text) else None


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


@dataclass(frozen=True, slots=True)
class _File:
    """A file of source: the lines as `linecache` has them, which reads a changed file anew into other ones, and its
    statements by the lines they are on, innermost last."""

    lines: list[str]
    rows: list[bytes]  # as positions in the tree count them
    statements: dict[int, ast.stmt]


_MOST_FILES = 16
_files: dict[str, _File] = {}


def _read(file: str) -> _File:
    """Returns a file, which is parsed once."""
    lines = linecache.getlines(file)
    kept = _files.get(file)
    if kept is not None and kept.lines is lines:
        return kept
    source = "".join(lines)
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # not Python, or changed since
        tree = ast.Module([], [])
    statements: dict[int, ast.stmt] = {}
    for node in ast.walk(tree):  # what is inside of a statement comes after it
        if isinstance(node, ast.stmt):
            for number in range(node.lineno, (node.end_lineno or node.lineno) + 1):
                if number not in statements or node.lineno >= statements[number].lineno:
                    statements[number] = node
    if len(_files) >= _MOST_FILES:
        _files.clear()
    read = _files[file] = _File(lines, source.encode("utf-8", "surrogatepass").split(b"\n"), statements)
    return read


def _statement(file: str, number: int) -> ast.stmt | None:
    """Finds the innermost statement on this line."""
    return _read(file).statements.get(number)


def _source(file: str, node: ast.expr | ast.stmt) -> str:
    """Returns the source of a node; of a block only its first line."""
    rows, body = _read(file).rows, getattr(node, "body", None)
    if isinstance(body, list) and body:
        rows = rows[node.lineno - 1 : max(node.lineno, body[0].lineno - 1)]
    elif rows := rows[node.lineno - 1 : node.end_lineno]:
        rows[-1] = rows[-1][: node.end_col_offset]
        rows[0] = rows[0][node.col_offset :]
    return b"\n".join(rows).decode("utf-8", "replace")


# ------------------------------------------------------------------------------------------ constants and values


def _runs(node: ast.AST, *, bare: bool) -> Iterator[list[Item]]:
    """Yields the texts a statement may append, each as its items in order. `bare`: also texts without a constant;
    a lone expression inside a value is no text of the prompt."""
    for child in _inside(node):
        if isinstance(child, ast.Constant) and not isinstance(child.value, str):  # such as max_tokens=8
            continue
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
