"""The progress bar of a batch, drawn by rich on standard error."""

from types import TracebackType
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID


class Bar:
    """A context manager; `show(n)` says that n programs have finished.

    Args:
        total: how many there are, or None when that is not known.
    """

    def __init__(self, total: int | None) -> None:
        self._total = total
        self._progress: Progress | None = None
        self._task: TaskID | None = None

    def __enter__(self) -> Self:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        self._progress = Progress(
            TextColumn("programs"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=Console(stderr=True)
        )
        self._task = self._progress.add_task("programs", total=self._total)
        self._progress.start()
        return self

    def show(self, finished: int) -> None:
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, completed=finished)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._progress is not None:
            self._progress.stop()
