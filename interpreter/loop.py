"""The event loops of a process: one for streams and backends, one for the bodies of async programs.

A stream is a queue and a task, not a thread, so ten thousand programs need one thread here. Loops
start on first use and end with the process. User code never runs on the streams' loop: a blocking
call there would stall every program.

A `Signal` wakes threads, and coroutines on other loops, that wait for what the streams' loop does. It is fired after
the state that it announces has changed. A waiter registers first and looks second, so no wake-up is lost; every waiter
has a callback of its own, so none is stolen.
"""

import asyncio
import atexit
import concurrent.futures
import contextlib
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import Context, copy_context
from functools import partial
from typing import Any, Protocol, TypeVar

from ..lang import checks
from ..lang.errors import DeadlineError, ProgramError
from ..lang.protocol import Backend

T = TypeVar("T")
_Call = tuple[Context, Callable[..., object], tuple[object, ...]]

_SHUTDOWN_SECONDS = 2.0
_HEARING_SECONDS = 1.0  # how long the main thread may block without a look for signals


class Home(Protocol):
    """The event loop of a run's streams. Its methods may be called on any thread."""

    def call(self, function: Callable[..., object], *arguments: object) -> None:
        """Run a plain function on the loop, soon and in order."""

    def call_later(self, seconds: float, function: Callable[..., object], *arguments: object) -> None: ...

    def time(self) -> float:
        """Returns the time of the clock of deadlines, in seconds."""


class RunningLoop:
    """Wraps the running loop as a home: for a server, whose programs need no thread of their own."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()

    def call(self, function: Callable[..., object], *arguments: object) -> None:
        self._loop.call_soon_threadsafe(function, *arguments)

    def call_later(self, seconds: float, function: Callable[..., object], *arguments: object) -> None:
        self.call(self._loop.call_later, seconds, function, *arguments)

    def time(self) -> float:
        return self._loop.time()


class LoopThread:
    """An event loop in a daemon thread, started when it is first needed. A home."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._calls: deque[_Call] = deque()
        self._woken = False  # the loop has been told that there are calls

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        loop = self._loop
        return loop if loop is not None else self._start()

    @property
    def current(self) -> bool:
        """True on this loop's thread."""
        return threading.current_thread() is self._thread

    def call(self, function: Callable[..., object], *arguments: object) -> None:
        """Runs a plain function on the loop, soon and in order. Waking the loop costs more than most calls, so one
        wake-up serves all calls queued before the loop is awake."""
        loop = self.loop
        calls = self._calls
        calls.append((copy_context(), function, arguments))
        if not self._woken:  # an append before the loop clears this is served by that waking
            self._woken = True
            try:
                loop.call_soon_threadsafe(self._run_calls, loop, calls)
            except RuntimeError:  # the loop was closed meanwhile
                self._woken = False
                raise

    def call_later(self, seconds: float, function: Callable[..., object], *arguments: object) -> None:
        self.call(self.loop.call_later, seconds, function, *arguments)

    def time(self) -> float:
        return time.monotonic()

    def _run_calls(self, loop: asyncio.AbstractEventLoop, calls: "deque[_Call]") -> None:
        self._woken = False
        for _ in range(len(calls)):
            context, function, arguments = calls.popleft()
            try:
                context.run(function, *arguments)
            except Exception as error:  # as the loop treats those of its own callbacks: the others go on
                loop.call_exception_handler({"message": "a call on the loop failed", "exception": error})

    def spawn(self, work: Coroutine[Any, Any, T], context: Context | None = None) -> "concurrent.futures.Future[T]":
        """Starts a coroutine on the loop, in `context` when given. Cancelling the future cancels it."""
        result: concurrent.futures.Future[T] = concurrent.futures.Future()

        def start() -> None:
            task = loop.create_task(work, context=context)
            _alive.add(task)
            task.add_done_callback(finish)
            result.add_done_callback(lambda _: result.cancelled() and loop.call_soon_threadsafe(task.cancel))

        def finish(task: "asyncio.Task[T]") -> None:
            _alive.discard(task)
            with contextlib.suppress(concurrent.futures.InvalidStateError):  # its holder cancelled it
                if task.cancelled():
                    result.cancel()
                elif (error := task.exception()) is not None:
                    result.set_exception(error)
                else:
                    result.set_result(task.result())

        loop = self.loop
        loop.call_soon_threadsafe(start)
        return result

    def run(self, work: Coroutine[Any, Any, T], timeout: float | None = None) -> T:
        """Runs a coroutine on the loop and waits for its result.

        Raises:
            ProgramError: called from the loop's own thread, which would wait for itself.
            TimeoutError: no result in time; the coroutine is cancelled.
        """
        if self.current:
            work.close()
            raise ProgramError("a blocking call on the event loop's own thread would wait for itself; await it instead")
        future = self.spawn(work)
        try:
            return result_of(future, timeout)
        except BaseException:
            future.cancel()
            raise

    def close(self) -> None:
        """Cancels all tasks and ends the thread. A later use starts a new loop."""
        with self._lock:
            loop, thread = self._loop, self._thread
            self._loop = self._thread = None
            self._calls, self._woken = deque(), False
        if loop is None or thread is None or self.current:
            return
        with contextlib.suppress(RuntimeError):  # the loop may be closed already
            loop.call_soon_threadsafe(_cancel_all, loop)
        thread.join(_SHUTDOWN_SECONDS)

    def forget(self) -> None:
        """Drops the loop in a forked child, where its thread does not exist. The next use starts a new one."""
        self._lock = threading.Lock()
        self._loop = self._thread = None
        self._calls, self._woken = deque(), False

    def _start(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None:
                loop = Context().run(asyncio.new_event_loop)  # it keeps the context: of no run
                self._thread = threading.Thread(target=_serve, args=(loop,), name=self._name, daemon=True)
                self._thread.start()
                self._loop = loop
            return self._loop


# asyncio keeps only weak references to tasks.
_alive: "set[asyncio.Task[Any]]" = set()


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
    finally:
        loop.close()


def _cancel_all(loop: asyncio.AbstractEventLoop) -> None:
    """Cancels every task, and those they start meanwhile, lets each of them end, then stops the loop."""

    async def leave() -> None:
        while tasks := asyncio.all_tasks(loop) - {asyncio.current_task(loop)}:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        await loop.shutdown_asyncgens()
        loop.stop()

    _alive.add(loop.create_task(leave()))
    loop.call_later(_SHUTDOWN_SECONDS / 2, loop.stop)  # a task that refuses to end does not keep the process


streams = LoopThread("umbel-streams")  # backends, streams, requests
programs = LoopThread("umbel-programs")  # bodies of async programs that were started from sync code


def _close_all() -> None:
    programs.close()
    streams.close()


def _forget_all() -> None:
    _alive.clear()
    programs.forget()
    streams.forget()


atexit.register(_close_all)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_all)

