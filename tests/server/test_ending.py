"""The end of a server: the runtime saves its cache, unless the user asks a second time."""

import asyncio
from typing import cast

from umbel.interpreter.backends.runtime import Runtime
from umbel.server.workers import Ending


class SavingRuntime:
    """Saves until it is told to stop, or is cancelled."""

    def __init__(self) -> None:
        self.saving, self.saved = asyncio.Event(), asyncio.Event()
        self.ended: list[str] = []

    async def close(self) -> None:
        self.saving.set()
        try:
            await self.saved.wait()
        except asyncio.CancelledError:
            self.ended.append("cut")
            raise
        self.ended.append("saved")

    async def end_at_once(self) -> None:
        self.ended.append("at once")


def ended(*wishes: str) -> list[str]:
    """Ends a server, with a second wish before or while the cache is saved, or none → what the runtime did."""

    async def run() -> list[str]:
        runtime = SavingRuntime()
        ending = Ending(cast(Runtime, runtime))
        if "before" in wishes:
            ending.hurry()
        end = asyncio.create_task(ending.run())
        if "before" not in wishes:
            await runtime.saving.wait()
        if "while it saves" in wishes:
            ending.hurry()
        else:
            runtime.saved.set()
        await end
        return runtime.ended

    return asyncio.run(run())


def test_a_server_that_is_asked_once_saves_its_cache() -> None:
    assert ended() == ["saved"]


def test_a_second_wish_ends_it_at_once() -> None:
    assert ended("before") == ["at once"]
    assert ended("while it saves") == ["cut"]
