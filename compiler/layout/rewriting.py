"""A proposal as an edit of the file: whole `s +=` lines move where that is enough, else the expression is written anew.

There is an edit only where it is certain what to write: the file is read again with it, and has to say what was
proposed.
"""

import ast
import itertools
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from .marked import Marked
from .patches import Edit, Offsets, Patch, edited
from .runs import Aligned, Container, Run, Source, aligned
from .source import SourceFile, SourceProgram


@dataclass(frozen=True, slots=True)
class _Span:
    """What a container says: `text[start:end]` in marks."""

    container: Container
    start: int
    end: int


def patch_for(file: SourceFile, program: SourceProgram, run: Run, marked: Marked, new_text: str) -> Patch | None:
    """The edit after which `run` says `new_text`; None where there is none that is certain."""
    parts = aligned(run, marked)
    if parts is None:
        return None
    spans, changed = _changed(_spans(parts), marked.text, new_text)
    inner = [part for part in parts if spans and spans[0].start <= part.start and part.end <= spans[-1].end]
    content = _content(inner, marked, changed)
    if not spans or content is None:
        return None
    offsets = Offsets(file.text)
    if len(spans) == 1:
        edits = _one_expression(file, spans[0].container, content, offsets)
    else:
        edits = _moved_lines(file, spans, marked, changed, offsets) or _new_statement(file, spans, content, offsets)
    if edits is None or not _says(file, program, edits, parts, Marked(new_text, marked.holes)):
        return None
    return edits


def _spans(parts: Iterable[Aligned]) -> list[_Span]:
    spans: list[_Span] = []
    for part in parts:
        if spans and spans[-1].container is part.source.container:
            spans[-1] = _Span(spans[-1].container, spans[-1].start, part.end)
        else:
            spans.append(_Span(part.source.container, part.start, part.end))
    return spans


def _changed(spans: list[_Span], old: str, new: str) -> tuple[list[_Span], str]:
    """Without the expressions at both ends that stay as they are, and their text."""
    first, last, begin, end = 0, len(spans), 0, len(new)
    while first < last and new.startswith(old[spans[first].start : spans[first].end], begin):
        begin += spans[first].end - spans[first].start
        first += 1
    while first < last and new[begin:end].endswith(old[spans[last - 1].start : spans[last - 1].end]):
        end -= spans[last - 1].end - spans[last - 1].start
        last -= 1
    return spans[first:last], new[begin:end]


# --------------------------------------------------------------------------------- what to write

_Item = str | Source  # words, or an expression
_WORDS = re.compile(r"\n+|[^\S\n]*[^\s]+[^\S\n]*\n*|[^\S\n]+\n*")  # with the white space behind them
_WIDTH = 105  # characters of a literal


def _content(parts: Sequence[Aligned], marked: Marked, new: str) -> list[_Item] | None:
    """The new text as words and expressions; None where an expression's constant text was cut or cannot be found."""
    by_mark: dict[str, Source] = {}
    named: list[tuple[int, int, Source]] = []  # expressions that gave constant text: their places in `new`
    for part in parts:
        said = marked.text[part.start : part.end]
        if part.source.text is not None or not said:
            continue
        if said in marked.holes:
            by_mark[said] = part.source
        elif new.count(said) == 1:
            named.append((new.index(said), new.index(said) + len(said), part.source))
        else:
            return None
    content: list[_Item] = []
    position = 0
    for start, end, source in sorted(named, key=lambda place: place[:2]):
        if start < position:
            return None
        content += [*_split(new[position:start], by_mark), source]
        position = end
    return [*content, *_split(new[position:], by_mark)]


def _split(text: str, by_mark: dict[str, Source]) -> list[_Item]:
    items: list[_Item] = []
    for character in text:
        if character in by_mark:
            items.append(by_mark[character])
        elif items and isinstance(items[-1], str):
            items[-1] += character
        else:
            items.append(character)
    return items


def _literals(content: Iterable[_Item]) -> list[str] | None:
    """Literals and expressions to be written one below the other: the prompt's lines, long ones cut between words."""
    lines: list[list[_Item]] = [[]]
    for item in content:
        for piece in (item,) if isinstance(item, Source) else _WORDS.findall(item):
            line = lines[-1]
            ended = line and isinstance(line[-1], str) and line[-1].endswith("\n")
            if (ended and piece != "\n") or (line and _length(line) + _length([piece]) > _WIDTH):
                lines.append([])
            lines[-1].append(piece)
    literals = [_literal(line) for line in lines if line]
    return None if None in literals else [literal for literal in literals if literal is not None]


def _length(items: Iterable[_Item]) -> int:
    return sum(len(item) if isinstance(item, str) else len(ast.unparse(item.expression)) for item in items)


