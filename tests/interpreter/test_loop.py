"""The loops' threads: on demand, one each, closed for good order."""

import asyncio
import threading

import pytest
from umbel.interpreter.loop import LoopThread
from umbel.lang.errors import ProgramError


def test_a_loop_starts_on_first_use_and_again_after_closing() -> None:
    thread = LoopThread("toy")
    before = threading.active_count()

    async def who() -> str:
        return threading.current_thread().name

    assert threading.active_count() == before
    assert thread.run(who()) == thread.run(who()) == "toy"
    assert threading.active_count() == before + 1
    thread.close()
    assert threading.active_count() == before
    assert thread.run(who()) == "toy"
    thread.close()


def test_closing_cancels_what_runs() -> None:
    thread = LoopThread("toy")
    ended: list[str] = []
    started = threading.Event()

    async def forever() -> None:
        try:
            started.set()
            await asyncio.Event().wait()
        finally:
            ended.append("cancelled")

    future = thread.spawn(forever())
    assert started.wait(10)
    thread.close()
    assert ended == ["cancelled"]
    assert future.cancelled()


def test_closing_cancels_also_what_begins_meanwhile() -> None:
    thread = LoopThread("toy")
    ended: list[str] = []
    started = threading.Event()

    async def late() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("late")

    async def forever() -> None:
        try:
            started.set()
            await asyncio.Event().wait()
        finally:
            tasks.append(asyncio.create_task(late()))
            await asyncio.sleep(0)

    tasks: list[asyncio.Task[None]] = []
    thread.spawn(forever())
    assert started.wait(10)
    thread.close()
    assert ended == ["late"]


def test_a_loop_does_not_wait_for_itself() -> None:
    thread = LoopThread("toy")

    async def inner() -> None:
        pass

    async def outer() -> None:
        thread.run(inner())

    with pytest.raises(ProgramError, match="would wait for itself"):
        thread.run(outer())
    thread.close()


def test_a_timeout_cancels_the_work() -> None:
    thread = LoopThread("toy")
    cancelled = threading.Event()

    async def forever() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.set()
            raise

    with pytest.raises(TimeoutError):
        thread.run(forever(), timeout=0.01)
    assert cancelled.wait(10)
    thread.close()


def test_errors_come_back_as_they_are() -> None:
    thread = LoopThread("toy")
    error = ValueError("mine")

    async def fail() -> None:
        raise error

    with pytest.raises(ValueError, match="mine") as caught:
        thread.run(fail())
    assert caught.value is error
    thread.close()