# Backends that have started, with the loop on which they have. `Backend.start` is idempotent and may take seconds the
# first time, so it is awaited in a task of its own; once it has started, that task would be a tenth of what a call
# costs. A backend that is gone is forgotten, a new loop starts everything anew, and after a fork the loop is a new one.
_started: "weakref.WeakKeyDictionary[Backend, weakref.ref[asyncio.AbstractEventLoop]]" = weakref.WeakKeyDictionary()


def has_started(backend: Backend) -> bool:
    """Returns whether the backend has started on the running loop."""
    try:
        loop = _started.get(backend)
    except TypeError:  # not hashable, or it takes no weak reference: it is asked again
        return False
    return loop is not None and loop() is asyncio.get_running_loop()


def note_started(backend: Backend) -> None:
    """Records that the backend's `start` has returned on the running loop."""
    try:
        _started[backend] = weakref.ref(asyncio.get_running_loop())
    except TypeError:
        return


# -------------------------------------------------------------------------------- waiting

Wake = Callable[[], object]

_TIMEOUT = f"seconds, at most {checks.LONGEST_SECONDS:g}, or None to wait for the run's own deadline"


class Signal:
    """One-shot callbacks, called on the thread that fires.

    There is no lock: each operation on the dict is one step for all threads, and the thread that takes a wake calls it.
    """

    __slots__ = ("_wakes",)

    def __init__(self) -> None:
        self._wakes: dict[Wake, bool] = {}

    def add(self, wake: Wake) -> None:
        self._wakes[wake] = True

    def discard(self, wake: Wake) -> None:
        self._wakes.pop(wake, None)

    def fire(self) -> None:
        if self._wakes:
            for wake in list(self._wakes):
                if self._wakes.pop(wake, False):
                    wake()


