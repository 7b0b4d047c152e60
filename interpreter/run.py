"""One run of a program: its id, backend, deadline, cost, and how it is stopped.

Every stream of the run (the program's own and those of its branches) belongs to one `Run`.

Two things are looked up in the caller's context where a run is opened, so two threads, or two tasks, do not see each
other's: the default backend of a block, and the recording of a program that is traced. A program that is given no
backend runs on the block's, else on the process's, else on the embedded model.
"""

import asyncio
import itertools
import os
import secrets
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from inspect import BoundArguments
from typing import TYPE_CHECKING, Any, Protocol, cast

from ..lang import checks
from ..lang.errors import BudgetError, CancelledError, DeadlineError, ParameterError, ProgramError, shown
from ..lang.protocol import Backend, Done, Origin
from ..lang.sampling import MAX_TOKENS
from ..lang.state import AsyncState, Sink, State
from . import loop
from .budget import Allowance, Ledger
from .cache_explain.history import CallLog, History, history_of
from .calls import Calls
from .loop import Signal, earliest, seconds_left
from .observing import observation
from .view.record import Record

if TYPE_CHECKING:
    from .body import Body
    from .journal.stored import StoredCalls
    from .journal.use import JournalUse
    from .observing.spans import RunSpans
    from .speculation.planner import Planner


# The runs whose bodies the current thread or task is in, innermost last. Reads use it to tell a
# program that asks for a name it never set from an observer that is early.
_inside: ContextVar[tuple["Run", ...]] = ContextVar("umbel_runs", default=())

# Runs are numbered after a name of the process: unique among all clients of a backend, and cheap.
_process_name = [secrets.token_hex(6)]
_numbers = itertools.count(1)


def _rename_process() -> None:
    _process_name[0] = secrets.token_hex(6)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_rename_process)


class Cancellable(Protocol):
    """A task, or what cancels one on another loop."""

    def cancel(self) -> object: ...


