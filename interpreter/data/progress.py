"""Counts a running batch, and shows the numbers: a bar on stderr or in a notebook, or a function of the user's.

programs ━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━ 812/1000 0:01:04
185 running · 3 failed · 12.6 rows/s · 15 s left
2,411 calls · 1,204,113 tokens in, 71% cached, 40,021 out · $0.41

Calls are counted as they end, those of running programs, too: where many programs run at once, none ends for long.
"""

import time
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import msgspec

from ...lang.protocol import Cost, Usage
from ..notebooks.display import NotebookBar, in_notebook

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

SHOWN_EVERY = 0.5  # seconds between two looks at what runs
_TOLD_EVERY = 30.0  # seconds between two texts of a bar where nothing is drawn


class BatchProgress(msgspec.Struct, frozen=True):
    """Holds the numbers of a batch at a moment: what a function given as `progress=` gets. `print` shows a line.

    Attributes:
        total: number of programs of the batch; None where it is not known, as for an iterator.
        done: number of programs that have ended well.
        failed: number of programs that have failed.
        resumed: number of programs whose results an earlier run has written.
        seconds: since the batch began.
        usage: tokens and calls of all calls that have ended, those of programs that run among them.
        dollars: cost by `umbel.prices`, 0 for a model that runs here; None: without a price.
        running: number of programs that have begun and not ended.
        read: tokens and calls that a journal has answered: they cost nothing now.

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
        at the end: ... rows/s · 2 calls · 4 tokens in, 0% cached, 2 out
    """

    total: int | None
    done: int
    failed: int
    resumed: int
    seconds: float
    usage: Usage
    dollars: float | None
    running: int = 0
    read: Usage = Usage()

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
        return " · ".join(self.lines())

    def lines(self) -> tuple[str, ...]:
        """Returns what is to be said of the programs, of the calls that were made, and of those that a journal had."""
        made, *read = told_calls(self.usage, self.read)
        return " · ".join(self._of_programs()), " · ".join(self._of_calls(made)), *read

    def _of_programs(self) -> list[str]:
        facts = [f"{self.running:,} running"] if self.running else []
        facts += [f"{self.failed:,} failed"] if self.failed else []
        facts += [f"{self.resumed:,} done before"] if self.resumed else []
        facts.append(f"{self.rate:.3g} rows/s")
        if self.seconds_left:
            facts.append(f"{_spoken(self.seconds_left)} left")
        return facts

    def _of_calls(self, made: str) -> list[str]:
        facts = [_calls(self.usage.calls), made] if self.usage.calls or not self.read.calls else [made]
        if self.dollars:
            facts.append(f"${self.dollars:.2f}" if self.dollars >= 0.01 else f"${self.dollars:.4f}")
        elif self.dollars is None:
            facts.append("price not known")
        return facts


def told_calls(usage: Usage, read: Usage) -> list[str]:
    """Returns the tokens of calls that were made, and the number of those that a journal has answered."""
    told = [f"{_calls(read.calls)} read from the journal"] if read.calls else []
    if not usage.calls and read.calls:
        return ["no call made", *told]
    share = usage.cached_tokens / usage.prompt_tokens if usage.prompt_tokens else 0.0
    return [f"{usage.prompt_tokens:,} tokens in, {share:.0%} cached, {usage.completion_tokens:,} out", *told]


def _calls(count: int) -> str:
    return f"{count:,} call{'' if count == 1 else 's'}"


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
        self._looked_at = self._began
        self.cost = Cost()  # of programs that have ended
        self.done = 0
        self.failed = 0
        self.resumed = 0

    def add(self, cost: Cost, *, failed: bool) -> None:
        """Counts a program that has ended."""
        self.cost += cost
        self.done += not failed
        self.failed += failed

    @property
    def is_due(self) -> bool:
        """True where `numbers` was called so long ago that there may be something to show."""
        return self._clock() - self._looked_at >= SHOWN_EVERY

    def numbers(self, running: Iterable[Cost] = ()) -> BatchProgress:
        """Returns the numbers now. `running`: what the programs that run have cost so far."""
        self._looked_at = self._clock()
        others = list(running)
        cost = sum(others, self.cost)
        return BatchProgress(
            self._total,
            self.done,
            self.failed,
            self.resumed,
            self._looked_at - self._began,
            cost.usage,
            cost.dollars,
            len(others),
            cost.read,
        )


def bar_for(total: int | None) -> "Bar | NotebookBar":
    """Returns the bar of the place that this process writes to: a notebook's cell, or a terminal."""
    return NotebookBar(total) if in_notebook() else Bar(total)


class Bar:
    """Shows a progress bar with the numbers of a batch on stderr. Where that is no terminal, the numbers are told twice
    a minute, and the bar is drawn at the end. A context manager.

    Args:
        total: number of programs, or None when it is not known.
        clock: in seconds.
    """

    def __init__(self, total: int | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._total = total
        self._clock = clock
        self._told_at = clock()
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
            self._facts = "\n".join(numbers.lines())
            self._progress.update(self._task, completed=numbers.finished)
            console = self._progress.console
            if numbers.running and not console.is_interactive and self._clock() - self._told_at >= _TOLD_EVERY:
                self._told_at = self._clock()
                of = "" if self._total is None else f"/{self._total}"
                console.print(f"programs {numbers.finished}{of}\n{self._facts}", markup=False, highlight=False)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._progress is not None:
            self._progress.stop()
