"""A stream: the sink of one state, which runs its operations. Called by the program's thread and by readers.

submit(op)  → Grammar: check → bind names, queue → StepQueue → Executor, on the streams' loop → bindings
read(name)  ← binding ←─────────────────────────────────────────────────────────────────────────┘

The grammar checks which operations may follow which: roles do not nest, a scope ends where it began, a file exists. A
mistake raises at the line that makes it, before anything of that line is queued.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, cast

from ..lang import ops, sampling
from ..lang.agents.plan import AgentPlan, AgentResult
from ..lang.cache_report import CacheReport
from ..lang.errors import BranchCancelledError, DeadlineError, ParameterError, ProgramError
from ..lang.ops import Op, checked_name
from ..lang.partial.reader import reader_of
from ..lang.prompt import Source, SourceKind, calling_place, checked_tenant
from ..lang.protocol import Cost
from ..lang.sampling import SamplingParams
from ..lang.state import JoinMode, RunRecord, Sink, Value
from . import loop, media
from .agents import calling
from .agents.agent import Agent
from .cache_explain.report import explained
from .executor import StepQueue
from .loop import Signal, earliest, seconds_left, wait_until, wait_until_async
from .notebooks.interrupts import interrupted_with_cell
from .position import Reached
from .reasoning import ReasoningTags
from .run import Run, not_while_recording, noted_wait
from .steps import BranchOff, Concatenate, Converse, Gather, Joined, Keep, Mark, Recall, Step
from .variables import Binding, Feed, Meta, Piece, VariableTable

Merge = Callable[[Mapping[str, Any]], SamplingParams]

REASONING_SUFFIX = "_reasoning_content"


@dataclass(frozen=True, slots=True)
class Grammar:
    """The role and scopes open at this place of the program text. Immutable: a branch shares its parent's."""

    open_role: str | None = None
    open_scopes: tuple[str, ...] = ()

    def read(self, op: ops.Op, merge: Merge, source: Source | None = None) -> tuple["Grammar", list[Step]]:
        """Checks `op` here. Returns the grammar after it and its steps. `source`: its place in the program.

        Raises:
            ProgramError: a role or scope that does not fit.
            ParameterError: sampling parameters that do not fit together, an image that does not exist.
        """
        steps: list[Step] = []
        return self._read(op, merge, source, None, steps), steps

    def _read(
        self,
        op: ops.Op,
        merge: Merge,
        source: Source | None,
        tags: ReasoningTags | None,
        steps: list[Step],
    ) -> "Grammar":
        grammar = self
        match op:
            case ops.Sequence(members):
                for member in members:
                    grammar = grammar._read(member, merge, source, tags, steps)
            case ops.SeparateReasoning(inner, open_tag, close_tag):
                grammar = grammar._read(inner, merge, source, ReasoningTags(open_tag, close_tag), steps)
            case ops.Gen(name, options, result=result, captures=captures):
                thinking = Binding(name + REASONING_SUFFIX if name else "") if tags is not None else None
                sampling = merge(options)
                _check_logprobs(op, sampling)
                found = () if captures is None else tuple(Binding(*each) for each in captures.results.items())
                steps.append(Step(op, Binding(name or "", result), sampling, thinking, tags, source, captured=found))
            case ops.Select(name):
                steps.append(Step(op, Binding(name or ""), merge(op.options), source=source))
            case ops.RoleBegin(role):
                grammar = self._open_role(role)
                steps.append(Step(op, source=source))
            case ops.RoleEnd(role):
                grammar = self._close_role(role)
                steps.append(Step(op, source=source))
            case ops.VarScopeBegin(name):
                grammar = replace(self, open_scopes=(*self.open_scopes, name))
                steps.append(Step(op, source=source))
            case ops.VarScopeEnd(name):
                grammar = self._close_scope(name)
                steps.append(Step(op, Binding(name), source=source))
            case ops.Image() | ops.Video():
                media.check(op)
                steps.append(Step(op, source=source))
            case ops.PrivateBegin(tenant):
                steps.append(Step(ops.PrivateBegin(checked_tenant(tenant)), source=source))
            case _:
                steps.append(Step(op, source=source))
        return grammar

    def _open_role(self, role: str) -> "Grammar":
        if self.open_role is not None:
            raise ProgramError(
                f"{role} cannot begin inside an open {self.open_role} turn; end that one first "
                f"({self.open_role}_end(), or leave its with block)"
            )
        return replace(self, open_role=role)

    def _close_role(self, role: str) -> "Grammar":
        if self.open_role != role:
            found = f"the open turn is {self.open_role}" if self.open_role else "no turn is open"
            raise ProgramError(f"{role}_end() without {role}_begin(): {found}")
        return replace(self, open_role=None)

    def _close_scope(self, name: str) -> "Grammar":
        if not self.open_scopes or self.open_scopes[-1] != name:
            found = f"the innermost open one is {self.open_scopes[-1]!r}" if self.open_scopes else "none is open"
            raise ProgramError(f"the end of var_scope({name!r}) does not match its beginning: {found}")
        return replace(self, open_scopes=self.open_scopes[:-1])

    def check_same_turn(self, parent: "Grammar", branch: int) -> None:
        """Raises ProgramError when a branch whose text is to be appended is inside another turn than its parent."""
        if self.open_role != parent.open_role:
            raise ProgramError(
                f"branch {branch} is inside {self.open_role or 'no'} turn and its parent inside "
                f"{parent.open_role or 'no'} turn; close the branch's turn before join('concate_and_append')"
            )


