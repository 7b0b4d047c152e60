"""Many runs of one program: bounded in number, in order, one failure at a time.

    not started → body running (a thread of the pool, or a coroutine) → calls running → finished → given out
                  at most `threads`                                     at most `limit` at once

A thread is held while a body runs, not while the last calls of its program do. In generator form the
programs that are finished and not given out count too, so a slow reader slows the batch and not the memory.
With an output a program has finished when its result is written, by a thread of its own.
"""

import contextlib
import inspect
import os
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from enum import Enum
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar, cast

from ..lang import checks
from ..lang.errors import CancelledError, JournalError, ParameterError, ResultError, UmbelError, shown
from ..lang.state import State
from .body import Arguments, Host, RunOptions, journaled, opened
from .budget import Allowance, allowance_of
from .data.frames import Framed, joined
from .data.output import EXISTING, BatchOutput, ResultFile, plain, refuse_one_file
from .data.progress import SHOWN_EVERY, BatchProgress, Tally, bar_for
from .data.rows import Row, RowCalls, table_of
from .loop import hearing
from .run import Run

if TYPE_CHECKING:
    from .view.batch_file import BatchFile

Item = Mapping[str, Any] | tuple[Any, ...] | list[Any]  # arguments of one program: its own values
Source = Iterable[Item] | str | os.PathLike[str] | Any  # Any: a frame or a table, of a library that is not imported
OnError = Literal["raise", "return"]
IfExists = Literal["error", "resume", "overwrite"]
# Of the batch: number, as given, for the function; or the error of a row that does not fit.
Call = tuple[int, Item, inspect.BoundArguments | ParameterError]

MAX_ARGUMENTS = 10_000  # of one program
MAX_THREADS = 32  # bodies mostly wait
MAX_LIMIT = 4096  # of num_threads
MAX_LISTED = 1_000_000  # programs whose results are returned as one list
MAX_IN_FLIGHT = 256  # programs, when the user sets no limit; far below the queue of a runtime
KNOWN = 1e-6  # seconds to wait for a value that is there, or never comes


class Order(Enum):
    """Says in which order results are given out, and so what is held back."""

    ALL = "as started, all kept in a list"
    STARTS = "as started, in bounded memory"
    ENDS = "as they end, in bounded memory"


@dataclass(frozen=True, slots=True)
class Failure:
    """Describes a failed program of a batch that was run with `on_error="return"`: it stands in the place of its state.

    Attributes:
        index: number of the program in the batch, from 0.
        arguments: as they were given.
        error: that ended the program.
        state: the state up to then.

    Examples:
        >>> @ul.function
        ... def review(s, text):
        ...     if not text:
        ...         raise ValueError("an empty text")
        ...     s += text + ul.gen("review", max_tokens=8)
        >>> texts = [{"text": "A book."}, {"text": ""}]
        >>> results = review.run_batch(texts, on_error="return", backend=ul.Echo([" Good."]))
        >>> for result in results:
        ...     print(repr(result.error) if isinstance(result, ul.Failure) else result["review"])
         Good.
        ValueError('an empty text')
        >>> results[1].index, results[1].arguments
        (1, {'text': ''})
    """

    index: int
    arguments: Item
    error: BaseException
    state: State


Outcome = TypeVar("Outcome", bound="State | Failure")


class Results(Framed, list[Outcome]):
    """The results of a batch: a list that a notebook shows as a table, and that becomes a frame.

    Attributes:
        inputs: of each result: its row, or its arguments by name.
    """

    def __init__(self) -> None:
        super().__init__()
        self.inputs: list[Row] = []

    def rows(self) -> Iterator[Row]:
        """Yields each result as a dict: `row`, the input, then the variables as `state.value` gives them; `error` where
        there are failures, with their class and message, a text that was cut off among them.

        Raises:
            ParameterError: results were added to the list, or taken out of it.
        """
        if len(self) != len(self.inputs):
            raise ParameterError("the list of results was changed; make the frame first, and change that")
        found = [(inputs, *_told(result)) for result, inputs in zip(self, self.inputs, strict=True)]
        failed = any(error is not None for _, _, error in found)
        for index, (inputs, values, error) in enumerate(found):
            told = {"error": None if error is None else f"{type(error).__name__}: {error}"} if failed else {}
            yield cast(Row, plain(joined(index, inputs, {**values, **told})))

    def _repr_html_(self) -> str:
        from .view import summary  # loaded by notebooks

        return summary.html_of_results(self)


