"""A server whose processes are killed or stopped: clients get errors, `/health` is true, and it serves again.

The short form is for every run. The full one is for `pytest -m nightly tests/stress`.
"""

import asyncio
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from ..serving import PATIENCE
from .serving import Answer, Serving, serving, until_async

pytestmark = pytest.mark.processes

LONG = {"model": "oracle", "max_tokens": 60, "temperature": 0, "ignore_eos": True}


def prompt(number: int) -> str:
    return f"a long text {number}: "


class HealthWatch:
    """Asks for the health of a server all the time: the states that were seen, and when."""

    def __init__(self, server: Serving) -> None:
        self._server = server
        self.seen: list[tuple[float, int]] = []

    async def run(self) -> None:
        while True:
            self.seen.append((time.monotonic(), await self._server.status_of_health()))
            await asyncio.sleep(0.02)

    def first(self, status: int, after: float) -> float:
        """Seconds from a moment until a status was seen; infinite for never."""
        return min((at - after for at, each in self.seen if each == status and at >= after), default=float("inf"))

    @property
    def statuses(self) -> set[int]:
        return {status for _, status in self.seen}


@asynccontextmanager
async def watched(server: Serving) -> AsyncIterator[HealthWatch]:
    watch = HealthWatch(server)
    task = asyncio.create_task(watch.run())
    try:
        yield watch
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def lose_an_engine(server: Serving, count: int, whole: int, by: int = signal.SIGKILL) -> tuple[float, float]:
    """Kills the engine, or stops it for good, while `count` texts are streamed and `whole` others are asked for.

    Returns the seconds until the last stream had ended, and until `/health` said so.
    """
    begun: set[int] = set()
    ended: list[float] = []

    async def one(number: int) -> Answer:
        body = {**LONG, "prompt": prompt(number)}
        answer = await server.stream(body, lambda _: begun.add(number))
        ended.append(time.monotonic())
        return answer

    async with watched(server) as watch:
        streams = [asyncio.create_task(one(number)) for number in range(count)]
        await until_async(lambda: _is(len(begun) == count), "all streams have begun")
        others = [
            asyncio.create_task(server.post("/v1/completions", {**LONG, "prompt": prompt(n)})) for n in range(whole)
        ]
        engine = server.engine()
        killed = time.monotonic()
        engine.send_signal(by)
        answers = await asyncio.gather(*streams)
        last = max(ended) - killed
        answered = await asyncio.gather(*others)
        await server.ready()
    for answer in answers:
        assert answer.whole
        assert answer.status == 200
        assert answer.error, "the engine was lost before the text could end"
    asked_again = (server.post("/v1/completions", {**LONG, "prompt": prompt(n)}) for n in range(max(count, whole)))
    fault_free = [answer.text for answer in await asyncio.gather(*asked_again)]
    for got, text in zip(answers, fault_free, strict=False):
        assert got.text, "it had begun"
        assert text.startswith(got.text)
    # Nothing was sent of these: they are asked again, and give what they would have given.
    assert [answer.text for answer in answered] == fault_free[:whole]
    assert not engine.is_running() or engine.status() == psutil.STATUS_ZOMBIE
    return last, watch.first(503, killed)


async def _is(value: bool) -> bool:
    return value


@pytest.mark.parametrize("by", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_an_engine_that_is_lost_is_replaced_and_each_client_hears_of_it(by: int, server: Serving) -> None:
    async def scenario() -> None:
        await server.ready()
        _, noticed = await lose_an_engine(server, 4, 2, by)
        assert noticed < PATIENCE
        await server.rest()

    asyncio.run(scenario())


@pytest.mark.nightly
def test_an_engine_is_killed_five_times_with_thirty_two_in_flight(server: Serving) -> None:
    async def scenario() -> None:
        await server.ready()
        for _ in range(5):
            last, noticed = await lose_an_engine(server, 24, 8)
            print(f"streams ended after {last:.2f} s, /health said 503 after {noticed:.2f} s")
            assert last < 2
            assert noticed < 2
        await server.rest()

    asyncio.run(scenario())


@pytest.mark.nightly
@pytest.mark.parametrize("which", ["engine", "gateway"])
def test_a_process_that_is_stopped_is_noticed_and_replaced(which: str, server: Serving) -> None:
    async def scenario() -> None:
        await server.ready()
        for _ in range(3):
            victim: psutil.Process = getattr(server, which)()
            async with watched(server) as watch:
                stopped = time.monotonic()
                victim.suspend()
                await until_async(lambda: _is(503 in watch.statuses), "/health says 503")
                await server.ready()
            print(f"{which}: /health said 503 after {watch.first(503, stopped):.2f} s")
            assert watch.first(503, stopped) < 6
            assert getattr(server, which)().pid != victim.pid
            answer = await server.post("/v1/completions", {**LONG, "prompt": "hello"})
            assert answer.status == 200
            psutil.wait_procs([victim], PATIENCE)
            assert not victim.is_running()

    asyncio.run(scenario())


@pytest.mark.nightly
def test_a_step_of_twenty_seconds_is_healthy(tmp_path: Path) -> None:
    async def scenario(server: Serving) -> Any:
        await server.ready()
        async with watched(server) as watch:
            answer = await server.post("/v1/completions", {"model": "oracle", "prompt": "x" * 600, "max_tokens": 1})
        assert watch.statuses == {200}
        return answer

    with serving(tmp_path, {"debug": {"step_delay": 20.0}}) as server:
        assert asyncio.run(scenario(server)).status == 200
