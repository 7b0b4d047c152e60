"""Many runs of one program: bounded in number, in order, one failure at a time.

    not started → body running (a thread of the pool, or a coroutine) → calls running → finished → given out
                  at most `threads`                                     at most `limit` at once

A thread is held while a body runs, not while the last calls of its program do. In generator form the
programs that are finished and not given out count too, so a slow reader slows the batch and not the memory.
"""

import inspect
import itertools
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence, Sized
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import islice
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Protocol, Self

from ..lang import checks
from ..lang.errors import ParameterError, shown
from ..lang.state import State
from .body import Arguments, Host, RunOptions, journaled, opened
from .budget import Allowance, allowance_of
from .run import Run

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID


Item = Mapping[str, Any] | tuple[Any, ...] | list[Any]  # arguments of one program: its own values
OnError = Literal["raise", "return"]
Call = tuple[int, Item, inspect.BoundArguments]  # of the batch: number, as given, for the function

MAX_ARGUMENTS = 10_000  # of one program
MAX_THREADS = 32  # bodies mostly wait
MAX_LIMIT = 4096  # of num_threads
MAX_LISTED = 1_000_000  # programs whose results are returned as one list
MAX_IN_FLIGHT = 256  # programs, when the user sets no limit; far below the queue of a runtime


