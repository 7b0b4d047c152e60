"""Waits, in threads and in coroutines, for a condition that another thread makes true.

A `Signal` is fired after the state that it announces has changed. A waiter registers first and looks
second, so no wake-up is lost; every waiter has a callback of its own, so none is stolen.
"""

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable
from functools import partial

from ..lang import checks
from ..lang.errors import DeadlineError

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
            gate.acquire(timeout=-1 if remaining is None else min(remaining, threading.TIMEOUT_MAX))
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
                loop.call_soon_threadsafe(_settle, future)

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


def _settle(future: "asyncio.Future[None]") -> None:
    if not future.done():
        future.set_result(None)