def earliest(
    timeout: float | None, deadline: float | None, clock: Callable[[], float] = time.monotonic
) -> float | None:
    """Returns the earlier of a timeout, in seconds from now, and a deadline on `clock`.

    Raises:
        ParameterError: the timeout is no number, or beyond 10**9 seconds. One below 0 has passed.
    """
    if timeout is None:
        return deadline
    limit = clock() + checks.number("timeout", timeout, -checks.LONGEST_SECONDS, checks.LONGEST_SECONDS, _TIMEOUT)
    return limit if deadline is None else min(limit, deadline)


def seconds_left(deadline: float | None, clock: Callable[[], float] = time.monotonic) -> float | None:
    """Returns the seconds until a deadline on `clock`, not below 0."""
    return None if deadline is None else max(0.0, deadline - clock())


def hearing(seconds: float | None = None) -> float:
    """Returns how long this thread may block, in seconds: `seconds`, but on the main thread at most one.

    Python runs a signal's handler between two instructions. A signal that comes right before the main thread blocks
    on a lock, or that another thread gets, wakes nothing up: Ctrl-C would be heard when the answer is there. So what
    blocks the main thread blocks it in pieces.
    """
    longest = threading.TIMEOUT_MAX
    if threading.current_thread() is threading.main_thread():
        longest = _HEARING_SECONDS
    return longest if seconds is None else min(seconds, longest)


def result_of(future: "concurrent.futures.Future[T]", timeout: float | None = None) -> T:
    """Blocks until the future has its result, and returns it.

    Raises:
        TimeoutError: it has none after `timeout` seconds.
    """
    limit = None if timeout is None else time.monotonic() + timeout
    while True:
        left = seconds_left(limit)
        try:
            return future.result(hearing(left))
        except TimeoutError:
            if future.done():  # it is the result's own, or the result has come since
                return future.result(0)
            if left == 0:
                raise


def wait_for(event: threading.Event, seconds: float | None = None) -> bool:
    """Blocks until the event is set, at most so many seconds, and returns whether it is."""
    limit = None if seconds is None else time.monotonic() + seconds
    while not event.wait(hearing(left := seconds_left(limit))):
        if left == 0:
            return False
    return True


def wait_until(ready: Callable[[], bool], signals: tuple[Signal, ...], limit: float | None, what: str) -> None:
    """Blocks this thread until `ready`.

    Raises:
        DeadlineError: `limit` passed first; the message says `what` was waited for.
    """
    while not ready():
        gate = threading.Lock()  # an Event is four of them
        gate.acquire()
        wake = partial(_open, gate)
        for signal in signals:
            signal.add(wake)
        try:
            if ready():
                return
            remaining = None if limit is None else limit - time.monotonic()
            if remaining is not None and remaining <= 0:
                raise DeadlineError(f"{what} was not known in time; give more with timeout=")
            gate.acquire(timeout=hearing(remaining))
        finally:
            for signal in signals:
                signal.discard(wake)


def _open(gate: threading.Lock) -> None:
    with contextlib.suppress(RuntimeError):  # another signal has opened it
        gate.release()


async def wait_until_async(
    ready: Callable[[], bool], signals: tuple[Signal, ...], limit: float | None, what: str
) -> None:
    """Waits as `wait_until` does, for a coroutine on any loop."""
    loop = asyncio.get_running_loop()
    while not ready():
        future: asyncio.Future[None] = loop.create_future()

        def wake(future: "asyncio.Future[None]" = future) -> None:
            with contextlib.suppress(RuntimeError):  # the waiter's loop is closed: the waiter is gone
                loop.call_soon_threadsafe(set_done, future)

        for signal in signals:
            signal.add(wake)
        try:
            if ready():
                return
            remaining = None if limit is None else limit - time.monotonic()
            if remaining is not None and remaining <= 0:
                raise DeadlineError(f"{what} was not known in time; give more with timeout=")
            await asyncio.wait((future,), timeout=remaining)
        finally:
            for signal in signals:
                signal.discard(wake)


def set_done(future: "asyncio.Future[None]") -> None:
    """Ends the wait for `future`; its waiter may have been cancelled."""
    if not future.done():
        future.set_result(None)
