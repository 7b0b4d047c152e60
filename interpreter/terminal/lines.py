"""Lines that a person types: with arrow keys and a history where input is a terminal, plain ones elsewhere.

The history is a file of its owner alone (0600): a line is appended when it was typed, so several chats share it and an
end without warning loses nothing. The oldest lines are dropped at the start of a chat.
"""

import contextlib
import importlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .help import has_colours

MOST_LINES = 1000
_PROMPT, _NEXT = "> ", "… "


def history_path() -> Path:
    """Returns where messages are kept: below XDG_STATE_HOME, or ~/.local/state."""
    state = os.environ.get("XDG_STATE_HOME")
    folder = Path(state) if state and os.path.isabs(state) else Path(os.path.expanduser("~/.local/state"))
    return folder / "umbel" / "chat_history"


def short_path(path: Path) -> str:
    """Returns a path for people: ~ stands for their folder."""
    home = os.path.expanduser("~")
    return f"~{os.sep}{path.relative_to(home)}" if home != "~" and path.is_relative_to(home) else str(path)


def typed_lines(history: Path | None) -> Iterator[str]:
    """Yields what is typed, until the end of input. A line that ends in a backslash goes on in the next one.

    Args:
        history: the file of earlier lines; None: there is none.
    """
    if not sys.stdin.isatty():
        yield from (line.rstrip("\n") for line in sys.stdin)
        return
    readline = _readline()
    if readline is not None:
        readline.set_auto_history(False)
        for line in _read(history):
            readline.add_history(line)
    while True:
        try:
            line = _typed()
        except KeyboardInterrupt:
            print("\n(Ctrl-D or /quit ends)")
            continue
        except EOFError:
            print()
            return
        if readline is not None and line.strip() and not line.startswith(" "):
            for each in line.splitlines():
                readline.add_history(each)
            _keep(history, line)
        yield line


def _readline() -> Any:  # Any: a module, which Windows lacks
    try:
        return importlib.import_module("readline")
    except ImportError:
        return None


def _typed() -> str:
    lines: list[str] = []
    while True:
        line = input(_prompt(_NEXT if lines else _PROMPT))
        lines.append(line.removesuffix("\\"))
        if not line.endswith("\\"):
            return "\n".join(lines)


def _prompt(text: str) -> str:
    """Colours a prompt. The marks around the codes tell readline that they have no width."""
    return f"\001\033[1;32m\002{text}\001\033[0m\002" if has_colours(sys.stdout) else text


def _read(path: Path | None) -> list[str]:
    """Reads the history and drops its oldest lines. A file that cannot be read is none."""
    if path is None:
        return []
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    if len(lines) > 2 * MOST_LINES:  # not at every start
        lines = lines[-MOST_LINES:]
        with contextlib.suppress(OSError):
            _write(path, "".join(f"{line}\n" for line in lines), os.O_TRUNC)
    return lines[-MOST_LINES:]


def _keep(path: Path | None, line: str) -> None:
    """Appends to the history. A chat goes on where that cannot be done: the folder may be read-only."""
    if path is not None:
        with contextlib.suppress(OSError):
            _write(path, f"{line}\n", os.O_APPEND)


def _write(path: Path, text: str, mode: int) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | mode, 0o600)
    with open(descriptor, "a", encoding="utf-8") as file:
        os.fchmod(descriptor, 0o600)  # also of a file that was there
        file.write(text)