def values_of(state: State) -> Row:
    """Returns the variables of a program that has ended, as `state.value` gives them, and its `ret_value`, if any.

    Raises:
        ResultError: a text is not the object that was asked for.
    """
    values = {name: state.value(name) for name in state.variables}
    return values if state.ret_value is None else {**values, "ret_value": state.ret_value}


def _told(result: State | Failure) -> tuple[Row, BaseException | None]:
    """Returns the variables of a program, and why it has no others."""
    if isinstance(result, Failure):
        return known_values(result.state), result.error
    try:
        return values_of(result), None
    except ResultError as error:  # a text was cut off
        return known_values(result), error


def known_values(state: State) -> Row:
    """Returns the variables that a failed program has set, as texts and lists of texts."""
    found: Row = {}
    for name in state.variables:
        with contextlib.suppress(Exception):  # it is one of those that failed
            found[name] = state.get_var(name, KNOWN)
    return found


@dataclass(slots=True)
class Member:
    """One program of a batch from its start until its result is given out."""

    index: int
    arguments: Item
    inputs: Row  # by name
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
        items: arguments of every program: an iterable, a frame or a path.
        num_threads: most programs at once, or "auto".
        on_error: "raise" starts no more programs after a failure; "return" goes on; None: "return" with an output.
        options: of every run.
        companion: admits programs, in addition to the limits; None: the limits alone do.
        output: path that results are written to; None: nowhere.
        if_exists: what becomes of an output that is there.
        progress: True shows a bar; a function gets the numbers.
        view: path of a file that a page follows; None: none.

    Raises:
        ParameterError: a wrong option, or arguments that do not fit. Those of an iterator are checked as they come.
    """

    def __init__(
        self,
        host: BatchHost,
        arguments: Arguments,
        items: Source,
        *,
        num_threads: int | Literal["auto"],
        on_error: OnError | None,
        options: RunOptions,
        companion: Companion | None = None,
        output: str | os.PathLike[str] | None = None,
        if_exists: IfExists = "error",
        progress: bool | Callable[[BatchProgress], object] = False,
        view: str | os.PathLike[str] | None = None,
    ) -> None:
        if on_error is not None:
            checks.one_of("on_error", on_error, ("raise", "return"))
        if callable(progress):
            checks.function("progress", progress)
        else:
            checks.switch("progress", progress)
        self._host = host
        self._options = options
        self._limit = _checked_limit(num_threads)
        self._threads = MAX_THREADS if isinstance(num_threads, str) else self._limit
        self._keeps_going = on_error == "return" or (on_error is None and output is not None)
        self._progress = progress
        table = table_of(items)
        self._is_table = table is not None
        self._source = "" if table is None else table.path
        self._skips = None if table is None else table.skips
        self.total: int | None
        if table is not None:
            self.total = table.total
            self._known: list[Call] | None = None
            self._calls = calls_of_rows(RowCalls(arguments, table), table.rows)
        else:
            self._take(arguments, items, carries=output is not None)
        checks.one_of("if_exists", if_exists, EXISTING)
        refuse_one_file({"output": output, "view": view, "journal": options.journal and options.journal.path})
        self._output_options = (output, if_exists, None if table is None else table.schema)
        self._output: ResultFile | None = None
        self._view_path = view
        self._view: BatchFile | None = None  # loaded by batches that have one
        self._writer: ThreadPoolExecutor | None = None  # one thread, for output and view
        self._turned_away: Call | None = None  # by the companion, until there is room
        self._companion = companion
        self._allowance: Allowance | None = None  # one for all
        self._window: dict[int, Member] = {}  # started, not given out
        self._news = threading.Condition()  # guards what follows
        self._ended: deque[int] = deque()  # in the window, in the order of their ends
        self._bodies = 0
        self._running: dict[int, Member] = {}
        self._changes = 0
        self._failed = False
        self._unwritten: BaseException | None = None  # the output cannot be written
        self._unread: BaseException | None = None  # raised by the caller's iterable
        self._tally = Tally(self.total)
        self._shown = (-1, 0, 0)  # programs that had ended, that ran, and calls that had, when they were shown last
        self._given: Row = {}  # input of the result that was given out last
        self._outcome: BatchOutput | None = None

    def _take(self, arguments: Arguments, items: Any, *, carries: bool) -> None:
        """Takes `items`, if they are an iterable of dicts and tuples; of a list all, checked before anything runs."""
        if isinstance(items, str | bytes | Mapping) or not isinstance(items, Iterable):
            raise ParameterError(
                f"run_batch(batch_arguments) takes a list of dicts or tuples, got {type(items).__name__} "
                f"{shown(items)}; a frame or the path of a file does, too"
            )
        self.total = checks.length("run_batch(batch_arguments)", items, "a list of dicts or tuples")
        if self.total is not None:
            if self.total > MAX_LISTED:
                raise _too_many()
            items = checks.members("run_batch(batch_arguments)", items, MAX_LISTED, "a list of dicts or tuples")
        else:
            items = checks.begun("run_batch(batch_arguments)", items, "a list of dicts or tuples")
        calls = calls_of(arguments, items, RowCalls(arguments) if carries else None)
        self._known = None if self.total is None else list(calls)
        self._calls = calls if self._known is None else iter(self._known)

    def collect(self) -> "Results[State | Failure] | BatchOutput":
        """Returns all results, or where they are. Raises the first error by position once the running programs have
        ended; with an output, the first that came.

        Raises:
            ParameterError: there are more results than a list may hold, as for an endless iterable.
        """
        if self._output_options[0] is not None:
            for _ in self._outcomes(Order.ENDS):
                pass
            assert self._outcome is not None, "the batch has come to its end"
            return self._outcome
        if self._is_table and (self.total or 0) > MAX_LISTED:
            raise _too_many()
        results: Results[State | Failure] = Results()
        for outcome in islice(self._outcomes(Order.ALL), MAX_LISTED + 1):
            results.append(outcome)
            results.inputs.append(self._given)
        if len(results) > MAX_LISTED:
            raise _too_many()
        return results

    def generate(self) -> Generator[State | Failure, None, None]:
        """Yields results one by one. An error is raised in its place; closing cancels the running programs."""
        return self._outcomes(Order.STARTS)

    # -------------------------------------------------------------------------------- how

    def _outcomes(self, order: "Order") -> Generator[State | Failure, None, None]:
        states: dict[int, State] = {}  # for the error, in list form
        listed = order is Order.ALL
        self._allowance = allowance_of(self._options.budget)  # its seconds begin
        self._tally = Tally(self.total)
        with ExitStack() as stack:
            stack.enter_context(journaled(self._host, self._options))
            if self._options.journal is not None and self._known is not None:
                calls = [call for _, _, call in self._known if not isinstance(call, ParameterError)]
                self._options.journal.check(calls, self._options)
            self._open_output(stack)
            pool = ThreadPoolExecutor(self._threads, thread_name_prefix="umbel-batch")
            stack.callback(pool.shutdown, wait=False, cancel_futures=True)
            if self._companion is not None:
                stack.callback(self._companion.end)
                known = self._known
                self._companion.begin(
                    None if known is None else [c for _, _, c in known if not isinstance(c, ParameterError)]
                )
            stack.callback(self._cancel_rest)
            show = self._shower(stack)
            while (member := self._await(pool, order, show)) is not None:
                self._given = member.inputs
                if member.error is None:
                    if listed:
                        states[member.index] = member.state
                    yield member.state
                elif self._keeps_going:
                    yield Failure(member.index, member.arguments, member.error, member.state)
                else:
                    if order is not Order.STARTS:
                        self._await_rest(states)
                    raise _annotated(member, self.total, states if listed else None)
            if self._unread is not None:
                if listed:
                    self._unread.batch_results = states  # type: ignore[attr-defined]  # as of `_annotated`
                raise self._unread
            self._finish_output()

    def _open_output(self, stack: ExitStack) -> None:
        output, existing, schema = self._output_options
        if output is not None:
            self._output = ResultFile(output, existing, schema, self._source)
            stack.callback(self._output.close)
        if self._view_path is not None:
            from .view.batch_file import BatchFile

            backend = self._options.backend.capabilities.name
            view = self._view = BatchFile(self._view_path, self._host.name, backend, self.total)
            stack.callback(lambda: view.close(self._tally.resumed))
        if self._output is not None or self._view is not None:
            self._writer = ThreadPoolExecutor(1, thread_name_prefix="umbel-output")
            stack.callback(self._writer.shutdown, wait=True)

    def _finish_output(self) -> None:
        output = self._output
        if output is not None:
            output.finish()
            numbers = self._tally.numbers()
            self._outcome = BatchOutput(
                output.path,
                len(output.done),
                numbers.resumed,
                numbers.failed,
                output.failed_path if output.failures_written else None,
                self._tally.cost,
                numbers.seconds,
            )

    def _shower(self, stack: ExitStack) -> Callable[[BatchProgress], object] | None:
        if callable(self._progress):
            return self._progress
        if not self._progress:
            return None
        bar = bar_for(self.total)
        stack.enter_context(bar)
        return bar.show

    def _await(
        self, pool: ThreadPoolExecutor, order: "Order", show: Callable[[BatchProgress], object] | None
    ) -> Member | None:
        """Waits for the next program, starting others meanwhile. Returns None after the last."""
        while True:
            with self._news:
                seen = self._changes
            self._fill(pool, order)
            if self._unwritten is not None:
                raise self._unwritten
            if show is not None:
                self._show(show)
            if not self._window:
                return None
            with self._news:
                index = self._next(order)
                if index is not None:
                    return self._window.pop(index)
                if self._changes == seen:
                    self._news.wait(hearing(None if show is None else SHOWN_EVERY))

    def _show(self, show: Callable[[BatchProgress], object]) -> None:
        """Shows the numbers if they are new: now and then, at the end, and before an error ends the batch."""
        if not self._tally.is_due and self._window and (self._keeps_going or not self._failed):
            return
        with self._news:
            numbers = self._tally.numbers(member.run.ledger.cost for member in self._running.values())
        shown = (numbers.finished, numbers.running, numbers.usage.calls + numbers.read.calls)
        if shown != self._shown:
            self._shown = shown
            show(numbers)

    def _next(self, order: "Order") -> int | None:
        """Returns the program to give out, if it has ended: any, or the first of those that were started."""
        if order is Order.ENDS:
            return self._ended.popleft() if self._ended else None
        index = next(iter(self._window))
        return index if self._window[index].finished else None

    def _fill(self, pool: ThreadPoolExecutor, order: "Order") -> None:
        """Starts programs while there is room. Holds no lock: the caller's iterator may block."""
        while not (self._failed and not self._keeps_going) and self._unwritten is None:
            if self._bodies >= self._threads or len(self._running) >= self._limit:
                return
            if order is not Order.ALL and len(self._window) >= 2 * self._limit:
                return
            following, self._turned_away = self._turned_away or self._following(), None
            if following is None:
                return
            index, item, call = following
            if isinstance(call, ParameterError):
                self._refuse(index, item, inputs_of(item, call), call)
                continue
            if self._companion is not None and not self._companion.admits(index, call):
                self._turned_away = following
                return
            self._start(index, item, call, pool)

    def _following(self) -> Call | None:
        """Returns the next program whose result is not there yet. An error of the caller's iterable is raised when the
        programs before it have ended, so that what they did is not lost."""
        while self._unread is None:
            try:
                following = next(self._calls, None)
                if following is None:
                    return None
                index, item, call = following
                skips = self._skips if self._output is None else self._output.has
                if skips is None or not skips(index, inputs_of(item, call)):
                    return following
            except Exception as error:
                self._unread = error
                return None
            with self._news:
                self._tally.resumed += 1
        return None

    def _refuse(self, index: int, item: Item, inputs: Row, error: UmbelError) -> None:
        """Ends a program whose row does not fit it, or its journal, before it begins."""
        run, state = self._host.open(self._options, self._allowance)
        run.end(error)
        member = self._window[index] = Member(index, item, inputs, run, state, error)
        with self._news:
            self._running[index] = member
        if self._view is not None:
            self._view.note_begin(index, member.inputs)
        self._note_end(member)

    def _start(self, index: int, item: Item, call: inspect.BoundArguments, pool: ThreadPoolExecutor) -> None:
        try:
            run, state = opened(self._host, self._options, self._allowance, call, index)
        except JournalError as error:
            if not isinstance(error.__context__, UnicodeEncodeError):
                raise
            self._refuse(index, item, inputs_of(item, call), error)  # the arguments of this row alone cannot be kept
            return
        member = self._window[index] = Member(index, item, inputs_of(item, call), run, state)
        with self._news:
            self._bodies += 1
            self._running[index] = member
        if self._view is not None:
            self._view.note_begin(index, member.inputs)

        def body_ended(error: BaseException | None) -> None:
            with self._news:
                member.error = error
                self._bodies -= 1
                self._changes += 1
                self._news.notify_all()

        def finished() -> None:
            if self._companion is not None:
                self._companion.leaves(index)
            member.error = member.error or state._sink.error()
            self._note_end(member)

        self._host.start(run, state, call, pool, body_ended=body_ended, finished=finished)

    def _note_end(self, member: Member) -> None:
        """Notes that a program has ended: at once, or when its result is written. Until then it counts as running, so
        a slow disk slows the batch and not the memory."""
        if self._writer is None:
            self._close(member)
            return
        with contextlib.suppress(RuntimeError):  # the batch was given up: nothing is written any more
            self._writer.submit(self._write, member)

    def _write(self, member: Member) -> None:
        try:
            if self._unwritten is None and self._output is not None:
                self._write_to(self._output, member)
            if self._view is not None:
                self._view.note_end(member.index, member.run, member.state._sink.described(), member.error)
        except BaseException as error:
            self._unwritten = error
        self._close(member)

    def _write_to(self, output: ResultFile, member: Member) -> None:
        if member.error is None:
            try:
                values = values_of(member.state)
            except ResultError as error:  # a text was cut off: the row has no result
                member.error = error
            else:
                output.write(member.index, member.inputs, values)
                return
        if not isinstance(member.error, CancelledError):
            output.fail(member.index, member.inputs, member.error, known_values(member.state))

    def _close(self, member: Member) -> None:
        with self._news:
            member.finished = True
            failed = member.error is not None
            self._failed = self._failed or failed
            del self._running[member.index]
            self._ended.append(member.index)
            self._tally.add(member.run.ledger.cost, failed=failed)
            self._changes += 1
            self._news.notify_all()

    def _await_rest(self, states: dict[int, State]) -> None:
        with self._news:
            self._news.wait_for(lambda: not self._running)
        states.update({index: member.state for index, member in self._window.items() if member.error is None})

    def _cancel_rest(self) -> None:
        for member in self._window.values():
            if not member.finished:
                member.run.cancel()


