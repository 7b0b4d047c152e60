"""The gateway's end of its clients: who is there, and who is gone."""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import zmq
from umbel.lang.status import EngineState
from umbel.lang.transport.link import Codec, FromGateway, Hello, Inbound, Outbound, Pong, ToGateway
from umbel.srt.core.instruments import VirtualClock
from umbel.srt.gateway.calls import Client
from umbel.srt.gateway.clients import Clients, Connection, Received

pytestmark = pytest.mark.processes

PONG = Pong(EngineState.READY, 0.25)
SILENCE = 60.0
PATIENCE = 30.0  # seconds until what must come counts as missing


class Meeting:
    """Clients, and one client that has said something."""

    def __init__(self, folder: Path) -> None:
        self.clock = VirtualClock()
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.heard: list[Received] = []
        path = folder / "clients"
        self.clients = Clients(
            self.context,
            path,
            8,
            clock=self.clock,
            on_frames=self.heard.extend,
            on_error=lambda error: self.heard.clear(),
        )
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.connect(f"ipc://{path}")
        self._outbound: Outbound[ToGateway] = Outbound(Codec(ToGateway))
        self._inbound: Inbound[FromGateway] = Inbound(Codec(FromGateway), Counter())

    def say(self) -> None:
        self.socket.send_multipart(self._outbound.write([Hello()]))

    def answers(self) -> list[FromGateway]:
        return self._inbound.read(self.socket.recv_multipart()) if self.socket.poll(PATIENCE * 1000) else []

    async def until_heard(self, count: int) -> Connection:
        while len(self.heard) < count:
            self.clients.look()
            await asyncio.sleep(0)
        return self.heard[-1].connection

    def probe(self) -> list[Client]:
        """Those that are gone, after a long silence."""
        self.clock.advance(SILENCE + 1)
        self.clients.probe(SILENCE, PONG)
        return self.clients.flush()


def meet(folder: Path, story: Callable[[Meeting], Awaitable[None]]) -> None:
    async def run() -> None:
        meeting = Meeting(folder)
        try:
            async with asyncio.timeout(PATIENCE):
                await story(meeting)
        finally:
            meeting.context.destroy(linger=0)

    asyncio.run(run())


def test_a_client_that_is_silent_but_there_stays_and_its_frames_go_on(tmp_path: Path) -> None:
    async def story(meeting: Meeting) -> None:
        meeting.say()
        connection = await meeting.until_heard(1)
        for _ in range(3):  # stopped for minutes, or busy with work of its own
            assert meeting.probe() == []
            assert meeting.answers() == [PONG]
        meeting.say()
        assert await meeting.until_heard(2) is connection
        assert meeting.clients.counters["lost"] == 0

    meet(tmp_path, story)


def test_every_client_is_told(tmp_path: Path) -> None:
    async def story(meeting: Meeting) -> None:
        meeting.say()
        await meeting.until_heard(1)
        meeting.clients.tell_all(PONG)
        assert meeting.clients.flush() == []
        assert meeting.answers() == [PONG]

    meet(tmp_path, story)


def test_a_client_that_is_gone_without_a_word_is_found_by_a_probe(tmp_path: Path) -> None:
    async def story(meeting: Meeting) -> None:
        meeting.say()
        connection = await meeting.until_heard(1)
        meeting.socket.close(linger=0)
        gone: list[Client] = []
        while not gone:  # its end reaches the router some moments later
            gone = meeting.probe()
            await asyncio.sleep(0)
        assert gone == [connection.client]

    meet(tmp_path, story)


def test_a_client_that_talks_is_not_probed(tmp_path: Path) -> None:
    async def story(meeting: Meeting) -> None:
        meeting.say()
        await meeting.until_heard(1)
        meeting.clock.advance(SILENCE)
        meeting.clients.probe(SILENCE, PONG)
        assert meeting.clients.flush() == []
        assert not meeting.socket.poll(0)

    meet(tmp_path, story)
