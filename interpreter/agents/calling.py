"""Drives an agent's steps, and runs its tools: in threads for sync states, as tasks for async ones.

A tool that does not end in its time is left alone: Python cannot stop a thread. Its thread is a daemon, and what it
returns later is dropped.
"""

import asyncio
import contextlib
import contextvars
import threading
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from ...lang.agents.plan import AgentResult
from ...lang.errors import DeadlineError
from ..loop import wait_for
from ..variables import Binding
from .agent import Agent, ReadyCall, Round

if TYPE_CHECKING:
    from ..run import Run
    from ..stream import Stream


def run(stream: "Stream", agent: Agent) -> AgentResult:
    """Runs an agent in the calling thread."""
    steps, sent = agent.steps(), None
    while True:
        try:
            asked = steps.send(sent)
        except StopIteration as end:
            result: AgentResult = end.value
            return result
        sent = _called(stream, asked, agent.plan.timeout) if isinstance(asked, Round) else stream.settled(asked)


async def run_async(stream: "Stream", agent: Agent) -> AgentResult:
    """Runs an agent on the caller's event loop."""
    steps, sent = agent.steps(), None
    while True:
        try:
            asked = steps.send(sent)
        except StopIteration as end:
            result: AgentResult = end.value
            return result
        if isinstance(asked, Binding):
            sent = await stream.settled_async(asked)
        else:
            seconds = _seconds(stream, agent.plan.timeout)
            sent = await asyncio.gather(*(_outcome_async(call, seconds, stream.run) for call in asked.calls))
            if stream.run.reason is not None:
                raise stream.run.reason
            _check_time(stream)


def _called(stream: "Stream", asked: Round, timeout: float) -> list[Any]:
    """Runs calls in threads of their own → a value or an exception for each."""
    outcomes = [_Outcome(call) for call in asked.calls]
    seconds = _seconds(stream, timeout)
    for outcome in outcomes:
        outcome.start()
    deadline = stream.run.home.time() + seconds
    told = [outcome.wait(max(0.0, deadline - stream.run.home.time()), seconds) for outcome in outcomes]
    _check_time(stream)
    return told


class _Outcome:
    """A call in a thread of its own, in the context of the program."""

    def __init__(self, call: ReadyCall, ended: Callable[[], object] = lambda: None) -> None:
        self._call = call
        self._ended = ended
        self._done = threading.Event()
        self._outcome: Any = None
        self._context = contextvars.copy_context()

    def start(self) -> None:
        named = f"umbel-tool-{self._call.tool.name}"
        threading.Thread(target=self._context.run, args=(self._run,), name=named, daemon=True).start()

    def _run(self) -> None:
        try:
            value = self._call.tool(**self._call.arguments)
            self._outcome = asyncio.run(_awaited(value)) if isinstance(value, Awaitable) else value
        except BaseException as error:
            self._outcome = error
        finally:
            self._done.set()
            self._ended()

    def wait(self, seconds: float, timeout: float) -> Any:  # Any: what the tool returns, or an exception
        if wait_for(self._done, seconds):
            return self._outcome
        return _late(self._call, timeout)


async def _outcome_async(call: ReadyCall, seconds: float, run: "Run") -> Any:  # Any: its value, or an exception
    """Runs a call as a task, or in a thread where it is no coroutine function. The end of the run cancels the task."""
    if not call.tool.is_async:
        loop, ended = asyncio.get_running_loop(), asyncio.Event()
        outcome = _Outcome(call, partial(_wake, loop, ended))
        outcome.start()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(ended.wait(), seconds)
        return outcome.wait(0, seconds)
    task = asyncio.create_task(_awaited(call.tool(**call.arguments)))
    stopper = _Stopper(task)
    run.home.call(run.track, stopper)
    task.add_done_callback(lambda _: run.home.call(run.untrack, stopper))
    if run.reason is not None:  # the run has stopped its tasks before it knew of this one
        task.cancel()
    try:
        done, _ = await asyncio.wait((task,), timeout=seconds)
    except asyncio.CancelledError:
        task.cancel()
        raise
    if not done:
        task.cancel()
        return _late(call, seconds)
    return asyncio.CancelledError() if task.cancelled() else task.exception() or task.result()


class _Stopper:
    """Cancels a task from the thread of the streams."""

    def __init__(self, task: asyncio.Task[Any]) -> None:
        self._task = task

    def cancel(self) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._task.get_loop().call_soon_threadsafe(self._task.cancel)


def _wake(loop: asyncio.AbstractEventLoop, ended: asyncio.Event) -> None:
    with contextlib.suppress(RuntimeError):  # the loop is closed: the tool ended too late
        loop.call_soon_threadsafe(ended.set)


async def _awaited(value: Awaitable[Any]) -> Any:  # Any: what the tool returns
    return await value


def _late(call: ReadyCall, seconds: float) -> DeadlineError:
    return DeadlineError(f"the tool {call.tool.name} did not end within timeout={seconds:g} seconds")


def _seconds(stream: "Stream", timeout: float) -> float:
    left = stream.run.seconds_left
    return timeout if left is None else min(timeout, left)


def _check_time(stream: "Stream") -> None:
    """Raises the run's own error where its time is up."""
    if stream.run.is_late:
        raise stream.run.lateness()
