"""Whose line it is: frames of the user's program, told apart from ours and from Python's own."""

import os
import sys
import sysconfig
from collections.abc import Iterator
from types import FrameType, TracebackType

from .graph import Line

_PACKAGE = __name__.partition(".")[0]
_PARTS = tuple(f"{_PACKAGE}.{part}" for part in ("compiler", "fsm", "interpreter", "lang", "srt"))
_STANDARD = tuple({os.path.join(sysconfig.get_path(kind), "") for kind in ("stdlib", "platstdlib")})
_INSTALLED = tuple({os.path.join(sysconfig.get_path(kind), "") for kind in ("purelib", "platlib")})


def is_ours(frame: FrameType) -> bool:
    """Whether the frame is of this package, whose own looks at a symbol mean nothing."""
    module = frame.f_globals.get("__name__")
    return isinstance(module, str) and module.startswith(_PARTS)


def is_standard(file: str) -> bool:
    """Whether a file is of Python's standard library, and not of what is installed beneath it."""
    return file.startswith("<frozen ") or (file.startswith(_STANDARD) and not file.startswith(_INSTALLED))


def is_users(frame: FrameType) -> bool:
    return not is_standard(frame.f_code.co_filename) and not is_ours(frame)


def line_of(frame: FrameType | None) -> Line | None:
    """The innermost line of the user's from `frame` outwards; None where there is none."""
    while frame is not None and not is_users(frame):
        frame = frame.f_back
    if frame is None:
        return None
    return Line(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)


def current_line() -> Line | None:
    return line_of(sys._getframe(1))


def raising_line(error: BaseException) -> Line | None:
    """The innermost line of the user's in the traceback of an error."""
    found = None
    for frame, number in _walk(error.__traceback__):
        if is_users(frame):
            found = Line(frame.f_code.co_filename, number, frame.f_code.co_name)
    return found


def _walk(traceback: TracebackType | None) -> Iterator[tuple[FrameType, int]]:
    while traceback is not None:
        yield traceback.tb_frame, traceback.tb_lineno
        traceback = traceback.tb_next