def _literal(items: list[_Item]) -> str | None:
    expressions = [ast.unparse(item.expression) for item in items if isinstance(item, Source)]
    if not expressions:
        return json.dumps("".join(item for item in items if isinstance(item, str)), ensure_ascii=False)
    if len(items) == 1 and isinstance(items[0], Source) and not items[0].in_f_string:
        return expressions[0]
    if any(sign in expression for expression in expressions for sign in '"\\\n#'):
        return None  # no f-string of this quotation mark can hold it
    text = ""
    for item in items:
        if isinstance(item, Source):
            text += f"{{{ast.unparse(item.expression)}{item.suffix}}}"
        else:
            text += json.dumps(item.replace("{", "{{").replace("}", "}}"), ensure_ascii=False)[1:-1]
    return f'f"{text}"'


def _written(content: Iterable[_Item], indent: str, *, bracketed: bool) -> str | None:
    """One expression: a literal, or several below one another, in brackets unless they are in some already."""
    literals = _literals(content)
    if not literals:
        return None
    plus = "" if all(literal.endswith('"') for literal in literals) else "+ "
    if bracketed or len(literals) == 1:
        return f"\n{indent}{plus}".join(literals)
    return f"(\n{indent}    " + f"\n{indent}    {plus}".join(literals) + f"\n{indent})"


# --------------------------------------------------------------------------------- where to write it


def _one_expression(file: SourceFile, container: Container, content: list[_Item], offsets: Offsets) -> Patch | None:
    start, end = offsets.start(container.operands[0]), offsets.end(container.operands[-1])
    bracketed = file.text[:start].rstrip().endswith("(") and file.text[end:].lstrip().startswith((")", ",)"))
    column = start - file.text.rfind("\n", 0, start) - 1 if bracketed else container.statement.col_offset
    written = _written(content, " " * column, bracketed=bracketed)
    return None if written is None else (Edit(start, end, written),)


def _moved_lines(file: SourceFile, spans: list[_Span], marked: Marked, new: str, offsets: Offsets) -> Patch | None:
    """The same lines in another order, each with the comments in front of it."""
    if not _are_neighbours(spans):
        return None
    said = [marked.text[span.start : span.end] for span in spans]
    order = _order(said, new)
    if order is None:
        return None
    starts = [offsets.lines_of(span.container.statement)[0] for span in spans]
    end = offsets.lines_of(spans[-1].container.statement)[1]
    ends = [offsets.lines_of(span.container.statement)[1] for span in spans]
    pieces = [file.text[begin:finish] for begin, finish in zip([starts[0], *ends[:-1]], ends, strict=True)]
    if not pieces[-1].endswith("\n"):
        return None  # the file ends without one
    return (Edit(starts[0], end, "".join(pieces[number] for number in order)),)


def _order(said: list[str], new: str) -> list[int] | None:
    order: list[int] = []
    position = 0
    while position < len(new):
        fitting = [n for n in range(len(said)) if n not in order and said[n] and new.startswith(said[n], position)]
        if not fitting:
            return None
        order.append(max(fitting, key=lambda number: (len(said[number]), -number)))
        position += len(said[order[-1]])
    return order if len(order) == len(said) else None


def _new_statement(file: SourceFile, spans: list[_Span], content: list[_Item], offsets: Offsets) -> Patch | None:
    """One `s += (...)` in the place of all; comments would have no place in it."""
    if not _are_neighbours(spans):
        return None
    first, last = spans[0].container.statement, spans[-1].container.statement
    start, end = offsets.lines_of(first)[0], offsets.lines_of(last)[1]
    if any(line.lstrip().startswith("#") for line in file.text[start:end].splitlines()):
        return None
    assert isinstance(first, ast.AugAssign), "whole statements are additions"
    indent, target = " " * first.col_offset, ast.unparse(first.target)
    written = _written(content, indent, bracketed=False)
    ending = "\n" if file.text[start:end].endswith("\n") else ""
    return None if written is None else (Edit(start, end, f"{indent}{target} += {written}{ending}"),)


def _are_neighbours(spans: list[_Span]) -> bool:
    """Whether these are whole statements, one directly behind the other, each on lines of its own."""
    containers = [span.container for span in spans]
    siblings = containers[0].siblings
    if any(not container.whole or container.siblings is not siblings for container in containers):
        return False
    places = [siblings.index(container.statement) for container in containers]
    lines = [(container.statement.lineno, container.statement.end_lineno) for container in containers]
    return places == list(range(places[0], places[0] + len(places))) and all(
        one[1] is not None and one[1] < other[0] for one, other in itertools.pairwise(lines)
    )


def _says(file: SourceFile, program: SourceProgram, edits: Patch, parts: list[Aligned], wanted: Marked) -> bool:
    """Whether the edited file says what is wanted, with the same expression in every hole."""
    try:
        changed = SourceFile.of(file.path, edited(file.text, edits))
    except SyntaxError:
        return False
    expressions = {part.end: ast.unparse(part.source.expression) for part in parts if part.source.text is None}
    holes = sorted(expressions.values())
    for other in changed.programs:
        if other.function.name == program.function.name:
            for run in other.runs:
                found = aligned(run, wanted)
                if found is not None and holes == sorted(
                    ast.unparse(part.source.expression) for part in found if part.source.text is None
                ):
                    return True
    return False
