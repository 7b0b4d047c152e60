"""Runs files of the user: `umbel run`, whose programs use the model of the command line, and FILE.py:NAME of others."""

import argparse
import difflib
import os
import runpy
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ...lang.errors import ParameterError, shown
from ..run import set_default_backend
from .help import refuse_option
from .models import add_model_options, chosen_model

# What __name__ is in a file that is run for a name in it: an error in its functions is shown from its own lines on.
RUN_NAMES = {"eval": "umbel_eval", "replay": "umbel_replay"}  # by command
_MOST_NAMES = 5  # listed where another one was named


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    made = argparse.ArgumentParser(
        prog="umbel run",
        description="Runs a Python file. Its programs use the model that is named here, unless they name their own; "
        "without one, the default model.",
    )
    made.add_argument("file", type=Path, help="the Python file")
    made.add_argument(
        "arguments",
        nargs="*",
        default=[],  # without one argparse calls them required
        help="what the file finds in sys.argv; write -- before options of its own",
    )
    add_model_options(made)
    return made


def main(arguments: Sequence[str]) -> int:
    """Runs the command. Returns the exit status; raises ParameterError, and what the file raises."""
    made = parser()
    options, rest = made.parse_known_args(arguments)  # those after `FILE --model NAME` argparse calls unknown
    if "--" in rest:  # where an option stands between it and the file, argparse leaves it there
        rest.remove("--")
        options.arguments, rest = [*options.arguments, *rest], []
    for argument in rest:
        if argument.startswith("-"):
            known = [text for action in made._actions for text in action.option_strings if text.startswith("--")]
            refuse_option(made, argument, known, "write -- before the options of the file")
    if not os.path.isfile(options.file):  # False also for what no file can be called
        file, _, name = str(options.file).rpartition(":")
        advice = "write the path of a Python file with programs"
        if os.path.isfile(file):
            advice = f"umbel run runs all of a file: umbel run {file}, which calls {name} itself"
        raise ParameterError(f"{shown(str(options.file))} is not a file; {advice}")
    if (backend := chosen_model(options)) is not None:
        set_default_backend(backend)
    sys.argv = [str(options.file), *options.arguments, *rest]
    sys.path.insert(0, str(options.file.resolve().parent))
    runpy.run_path(str(options.file), run_name="__main__")
    return 0


def is_program(found: Any) -> bool:
    """Tells whether an object runs over data: of the interpreter or the compiler, which is not imported here."""
    return callable(getattr(found, "run_batch", None)) and not isinstance(found, type)


def named_in_file(
    given: str, kind: str, fits: Callable[[Any], bool], command: str, files: dict[str, dict[str, Any]]
) -> Any:
    """Returns what FILE.py:NAME names. Any: whatever the file has.

    Args:
        given: FILE.py:NAME.
        kind: what it is to be, for messages: "program".
        fits: tells whether an object of the file is of the kind.
        command: "eval" or "replay".
        files: those that have run, by path: each runs once.

    Raises:
        ParameterError: there is no such file, or nothing of the kind has this name in it.
    """
    path, _, name = given.rpartition(":")
    if not path or not name:
        raise ParameterError(
            f"{shown(given)} is no FILE.py:NAME; write the path of a Python file, ':' and the name of the {kind}"
        )
    if not os.path.isfile(path):
        raise ParameterError(f"{shown(given)}: {shown(path)} is not a file; write the path of a Python file")
    if path not in files:
        sys.path.insert(0, str(Path(path).resolve().parent))
        files[path] = runpy.run_path(path, run_name=RUN_NAMES[command])
    found = files[path].get(name)
    if found is None or not fits(found):
        names = [other for other, value in files[path].items() if not other.startswith("_") and fits(value)]
        if kind != "program":  # of metrics and backends many other names fit, too
            names = difflib.get_close_matches(name, names, n=_MOST_NAMES)
        known = " or ".join(f"{path}:{other}" for other in names[:_MOST_NAMES])
        advice = "the name of a function with @umbel.function" if kind == "program" else f"the name of the {kind}"
        raise ParameterError(f"{path} has no {kind} {shown(name)}; write {known or advice}")
    return found
