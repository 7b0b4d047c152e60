"""A stream: the queue of one state. Submitted to by the program's thread, executed on the streams' loop.

    program's thread                          streams' loop
    submit(op)  → check, bind names, queue →  drain: one task while there are steps → Executor → bindings
    read(name)  ← binding ←──────────────────────────────────────────────────────────┘

A stream fails as a whole: the first error is recorded, then every pending and later binding carries
it, and later steps do nothing else. A branch begins when its parent comes to the place of the fork.
"""

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import Any, cast

from ..lang import sampling
from ..lang.errors import CancelledError
from ..lang.ops import Op
from ..lang.protocol import Usage
from ..lang.state import JoinMode, Sink, Value
from . import loop
from .executor import Executor
from .grammar import Grammar
from .position import Position, Reached
from .run import Run
from .steps import BranchOff, Concatenate, Gather, Mark, Step
from .variables import Binding, Feed, Meta, Piece, VariableTable
from .waiting import Signal, earliest, wait_until, wait_until_async

Options = Mapping[str, Any]  # sampling fields as `sampling.overrides` gives them


class Stream(Sink):
    """One stream of operations: a Sink that runs them.

    Args:
        run: the run it belongs to.
        program_options: sampling defaults of the program.
        run_options: sampling defaults of the run, which win over the program's.
    """

    def __init__(self, run: Run, program_options: Options | None = None, run_options: Options | None = None) -> None:
        self.run = run
        self.table = VariableTable()
        self._program_options: Options = program_options or {}
        self._run_options: Options = run_options or {}
        self._grammar = Grammar()
        self._spoken = Feed()
        self._lock = threading.Lock()  # queue, names and grammar change together
        self._queue: deque[Step] = deque()
        self._active = False  # a drain is running or scheduled, or the parent will start one
        self._error: BaseException | None = None
        self._traceback: TracebackType | None = None
        self.fork_group = ""
        self._streaming = False
        self._executor = Executor(run, self._spoken, Position())

    def _branch(self, base: Mapping[str, Binding], fork_group: str) -> "Stream":
        """A stream that waits until the parent comes to the place of the fork."""
        branch = Stream(self.run, self._program_options, self._run_options)
        branch.table = VariableTable(base)
        branch._grammar = self._grammar
        branch._active = True
        branch.fork_group = fork_group
        return branch

    # -------------------------------------------------------------------------------- saying

    def submit(self, op: Op) -> None:
        with self._lock:
            grammar, steps = self._grammar.read(op, self._sampling)  # raises before anything is queued
            self._grammar = grammar
            for step in steps:
                self._queue_step(step)

    def fork(self, size: int) -> list[Sink]:
        with self._lock:
            base = self.table.snapshot()
            group = self.run.request_id() if size > 1 else ""
            branches = [self._branch(base, group) for _ in range(size)]
            self._queue_step(Step(BranchOff(tuple(branches))))
        return list(branches)

    def join(self, children: list[Sink], mode: JoinMode) -> None:
        """Returns at once. A branch that failed fails this stream, with the branch's own error."""
        branches = [cast(Stream, child) for child in children]
        if mode == "concate_and_append":
            for index, branch in enumerate(branches):
                branch._grammar.check_same_turn(self._grammar, index)
            self._queue_joined(Concatenate(tuple(branch._mark()[0] for branch in branches)))
            return
        marks, tables = zip(*(branch._mark() for branch in branches), strict=True)
        names = dict.fromkeys(name for table in tables for name in table)
        columns = tuple((Binding(name), tuple(table.get(name) for table in tables)) for name in names)
        self._queue_joined(Gather(marks, columns))

    def assign(self, name: str, value: Value) -> None:
        binding = Binding(name)
        binding.resolve(value)
        with self._lock:
            self.table.bind(binding)

    @contextmanager
    def options(self, program_options: Options) -> Iterator[None]:
        """While a nested program speaks: its own sampling defaults go before those of the program around it."""
        outer = self._program_options
        self._program_options = {**outer, **program_options}
        try:
            yield
        finally:
            self._program_options = outer

    def _sampling(self, given: Options) -> sampling.SamplingParams:
        return sampling.merge(self._program_options, self._run_options, given)

    def _mark(self) -> tuple[Binding, dict[str, Binding]]:
        """A mark behind everything submitted so far, and the names this stream itself has bound by then."""
        mark = Binding("")
        with self._lock:
            self._queue_step(Step(Mark(), mark))
            return mark, dict(self.table.own)

    def _queue_joined(self, op: Gather | Concatenate) -> None:
        with self._lock:
            for binding, _ in op.columns if isinstance(op, Gather) else ():
                self.table.bind(binding)
            self._queue_step(Step(op))

    def _queue_step(self, step: Step) -> None:
        """With the lock held."""
        for binding in (step.binding, step.reasoning):
            if binding is not None and binding.name:
                self.table.bind(binding)
        self._queue.append(step)
        if not self._active:
            self._active = True
            self.run.begin_work()
            loop.streams.call(self._start)

    # -------------------------------------------------------------------------------- running, on the streams' loop

    def begin(self, position: Position, *, ready: bool) -> None:
        """The parent has come to the place where this branch leaves it."""
        self._executor = Executor(self.run, self._spoken, position, fork_group=self.fork_group, ready=ready)
        self._executor.streaming = self._streaming
        self._released()

    def begin_failed(self, error: BaseException) -> None:
        """The parent failed before it came to the place of the fork."""
        self._fail(error)
        self._released()

    def _released(self) -> None:
        with self._lock:
            self._active = bool(self._queue)
            if self._active:
                self.run.begin_work()
        if self._active:
            self._start()
        else:
            self._spoken.changed.fire()

    def _start(self) -> None:
        task = asyncio.get_running_loop().create_task(self._drain())
        self.run.track(task)
        task.add_done_callback(self._drained)

    async def _drain(self) -> None:
        while True:
            with self._lock:
                if not self._queue:
                    self._active = False
                    break
                step = self._queue.popleft()
            await self._take(step)
        self.run.end_work()
        self._spoken.changed.fire()

    def _drained(self, task: "asyncio.Task[None]") -> None:
        """A task that was cancelled before it began has failed none of its steps yet."""
        if task.cancelled():
            self._fail(self.run.reason or CancelledError("the interpreter is shutting down"))
            self._start()

    async def _take(self, step: Step) -> None:
        error = self._error or self.run.reason
        if error is None:
            try:
                await self._executor.execute(step)
                return
            except asyncio.CancelledError:
                task = asyncio.current_task()
                while task is not None and task.cancelling():
                    task.uncancel()
                error = self.run.reason or CancelledError("the interpreter is shutting down")
            except BaseException as raised:  # whatever it is, the program's reads have to raise it
                error = raised
        self._fail(error)
        step.fail(error)

    def _fail(self, error: BaseException) -> None:
        """Recorded before anybody is woken."""
        if self._error is None:
            self._error = error
            self._traceback = error.__traceback__
        self.table.bound.fire()
        self._spoken.changed.fire()

    # -------------------------------------------------------------------------------- reading

    def has(self, name: str) -> bool:
        return self.table.get(name) is not None

    def names(self) -> list[str]:
        return self.table.names()

    def read(self, name: str, timeout: float | None) -> Value:
        return self._wait(name, timeout).value()

    async def read_async(self, name: str, timeout: float | None) -> Value:
        return (await self._wait_async(name, timeout)).value()

    def meta(self, name: str, timeout: float | None) -> dict[str, Any]:
        binding = self._wait(name, timeout)
        binding.value()
        return cast(Meta, binding.meta)

    async def meta_async(self, name: str, timeout: float | None) -> dict[str, Any]:
        binding = await self._wait_async(name, timeout)
        binding.value()
        return cast(Meta, binding.meta)

    def text(self, timeout: float | None) -> str:
        return self._reach(timeout).position.prompt.text

    async def text_async(self, timeout: float | None) -> str:
        return (await self._reach_async(timeout)).position.prompt.text

    def messages(self, timeout: float | None) -> list[dict[str, str]]:
        return self._reach(timeout).position.messages()

    async def messages_async(self, timeout: float | None) -> list[dict[str, str]]:
        return (await self._reach_async(timeout)).position.messages()

    def sync(self, timeout: float | None) -> None:
        self._reach(timeout)

    async def sync_async(self, timeout: float | None) -> None:
        await self._reach_async(timeout)

    def error(self) -> BaseException | None:
        return self._error or self.run.reason

    def usage(self) -> Usage:
        return self.run.usage

    def cancel(self) -> None:
        self.run.cancel()

    # -------------------------------------------------------------------------------- how reads wait

    def _wait(self, name: str, timeout: float | None) -> Binding:
        limit = earliest(timeout, self.run.deadline)
        if self._may_come(name):
            wait_until(lambda: not self._may_come(name), (self.table.bound, self.run.changed), limit, _called(name))
        binding = self._bound(name)
        if not binding.done:
            self.run.check_process()
            wait_until(lambda: binding.done, (binding.settled,), limit, _called(name))
        return binding

    async def _wait_async(self, name: str, timeout: float | None) -> Binding:
        limit = earliest(timeout, self.run.deadline)
        if self._may_come(name):
            signals = (self.table.bound, self.run.changed)
            await wait_until_async(lambda: not self._may_come(name), signals, limit, _called(name))
        binding = self._bound(name)
        if not binding.done:
            await wait_until_async(lambda: binding.done, (binding.settled,), limit, _called(name))
        return binding

    def _may_come(self, name: str) -> bool:
        """Whether an observer of a running program should wait for it to say `name`. The program itself never does."""
        run = self.run
        return (
            run.streaming
            and not run.ended
            and self.table.get(name) is None
            and self.error() is None
            and not run.is_inside
        )

    def _bound(self, name: str) -> Binding:
        """Raises VariableError for a name the program does not set, or the error that kept it from setting it."""
        binding = self.table.get(name)
        if binding is not None:
            return binding
        self.raise_error()
        raise self.table.unknown(name)

    def raise_error(self) -> None:
        """Raise this stream's error, if it has one, with the traceback of where it happened."""
        if self._error is not None:
            raise self._error.with_traceback(self._traceback)
        if self.run.reason is not None:
            raise self.run.reason

    def _reach(self, timeout: float | None) -> Reached:
        """Where the stream stands when everything submitted so far has run."""
        self.run.check_process()
        limit = earliest(timeout, self.run.deadline)
        mark, _ = self._mark()
        wait_until(lambda: mark.done, (mark.settled,), limit, "the text")
        return cast(Reached, mark.value())

    async def _reach_async(self, timeout: float | None) -> Reached:
        limit = earliest(timeout, self.run.deadline)
        mark, _ = self._mark()
        await wait_until_async(lambda: mark.done, (mark.settled,), limit, "the text")
        return cast(Reached, mark.value())

    # -------------------------------------------------------------------------------- pieces

    def iterate(self, name: str | None) -> Iterator[Piece]:
        """The program itself, reading its whole text, comes to the end when all it said so far has run."""
        self._ask_for_pieces()
        if name is not None and self._may_come(name):
            signals = (self.table.bound, self.run.changed)
            wait_until(lambda: not self._may_come(name), signals, self.run.deadline, _called(name))
        reader = self._reader(name)
        while True:
            yield from reader.new_pieces()
            if reader.at_end():
                break
            wait_until(reader.has_news, reader.signals, self.run.deadline, _called(name))
        reader.raise_error()

    async def iterate_async(self, name: str | None) -> AsyncIterator[Piece]:
        self._ask_for_pieces()
        if name is not None and self._may_come(name):
            signals = (self.table.bound, self.run.changed)
            await wait_until_async(lambda: not self._may_come(name), signals, self.run.deadline, _called(name))
        reader = self._reader(name)
        while True:
            for piece in reader.new_pieces():
                yield piece
            if reader.at_end():
                break
            await wait_until_async(reader.has_news, reader.signals, self.run.deadline, _called(name))
        reader.raise_error()

    def _ask_for_pieces(self) -> None:
        """Requests from now on are streamed."""
        self._streaming = True
        self._executor.streaming = True

    def _reader(self, name: str | None) -> "_Reader":
        if name is None:
            inside = self.run.is_inside
            return _Reader(
                self._spoken,
                lambda: not self._active and (inside or self.run.ended),
                (self._spoken.changed, self.run.changed),
                self.raise_error,
            )
        binding = self._bound(name)
        return _Reader(binding.feed, lambda: binding.done, (binding.feed.changed,), binding.value)


class _Reader:
    """One reader's place in a feed."""

    def __init__(
        self, feed: Feed, complete: Callable[[], bool], signals: tuple[Signal, ...], result: Callable[[], object]
    ) -> None:
        self._feed = feed
        self._complete = complete
        self._result = result
        self._place = 0
        self.signals = signals

    def new_pieces(self) -> Iterator[Piece]:
        while self._place < len(self._feed.pieces):
            self._place += 1
            yield self._feed.pieces[self._place - 1]

    def has_news(self) -> bool:
        return self._place < len(self._feed.pieces) or self._complete()

    def at_end(self) -> bool:
        """No more will come, and all that came was given out: looked at in this order."""
        return self._complete() and self._place == len(self._feed.pieces)

    def raise_error(self) -> None:
        self._result()


def _called(name: str | None) -> str:
    return "the text" if name is None else f"variable {name!r}"