class Run:
    """State that the streams of one run share.

    Args:
        backend: serves every request of the run.
        timeout: seconds from now until everything pending fails with DeadlineError; None for no limit.
        allowance: what is left of the budget of the run, or of its batch; None for no budget.
        streaming: requests ask for chunks, and readers may wait for names that are not set yet.
        salt, priority: of every request.
        adapter: of requests that stand for no call, such as hints; calls have that of their sampling parameters.
        speculation: shared settings and statistics of API speculation; None: off.
        home: the loop of its streams, whose clock its deadline is on; None: the loop of all programs.
        history: keeps its calls beyond its end; None: the backend's.
        record: keep what its streams do, for `state.show()`.
        program: its name, for the record.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        timeout: float | None = None,
        allowance: Allowance | None = None,
        streaming: bool = False,
        salt: str = "",
        priority: int = 0,
        adapter: str = "",
        speculation: "RunSpeculation | None" = None,
        home: loop.Home | None = None,
        history: History | None = None,
        record: bool = True,
        program: str = "",
    ) -> None:
        self.id = f"{_process_name[0]}-{next(_numbers):x}"
        self.home: loop.Home = loop.streams if home is None else home
        self.backend = backend
        self.streaming = streaming
        self.salt = salt
        self.priority = priority
        self.adapter = adapter
        self.speculation = speculation
        self.timeout = timeout
        ends = allowance.ends if allowance is not None else None
        self.deadline = earliest(timeout, ends, self.home.time)
        # The budget whose seconds end the run, before its timeout does.
        self._late_budget = allowance if ends is not None and ends == self.deadline else None
        self.log = CallLog(history_of(backend) if history is None else history, self.home.time)
        self.stored: StoredCalls | None = None  # calls of a journal; set before the body begins
        self.record = Record(self.home.time, program) if record else None
        self.ledger = Ledger(backend, allowance)
        self.reason: BaseException | None = None  # why everything was stopped
        self.ended = False  # the body has returned or raised
        self.body: asyncio.Future[None] | None = None  # of a program that is not awaited; asyncio does not hold it
        self.changed = Signal()  # fired when the body ends, and when the run falls idle
        self._process = os.getpid()
        self._requests = itertools.count(1)
        self._roots = itertools.count()
        self._lock = threading.Lock()
        self._busy = 0  # streams with work
        self.printer: threading.Thread | None = None  # of a verbose run
        self._tasks: set[Cancellable] = set()  # touched on the streams' loop only
        observed = observation.current
        self.spans: RunSpans | None = None if observed is None else observed.open(self, program)
        self.calls = Calls(self) if self.spans is None else self.spans.calls(self)
        if self.deadline is not None:
            # The reference is weak: a run that is not referenced any more is not kept until its deadline.
            self.home.call_later(self.deadline - self.home.time(), _ring, weakref.ref(self))

    # -------------------------------------------------------------------------------- requests

    def request_id(self) -> str:
        return f"{self.id}-{next(self._requests)}"

    def next_path(self) -> str:
        """Returns the path of the next stream that is no branch: "0" for the program's own."""
        return str(next(self._roots))

    def origin(self, fork_group: str, adapter: str, ahead: int = 0) -> Origin:
        return Origin(self.id, fork_group, self.salt, self.priority, self.seconds_left, ahead, adapter)

    @property
    def seconds_left(self) -> float | None:
        """Seconds until the deadline, not below 0; None without one."""
        return seconds_left(self.deadline, self.home.time)

    # -------------------------------------------------------------------------------- the body

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Marks the current thread or task as the program's own while its body runs."""
        token = _inside.set((*_inside.get(), self))
        attached = None if self.spans is None else self.spans.attach()
        try:
            yield
        finally:
            if self.spans is not None and attached is not None:
                self.spans.detach(attached)
            _inside.reset(token)

    @property
    def is_inside(self) -> bool:
        return any(run is self for run in _inside.get())

    def end(self, error: BaseException | None = None) -> None:
        """Records that the body has returned, or raised `error`, which then stops the run."""
        if error is not None:
            self.stop(error)
        with self._lock:
            self.ended = True
            self._release_deadline()
        self.changed.fire()

    # -------------------------------------------------------------------------------- stopping

    def stop(self, reason: BaseException) -> None:
        """Stops the run: requests in flight are aborted, pending and later steps fail with `reason`.

        The first reason wins; a run that has finished has nothing to stop.
        """
        with self._lock:
            if self.reason is not None or (self.ended and self._busy == 0):
                return
            self.reason = reason
        self.home.call(self._cancel_tasks)

    def cancel(self) -> None:
        self.stop(CancelledError("the run was cancelled"))

    def interrupt(self) -> None:
        """Stops the run as KeyboardInterrupt does, for readers that wait where it is not raised."""
        self.stop(ending(KeyboardInterrupt()))

    def _cancel_tasks(self) -> None:
        for task in tuple(self._tasks):
            task.cancel()

    def expire(self) -> None:
        self.stop(self.lateness())

    @property
    def is_late(self) -> bool:
        deadline = self.deadline  # read once: the thread that ends the last work sets it to None
        return deadline is not None and self.home.time() >= deadline

    def lateness(self) -> DeadlineError | BudgetError:
        """Returns the error of a run past its deadline: for its timeout, or for the seconds of its budget."""
        if self._late_budget is not None:
            return self._late_budget.late()
        return DeadlineError(f"the run did not end within timeout={self.timeout} seconds")

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Stops the run on Ctrl-C, in its body and outside of it."""
        try:
            yield
        except KeyboardInterrupt as error:
            self.stop(ending(error))
            raise

    @contextmanager
    def bounded(self) -> Iterator[None]:
        """Wraps a wait of a reader: `interruptible`, and a passed deadline stops the run even if its timer has not
        fired."""
        try:
            with self.interruptible():
                yield
        except DeadlineError:
            if self.is_late:
                self.expire()
                if isinstance(self.reason, BudgetError):
                    raise self.reason from None
            raise

    # -------------------------------------------------------------------------------- work

    def track(self, task: "Cancellable") -> None:
        """Registers a task that serves this run: the end of the run cancels it. Called on the streams' loop."""
        self._tasks.add(task)

    def untrack(self, task: "Cancellable") -> None:
        self._tasks.discard(task)

    def begin_work(self) -> None:
        with self._lock:
            self._busy += 1

    def end_work(self) -> None:
        with self._lock:
            self._busy -= 1
            idle = self._busy == 0
            self._release_deadline()
        if idle:
            self.changed.fire()

    def _release_deadline(self) -> None:
        """Drops the deadline of a finished run: later steps of its state are not late. Called with the lock held."""
        if self.finished:
            self.deadline = None

    @property
    def idle(self) -> bool:
        return self._busy == 0

    @property
    def finished(self) -> bool:
        """True once the body has ended and every stream has run its steps."""
        return self.ended and self._busy == 0

    def when_finished(self, function: Callable[[], Any]) -> None:
        """Calls `function` once, now or on the thread that ends the last work."""
        called = threading.Lock()  # taken by the first caller, never released

        def check() -> None:
            if not self.finished:
                self.changed.add(check)
                if not self.finished:
                    return
                self.changed.discard(check)
            if called.acquire(blocking=False):
                function()

        check()

    def wait_finished(self) -> None:
        """Blocks until the body has ended and every stream has run its steps."""
        finished = threading.Event()
        self.when_finished(finished.set)
        loop.wait_for(finished)

    def check_process(self) -> None:
        """Raises ProgramError in a forked child, where the loop that serves this run does not exist."""
        if self._process != os.getpid():
            raise ProgramError(
                "this state belongs to the parent process; read it before forking, or run the program in the child"
            )


