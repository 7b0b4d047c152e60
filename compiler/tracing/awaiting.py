"""The event loop of a trace: it runs what is ready, and nothing else ever is.

An async program awaits its variables, which a trace has at once. What waits for anything else, a timer, a thread,
a socket, would wait for ever: the body has not ended when nothing is ready, and that is the error.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import Context
from typing import Any, TypeVarTuple, Unpack

from ...lang.errors import TraceError
from ..graph import Line
from .lines import line_of, raising_line
from .tape import Tape

Ts = TypeVarTuple("Ts")


def finish(coroutine: Coroutine[Any, Any, Any], tape: Tape) -> Any:
    """What the coroutine returns, run to its end here and now, also inside a running loop.

    Raises:
        TraceError: it awaits what is not the program's own.
    """
    loop = _ReadyLoop()  # type: ignore[abstract]  # what waits is left out
    running = asyncio._get_running_loop()
    asyncio._set_running_loop(loop)
    try:
        task = loop.create_task(coroutine)
        loop.run_ready()
        if not task.done():
            frames = task.get_stack()
            refusal = _refusal(tape, line_of(frames[-1]) if frames else None)
            task.cancel()
            loop.run_ready()
            raise refusal
        try:
            return task.result()
        except NotImplementedError as error:
            if _is_of_the_loop(error):
                raise _refusal(tape, raising_line(error)) from None
            raise
    finally:
        asyncio._set_running_loop(running)


def _refusal(tape: Tape, line: Line | None) -> TraceError:
    return tape.refuse_at(
        line,
        "the program awaits what is not its own: a timer, a thread or a connection",
        "await in front of variables of the state and of programs that are run, and of nothing else",
    )


def _is_of_the_loop(error: BaseException) -> bool:
    """Whether the loop was asked for a thread or a connection, which the class that it is made of refuses."""
    traceback = error.__traceback__
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    return traceback is not None and traceback.tb_frame.f_globals.get("__name__") == asyncio.events.__name__


class _ReadyLoop(asyncio.AbstractEventLoop):
    def __init__(self) -> None:
        self._ready: deque[asyncio.Handle] = deque()

    def run_ready(self) -> None:
        while self._ready:
            handle = self._ready.popleft()
            if not handle.cancelled():
                handle._run()

    def call_soon(
        self, callback: Callable[[Unpack[Ts]], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context)
        self._ready.append(handle)
        return handle

    def call_at(
        self, when: float, callback: Callable[[Unpack[Ts]], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        """Time stands still: the handle can be cancelled, and never rings."""
        return asyncio.TimerHandle(when, callback, args, self, context)

    def call_later(
        self, delay: float, callback: Callable[[Unpack[Ts]], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        return self.call_at(delay, callback, *args, context=context)

    def create_task(self, coro: Any, *, name: str | None = None, context: Context | None = None) -> "asyncio.Task[Any]":
        return asyncio.Task(coro, loop=self, name=name, context=context)

    def create_future(self) -> "asyncio.Future[Any]":
        return asyncio.Future(loop=self)

    def time(self) -> float:
        return 0.0

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return True

    def is_closed(self) -> bool:
        return False

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """A task whose error nobody has looked at: the body has, or it has ended with another."""
        return

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        return
