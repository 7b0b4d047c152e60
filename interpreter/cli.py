"""The command `umbel`: finds the command of a command line and runs it. `terminal/commands.py` has the table."""

import os
import select
import sys
from collections.abc import Sequence
from itertools import takewhile
from types import TracebackType

from ..lang import __version__
from ..lang.errors import UmbelError
from .terminal.commands import COMMANDS
from .terminal.help import check_options, front_page, page_of, refuse_command

_HELP = ("-h", "--help")
_BROKEN_PIPE = 141  # as of a process that SIGPIPE ends: a judgement, say, was not told


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command line. Returns the exit status; errors of umbel are printed without a traceback."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    command = COMMANDS.get(given[0]) if given else None
    failed = 2 if command is not None and command.judges else 1
    try:
        status = _run(given)
        if sys.stdout is not None:
            sys.stdout.flush()
        return status
    except UmbelError as error:
        text = f"umbel: {type(error).__name__}: {error}"
        print("\n  ".join([text, *getattr(error, "__notes__", ())]), file=sys.stderr)
        return failed
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        own = _of_the_file(error)
        if own is not None:
            sys.excepthook(type(error), error.with_traceback(own[0]), own[0])
            return failed
        if isinstance(error, BrokenPipeError) and _reader_is_gone():
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is buffered goes nowhere
            return _BROKEN_PIPE
        raise


def _run(given: Sequence[str]) -> int:
    match given:
        case [] | ["help"] | ["-h" | "--help", *_]:
            print(front_page())
            return 0
        case ["--version" | "-V" | "version", *_]:
            print(f"umbel {__version__}")
            return 0
        case ["help", word, *_]:
            given = [word, "--help"]
    word, *rest = given
    command = COMMANDS.get(word)
    if command is None:
        return refuse_command(word)
    if any(argument in _HELP for argument in takewhile(lambda argument: argument != "--", rest)):
        print(page_of(command))
        return 0
    if any(argument.startswith("--") for argument in rest) and word != "run":  # what follows a file is the file's
        check_options(command.parser(), rest)
    return command.main(rest)


def _of_the_file(error: Exception) -> tuple[TracebackType | None] | None:
    """Returns the part of the traceback that begins in a file which the command runs; None for an error elsewhere."""
    from .terminal.run_file import RUN_NAMES  # with the interpreter, which most commands do not need

    frame = error.__traceback__
    while frame is not None and not (
        _is_runpy(frame) or frame.tb_frame.f_globals.get("__name__") in RUN_NAMES.values()
    ):
        frame = frame.tb_next
    if frame is None:
        return None
    while frame is not None and _is_runpy(frame):
        frame = frame.tb_next
    return (frame,)


def _is_runpy(frame: TracebackType) -> bool:
    return frame.tb_frame.f_globals.get("__name__") == "runpy"


def _reader_is_gone() -> bool:
    """Returns whether the reader of a pipe has seen enough, such as `head`; a broken pipe may be another one."""
    try:
        written = sys.stdout.fileno()
    except (AttributeError, OSError, ValueError):  # no descriptor is there
        return False
    if not hasattr(select, "poll"):
        return True
    poll = select.poll()
    poll.register(written, select.POLLOUT)  # macOS tells nothing where nothing is asked for
    return any(events & (select.POLLERR | select.POLLHUP) for _, events in poll.poll(0))
