"""`umbel run`: a Python file, whose programs use the model that is named on the command line."""

import argparse
import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from ...lang.errors import ParameterError, shown
from ..run import set_default_backend
from .help import refuse_option
from .models import add_model_options, chosen_model


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
        raise ParameterError(f"{shown(str(options.file))} is not a file; write the path of a Python file with programs")
    if (backend := chosen_model(options)) is not None:
        set_default_backend(backend)
    sys.argv = [str(options.file), *options.arguments, *rest]
    sys.path.insert(0, str(options.file.resolve().parent))
    runpy.run_path(str(options.file), run_name="__main__")
    return 0