def ending(error: BaseException) -> BaseException:
    """Returns the error that reads of a run raise after its body, or a wait for it, ended with `error`."""
    if isinstance(error, asyncio.CancelledError | KeyboardInterrupt | GeneratorExit):
        ending = CancelledError(f"the run was interrupted by {type(error).__name__}")
        ending.__cause__ = error
        return ending
    return error


def _ring(reference: "weakref.ref[Run]") -> None:
    run = reference()
    if run is not None and not run.finished:
        run.expire()


# -------------------------------------------------------------------------------- the default backend

_HOOKS = ("start", "generate", "score", "hint", "tokens_at_most", "control", "close")

_in_context: ContextVar[Backend | None] = ContextVar("umbel_default_backend", default=None)
_lock = threading.Lock()
_of_process: list[Backend] = []  # at most one


def set_default_backend(backend: Backend | None) -> None:
    """Sets the default backend of this process: of all runs that name none.

    Programs that a program's body runs, and that name none, go to the backend of that program.

    Args:
        backend: such as `ul.Runtime()`; None unsets it, and then the default is a Runtime with the default model.

    Raises:
        ParameterError: not a backend.

    Examples:
        >>> ul.set_default_backend(ul.Echo({"France": "Paris"}))
        >>> @ul.function
        ... def capital(s, country):
        ...     s += f"The capital of {country}: " + ul.gen("city", max_tokens=8)
        >>> capital.run("France")["city"]
        'Paris'
    """
    chosen = [] if backend is None else [checked(backend)]
    with _lock:
        _of_process[:] = chosen


@contextmanager
def default_backend(backend: Backend) -> Iterator[Backend]:
    """Sets the default backend of a `with` block, which yields it.

    Other threads, and tasks that were started before, keep theirs.

    Args:
        backend: such as `ul.Runtime()`.

    Raises:
        ParameterError: not a backend.

    Examples:
        >>> @ul.function
        ... def capital(s, country):
        ...     s += f"The capital of {country}: " + ul.gen("city", max_tokens=8)
        >>> with ul.default_backend(ul.Echo({"France": "Paris"})) as model:
        ...     capital.run("France")["city"]
        ...     model.calls
        'Paris'
        1
    """
    token = _in_context.set(checked(backend))
    try:
        yield backend
    finally:
        _in_context.reset(token)


