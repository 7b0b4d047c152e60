"""The loops' threads: on demand, one each, closed for good order."""

import asyncio
import gc
import threading
import weakref
from contextvars import ContextVar, copy_context

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


def test_a_loop_keeps_nothing_of_the_run_that_started_it() -> None:
    running: ContextVar[object] = ContextVar("running")
    thread = LoopThread("toy")

    class Run:
        pass

    def first() -> weakref.ref[Run]:
        run = Run()
        running.set(run)
        thread.run(asyncio.sleep(0))
        return weakref.ref(run)

    gone = copy_context().run(first)
    gc.collect()
    assert gone() is None
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


def test_calls_of_many_threads_all_run_and_those_of_one_thread_in_order() -> None:
    loop = LoopThread("toy")
    ran: list[tuple[int, int]] = []
    done = threading.Event()

    def note(who: int, number: int) -> None:
        ran.append((who, number))
        if len(ran) == 4 * 500:
            done.set()

    def say(who: int) -> None:
        for number in range(500):
            loop.call(note, who, number)

    threads = [threading.Thread(target=say, args=(who,)) for who in range(4)]
    for thread in threads:
        thread.start()
    assert done.wait(10)
    for who in range(4):
        assert [number for caller, number in ran if caller == who] == list(range(500))
    loop.close()


def test_a_call_that_fails_leaves_the_others_alone_and_is_reported() -> None:
    loop = LoopThread("toy")
    reported: list[BaseException] = []
    done = threading.Event()
    loop.loop.set_exception_handler(lambda _, context: reported.append(context["exception"]))

    def fail() -> None:
        raise ValueError("a call that fails")

    loop.call(fail)
    loop.call(done.set)
    assert done.wait(10)
    assert [str(error) for error in reported] == ["a call that fails"]
    loop.close()


def test_a_call_sees_the_context_of_its_caller() -> None:
    loop = LoopThread("toy")
    who: ContextVar[str] = ContextVar("who", default="nobody")
    seen: list[str] = []
    done = threading.Event()
    for name in ("first", "second"):
        token = who.set(name)
        loop.call(lambda: seen.append(who.get()))
        who.reset(token)
    loop.call(done.set)
    assert done.wait(10)
    assert seen == ["first", "second"]
    loop.close()
