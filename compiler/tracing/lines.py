"""Finds the user's line: tells frames of the user's program from ours and from Python's own."""

import os
import sys
import sysconfig
from collections.abc import Iterator
from types import FrameType, TracebackType

from ..graph import Line

_PACKAGE = __name__.partition(".")[0]
_PARTS = tuple(f"{_PACKAGE}.{part}" for part in ("compat", "compiler", "fsm", "interpreter", "lang", "srt"))
_STANDARD = tuple({os.path.join(sysconfig.get_path(kind), "") for kind in ("stdlib", "platstdlib")})
BOUNDARY = "record"  # the function of trace.py around a body
_GENERATED = ("<string>", "<attrs ")
_INSTALLED = tuple({os.path.join(sysconfig.get_path(kind), "") for kind in ("purelib", "platlib")})


def is_ours(frame: FrameType) -> bool:
    """Returns whether the frame is of this package, whose own looks at a symbol mean nothing."""
    module = frame.f_globals.get("__name__")
    return isinstance(module, str) and module.startswith(_PARTS)


def is_standard(file: str) -> bool:
    """Returns whether a file is of Python's standard library, and not of what is installed beneath it."""
    return file.startswith("<frozen ") or (file.startswith(_STANDARD) and not file.startswith(_INSTALLED))


def is_users(frame: FrameType) -> bool:
    return not is_standard(frame.f_code.co_filename) and not is_ours(frame)


def is_traced(frame: FrameType | None) -> bool:
    """Returns whether the frame is inside of the body that is traced, and not in a module that it imports."""
    while frame is not None and frame.f_code.co_name != "<module>":
        if _is_boundary(frame):
            return True
        frame = frame.f_back
    return False


def _is_boundary(frame: FrameType) -> bool:
    """Returns whether the frame is around the traced body: those around it have nothing to do with it."""
    return frame.f_code.co_name == BOUNDARY and frame.f_globals.get("__name__") == f"{_PACKAGE}.compiler.tracing.trace"


def users_frame(frame: FrameType | None) -> FrameType | None:
    """Returns the innermost frame of the user's from `frame` outwards; None where there is none. One of what is
    installed or generated counts where no other is: a program may be installed, or typed after `python -c`, but a
    library that a program calls, and the `__init__` of its dataclass, are not the program."""
    another = None
    while frame is not None and not _is_boundary(frame):
        if is_users(frame):
            if not frame.f_code.co_filename.startswith((*_INSTALLED, *_GENERATED)):
                return frame
            another = another or frame
        frame = frame.f_back
    return another


def line_of(frame: FrameType | None) -> Line | None:
    """Returns the line of `users_frame`."""
    found = users_frame(frame)
    return None if found is None else Line(found.f_code.co_filename, found.f_lineno, found.f_code.co_name)


def current_line() -> Line | None:
    return line_of(sys._getframe(1))


def raising_line(error: BaseException) -> Line | None:
    """Returns the innermost line of the user's in the traceback of an error."""
    found = None
    for frame, number in _walk(error.__traceback__):
        if is_users(frame):
            found = Line(frame.f_code.co_filename, number, frame.f_code.co_name)
    return found


def _walk(traceback: TracebackType | None) -> Iterator[tuple[FrameType, int]]:
    while traceback is not None:
        yield traceback.tb_frame, traceback.tb_lineno
        traceback = traceback.tb_next
