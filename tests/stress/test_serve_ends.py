"""The start and the end of a server: it drains, its port is free again, and nothing of it is left."""

import asyncio
import os
import signal
import socket
from pathlib import Path

import psutil
import pytest

from ..serving import PATIENCE
from .serving import Answer, Serving, serving, until_async

pytestmark = pytest.mark.processes

SLOW = {"debug": {"step_delay": 0.05}}
TEXT = {"model": "oracle", "prompt": "a long text: ", "max_tokens": 40, "temperature": 0, "ignore_eos": True}


def left_of(server: Serving) -> list[psutil.Process]:
    """Waits for the end of a server → its processes that have not ended then."""
    known = server.known()
    server.process.wait(PATIENCE)
    return psutil.wait_procs(known, PATIENCE)[1]


async def streaming(server: Serving) -> "asyncio.Task[Answer]":
    """A stream that has begun."""
    begun = asyncio.Event()
    task = asyncio.create_task(server.stream(TEXT, lambda _: begun.set()))
    await asyncio.wait_for(begun.wait(), PATIENCE)
    return task


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.nightly)])
def test_a_server_that_is_told_to_end_lets_streams_end_and_frees_its_port(number: int, tmp_path: Path) -> None:
    async def scenario(server: Serving) -> Answer:
        await server.ready()
        task = await streaming(server)
        server.known()
        os.kill(server.process.pid, number)
        return await task

    with serving(tmp_path, SLOW) as server:
        answer = asyncio.run(scenario(server))
        assert left_of(server) == []
        assert server.process.returncode == 0
        assert (answer.whole, answer.error) == (True, "")
        assert answer.content.endswith(b"data: [DONE]\n\n")
        with socket.create_server((server.host, server.port)):
            pass


@pytest.mark.nightly
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_ends_a_server_at_once(number: int, tmp_path: Path) -> None:
    async def scenario(server: Serving) -> Answer:
        await server.ready()
        task = await streaming(server)
        server.known()
        os.kill(server.process.pid, number)
        await until_async(lambda: _logged(server, "stopping"), "it has heard the first signal")
        os.kill(server.process.pid, number)
        return await task

    with serving(tmp_path, {"debug": {"step_delay": 1.0}}) as server:
        answer = asyncio.run(scenario(server))
        assert not answer.content.endswith(b"data: [DONE]\n\n")
        assert left_of(server) == []


async def _logged(server: Serving, words: str) -> bool:
    return words in server.log


def test_what_a_killed_server_has_started_ends_with_it(tmp_path: Path) -> None:
    async def scenario(server: Serving) -> None:
        await server.ready()
        task = await streaming(server)
        server.known()
        server.process.kill()
        assert not (await task).whole

    with serving(tmp_path, SLOW) as server:
        asyncio.run(scenario(server))
        assert left_of(server) == []


@pytest.mark.nightly
def test_ten_servers_start_at_once(tmp_path: Path) -> None:
    async def scenario(servers: list[Serving]) -> list[Answer]:
        await asyncio.gather(*(server.ready() for server in servers))
        return await asyncio.gather(*(server.post("/v1/completions", TEXT) for server in servers))

    folders = [tmp_path / str(number) for number in range(10)]
    for folder in folders:
        folder.mkdir()
    servers = [Serving(folder) for folder in folders]
    try:
        answers = asyncio.run(scenario(servers))
        assert len({server.port for server in servers}) == 10
        assert {answer.text for answer in answers} == {answers[0].text}
    finally:
        for server in servers:
            server.end()