def _check_logprobs(gen: ops.Gen, sampling: SamplingParams) -> None:
    """Raises ParameterError where texts of log-probabilities are left out that are not asked for."""
    asks_logprobs = sampling.logprobs or sampling.top_logprobs or sampling.prompt_logprobs_from is not None
    if not (gen.text_in_logprobs or asks_logprobs):
        raise ParameterError(
            "return_text_in_logprobs=False does nothing without log-probabilities; remove it, or write "
            "return_logprob=True"
        )


Options = Mapping[str, Any]  # sampling fields as `sampling.overrides` gives them


class PieceReader:
    """Iterates over the pieces of a feed, for one reader.

    Args:
        feed: the pieces.
        complete: returns whether no more pieces will come.
        signals: fired after `feed` has grown or `complete` has changed.
        result: raises the error with which the feed ended, if it did.
    """

    def __init__(
        self, feed: Feed, complete: Callable[[], bool], signals: tuple[Signal, ...], result: Callable[[], object]
    ) -> None:
        self._feed = feed
        self._complete = complete
        self._result = result
        self._place = 0
        self.signals = signals

    @classmethod
    def of(cls, binding: Binding) -> "PieceReader":
        """Returns a reader of a variable's text."""
        return cls(binding.feed, lambda: binding.done, (binding.feed.changed,), binding.value)

    def new_pieces(self) -> Iterator[Piece]:
        while self._place < len(self._feed.pieces):
            self._place += 1
            yield self._feed.pieces[self._place - 1]

    def has_news(self) -> bool:
        return self._place < len(self._feed.pieces) or self._complete()

    def at_end(self) -> bool:
        """Returns whether no more will come and all pieces were given out; checked in this order."""
        return self._complete() and self._place == len(self._feed.pieces)

    def raise_error(self) -> None:
        self._result()


class _Growth:
    """Reads the object of a variable while its text comes, for one reader."""

    def __init__(self, binding: Binding) -> None:
        self.binding = binding
        self.pieces = PieceReader.of(binding)
        self._reader = reader_of(binding.result)

    def news(self) -> Iterator[Any]:
        """Yields the latest part, if the text since the last one has changed it."""
        text = "".join(text for text, _ in self.pieces.new_pieces())
        if self._reader.read(text):
            yield self._reader.value()