def chosen_backend(given: object = None) -> Backend:
    """Returns the backend given to a run, else that of the block or of the program around it, else the process's, else
    the embedded model.

    Raises:
        ParameterError: not a backend.
        MissingExtraError: none was chosen, and the runtime is not installed.
    """
    if given is not None:
        return checked(given)
    in_context = _in_context.get()
    if in_context is not None:
        return in_context
    with _lock:
        if not _of_process:
            from .backends.runtime import Runtime

            _of_process.append(Runtime())  # starts nothing before its first use
        return _of_process[0]


def checked(backend: object) -> Backend:
    """Checks that an object is a backend, by its class: properties may need a started backend."""
    if isinstance(backend, type) or not all(callable(getattr(type(backend), hook, None)) for hook in _HOOKS):
        raise ParameterError(
            f"{shown(backend)} is not a backend; write an instance such as umbel.Runtime() or umbel.Echo()"
        )
    return cast(Backend, backend)


def flush_cache(backend: Backend | None = None) -> None:
    """Drops the cached prefixes of a backend, but for those that running calls use.

    Args:
        backend: that is asked; None is the default one.

    Raises:
        CapabilityError: the backend cannot: hosted models forget by themselves.

    Examples:
        >>> model = ul.Echo()
        >>> text = model("Venice is sinking.", max_tokens=4)
        >>> ul.get_server_info(model)["cached_tokens"]
        8
        >>> ul.flush_cache(model)
        >>> ul.get_server_info(model)["cached_tokens"]
        0
    """
    _ask(chosen_backend(backend), "flush_cache")


def get_server_info(backend: Backend | None = None) -> dict[str, Any]:
    """Returns facts about a backend: its model, sizes and counters. Starts it if it does not run yet.

    Args:
        backend: that is asked; None is the default one. A `Runtime` has some hundred facts, which docs/runtime.md
            describes, hosted models have calls and retries.

    Examples:
        >>> model = ul.Echo()
        >>> text = model("Venice is sinking.", max_tokens=4)
        >>> info = ul.get_server_info(model)
        >>> info["model"], info["calls"]
        ('Echo', 1)
    """
    return dict(_ask(chosen_backend(backend), "info").result)


def _ask(backend: Backend, verb: str) -> Done:
    async def ask() -> Done:
        await backend.start()
        return await backend.control(verb)

    return loop.streams.run(ask())


# -------------------------------------------------------------------------------- journals

_journal_in_context: ContextVar["Callable[[], JournalUse] | None"] = ContextVar("umbel_journal", default=None)


@contextmanager
def journal_of_block(use: "Callable[[], JournalUse]") -> Iterator[None]:
    """Gives the runs of a block a journal, each its own use of it."""
    token = _journal_in_context.set(use)
    try:
        yield
    finally:
        _journal_in_context.reset(token)


def chosen_journal(given: object = None) -> "JournalUse | None":
    """Returns the use of the journal given to a run; else of that of the run whose body starts it; else the block's.

    Raises:
        JournalError: no path.
    """
    if given is not None:
        from .journal.use import use_of

        return use_of(given)
    around = _inside.get()
    if around and around[-1].stored is not None:
        return around[-1].stored.inner_use()
    of_block = _journal_in_context.get()
    return None if of_block is None else of_block()


# -------------------------------------------------------------------------------- recording


class Recording(Protocol):
    """Records the runs of a program while its caller is traced."""

    def run(self, body: "Body", call: BoundArguments, options: Mapping[str, Any]) -> State:
        """Records `program.run(...)` as a stream of its own. `options`: keywords of the run as they were given."""

    async def run_async(self, body: "Body", call: BoundArguments, options: Mapping[str, Any]) -> AsyncState: ...

    def enter(self, body: "Body", call: BoundArguments, sink: Sink) -> None:
        """Records `program(s, ...)` in the caller's state. Raises TraceError for a state of another program."""

    def refuse(self, what: str, instead: str) -> Exception:
        """Returns the error for `what`, which cannot be recorded; `instead`: what to write."""


