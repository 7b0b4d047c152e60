"""Sources of prompt text: the line that said it, kept for explanations, traces and messages.

Operations are submitted far more often than their places are read, so a place is kept as a code object
and an instruction; file, line and columns are looked up when they are read.
"""

import os
import sys
from enum import StrEnum
from itertools import islice
from types import CodeType
from typing import Protocol

import msgspec

# Frames of these modules are ours: what the user wrote is further out. `with s.user():` goes through contextlib.
_ROOT = __name__.partition(".")[0]
_OURS = (f"{_ROOT}.lang.", f"{_ROOT}.interpreter.", f"{_ROOT}.compiler.", f"{_ROOT}.compat.", "contextlib")


class Place(Protocol):
    """A line of the user's program: `compiler.graph.Line`, or a CodePlace."""

    @property
    def file(self) -> str: ...

    @property
    def number(self) -> int: ...

    @property
    def function(self) -> str: ...


class CodePlace(msgspec.Struct, frozen=True, gc=False):
    """An instruction of a function that runs."""

    code: CodeType
    instruction: int  # offset in bytes

    @property
    def file(self) -> str:
        return self.code.co_filename

    @property
    def number(self) -> int:
        """The line number, counted from 1. A statement of several lines has the one on which it begins."""
        return self.span[0] or self.code.co_firstlineno

    @property
    def function(self) -> str:
        return self.code.co_name

    @property
    def span(self) -> tuple[int | None, int | None]:
        """First and last line of what is being computed there; None where Python keeps no positions."""
        found = next(islice(self.code.co_positions(), self.instruction // 2, None), None)
        return (None, None) if found is None else found[:2]


def public_name(file: str) -> str:
    """A source file as files that leave this machine may name it: from its outermost package on, or by its own name.

    /home/me/secret/app/prompts/tip.py is "app/prompts/tip.py" where app is a package. The folders before it tell
    private things: names of people and of projects. Relative names, and no paths at all such as "<stdin>", stay.
    """
    if not os.path.isabs(file) and os.pardir not in file.split(os.sep):
        return file
    folder, name = os.path.split(os.path.abspath(file))
    while folder and os.path.isfile(os.path.join(folder, "__init__.py")):
        outer, package = os.path.split(folder)
        if not package or outer == folder:
            break
        folder, name = outer, f"{package}/{name}"
    return name


def shown_name(file: str) -> str:
    """A source file as a person is told of it: from the current folder on, or by its public name."""
    if not os.path.isabs(file):
        return file
    below = os.path.relpath(file)
    return public_name(file) if below.startswith(os.pardir) else below


def calling_place() -> CodePlace | None:
    """Finds the line that the user's program is at: the innermost frame that is none of ours."""
    frame = sys._getframe(1)
    while frame.f_globals.get("__name__", "").startswith(_OURS):
        outer = frame.f_back
        if outer is None:
            return None
        frame = outer
    return CodePlace(frame.f_code, frame.f_lasti)


class SourceKind(StrEnum):
    TEXT = "text"  # of the program
    SCAFFOLD = "scaffold"  # what a chat template writes around a turn
    GENERATED = "generated"
    CHOSEN = "chosen"


class Source(msgspec.Struct, frozen=True, gc=False):
    """The origin of a piece of prompt text.

    Attributes:
        place: the line; None where no line of a program said it.
        name: the role of a scaffold, the variable of a generated or chosen text.
    """

    kind: SourceKind
    place: Place | None
    name: str = ""

    def of(self, kind: SourceKind, name: str) -> "Source":
        """The same line as the source of something else."""
        return Source(kind, self.place, name)