class Bar:
    """Shows a progress bar on stderr. A context manager; `show(n)` sets the number of finished programs.

    Args:
        total: number of programs, or None when it is not known.
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


@dataclass(frozen=True, slots=True)
class Failure:
    """A failed program of a batch: its index, arguments, error, and state up to then."""

    index: int
    arguments: Item
    error: BaseException
    state: State


class Results(list[State | Failure]):
    """The results of a batch: a list that a notebook shows as a table."""

    def _repr_html_(self) -> str:
        from .view import summary  # loaded by notebooks

        return summary.html_of_results(self)


@dataclass(slots=True)
class Member:
    """One program of a batch from its start until its result is given out."""

    index: int
    arguments: Item
    run: Run
    state: State
    error: BaseException | None = None  # what the body raised, or what stopped the program's own stream
    finished: bool = False


class BatchHost(Host, Protocol):
    """A program as its batch sees it."""

    def start(
        self,
        run: Run,
        state: State,
        call: inspect.BoundArguments,
        pool: ThreadPoolExecutor,
        *,
        body_ended: Callable[[BaseException | None], None],
        finished: Callable[[], None],
    ) -> None:
        """Begins the body. Calls `body_ended` with its error, then `finished` when the whole run has ended."""


class Companion(Protocol):
    """Admits the programs of a batch: it knows what they share, and how much memory each takes."""

    def begin(self, calls: Sequence[inspect.BoundArguments] | None) -> None:
        """Called before the first program starts. `calls`: all of them, if known."""

    def admits(self, index: int, call: inspect.BoundArguments) -> bool:
        """Returns whether the program may start while others run. A refused program is asked about again, before any
        later one, when another has left. A program is always admitted if none runs."""

    def leaves(self, index: int) -> None:
        """Called when the program has finished, on any thread."""

    def end(self) -> None:
        """Called when no program of the batch runs any more, or the batch was given up."""


class Job:
    """One call of run_batch.

    Args:
        host: the program.
        arguments: the program's parameters.
        items: arguments of every program.
        num_threads: most programs at once, or "auto".
        on_error: "raise" starts no more programs after a failure; "return" goes on.
        options: of every run.
        companion: admits programs, in addition to the limits; None: the limits alone do.

    Raises:
        ParameterError: a wrong option, or arguments that do not fit. Those of an iterator are checked as they come.
    """

    def __init__(
        self,
        host: BatchHost,
        arguments: Arguments,
        items: Iterable[Item],
        *,
        num_threads: int | Literal["auto"],
        on_error: OnError,
        options: RunOptions,
        companion: Companion | None = None,
    ) -> None:
        checks.one_of("on_error", on_error, ("raise", "return"))
        if isinstance(items, str | bytes | Mapping) or not isinstance(items, Iterable):
            raise ParameterError(
                f"run_batch(batch_arguments) takes a list of dicts or tuples, got {type(items).__name__} {shown(items)}"
            )
        self._host = host
        self._options = options
        self._limit = _checked_limit(num_threads)
        self._threads = MAX_THREADS if isinstance(num_threads, str) else self._limit
        self._keeps_going = on_error == "return"
        self.total = _length(items)
        if self.total is not None:
            items = checks.members("run_batch(batch_arguments)", items, MAX_LISTED, "a list of dicts or tuples")
        else:
            items = _begun(items)
        calls = calls_of(arguments, items)
        self._known = None if self.total is None else list(calls)  # a list is checked before anything runs
        self._calls = calls if self._known is None else iter(self._known)
        self._turned_away: Call | None = None  # by the companion, until there is room
        self._companion = companion
        self._allowance: Allowance | None = None  # one for all
        self._window: dict[int, Member] = {}  # started, not given out
        self._news = threading.Condition()  # guards the counters below
        self._bodies = 0
        self._running = 0
        self._finished = 0
        self._changes = 0
        self._failed = False

    def collect(self, *, progress_bar: bool) -> list[State | Failure]:
        """Returns all results. Raises the first error by position once the running programs have ended.

        Raises:
            ParameterError: there are more results than a list may hold, as for an endless iterable.
        """
        results = Results(islice(self._outcomes(progress_bar=progress_bar, bounded=False), MAX_LISTED + 1))
        if len(results) > MAX_LISTED:
            raise _too_many()
        return results

    def generate(self, *, progress_bar: bool) -> Generator[State | Failure, None, None]:
        """Yields results one by one. An error is raised in its place; closing cancels the running programs."""
        return self._outcomes(progress_bar=progress_bar, bounded=True)

    # -------------------------------------------------------------------------------- how

    def _outcomes(self, *, progress_bar: bool, bounded: bool) -> Generator[State | Failure, None, None]:
        states: dict[int, State] = {}  # for the error, in list form
        self._allowance = allowance_of(self._options.budget)  # its seconds begin
        with ExitStack() as stack:
            stack.enter_context(journaled(self._host, self._options))
            if self._options.journal is not None and self._known is not None:
                self._options.journal.check([call for _, _, call in self._known], self._options)
            pool = ThreadPoolExecutor(self._threads, thread_name_prefix="umbel-batch")
            stack.callback(pool.shutdown, wait=False, cancel_futures=True)
            if self._companion is not None:
                stack.callback(self._companion.end)
                self._companion.begin(None if self._known is None else [call for _, _, call in self._known])
            stack.callback(self._cancel_rest)
            bar = stack.enter_context(Bar(self.total)) if progress_bar else None
            for index in itertools.count():
                member = self._await(index, pool, bar, bounded)
                if member is None:
                    return
                if member.error is None:
                    if not bounded:
                        states[index] = member.state
                    yield member.state
                elif self._keeps_going:
                    yield Failure(index, member.arguments, member.error, member.state)
                else:
                    if not bounded:
                        self._await_rest(states)
                    raise _annotated(member, self.total, None if bounded else states)

    def _await(self, index: int, pool: ThreadPoolExecutor, bar: Bar | None, bounded: bool) -> Member | None:
        """Waits for the program at `index`, starting others meanwhile. Returns None after the last."""
        while True:
            with self._news:
                seen = self._changes
            self._fill(pool, bounded)
            member = self._window.get(index)
            if member is None:
                return None
            if bar is not None:
                bar.show(self._finished)
            with self._news:
                if member.finished:
                    return self._window.pop(index)
                if self._changes == seen:
                    self._news.wait()

    def _fill(self, pool: ThreadPoolExecutor, bounded: bool) -> None:
        """Starts programs while there is room. Holds no lock: the caller's iterator may block."""
        while not (self._failed and not self._keeps_going):
            if self._bodies >= self._threads or self._running >= self._limit:
                return
            if bounded and len(self._window) >= 2 * self._limit:
                return
            following, self._turned_away = self._turned_away or next(self._calls, None), None
            if following is None:
                return
            index, _, call = following
            if self._companion is not None and not self._companion.admits(index, call):
                self._turned_away = following
                return
            self._start(*following, pool)

    def _start(self, index: int, item: Item, call: inspect.BoundArguments, pool: ThreadPoolExecutor) -> None:
        run, state = opened(self._host, self._options, self._allowance, call, index)
        member = self._window[index] = Member(index, item, run, state)
        with self._news:
            self._bodies += 1
            self._running += 1

        def body_ended(error: BaseException | None) -> None:
            with self._news:
                member.error = error
                self._bodies -= 1
                self._changes += 1
                self._news.notify_all()

        def finished() -> None:
            if self._companion is not None:
                self._companion.leaves(index)
            with self._news:
                member.error = member.error or state._sink.error()
                member.finished = True
                self._failed = self._failed or member.error is not None
                self._running -= 1
                self._finished += 1
                self._changes += 1
                self._news.notify_all()

        self._host.start(run, state, call, pool, body_ended=body_ended, finished=finished)

    def _await_rest(self, states: dict[int, State]) -> None:
        with self._news:
            self._news.wait_for(lambda: self._running == 0)
        states.update({index: member.state for index, member in self._window.items() if member.error is None})

    def _cancel_rest(self) -> None:
        for member in self._window.values():
            if not member.finished:
                member.run.cancel()


