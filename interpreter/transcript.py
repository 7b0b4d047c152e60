"""`run(verbose=True)`: the text of a program on the terminal, as it runs.

What the program wrote is dim, what the model wrote is not. A thread of its own prints, so that a slow
terminal slows nothing else. Branches are shown when they are joined, where their text then stands.
"""

import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING

from .stream import Stream
from .variables import Piece

if TYPE_CHECKING:
    from rich.console import Console


def follow(stream: Stream, name: str, console: "Console | None" = None) -> threading.Thread:
    """Print `stream` until its run has ended. Returns the thread that does it."""
    from rich.console import Console

    pieces = stream.iterate(None)
    stream.ask_for_pieces()  # before the program says anything
    target = console or Console(highlight=False)
    thread = threading.Thread(target=_print, args=(pieces, name, target), name=f"umbel-show-{name}", daemon=True)
    thread.start()
    return thread


def _print(pieces: Iterator[Piece], name: str, console: "Console") -> None:
    from rich.text import Text

    console.rule(name, style="dim", align="left")
    try:
        for text, facts in pieces:
            console.print(Text(text, style="bold" if facts else "dim"), end="")
        console.print()
    except Exception as error:  # whoever reads the state raises it; here it is only shown
        console.print(Text(f"\n{type(error).__name__}: {error}", style="red"))
