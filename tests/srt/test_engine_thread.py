"""Steps in a thread: how many follow each other, what becomes of them when nobody waits any more, and another loop."""

import asyncio
import threading
from collections.abc import Sequence
from types import SimpleNamespace

import pytest
from umbel.srt.core.messages import EngineEnd, FromEngine, Tokens
from umbel.srt.in_process import MOST_STEPS, EngineThread, LocalEngine

TOLD = Tokens(1, [2])


class Steps:
    """A scheduler that tells something in some of its steps, and never comes to an end unless it is said."""

    unchecked = False

    def __init__(self, told: Sequence[bool] = (), *, idle_after: int | None = None, opening: bool = False) -> None:
        self.steps = 0
        self.opening = opening
        self._told = told
        self._idle_after = idle_after

    @property
    def idle(self) -> bool:
        return self._idle_after is not None and self.steps >= self._idle_after

    def step(self) -> list[FromEngine]:
        self.steps += 1
        return [TOLD] if self.steps <= len(self._told) and self._told[self.steps - 1] else []


def advance(scheduler: Steps, *, news: bool = False) -> list[FromEngine]:
    async def once() -> list[FromEngine]:
        thread = EngineThread(scheduler, lambda: news, threading.Lock())  # type: ignore[arg-type]  # the part of a scheduler that it uses
        try:
            return await thread.advance()
        finally:
            thread.close()

    return asyncio.run(once())


def test_steps_follow_each_other_while_there_is_nothing_to_tell() -> None:
    scheduler = Steps()
    assert advance(scheduler) == []
    assert scheduler.steps == MOST_STEPS


def test_what_there_is_to_tell_is_told_at_once() -> None:
    scheduler = Steps([False, True])
    assert advance(scheduler) == [TOLD]
    assert scheduler.steps == 2


@pytest.mark.parametrize(
    ("scheduler", "news"), [(Steps(), True), (Steps(idle_after=1), False), (Steps(opening=True), False)]
)
def test_messages_an_idle_engine_and_one_that_waits_end_them(scheduler: Steps, news: bool) -> None:
    assert advance(scheduler, news=news) == []
    assert scheduler.steps == 1


def test_whoever_is_cancelled_waits_for_the_step() -> None:
    begun, may_end = threading.Event(), threading.Event()

    class Long(Steps):
        def step(self) -> list[FromEngine]:
            begun.set()
            assert may_end.wait(10)
            return super().step()

    scheduler = Long(idle_after=1)

    async def cancel() -> None:
        thread = EngineThread(scheduler, lambda: False, threading.Lock())  # type: ignore[arg-type]  # as above
        task = asyncio.create_task(thread.advance())
        await asyncio.to_thread(begun.wait, 10)
        task.cancel()
        await asyncio.sleep(0)
        assert not task.done()
        may_end.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        thread.close()

    asyncio.run(cancel())
    assert scheduler.steps == 1


class Steady(Steps):
    """Takes messages, and tells one event for each; its next step after `hold` waits until the test lets it go on."""

    def __init__(self) -> None:
        super().__init__()
        self.unchecked = False
        self.left: list[object] = []
        self.threads: set[threading.Thread] = set()
        self.hold, self.held, self.go_on = False, threading.Event(), threading.Event()

    @property
    def idle(self) -> bool:
        return not self.left and not self.hold

    def handle_message(self, message: object) -> None:
        self.threads.add(threading.current_thread())
        self.left.append(message)

    def step(self) -> list[FromEngine]:
        told = [TOLD] * len(self.left)
        self.left.clear()
        if self.hold:
            self.hold = False
            self.held.set()
            assert self.go_on.wait(10)
        return told


class Turn:
    """A lock that lets the held step end when another thread begins to wait for it."""

    def __init__(self, go_on: threading.Event) -> None:
        self._lock, self._go_on = threading.Lock(), go_on

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            self._go_on.set()
            self._lock.acquire()

    def __exit__(self, *error: object) -> None:
        self._lock.release()


@pytest.mark.parametrize("step_seconds", [None, 0.0], ids=["in a thread", "on the loop"])
def test_an_engine_that_another_loop_takes_over_is_used_by_that_loop_alone(step_seconds: float | None) -> None:
    """As a program on the loop of all programs, and then `asyncio.run`: the first loop goes on running."""
    scheduler = Steady()
    heard: list[FromEngine] = []

    def on_events(events: list[FromEngine]) -> None:
        scheduler.threads.add(threading.current_thread())
        heard.extend(events)

    engine = SimpleNamespace(scheduler=scheduler, close=lambda: None)
    local = LocalEngine(
        engine,  # type: ignore[arg-type]  # the part of an engine that it uses
        on_events=on_events,
        on_lost=pytest.fail,
        step_seconds=step_seconds,
    )
    local._turn = local._thread._turn = Turn(scheduler.go_on)  # type: ignore[assignment]
    former = asyncio.new_event_loop()
    thread = threading.Thread(target=former.run_forever)
    thread.start()

    def begin() -> None:
        local.move_to(former)
        scheduler.hold = True
        local.send(EngineEnd())

    async def take_over() -> None:
        local.move_to(asyncio.get_running_loop())
        scheduler.threads.clear()
        for _ in range(3):
            local.send(EngineEnd())
        while len(heard) < 4:
            await asyncio.sleep(0)
        await local.close()

    former.call_soon_threadsafe(begin)
    assert scheduler.held.wait(10)
    asyncio.run(take_over())
    former.call_soon_threadsafe(former.stop)
    thread.join()
    former.close()
    assert scheduler.threads == {threading.current_thread()}
