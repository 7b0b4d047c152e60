"""Edits of a user's file, and what `patch -p0` reads."""

import ast
import difflib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from ...lang.source import shown_name


@dataclass(frozen=True, slots=True, order=True)
class Edit:
    """`text[start:end]` becomes `replacement`. Offsets are in characters."""

    start: int
    end: int
    replacement: str


Patch = tuple[Edit, ...]  # edits that belong together; none overlaps another


def edited(text: str, edits: Iterable[Edit]) -> str:
    for edit in sorted(edits, reverse=True):
        text = text[: edit.start] + edit.replacement + text[edit.end :]
    return text


def together(patches: Iterable[Patch]) -> list[Edit]:
    """The edits of as many patches as can be made at once, the first ones first."""
    taken: list[Edit] = []
    for patch in patches:
        if all(edit in taken or not _touches(edit, taken) for edit in patch):
            taken += [edit for edit in patch if edit not in taken]
    return taken


def _touches(edit: Edit, others: list[Edit]) -> bool:
    return any((edit.start < other.end and other.start < edit.end) or edit.start == other.start for other in others)


def unified(path: Path, text: str, edits: Iterable[Edit]) -> str:
    """A diff that `patch -p0` applies in the current folder, or in that of the outermost package of a file that lies
    elsewhere; empty without edits."""
    old, new = text.splitlines(keepends=True), edited(text, edits).splitlines(keepends=True)
    lines = []
    for line in difflib.unified_diff(old, new, shown_name(str(path)), shown_name(str(path))):
        lines.append(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n")
    return "".join(lines)


class Offsets:
    """Places of a syntax tree (lines, and bytes in a line) → characters of the text."""

    def __init__(self, text: str) -> None:
        self._lines = text.splitlines(keepends=True)
        self._starts = [0]
        for line in self._lines:
            self._starts.append(self._starts[-1] + len(line))

    def line_start(self, number: int) -> int:
        """`number` is counted from 1; one behind the last line gives the end of the text."""
        return self._starts[number - 1]

    def start(self, node: ast.expr | ast.stmt) -> int:
        return self._place(node.lineno, node.col_offset)

    def end(self, node: ast.expr | ast.stmt) -> int:
        assert node.end_lineno is not None, "parsed nodes know their ends"
        assert node.end_col_offset is not None, "parsed nodes know their ends"
        return self._place(node.end_lineno, node.end_col_offset)

    def lines_of(self, node: ast.stmt) -> tuple[int, int]:
        """From the beginning of its first line to the end of its last, the line's end included."""
        return self.line_start(node.lineno), self.line_start((node.end_lineno or node.lineno) + 1)

    def _place(self, line: int, byte: int) -> int:
        text = self._lines[line - 1] if line <= len(self._lines) else ""
        return self._starts[line - 1] + len(text.encode()[:byte].decode())