def calls_of(arguments: Arguments, items: Iterable[Item]) -> Iterator[Call]:
    """Yields the calls of a batch lazily: index, arguments as given, arguments bound to the function.

    Raises:
        ParameterError: an item that is no dict and no tuple, or that does not fit.
    """
    for index, item in enumerate(items):
        name = f"run_batch(batch_arguments) item {index}"
        match item:
            case Mapping():
                yield index, item, arguments.bind((), checks.entries(name, item, MAX_ARGUMENTS, "a dict of keywords"))
            case tuple() | list():
                positions = checks.members(name, item, MAX_ARGUMENTS, "a tuple of positions")
                yield index, item, arguments.bind(positions, {})
            case _:
                raise ParameterError(f"{name} is {shown(item)}; write a dict of keywords or a tuple of positions")


def _length(items: Iterable[Item]) -> int | None:
    """Returns the number of items, or None where it is not known.

    Raises:
        ParameterError: there are more items than a list of results may hold.
    """
    try:
        length = len(items) if isinstance(items, Sized) else None
    except Exception as error:  # of the collection's own code, or it is longer than any memory
        raise ParameterError(
            f"run_batch(batch_arguments): the length of {type(items).__name__} cannot be known "
            f"({type(error).__name__}); write a list of dicts or tuples"
        ) from error
    if length is not None and length > MAX_LISTED:
        raise _too_many()
    return length


def _begun(items: Iterable[Item]) -> Iterator[Item]:
    """Starts iterating. An error in the middle of it is the caller's own."""
    try:
        return iter(items)
    except Exception as error:  # of the iterable's own code
        raise ParameterError(
            f"run_batch(batch_arguments) must be a list of dicts or tuples; reading it raised {type(error).__name__}"
        ) from error


def _too_many() -> ParameterError:
    return ParameterError(
        f"run_batch(batch_arguments) has more than {MAX_LISTED} programs; write generator_style=True with an iterator "
        "over them, and use the results one by one"
    )


def _checked_limit(num_threads: object) -> int:
    if isinstance(num_threads, str) and checks.plain(num_threads) == "auto":
        return MAX_IN_FLIGHT
    return checks.integer("num_threads", num_threads, 1, MAX_LIMIT, f"1 to {MAX_LIMIT}, or 'auto'")


def _annotated(member: Member, total: int | None, states: dict[int, State] | None) -> BaseException:
    """Returns the program's own error with a note naming the program, and the others' states if given."""
    error = member.error
    assert error is not None, "only a failed member is annotated"
    of = "" if total is None else f" of {total}"
    error.add_note(f"program {member.index}{of} of the batch; on_error='return' gives a Failure in its place")
    if states is not None:
        error.batch_results = states  # type: ignore[attr-defined]  # documented in run_batch; its type is the user's
    return error
