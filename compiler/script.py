"""Runs a user's file as Python runs a script, for the names that it defines, without what stands under its __main__."""

import argparse
import os
import runpy
import sys
import traceback
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from ..interpreter.program import Program
from ..lang.errors import ParameterError, UmbelError, shown


def program_of(path: Path, name: str | None) -> Program:
    """Returns the program that a file calls `name`, or the only one that it has.

    Raises:
        ParameterError: there is no such file or program, or the file fails; the message has its line.
        UmbelError: the file raises it, with a note of its line.
    """
    programs = {known: value for known, value in names_of(path).items() if isinstance(value, Program)}
    if name is None and len(programs) == 1:
        return next(iter(programs.values()))
    if name is None or name not in programs:
        which = f"has no program {name!r}" if name is not None else f"has {len(programs) or 'no'} programs"
        known = (
            f"write {' or '.join(f'{path}:{known}' for known in programs)}" if programs else "write one, with @function"
        )
        raise ParameterError(f"{path} {which}; {known}")
    return programs[name]


def names_of(path: Path) -> Mapping[str, Any]:
    """Returns what the names of a file stand for after it has run.

    Raises:
        ParameterError: there is no such file, or it fails; the message has its line.
        UmbelError: the file raises it, with a note of its line.
    """
    if not os.path.isfile(path):  # False also for what no file can be called
        raise ParameterError(f"{shown(str(path))} is not a file; write the path of a Python file with programs")
    try:
        with _as_script(path):
            return runpy.run_path(str(path), run_name="__umbel__")
    except UmbelError as error:
        error.add_note(f"raised at {_line(path, error)}")
        raise
    except SyntaxError as error:
        raise ParameterError(f"{error.filename}:{error.lineno}: {type(error).__name__}: {error.msg}") from error
    except (Exception, SystemExit) as error:
        raise ParameterError(f"{_line(path, error)}: {type(error).__name__}: {error}") from error


def by_name(option: str, pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Returns what an option of a command that is given several times says, by name. Raises ParameterError for a name
    given twice."""
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ParameterError(
                f"{option} {shown(name)} is given twice, as {shown(found[name])} and {shown(value)}; leave one out"
            )
        found[name] = value
    return found


def pair(text: str, example: str) -> tuple[str, Any]:  # Any: JSON
    """Reads NAME=JSON. Raises ArgumentTypeError, with what to write, for other text."""
    name, _, value = text.partition("=")
    try:
        return name, msgspec.json.decode(value)
    except (msgspec.DecodeError, RecursionError, UnicodeEncodeError):
        raise argparse.ArgumentTypeError(f"{shown(text)} is no NAME=JSON; write {example}") from None


def add_static(parser: argparse.ArgumentParser) -> None:
    """Adds the option --static: values of arguments, by name."""
    parser.add_argument(
        "--static",
        action="append",
        default=[],
        type=_static,
        metavar="NAME=JSON",
        help="the value of an argument that decides what the program does, as static_args of trace()",
    )


def _static(text: str) -> tuple[str, Any]:  # Any: JSON
    return pair(text, '--static n=3, or --static \'names=["a", "b"]\'')


def _line(path: Path, error: BaseException) -> str:
    """Returns the last line of the file that had a part in the error."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    return f"{path}:{lines[-1]}" if lines else str(path)


@contextmanager
def _as_script(path: Path) -> Iterator[None]:
    """Sets what Python gives a script: its folder to import from, and its name in sys.argv."""
    arguments, folder = sys.argv, str(path.resolve().parent)
    sys.argv = [str(path)]
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        sys.argv = arguments
        sys.path.remove(folder)