def calls_of(arguments: Arguments, items: Iterable[Item], rows: RowCalls | None = None) -> Iterator[Call]:
    """Yields the calls of a batch lazily: index, arguments as given, arguments bound to the function.

    `rows`: binds dicts in place of `arguments`, and carries their further keys along.

    Raises:
        ParameterError: an item that is no dict and no tuple, or that does not fit.
    """
    for index, item in enumerate(items):
        name = f"run_batch(batch_arguments) item {index}"
        match item:
            case Mapping():
                given = checks.entries(name, item, MAX_ARGUMENTS, "a dict of keywords")
                if rows is None and (twice := next((each for each in given if each in arguments.bound), None)):
                    raise ParameterError(f"{name} gives {shown(twice)}, which {arguments.name} has bound; leave it out")
                yield index, item, arguments.bind((), given) if rows is None else rows.bind(index, given)
            case tuple() | list():
                positions = checks.members(name, item, MAX_ARGUMENTS, "a tuple of positions")
                yield index, item, arguments.bind(positions, {})
            case _:
                raise ParameterError(f"{name} is {shown(item)}; write a dict of keywords or a tuple of positions")


def calls_of_rows(binder: RowCalls, rows: Iterable[Row]) -> Iterator[Call]:
    """Yields the calls of a table's rows, with the error of a row that does not fit."""
    for index, row in enumerate(rows):
        try:
            yield index, row, binder.bind(index, row)
        except ParameterError as error:
            yield index, row, error