_recording: ContextVar[Recording | None] = ContextVar("umbel_recording", default=None)


def recording() -> Recording | None:
    """Returns the recording of the program being traced in this context; None where programs run."""
    return _recording.get()


@contextmanager
def recorded(by: Recording) -> Iterator[None]:
    """Sets the recording while a body is traced."""
    token = _recording.set(by)
    try:
        yield
    finally:
        _recording.reset(token)


def not_while_recording(what: str, instead: str) -> None:
    """Raises TraceError inside a traced program, for `what` with `instead` to write."""
    recorder = _recording.get()
    if recorder is not None:
        raise recorder.refuse(what, instead)


# -------------------------------------------------------------------------------- speculation


@dataclass(frozen=True, slots=True)
class SpeculationSetting:
    """The number of tokens by which calls go beyond what their `gen` needs.

    Attributes:
        tokens: the most; 0 turns speculation off, None lets the planner decide.
    """

    tokens: int | None


@dataclass(frozen=True, slots=True)
class RunSpeculation:
    """Speculation state that the streams of one run share.

    Attributes:
        setting: of the run or its program.
        planner: of the program, shared by all of its runs.
        waits: of the body of this run.
    """

    setting: SpeculationSetting
    planner: "Planner"
    waits: "BodyWaits"


def speculation_of(num_api_spec_tokens: object, speculate: object) -> SpeculationSetting | None:
    """Builds the setting from the options of a program or a run; None when neither is given.

    Raises:
        ParameterError: both, or a value that is none of theirs.
    """
    if num_api_spec_tokens is None and speculate is None:
        return None
    if num_api_spec_tokens is not None and speculate is not None:
        raise ParameterError(
            f"num_api_spec_tokens={shown(num_api_spec_tokens)} and speculate={shown(speculate)} are two answers to one "
            'question; give the number of tokens, or speculate="auto"'
        )
    if num_api_spec_tokens is None:
        if not isinstance(speculate, str) or checks.plain(speculate) != "auto":
            raise ParameterError(
                f'speculate={shown(speculate)}; write speculate="auto", or num_api_spec_tokens=64 for a fixed number'
            )
        return SpeculationSetting(None)
    remedy = f"a number of tokens from 0 to {MAX_TOKENS}, such as 64"
    return SpeculationSetting(checks.integer("num_api_spec_tokens", num_api_spec_tokens, 0, MAX_TOKENS, remedy))


def speculation_of_run(setting: SpeculationSetting | None, planner: "Planner") -> RunSpeculation | None:
    """Returns the speculation state of a new run; None where `setting` turns it off or is not given."""
    return None if setting is None or setting.tokens == 0 else RunSpeculation(setting, planner, BodyWaits())


class BodyWaits:
    """Counts the reads of a run's body that wait now.

    While one waits, the body adds no steps. Steps after a `gen` may come a moment later, from another thread, so the
    speculator waits until a step follows, the body waits too, or it has ended.
    """

    __slots__ = ("_lock", "_waiting", "changed")

    def __init__(self) -> None:
        self.changed = Signal()
        self._lock = threading.Lock()
        self._waiting = 0

    @property
    def waiting(self) -> bool:
        return self._waiting > 0

    def start(self) -> None:
        with self._lock:
            self._waiting += 1
        self.changed.fire()

    def end(self) -> None:
        with self._lock:
            self._waiting -= 1


@contextmanager
def noted_wait(run: Run) -> Iterator[None]:
    """Counts a wait of the body itself; an observer of the run does not count."""
    if run.speculation is None or not run.is_inside:
        yield
        return
    run.speculation.waits.start()
    try:
        yield
    finally:
        run.speculation.waits.end()
