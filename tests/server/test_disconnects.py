"""Clients that hang up at four places of a request: what it held is free again after a few steps of the engine."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from umbel.lang.status import RuntimeStatus
from umbel.server.limits import HttpLimits
from umbel.srt.in_process import LocalBackend

from ..srt.patient_compiler import PatientCompiler
from .client import AsgiClient, Live, served

AT_ONCE = 32
MOST_STEPS = 2  # of the engine, after the last client has gone
PROMPT = "a prompt of several chunks, which takes several steps to compute. "
LONG = {"model": "oracle", "max_tokens": 400, "temperature": 0, "ignore_eos": True}

# Place → the body of a request, and the sign that it is there.
Sign = Callable[[Live, RuntimeStatus], bool]
PLACES: dict[str, tuple[dict[str, Any], Sign]] = {
    "queued": ({**LONG, "prompt": "hello"}, lambda _, status: status.waiting > 0),
    "prefill": ({**LONG, "prompt": PROMPT * 20}, lambda _, status: status.counters["computed_prompt_tokens"] > 0),
    "decode": ({**LONG, "prompt": "hello", "stream": True}, lambda live, _: b"data: " in live.content),
    "compiling": (
        {**LONG, "prompt": PROMPT * 20, "regex": "[a-z]{1,40}x"},
        lambda _, status: status.in_flight == AT_ONCE,
    ),
}


async def hang_up_at(client: AsgiClient, place: str, streamed: bool) -> int:
    """32 requests that hang up at a place → steps of the engine until all that they held was free."""
    backend: LocalBackend = client.app.front.backend
    body, there = PLACES[place]
    bodies = [{**body, "prompt": f"{number} {body['prompt']}"} for number in range(AT_ONCE)]
    if streamed:
        bodies = [{**each, "stream": True} for each in bodies]
    lives = [client.begin("POST", "/v1/completions", each) for each in bodies]
    while not there(lives[0], await backend.status()):
        await asyncio.sleep(0)
    await asyncio.gather(*(live.hang_up() for live in lives))
    before = (await backend.status()).counters["steps"]
    while not _free(client, status := await backend.status()):
        assert status.counters["steps"] <= before + MOST_STEPS, (place, client.app.front.in_flight, status)
        await asyncio.sleep(0)
    assert not any(live.status >= 500 for live in lives)
    return int(status.counters["steps"] - before)


def _free(client: AsgiClient, status: RuntimeStatus) -> bool:
    held = (client.app.front.in_flight, status.in_flight, status.running, status.waiting)
    return not any(held) and status.pool.free + status.pool.cached == status.pool.total


def on_a_server(work: Callable[[AsgiClient], Awaitable[None]]) -> None:
    async def scenario() -> None:
        backend = LocalBackend(max_running=8, chunk_size=16, pool_tokens=1 << 16, debug={"check_every_step": False})
        async with served(backend, limits=HttpLimits(keep_alive=3_600)) as client:
            await work(client)

    asyncio.run(asyncio.wait_for(scenario(), 600))


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("rounds", [1, pytest.param(16, marks=pytest.mark.nightly)])
def test_what_a_client_that_hangs_up_held_is_free_after_a_few_steps(
    place: str, rounds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nightly: 2,048 disconnects, 32 at once."""
    compiler = PatientCompiler()
    monkeypatch.setattr("umbel.srt.in_process.InlineCompiler", lambda: compiler)

    async def work(client: AsgiClient) -> None:
        for number in range(rounds):
            await client.app.front.backend.control("flush_cache")
            steps = await hang_up_at(client, place, streamed=number % 2 == 1)
            assert steps <= MOST_STEPS
            compiler.work()
            assert compiler.asked == []  # no request is left that would want it
            answer = await client.post("/v1/completions", {**LONG, "prompt": "after all", "max_tokens": 3})
            assert answer.status == 200
        assert client.app.front.disconnects == rounds * AT_ONCE

    on_a_server(work)