class Stream(Sink):
    """One stream of operations: a Sink that runs them.

    Args:
        run: the run it belongs to.
        program_options: sampling defaults of the program.
        run_options: sampling defaults of the run, which win over the program's.
        queue: of its steps; None: a new one.
    """

    def __init__(
        self,
        run: Run,
        program_options: Options | None = None,
        run_options: Options | None = None,
        queue: StepQueue | None = None,
    ) -> None:
        self.run = run
        self.table = VariableTable()
        self._program_options: Options = program_options or {}
        self.run_options: Options = run_options or {}
        self._grammar = Grammar()
        self._queue = StepQueue(run) if queue is None else queue
        self._is_branch = False

    def _branch(self, base: Mapping[str, Binding], fork_group: str) -> "Stream":
        """Creates a stream that begins when this one reaches the fork."""
        queue = StepQueue(self.run, fork_group=fork_group, waits=True)
        branch = Stream(self.run, self._program_options, self.run_options, queue)
        branch.table = VariableTable(base)
        branch._grammar = self._grammar
        branch._is_branch = True
        return branch

    # -------------------------------------------------------------------------------- saying

    def submit(self, op: Op) -> None:
        not_while_recording("the state is of another program, which runs", "s += ... with the state that is traced")
        source = Source(SourceKind.TEXT, calling_place())
        with self._queue.lock:
            grammar, steps = self._grammar.read(op, self._sampling, source)  # raises before anything is queued
            self._grammar = grammar
            for step in steps:
                self._queue_step(step)

    def fork(self, size: int) -> list[Sink]:
        with self._queue.lock:
            base = self.table.snapshot()
            group = self.run.request_id() if size > 1 else ""
            branches = [self._branch(base, group) for _ in range(size)]
            queues = [branch._queue for branch in branches]
            if self._is_branch:
                self._queue.branches.extend(queues)  # they end with it
            stopped = self._queue.stopped
            self._queue_step(Step(BranchOff(tuple(queues))))
        for queue in queues if stopped is not None else ():
            queue.stop(cast(BranchCancelledError, stopped))
        return list(branches)

    def join(self, children: list[Sink], mode: JoinMode, quorum: int | None = None) -> None:
        """Returns at once. A branch that failed fails this stream, with the branch's own error."""
        branches = [cast(Stream, child) for child in children]
        if mode == "concate_and_append":
            for index, branch in enumerate(branches):
                branch._grammar.check_same_turn(self._grammar, index)
        marks, tables = zip(*(branch._mark() for branch in branches), strict=True)
        joined = Joined(marks, tuple(branch._queue for branch in branches), quorum)
        if mode == "concate_and_append":
            self._queue_joined(Concatenate(joined))
            return
        names = dict.fromkeys(name for table in tables for name in table)
        columns = tuple(
            (
                Binding(name),
                tuple(
                    table.get(name) or branch.table.before(name) for branch, table in zip(branches, tables, strict=True)
                ),
            )
            for name in names
        )
        self._queue_joined(Gather(joined, columns))

    def race(self, children: list[Sink], timeout: float | None) -> "Race":
        branches = [cast(Stream, child) for child in children]
        return Race(self, [branch._mark()[0] for branch in branches], earliest(timeout, self.run.deadline))

    def assign(self, name: str, value: Value) -> None:
        binding = Binding(name)
        binding.resolve(value)
        with self._queue.lock:
            self.table.bind(binding)

    @contextmanager
    def options(self, program_options: Options) -> Iterator[None]:
        """Applies a nested program's sampling defaults over those of the program around it."""
        outer = self._program_options
        self._program_options = {**outer, **program_options}
        try:
            yield
        finally:
            self._program_options = outer

    def _sampling(self, given: Options) -> sampling.SamplingParams:
        return sampling.merge(self._program_options, self.run_options, given)

    def _mark(self) -> tuple[Binding, dict[str, Binding]]:
        """Queues a mark after all submitted steps. Returns it, and the names this stream itself has bound by then. The
        mark of an idle stream is resolved at once."""
        mark = Binding("")
        with self._queue.lock:
            standing = self._queue.standing()
            if standing is None:
                self._queue_step(Step(Mark(), mark))
            else:
                mark.resolve(standing)
            return mark, dict(self.table.own)

    # -------------------------------------------------------------------------------- agents

    def call_tools(self, plan: AgentPlan) -> AgentResult:
        return calling.run(self, Agent(self, plan))

    async def call_tools_async(self, plan: AgentPlan) -> AgentResult:
        return await calling.run_async(self, Agent(self, plan))

    def converse(self, op: Converse, gen: ops.Gen) -> Binding:
        """Queues an assistant turn with the answer of a conversation. Returns the binding of its text."""
        answer, source = Binding(""), Source(SourceKind.TEXT, calling_place())
        self.submit(ops.RoleBegin("assistant"))
        with self._queue.lock:
            self._queue_step(Step(op, answer, self._sampling(gen.options), source=source))
        self.submit(ops.RoleEnd("assistant"))
        return answer

    def recall(self, op: Recall) -> Binding:
        """Queues a look into the journal. Returns the binding of what it finds."""
        return self._queued(op)

    def keep(self, op: Keep) -> Binding:
        """Queues an entry into the journal. Returns a binding that is resolved when it is written."""
        return self._queued(op)

    def _queued(self, op: Op) -> Binding:
        binding, source = Binding(""), Source(SourceKind.TEXT, calling_place())
        with self._queue.lock:
            self._queue_step(Step(op, binding, source=source))
        return binding

    def settled(self, binding: Binding) -> Any:  # Any: of the binding
        """Waits for a binding of this stream, and returns its value."""
        self._until(lambda: binding.done, (binding.settled,), self.run.deadline, None)
        return binding.value()

    async def settled_async(self, binding: Binding) -> Any:  # Any: of the binding
        await self._until_async(lambda: binding.done, (binding.settled,), self.run.deadline, None)
        return binding.value()

    def _queue_joined(self, op: Gather | Concatenate) -> None:
        with self._queue.lock:
            for binding, _ in op.columns if isinstance(op, Gather) else ():
                self.table.bind(binding)
            self._queue_step(Step(op))

    def _queue_step(self, step: Step) -> None:
        """Binds the step's names and queues it. Called with the lock held."""
        record = self.run.record
        if record is not None and record.last_read:
            step = replace(step, after_read=record.last_read)
        for binding in step.bindings:
            if binding.name:
                self.table.bind(binding)
        self._queue.push(step)

    def preload(self, steps: Iterable[Step], variables: Iterable[tuple[str, Binding]], grammar: Grammar) -> None:
        """Queues all steps of a compiled program, with its variables and its grammar at the end. Called first; the
        caller launches the queue."""
        self._grammar = grammar
        self.table.own.update(variables)
        self._queue.load(steps)

    @property
    def queue(self) -> StepQueue:
        """The queue of this stream's steps."""
        return self._queue

    # -------------------------------------------------------------------------------- reading

    def has(self, name: str) -> bool:
        return self.table.get(name) is not None

    def names(self) -> list[str]:
        return self.table.names()

    def read(self, name: str, timeout: float | None) -> Value:
        return self._wait(name, timeout).value()

    async def read_async(self, name: str, timeout: float | None) -> Value:
        return (await self._wait_async(name, timeout)).value()

    def value(self, name: str, timeout: float | None) -> Any:
        return self._wait(name, timeout).object()

    async def value_async(self, name: str, timeout: float | None) -> Any:
        return (await self._wait_async(name, timeout)).object()

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
        return self._queue.error or self.run.reason

    def cost(self) -> Cost:
        self._until(self._is_spent, (self.run.changed,), None, None)
        return self.run.ledger.cost

    async def cost_async(self) -> Cost:
        await self._until_async(self._is_spent, (self.run.changed,), None, None)
        return self.run.ledger.cost

    def cost_so_far(self) -> Cost:
        return self.run.ledger.cost

    def explain_cache(self, timeout: float | None) -> CacheReport:
        """Explains cache use of the run's calls; of a failed run, of the calls it has made."""
        limit = earliest(timeout, None)
        mark, _ = self._mark()
        self._until(lambda: mark.done, (mark.settled,), earliest(timeout, self.run.deadline), None)
        with _in_time():
            return loop.streams.run(explained(self.run), seconds_left(limit))

    async def explain_cache_async(self, timeout: float | None) -> CacheReport:
        limit = earliest(timeout, None)
        mark, _ = self._mark()
        await self._until_async(lambda: mark.done, (mark.settled,), earliest(timeout, self.run.deadline), None)
        explaining = asyncio.wrap_future(loop.streams.spawn(explained(self.run)))
        with _in_time():
            return await asyncio.wait_for(explaining, seconds_left(limit))

    def record(self, timeout: float | None) -> RunRecord:
        from .view import data, page  # loaded by programs that look at their runs

        self._check_recorded()
        limit = earliest(timeout, None)
        self._until(self._is_spent, (self.run.changed,), limit, None)
        with _in_time():
            return page.RunRecord.of(loop.streams.run(data.lines_of(self.run), seconds_left(limit)))

    async def record_async(self, timeout: float | None) -> RunRecord:
        from .view import data, page

        self._check_recorded()
        limit = earliest(timeout, None)
        await self._until_async(self._is_spent, (self.run.changed,), limit, None)
        writing = asyncio.wrap_future(loop.streams.spawn(data.lines_of(self.run)))
        with _in_time():
            return page.RunRecord.of(await asyncio.wait_for(writing, seconds_left(limit)))

    def _check_recorded(self) -> None:
        if self.run.record is None:
            raise ProgramError("this run keeps no record: it was started with record=False; leave that out")

    def described(self) -> dict[str, str]:
        from .view import summary

        return summary.values_of(self.table)

    def html(self) -> str:
        from .view import summary

        return summary.html_of(self.run, self.table, self._queue.number, self.error())

    def cancel(self) -> None:
        if self._is_branch:
            self._queue.stop(BranchCancelledError("the branch was cancelled"))
        else:
            self.run.cancel()

    @property
    def cancelled(self) -> bool:
        return self._queue.stopped is not None

    # -------------------------------------------------------------------------------- how reads wait

    def _wait(self, name: str, timeout: float | None) -> Binding:
        name = checked_name(name)
        limit = earliest(timeout, self.run.deadline)
        self._until(lambda: not self._may_come(name), self._naming_signals(), limit, name)
        binding = self._bound(name)
        self._until(lambda: binding.done, (binding.settled,), limit, name)
        self._note_read(name)
        return binding

    async def _wait_async(self, name: str, timeout: float | None) -> Binding:
        name = checked_name(name)
        limit = earliest(timeout, self.run.deadline)
        await self._until_async(lambda: not self._may_come(name), self._naming_signals(), limit, name)
        binding = self._bound(name)
        await self._until_async(lambda: binding.done, (binding.settled,), limit, name)
        self._note_read(name)
        return binding

    def _note_read(self, name: str) -> None:
        """Notes in the record that the body knows an answer now: what it says later may depend on it."""
        if self.run.record is not None and self.run.is_inside:
            self.run.record.last_read = name

    def _until(
        self, ready: Callable[[], bool], signals: tuple[Signal, ...], limit: float | None, name: str | None
    ) -> None:
        """Blocks until `ready`, at most until `limit`. `name` is the variable waited for, None for the text."""
        if not ready():
            self.run.check_process()
            with self.run.bounded(), noted_wait(self.run):
                wait_until(ready, signals, limit, _called(name))

    async def _until_async(
        self, ready: Callable[[], bool], signals: tuple[Signal, ...], limit: float | None, name: str | None
    ) -> None:
        if not ready():
            self.run.check_process()
            with self.run.bounded(), noted_wait(self.run), interrupted_with_cell(self.run):
                await wait_until_async(ready, signals, limit, _called(name))

    def _is_spent(self) -> bool:
        """Returns whether the run makes no more calls. An observer of a running program waits for its body, too."""
        run = self.run
        return run.idle and (run.ended or not run.streaming or run.is_inside)

    def _may_come(self, name: str) -> bool:
        """Returns whether an observer should wait for the running program to bind `name`. The program never waits."""
        run = self.run
        return (
            run.streaming
            and not run.ended
            and self.table.get(name) is None
            and self.error() is None
            and not run.is_inside
        )

    def _bound(self, name: str) -> Binding:
        """Returns the binding of a name. Raises VariableError for an unset one, or the error that prevented it."""
        binding = self.table.get(name)
        if binding is not None:
            return binding
        self._queue.raise_error()
        raise self.table.unknown(name)

    def _naming_signals(self) -> tuple[Signal, ...]:
        """Returns the signals fired when a name may be bound, or can be no more."""
        return self.table.bound, self.run.changed, self._queue.failed

    def _reach(self, timeout: float | None) -> Reached:
        """Returns the stream's position once everything submitted so far has run."""
        mark, _ = self._mark()
        self._until(lambda: mark.done, (mark.settled,), earliest(timeout, self.run.deadline), None)
        return cast(Reached, mark.value())

    async def _reach_async(self, timeout: float | None) -> Reached:
        mark, _ = self._mark()
        await self._until_async(lambda: mark.done, (mark.settled,), earliest(timeout, self.run.deadline), None)
        return cast(Reached, mark.value())

    async def reached(self) -> Reached:
        """Returns the stream's position once everything submitted so far has run. Raises the stream's error."""
        return await self._reach_async(None)

    # -------------------------------------------------------------------------------- pieces

    def iterate(self, name: str | None) -> Iterator[Piece]:
        """Yields pieces as they come. For the program itself, its text ends when all submitted steps have run."""
        self.ask_for_pieces()
        with self.run.interruptible():
            if name is not None:
                name = checked_name(name)
                self._until(lambda: not self._may_come(name), self._naming_signals(), self.run.deadline, name)
            reader = self._reader(name)
            while True:
                yield from reader.new_pieces()
                if reader.at_end():
                    break
                self._until(reader.has_news, reader.signals, self.run.deadline, name)
        reader.raise_error()

    async def iterate_async(self, name: str | None) -> AsyncIterator[Piece]:
        self.ask_for_pieces()
        if name is not None:
            name = checked_name(name)
            await self._until_async(lambda: not self._may_come(name), self._naming_signals(), self.run.deadline, name)
        reader = self._reader(name)
        while True:
            for piece in reader.new_pieces():
                yield piece
            if reader.at_end():
                break
            await self._until_async(reader.has_news, reader.signals, self.run.deadline, name)
        reader.raise_error()

    def grow(self, name: str) -> Iterator[Any]:
        self.ask_for_pieces()
        with self.run.interruptible():
            name = checked_name(name)
            self._until(lambda: not self._may_come(name), self._naming_signals(), self.run.deadline, name)
            growth = _Growth(self._bound(name))
            while not growth.binding.done:
                yield from growth.news()
                self._until(growth.pieces.has_news, growth.pieces.signals, self.run.deadline, name)
        yield growth.binding.object()

    async def grow_async(self, name: str) -> AsyncIterator[Any]:
        self.ask_for_pieces()
        name = checked_name(name)
        await self._until_async(lambda: not self._may_come(name), self._naming_signals(), self.run.deadline, name)
        growth = _Growth(self._bound(name))
        while not growth.binding.done:
            for part in growth.news():
                yield part
            await self._until_async(growth.pieces.has_news, growth.pieces.signals, self.run.deadline, name)
        yield growth.binding.object()

    def ask_for_pieces(self) -> None:
        """Makes requests from now on stream."""
        self._queue.streaming = True

    def _reader(self, name: str | None) -> PieceReader:
        if name is None:
            queue, inside = self._queue, self.run.is_inside
            return PieceReader(
                queue.spoken,
                lambda: not queue.active and (inside or self.run.ended),
                (queue.spoken.changed, self.run.changed),
                queue.raise_error,
            )
        return PieceReader.of(self._bound(name))


