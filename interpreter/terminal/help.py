"""Help on the command line: the list of commands, the page of each, and what is meant by a word that is none.

Pages are as wide as the terminal, up to 100 columns. Headings are bold on a terminal, unless NO_COLOR is set.
"""

import argparse
import difflib
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn, TextIO

from ...lang.errors import SYNONYMS, shown
from .commands import COMMANDS, GROUPS, Command

_WIDEST, _NARROWEST = 100, 30  # columns
_NARROW = 60  # columns; a usage with all options has no room in fewer
_MOST_OFFERED = 3
# What other programs call a command, or what a person may try first → ours.
MEANT = {
    "init": "new",
    "create": "new",
    "start": "serve",
    "server": "serve",
    "launch": "serve",
    "download": "pull",
    "get": "pull",
    "list": "models",
    "ls": "models",
    "ps": "models",
    "remove": "rm",
    "delete": "rm",
    "repl": "chat",
    "talk": "chat",
    "exec": "run",
    "check": "lint",
    "diagnose": "doctor",
    "info": "doctor",
    "trace": "compile",
    "graph": "compile",
    "show": "view",
    "open": "view",
    "regex": "fsm",
    "schema": "fsm",
    "completions": "completion",
    "evaluate": "eval",
    "perplexity": "eval",
}


def front_page() -> str:
    """Returns the list of all commands, by groups."""
    width = _width()
    column = max(map(len, COMMANDS)) + 4
    lines = ["usage: umbel COMMAND [options]", "", *_wrapped("Programs that call language models many times.", width)]
    for group, commands in GROUPS.items():
        lines += ["", f"{group}:"]
        for command in commands:
            about = textwrap.wrap(command.about, width - column)
            lines.append(f"  {command.name:<{column - 2}}{about[0]}")
            lines += [" " * column + rest for rest in about[1:]]
    ending = "umbel COMMAND --help says more of one, with examples. A first try: umbel new my-project, or umbel chat."
    return styled("\n".join([*lines, "", *_wrapped(ending, width)]))


def page_of(command: Command) -> str:
    """Returns the page of a command: usage, what it does, examples, arguments. Raises MissingExtraError."""
    parser = command.parser()
    parser.formatter_class = HelpFormatter
    if hasattr(parser, "color"):
        parser.color = False  # Python 3.14 has colours of its own
    if _width() < _NARROW:
        parser.usage = _short_usage(parser)
    about = parser.description or f"{command.about[0].upper()}{command.about[1:]}."
    parser.description = f"{about}\n\n{_examples(command)}"
    return styled(parser.format_help().rstrip())


def _short_usage(parser: argparse.ArgumentParser) -> str:
    """Returns a usage without the options, which have lines of their own."""
    arguments = [str(action.metavar or action.dest) for action in parser._actions if not action.option_strings]
    words = " ".join([parser.prog, "[options]", *arguments]).replace("%", "%%")
    return "\n    ".join(textwrap.wrap(words, _width() - len("usage: "), break_on_hyphens=False))


def _examples(command: Command) -> str:
    widest = max(len(line) for line, _ in command.examples)
    fits = all(widest + len(note) + 6 <= _width() for _, note in command.examples)
    lines = ["examples:"]
    for line, note in command.examples:
        if fits:
            lines.append(f"  {line:<{widest}}  {f'# {note}' if note else ''}".rstrip())
        else:
            lines += [f"  # {part}" for part in textwrap.wrap(note, _width() - 4)]
            lines.append(f"  {line}")
    return "\n".join(lines)


class HelpFormatter(argparse.HelpFormatter):
    """Wraps help to the terminal; examples stay as they are."""

    def __init__(self, prog: str, **options: Any) -> None:  # Any: of the base class, by the version of Python
        super().__init__(prog, **{**options, "width": _width()})

    def _format_action_invocation(self, action: argparse.Action) -> str:
        """Writes the value once, after all names of an option, as later versions of Python do."""
        if not action.option_strings or action.nargs == 0:
            return super()._format_action_invocation(action)
        value = self._format_args(action, self._get_default_metavar_for_optional(action))
        return f"{', '.join(action.option_strings)} {value}"

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        paragraphs = text.split("\n\n")
        return "\n\n".join(
            part if part.startswith("examples:") else super(HelpFormatter, self)._fill_text(part, width, indent)
            for part in paragraphs
        )


def refuse_command(word: str) -> int:
    """Says on standard error what is meant by a word that is no command. Returns the exit status."""
    if word.startswith("-"):
        hint = f"options follow a command: umbel COMMAND {word[:100]}"
    elif word.endswith(".py"):
        hint = f"to run a file, write: umbel run {word}"
    else:
        hint = _did_you_mean(_near(word, COMMANDS, MEANT)) or "umbel --help lists the commands"
    print(f"umbel: there is no command {shown(word)}; {hint}", file=sys.stderr)
    return 2


def check_options(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> None:
    """Ends the process with what is meant, for an option that the parser does not have; as argparse does otherwise."""
    known = [text for action in parser._actions for text in action.option_strings if text.startswith("--")]
    for argument in arguments:
        name = argument.partition("=")[0]
        if name == "--":
            return
        if name.startswith("--") and not any(text.startswith(name) for text in known):
            refuse_option(parser, name, known)


def refuse_option(parser: argparse.ArgumentParser, name: str, known: Iterable[str], otherwise: str = "") -> NoReturn:
    """Ends the process: usage, and what is meant by an option that there is not.

    Args:
        otherwise: what to say where no option is near.
    """
    plain = {text.removeprefix("--").replace("-", "_"): text for text in known}
    near = _near(name.removeprefix("--").replace("-", "_"), plain, {})
    hint = _did_you_mean([plain[each] for each in near]) or otherwise or f"{parser.prog} --help lists the options"
    parser.error(f"there is no option {name[:100]}; {hint}")


def _near(word: str, known: Iterable[str], meant: dict[str, str]) -> list[str]:
    names = list(known)
    if word in meant:
        return [meant[word]]
    same = [each for each in SYNONYMS.get(word, ()) if each in names]
    return (same or difflib.get_close_matches(word[:100], names, n=_MOST_OFFERED, cutoff=0.6))[:_MOST_OFFERED]


def _did_you_mean(names: Sequence[str]) -> str:
    return f"did you mean {' or '.join(names)}?" if names else ""


# --------------------------------------------------------------------------------------- the terminal


def has_colours(stream: TextIO) -> bool:
    """Returns whether a stream shows colours: it is a terminal, and nothing in the environment says no."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def styled(text: str) -> str:
    """Returns a page of help with bold headings, where standard output shows colours."""
    if not has_colours(sys.stdout):
        return text
    text = re.sub(r"^([A-Za-z][\w ]*:)$", "\033[1m\\1\033[0m", text, flags=re.MULTILINE)
    text = re.sub(r"^(usage:)", "\033[1m\\1\033[0m", text)
    return re.sub(r"^(  .*?)(# .*)$", "\\1\033[2m\\2\033[0m", text, flags=re.MULTILINE)


def _width() -> int:
    return max(_NARROWEST, min(_WIDEST, shutil.get_terminal_size().columns))


def _wrapped(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, width, break_on_hyphens=False)
