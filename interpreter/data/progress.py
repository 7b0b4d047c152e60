"""Counts a running batch, and shows the numbers: a bar on stderr or in a notebook, or a function of the user's.

━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━  812/1000  0:01:04
3 failed · 12.6 rows/s · 1,204,113 tokens in, 71 % cached, 40,021 out · $0.41 · 15 s left
"""

import time
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import msgspec

from ...lang.protocol import Cost, Usage
from ..notebooks.display import NotebookBar, in_notebook

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID


class BatchProgress(msgspec.Struct, frozen=True):
    """Holds the numbers of a batch at a moment: what a function given as `progress=` gets. `print` shows a line.

    Attributes:
        total: number of programs of the batch; None where it is not known, as for an iterator.
        done: number of programs that have ended well.
        failed: number of programs that have failed.
        resumed: number of programs whose results an earlier run has written.
        seconds: since the batch began.
        usage: tokens and calls of the programs that have ended.
        dollars: cost by `umbel.prices`, 0 for a model that runs here; None: without a price.

    Examples:
        >>> @ul.function
        ... def capital(s, country):
        ...     s += country + ":" + ul.gen("city", max_tokens=4)
        >>> seen = []
        >>> model = ul.Echo({"France": " Paris", "Italy": " Rome"})
        >>> states = capital.run_batch([("France",), ("Italy",)], progress=seen.append, backend=model)
        >>> last = seen[-1]
        >>> last.finished, last.total, last.usage.calls, last.dollars
        (2, 2, 2, 0.0)
        >>> print("at the end:", last)
        at the end: ... rows/s · 4 tokens in, 0% cached, 2 out
    """

    total: int | None
    done: int
    failed: int
    resumed: int
    seconds: float
    usage: Usage
    dollars: float | None

    @property
    def finished(self) -> int:
        """Number of programs that need no more time: done, failed and resumed ones."""
        return self.done + self.failed + self.resumed

    @property
    def rate(self) -> float:
        """Number of programs that end per second, 0 before the first."""
        return (self.done + self.failed) / self.seconds if self.seconds > 0 else 0.0

    @property
    def cached_share(self) -> float:
        """Part of the prompt tokens that was cached, 0 to 1."""
        return self.usage.cached_tokens / self.usage.prompt_tokens if self.usage.prompt_tokens else 0.0

    @property
    def seconds_left(self) -> float | None:
        """Seconds until the end at the rate so far; None where it cannot be said."""
        if self.total is None or not self.rate:
            return None
        return max(0, self.total - self.finished) / self.rate

    def __str__(self) -> str:
        facts = [f"{self.failed} failed"] if self.failed else []
        facts += [f"{self.resumed} done before"] if self.resumed else []
        facts.append(f"{self.rate:.3g} rows/s")
        usage = self.usage
        facts.append(
            f"{usage.prompt_tokens:,} tokens in, {self.cached_share:.0%} cached, {usage.completion_tokens:,} out"
        )
        if self.dollars:
            facts.append(f"${self.dollars:.2f}" if self.dollars >= 0.01 else f"${self.dollars:.4f}")
        elif self.dollars is None:
            facts.append("price not known")
        if self.seconds_left:
            facts.append(f"{_spoken(self.seconds_left)} left")
        return " · ".join(facts)


def _spoken(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{rest} s"


class Tally:
    """Counts the programs of a batch. The caller holds a lock.

    Args:
        total: of the batch, or None.
        clock: in seconds.
    """

    def __init__(self, total: int | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._total = total
        self._clock = clock
        self._began = clock()
        self.cost = Cost()
        self.done = 0
        self.failed = 0
        self.resumed = 0

    def add(self, cost: Cost, *, failed: bool) -> None:
        """Counts a program that has ended."""
        self.cost += cost
        self.done += not failed
        self.failed += failed

    def numbers(self) -> BatchProgress:
        seconds = self._clock() - self._began
        counts = (self.done, self.failed, self.resumed)
        return BatchProgress(self._total, *counts, seconds, self.cost.usage, self.cost.dollars)


def bar_for(total: int | None) -> "Bar | NotebookBar":
    """Returns the bar of the place that this process writes to: a notebook's cell, or a terminal."""
    return NotebookBar(total) if in_notebook() else Bar(total)


class Bar:
    """Shows a progress bar with the numbers of a batch on stderr: one line at the end where that is no terminal.
    A context manager.

    Args:
        total: number of programs, or None when it is not known.
    """

    def __init__(self, total: int | None) -> None:
        self._total = total
        self._progress: Progress | None = None
        self._task: TaskID | None = None
        self._facts = ""

    def __enter__(self) -> Self:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
        from rich.text import Text

        bar = self

        class WithFacts(Progress):
            def get_renderables(self) -> Any:  # Any: what rich renders
                yield from super().get_renderables()
                yield Text(bar._facts, style="dim")

        columns = (TextColumn("programs"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._progress = WithFacts(*columns, console=Console(stderr=True))
        self._task = self._progress.add_task("programs", total=self._total)
        self._progress.start()
        return self

    def show(self, numbers: BatchProgress) -> None:
        if self._progress is not None and self._task is not None:
            self._facts = str(numbers)
            self._progress.update(self._task, completed=numbers.finished)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._progress is not None:
            self._progress.stop()
