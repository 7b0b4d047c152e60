"""Clients that hang up at four places of a request: what it held is free again after a few steps of the engine."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import msgspec
import pytest
from umbel.lang.status import RuntimeStatus
from umbel.server.command import HttpProtocol, http_config
from umbel.server.limits import HttpLimits
from umbel.srt.in_process import LocalBackend
from uvicorn.server import ServerState

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


@asynccontextmanager
async def connected(client: AsgiClient) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A socket of the server's own protocol."""
    protocol = partial(HttpProtocol, http_config(client.app), ServerState(), {})
    listening = await asyncio.get_running_loop().create_server(protocol, "127.0.0.1", 0)
    async with listening, asyncio.timeout(60):
        reader, writer = await asyncio.open_connection(*listening.sockets[0].getsockname())
        yield reader, writer
        writer.close()


def request_of(tokens: int) -> bytes:
    body = msgspec.json.encode({**LONG, "prompt": "hello", "max_tokens": tokens})
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


@pytest.mark.parametrize("more", [request_of(4_000) + bytes(1 << 20), b"no HTTP\r\n\r\n", b"GET / HTT"])
def test_a_client_that_sends_more_than_one_request_at_once_and_leaves_ends_the_first(more: bytes) -> None:
    async def work(client: AsgiClient) -> None:
        front = client.app.front
        async with connected(client) as (_, writer):
            writer.write(request_of(4_000))
            while not (await front.backend.status()).running:
                await asyncio.sleep(0)
            writer.write(more)
            writer.close()
            while not _free(client, status := await front.backend.status()):
                await asyncio.sleep(0)
        assert status.counters["completion_tokens"] < 4_000
        assert front.disconnects == 1

    on_a_server(work)


def test_a_connection_ends_with_the_answer_before_which_more_was_sent() -> None:
    async def work(client: AsgiClient) -> None:
        async with connected(client) as (reader, writer):
            writer.write(request_of(3) * 2)
            answer = await reader.read()
        assert answer.count(b"HTTP/1.1 200 OK") == 1
        assert b"connection: close" in answer
        assert (await client.app.front.backend.status()).counters["finished"] == 1

    on_a_server(work)


def test_bytes_that_are_no_http_are_answered_and_counted() -> None:
    async def work(client: AsgiClient) -> None:
        async with connected(client) as (reader, writer):
            writer.write(b"\x16\x03\x01" + bytes(100))
            assert (await reader.read()).startswith(b"HTTP/1.1 400")
        assert client.app.front.malformed == 1
        assert b"umbel_http_malformed_total 1.0" in (await client.get("/metrics")).content

    on_a_server(work)


WISH = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAARAAAAAAAIAAAAA\r\n"


@pytest.mark.parametrize("pieces", [1, 2, 7], ids="in {} pieces".format)
def test_a_request_that_wishes_for_another_protocol_is_answered_with_its_body(pieces: int) -> None:
    """As Java's client sends each request."""

    async def work(client: AsgiClient) -> None:
        head, _, body = request_of(3).partition(b"\r\n\r\n")
        sent = head + b"\r\n" + WISH + b"\r\n" + body
        size = -(-len(sent) // pieces)
        async with connected(client) as (reader, writer):
            for _ in range(2):  # on one connection
                for start in range(0, len(sent), size):
                    writer.write(sent[start : start + size])
                    await writer.drain()
                    await asyncio.sleep(0)
                answer = await reader.readuntil(b"\r\n\r\n")
                assert answer.startswith(b"HTTP/1.1 200 OK")
                await reader.readexactly(int(answer.lower().split(b"content-length: ")[1].split(b"\r\n")[0]))
            writer.write(b"CONNECT a:443 HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            assert b"HTTP/1.1 4" in await reader.read()

    on_a_server(work)


@pytest.mark.parametrize("sent", [b"", b"\r\n", b"GET /health HTTP/1.1\r\nHost: loc", WISH])
def test_a_connection_without_a_whole_head_is_closed(sent: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("umbel.server.command.IDLE_SECONDS", 0.01)

    async def work(client: AsgiClient) -> None:
        async with connected(client) as (reader, writer):
            writer.write(sent)
            assert not (await reader.read()).startswith(b"HTTP/1.1 200")

    on_a_server(work)


def test_a_stream_outlives_the_time_for_a_head(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("umbel.server.command.IDLE_SECONDS", 0.01)

    async def work(client: AsgiClient) -> None:
        async with connected(client) as (reader, writer):
            writer.write(request_of(200))
            assert (await reader.read()).startswith(b"HTTP/1.1 200")

    on_a_server(work)
