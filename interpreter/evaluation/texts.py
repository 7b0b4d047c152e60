"""Lays out reports: fields with their names, as text of the terminal's width without colour, and as HTML."""

import shutil
import textwrap
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from itertools import groupby

from ...lang import notebook

Field = tuple[str, str]  # name, text; a field after one of the same name continues it

_WIDEST = 100
_NARROWEST = 20
_SIDE_BY_SIDE = 60  # columns from which on names stand in a column of their own


def width_of_terminal() -> int:
    """Returns the columns of the terminal, or what COLUMNS says: 20 to 100."""
    return max(_NARROWEST, min(_WIDEST, shutil.get_terminal_size().columns))


def laid_out(title: str, fields: Iterable[Field], width: int | None = None) -> str:
    """Returns a title and fields as lines of at most `width` characters; None: as wide as the terminal."""
    columns = width_of_terminal() if width is None else max(_NARROWEST, width)
    known = list(fields)
    indent = 2 + max((len(name) for name, _ in known), default=0) if columns >= _SIDE_BY_SIDE else 2
    lines = [textwrap.fill(title, columns)]
    for name, group in groupby(known, key=lambda field: field[0]):
        first = name.ljust(indent)
        if columns < _SIDE_BY_SIDE:
            lines.append(f"{name}:")
            first = " " * indent
        for _, text in group:
            lines.append(
                textwrap.fill(
                    text or "-",
                    columns,
                    initial_indent=first,
                    subsequent_indent=" " * indent + "  ",
                    break_on_hyphens=False,
                )
            )
            first = " " * indent
    return "\n".join(lines)


def as_html(title: str, fields: Iterable[Field]) -> str:
    """Returns a title and fields as a block of HTML for notebooks. Texts are escaped; tables in them stay aligned."""
    cells = []
    for name, group in groupby(fields, key=lambda field: field[0]):
        lines = "\n".join(notebook.escaped(text) for _, text in group)
        cells.append((f"<b>{notebook.escaped(name)}</b>", f'<span style="font-family:monospace">{lines}</span>'))
    return notebook.folded(title, notebook.table(cells), is_open=True)


class Printed(ABC):
    """Base of what is printed as a title and fields: text in a terminal, HTML in a notebook."""

    __slots__ = ()

    def text(self, width: int | None = None) -> str:
        """Returns what `print` shows.

        Args:
            width: of the lines, in characters; None: of the terminal, at most 100.
        """
        return laid_out(self._title(), self._fields(), width)

    def __str__(self) -> str:
        return self.text()

    def _repr_html_(self) -> str:
        return as_html(self._title(), self._fields())

    @abstractmethod
    def _title(self) -> str: ...

    @abstractmethod
    def _fields(self) -> Iterator[Field]: ...


def number(value: float, *, is_share: bool) -> str:
    """Returns a figure in words: a share in percent, another number with four digits."""
    return f"{value:.1%}" if is_share else f"{value:.4g}"


def signed(value: float, *, is_share: bool) -> str:
    """Returns a difference in words, with its sign; of shares in percentage points."""
    return f"{100 * value:+.1f} points" if is_share else f"{value:+.4g}"


def counted(count: int, noun: str) -> str:
    """Returns a number with its noun: "1 row", "2,000 rows"."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def listed_rows(rows: Iterable[int], most: int = 20) -> str:
    """Returns numbers of rows: "3, 5, 8 and 12 more"."""
    known = list(rows)
    more = f" and {len(known) - most} more" if len(known) > most else ""
    return ", ".join(map(str, known[:most])) + more