def inputs_of(item: Item, call: inspect.BoundArguments | ParameterError) -> Row:
    """Returns the input of a program by name: its row, or its arguments."""
    if isinstance(item, Mapping):
        return dict(item)
    return {} if isinstance(call, ParameterError) else dict(call.arguments)


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


def run_batch(
    host: BatchHost,
    arguments: Arguments,
    items: Source,
    options: RunOptions,
    *,
    num_threads: int | Literal["auto"],
    progress: bool | Callable[[BatchProgress], object],
    progress_bar: bool,
    generator_style: bool,
    on_error: OnError | None,
    output: str | os.PathLike[str] | None,
    if_exists: IfExists,
    view: str | os.PathLike[str] | None,
    companion: Companion | None = None,
) -> Any:  # as the overloads of the callers say
    """Checks the options of `Program.run_batch`, which documents them, and runs the batch."""
    for switch, given in (("progress_bar", progress_bar), ("generator_style", generator_style)):
        checks.switch(switch, given)
    if options.stream or options.verbose:
        raise ParameterError("run_batch() takes no stream and no verbose; generator_style=True gives early results")
    job = Job(
        host,
        arguments,
        items,
        num_threads=num_threads,
        on_error=on_error,
        options=options,
        companion=companion,
        output=output,
        if_exists=if_exists,
        progress=progress_bar if progress is False or progress is None else progress,
        view=view,
    )
    return job.generate() if generator_style else job.collect()


# Of `Program.run_batch`, for messages.
PARAMETERS = tuple(
    name
    for name, parameter in inspect.signature(run_batch).parameters.items()
    if parameter.kind is parameter.KEYWORD_ONLY and name != "companion"
)