class Race:
    """Tells which branches of a fork end, one after the other: all that was said to them has run, or failed.

    Args:
        parent: the stream that they were forked off.
        marks: at the end of each.
        limit: on the run's clock; None: no limit.
    """

    def __init__(self, parent: Stream, marks: list[Binding], limit: float | None) -> None:
        self._parent = parent
        self._marks = dict(enumerate(marks))  # of those that have not been told
        self._limit = limit

    def next(self) -> int:
        """Waits for the next one that ends, and returns its place. Raises DeadlineError after the limit."""
        self._parent._until(self._any, tuple(mark.settled for mark in self._marks.values()), self._limit, None)
        return self._take()

    async def next_async(self) -> int:
        signals = tuple(mark.settled for mark in self._marks.values())
        await self._parent._until_async(self._any, signals, self._limit, None)
        return self._take()

    def _any(self) -> bool:
        return any(mark.done for mark in self._marks.values())

    def _take(self) -> int:
        index = next(index for index, mark in self._marks.items() if mark.done)
        del self._marks[index]
        return index


@contextmanager
def _in_time() -> Iterator[None]:
    """Raises DeadlineError where waiting ended with Python's own TimeoutError."""
    try:
        yield
    except DeadlineError:
        raise
    except TimeoutError:
        raise DeadlineError("the answer was not known in time; give more with timeout=") from None


def _called(name: str | None) -> str:
    return "the text" if name is None else f"variable {name!r}"
