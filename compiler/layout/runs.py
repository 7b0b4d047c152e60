"""Runs: what a program's source appends between two things that are no text, as a segment of a graph is.

    s += SYSTEM + f"Question: {question}\\n"      Hole SYSTEM, Words "Question: ", Hole question, Words "\\n"

`aligned` finds which part of a segment came from which expression.
"""

import ast
from dataclasses import dataclass

from .marked import Marked


@dataclass(frozen=True, slots=True, eq=False)
class Container:
    """Operands of one expression that stand beside each other.

    Attributes:
        statement: it is in.
        operands: the operands.
        whole: the statement is `s += ` these and nothing else.
        siblings: the block of statements that it is in.
    """

    statement: ast.stmt
    operands: list[ast.expr]
    whole: bool
    siblings: list[ast.stmt]


@dataclass(frozen=True, slots=True)
class Source:
    """A part of a run.

    Attributes:
        text: of words; None for a hole.
        expression: of a hole; for words the literal.
        suffix: what stands behind a hole's expression in an f-string: `!r`, `:>8`.
        in_f_string: whether it stands in one.
    """

    text: str | None
    expression: ast.expr
    container: Container
    suffix: str = ""
    in_f_string: bool = False


@dataclass(frozen=True, slots=True)
class Run:
    """Text between two things that are none."""

    sources: tuple[Source, ...]

    @property
    def lines(self) -> tuple[int, int]:
        """The first and the last line of its statements."""
        statements = [source.container.statement for source in self.sources]
        return min(s.lineno for s in statements), max(s.end_lineno or s.lineno for s in statements)


@dataclass(frozen=True, slots=True)
class Shot:
    """An `image` or `video` that is an operand, and the operands of its expression."""

    call: ast.Call
    statement: ast.stmt
    operands: tuple[ast.expr, ...]
    siblings: list[ast.stmt]


@dataclass(frozen=True, slots=True)
class Aligned:
    """Which part of a segment a source is: `text[start:end]` in marks."""

    source: Source
    start: int
    end: int


def aligned(run: Run, marked: Marked) -> list[Aligned] | None:
    """The parts of a segment that a run made; None where it made another text.

    An expression that gave constant text is taken to end where the next words begin.
    """
    text, position, found = marked.text, 0, []
    for number, source in enumerate(run.sources):
        start = position
        if source.text is not None:
            if not text.startswith(source.text, position):
                return None
            position += len(source.text)
        elif text[position : position + 1] in marked.holes:
            position += 1
        else:
            following = run.sources[number + 1].text if number + 1 < len(run.sources) else None
            mark = next((i for i in range(position, len(text)) if text[i] in marked.holes), len(text))
            position = mark if following is None else text.find(following, position, mark + len(following))
            if position < 0:
                return None
        found.append(Aligned(source, start, position))
    return found if position == len(text) else None
