"""Displays HTML in the output of the notebook's cell that runs, and replaces it later. IPython is not imported."""

import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from ...lang import notebook

if TYPE_CHECKING:
    from ..data.progress import BatchProgress

_REPLACED_AT_MOST = 0.1  # seconds between two pictures of a bar


def in_notebook() -> bool:
    """Returns whether this process computes for a notebook."""
    running = getattr(sys.modules.get("IPython"), "get_ipython", None)  # None while it is imported
    shell = running() if running is not None else None
    return shell is not None and hasattr(shell, "kernel")


def displayed(content: str, plain: str) -> Any | None:  # Any: IPython's handle, which update() of a display takes
    """Displays HTML, or `plain` where none is shown. Returns a handle, or None where no notebook shows anything."""
    if not in_notebook():
        return None
    return sys.modules["IPython"].display.display(_bundle(content, plain), raw=True, display_id=True)


def _bundle(content: str, plain: str) -> dict[str, str]:
    return {"text/html": content, "text/plain": plain}


class NotebookBar:
    """Shows a progress bar with the numbers of a batch in the output of a cell. A context manager.

    It is plain HTML that is replaced: it needs no widgets, and a notebook that is saved keeps its last state.

    Args:
        total: number of programs, or None when it is not known.
        clock: in seconds.
    """

    def __init__(self, total: int | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._total = total
        self._clock = clock
        self._handle: Any | None = None  # IPython's
        self._shown_at = 0.0
        self._last: tuple[str, str] = ("", "")
        self._is_shown = True

    def __enter__(self) -> Self:
        self._handle = displayed(*self._pictured(0, ""))
        self._shown_at = self._clock()
        return self

    def show(self, numbers: "BatchProgress") -> None:
        """Replaces the bar, at most ten times a second."""
        self._last = self._pictured(numbers.finished, str(numbers))
        self._is_shown = False
        if self._clock() - self._shown_at >= _REPLACED_AT_MOST:
            self._replace()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if not self._is_shown:
            self._replace()

    def _replace(self) -> None:
        self._shown_at = self._clock()
        self._is_shown = True
        if self._handle is not None:
            self._handle.update(_bundle(*self._last), raw=True)

    def _pictured(self, finished: int, facts: str) -> tuple[str, str]:
        """Returns the bar as HTML, and as text."""
        of = "" if self._total is None else f"/{self._total}"
        reached = "" if self._total is None else f' value="{finished}" max="{max(self._total, 1)}"'
        title = f"programs {finished}{of}"
        content = (
            f'<div><progress style="width:min(24em,60%);vertical-align:middle"{reached}></progress> '
            f'{notebook.escaped(title)}<br><small style="opacity:.75">{notebook.escaped(facts)}</small></div>'
        )
        return content, f"{title}  {facts}".rstrip()
