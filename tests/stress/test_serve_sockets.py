"""Sockets that misbehave: huge headers, bodies without an end, clients that say nothing. Others are served."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack

import pytest

from .serving import Answer, Serving, read_answer

pytestmark = pytest.mark.processes

MOST_GROWTH = 64 << 20  # bytes of all processes
ASKED = {"model": "oracle", "prompt": "hello", "max_tokens": 2, "temperature": 0, "ignore_eos": True}


async def raw(
    server: Serving, data: bytes, body: Callable[[asyncio.StreamWriter], Awaitable[None]] | None = None
) -> int:
    """Sends bytes → the status that came; 0 where the socket was closed without an answer."""
    async with server.connected() as (reader, writer):
        answering = asyncio.ensure_future(read_answer(reader))
        try:
            writer.write(data)
            await writer.drain()
            if body is not None:
                await body(writer)
            answer: Answer = await answering
        except (ConnectionError, asyncio.IncompleteReadError):
            if not answering.done():
                await asyncio.gather(answering, return_exceptions=True)
            return answering.result().status if answering.exception() is None else 0
        return answer.status


def request(*headers: str, method: str = "POST", path: str = "/v1/completions", host: str = "localhost") -> bytes:
    lines = [f"{method} {path} HTTP/1.1", f"Host: {host}", *headers]
    return "\r\n".join([*lines, "", ""]).encode("latin-1")


async def endless(writer: asyncio.StreamWriter) -> None:
    """100 MB in chunks of 1 MB."""
    chunk = b"100000\r\n" + b"[" * (1 << 20) + b"\r\n"
    for _ in range(100):
        writer.write(chunk)
        await writer.drain()
    writer.write(b"0\r\n\r\n")


async def misbehave(server: Serving, slow: int) -> None:
    async with AsyncExitStack() as stack:
        for number in range(slow):  # half a head, half a body
            _, writer = await stack.enter_async_context(server.connected())
            half = request("Content-Length: 1000")
            writer.write(half if number % 2 else half[:30])
        assert await raw(server, request("X: " + "a" * 65_536)) in (0, 400, 431)
        assert await raw(server, request(*(f"x{n}: y" for n in range(10_000)))) in (0, 400, 431)
        assert await raw(server, request("Transfer-Encoding: chunked"), endless) in (0, 413)
        assert await raw(server, request("Content-Length: 100000000")) == 413
        assert await raw(server, request("Content-Length: -1")) == 400
        for host in ("evil.example", "", "a b", "localhost:x:y", "localhost@evil.example", "[::1", "\xff"):
            assert await raw(server, request("Content-Length: 2", host=host) + b"{}") in (400, 403), host
        for path in (
            "/v1/models?" + "x" * 60_000,
            "/%00",
            "//",
            "/v1/models/%2e%2e/%2e%2e",
            "/v1/models/" + "x" * 9_000,
        ):
            assert await raw(server, request(method="GET", path=path)) in (0, 400, 404, 200, 431), path
        assert await raw(server, b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 500) in (0, 400)
        assert await raw(server, b"GET / HTTP/9.9\r\n\r\n") in (0, 400, 505)
        answer = await server.post("/v1/completions", ASKED)
        assert answer.status == 200


async def check(server: Serving, rounds: int, slow: int) -> None:
    await server.ready()
    await misbehave(server, 2)
    await server.rest()
    before, resources = server.memory(), server.resources()
    for _ in range(rounds):
        await misbehave(server, slow)
    await server.rest()
    grown = server.memory() - before
    print(f"{grown / 2**20:.1f} MB more; descriptors, threads, processes {resources} → {server.resources()}")
    assert grown < MOST_GROWTH
    assert server.resources()[2] == resources[2]


def test_sockets_that_misbehave_harm_no_other_client(server: Serving) -> None:
    asyncio.run(check(server, 1, 50))


@pytest.mark.nightly
def test_two_hundred_slow_sockets_and_what_else_misbehaves(server: Serving) -> None:
    asyncio.run(check(server, 5, 200))
