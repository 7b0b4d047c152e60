"""One run of a program: its id, backend, deadline, cost, and how it is stopped.

Every stream of the run (the program's own and those of its branches) belongs to one `Run`.
"""

import asyncio
import itertools
import os
import secrets
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from ..lang.errors import BudgetError, CancelledError, DeadlineError, ProgramError
from ..lang.protocol import Backend, Origin
from . import loop
from .budgets.budget import Allowance, Ledger
from .cache_explain.history import History, Journal, history_of
from .calls import Calls
from .speculation.settings import Speculating
from .waiting import Signal, earliest, seconds_left

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


class Run:
    """State that the streams of one run share.

    Args:
        backend: serves every request of the run.
        timeout: seconds from now until everything pending fails with DeadlineError; None for no limit.
        allowance: what is left of the budget of the run, or of its batch; None for no budget.
        streaming: requests ask for chunks, and readers may wait for names that are not set yet.
        salt, priority: of every request.
        speculation: shared settings and statistics of API speculation; None: off.
        home: the loop of its streams, whose clock its deadline is on; None: the loop of all programs.
        history: keeps its calls beyond its end; None: the backend's.
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
        speculation: Speculating | None = None,
        home: loop.Home | None = None,
        history: History | None = None,
    ) -> None:
        self.id = f"{_process_name[0]}-{next(_numbers):x}"
        self.home: loop.Home = loop.streams if home is None else home
        self.backend = backend
        self.streaming = streaming
        self.salt = salt
        self.priority = priority
        self.speculation = speculation
        self.timeout = timeout
        ends = allowance.ends if allowance is not None else None
        self.deadline = earliest(timeout, ends, self.home.time)
        # The budget whose seconds end the run, before its timeout does.
        self._late_budget = allowance if ends is not None and ends == self.deadline else None
        self.calls = Calls(self)
        self.journal = Journal(history_of(backend) if history is None else history)
        self.ledger = Ledger(backend, allowance)
        self.reason: BaseException | None = None  # why everything was stopped
        self.ended = False  # the body has returned or raised
        self.body: asyncio.Future[None] | None = None  # of a program that is not awaited; asyncio does not hold it
        self.changed = Signal()  # fired when the body ends, and when the run falls idle
        self._process = os.getpid()
        self._requests = itertools.count(1)
        self._lock = threading.Lock()
        self._busy = 0  # streams with work
        self._tasks: set[asyncio.Task[None]] = set()  # touched on the streams' loop only
        if self.deadline is not None:
            # The reference is weak: a run that is not referenced any more is not kept until its deadline.
            self.home.call_later(self.deadline - self.home.time(), _ring, weakref.ref(self))

    # -------------------------------------------------------------------------------- requests

    def request_id(self) -> str:
        return f"{self.id}-{next(self._requests)}"

    def origin(self, fork_group: str, ahead: int = 0) -> Origin:
        return Origin(self.id, fork_group, self.salt, self.priority, self.seconds_left, ahead)

    @property
    def seconds_left(self) -> float | None:
        """Seconds until the deadline, not below 0; None without one."""
        return seconds_left(self.deadline, self.home.time)

    # -------------------------------------------------------------------------------- the body

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Marks the current thread or task as the program's own while its body runs."""
        token = _inside.set((*_inside.get(), self))
        try:
            yield
        finally:
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

    def track(self, task: "asyncio.Task[None]") -> None:
        """Registers a task that serves a stream of this run. Called on the streams' loop."""
        self._tasks.add(task)

    def untrack(self, task: "asyncio.Task[None]") -> None:
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
        finished.wait()

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
