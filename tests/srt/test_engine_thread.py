"""Steps in a thread: how many follow each other, and what becomes of them when nobody waits any more."""

import asyncio
import threading
from collections.abc import Sequence

import pytest
from umbel.srt.core.messages import FromEngine, Tokens
from umbel.srt.in_process import MOST_STEPS, EngineThread

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
        thread = EngineThread(scheduler, lambda: news)  # type: ignore[arg-type]  # the part of a scheduler that it uses
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
        thread = EngineThread(scheduler, lambda: False)  # type: ignore[arg-type]  # as above
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
