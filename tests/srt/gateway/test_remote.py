"""The TCP port of a gateway: which clients it admits, and what it makes of what they say of themselves."""

import asyncio
import contextlib
import socket as sockets
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import zmq
from umbel.lang.errors import ParameterError
from umbel.lang.prompt import Text
from umbel.lang.protocol import (
    Abort,
    Control,
    GenRequest,
    Hint,
    Origin,
    ReadCaches,
    ReadStatus,
    Release,
    Survey,
)
from umbel.lang.transport.keys import KeyPair, Listen, add_client, write_key
from umbel.lang.transport.link import Codec, EngineState, Outbound, Ping, Pong, ToGateway
from umbel.srt.core.instruments import SystemClock
from umbel.srt.gateway.clients import Clients, Received, Router
from umbel.srt.gateway.remote import Admission, CurveRouter, Ownership, of_the_owner, open_port

pytestmark = pytest.mark.processes


def new_pair(server: str | None = None) -> KeyPair:
    public, secret = zmq.curve_keypair()
    return KeyPair(public.decode(), secret.decode(), server)


class Port:
    """A gateway's clients with a port, which answers every message with a Pong."""

    def __init__(self, folder: Path) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.received: list[tuple[bytes, ToGateway]] = []
        self.errors: list[BaseException] = []
        self.server = new_pair()
        write_key(folder / "server.key", self.server)
        self.listen = Listen("tcp://127.0.0.1:*", str(folder / "server.key"), str(folder / "clients"))
        self.clients = Clients(
            self.context,
            folder / "s",
            8,
            clock=SystemClock(),
            on_frames=self._on_frames,
            on_error=self.errors.append,
        )
        self.ours: zmq.Context[zmq.Socket[bytes]] = zmq.Context()  # of the clients

    def open(self) -> None:
        self.admission = Admission(self.context, self.listen.clients, self.clients.counters, self.errors.append)
        socket, self.address = open_port(self.context, self.listen)
        self.clients.add(Router(CurveRouter(socket), Ownership()))

    def admit(self, name: str) -> KeyPair:
        pair = new_pair(self.server.public)
        add_client(self.listen.clients, name, pair.public)
        return pair

    def connect(self, pair: KeyPair | None) -> "Remote":
        socket = self.ours.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        if pair is not None:
            assert pair.server is not None
            socket.curve_publickey, socket.curve_secretkey = pair.public.encode(), pair.secret.encode()
            socket.curve_serverkey = pair.server.encode()
        socket.connect(self.address)
        return Remote(socket, Outbound(Codec(ToGateway)))

    def _on_frames(self, frames: list[Received]) -> None:
        for received in frames:
            for message in received.messages:
                self.received.append((received.connection.client.identity, message))
                self.clients.deliver(received.connection.client.identity, Pong(EngineState.READY))
        self.clients.flush()


class Remote(NamedTuple):
    socket: "zmq.Socket[bytes]"
    outbound: "Outbound[ToGateway]"

    def say(self, *messages: ToGateway) -> None:
        self.socket.send_multipart(self.outbound.write(messages))

    async def answered(self) -> bool:
        await until(lambda: bool(self.socket.poll(0)))
        self.socket.recv_multipart()
        return True


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0)


def play(folder: Path, story: Callable[[Port], Coroutine[Any, Any, None]]) -> None:
    async def told() -> None:
        port = Port(folder)
        try:
            await story(port)
        finally:
            assert port.errors == []
            port.ours.destroy(linger=0)
            port.context.destroy(linger=0)

    asyncio.run(told())


def request(label: str, **origin: Any) -> GenRequest:  # Any: fields of Origin
    return GenRequest(label, (Text("x"),), origin=Origin(**origin))


def test_what_clients_say_of_themselves_is_bound_to_their_keys(tmp_path: Path) -> None:
    async def story(port: Port) -> None:
        pairs = [port.admit("a"), port.admit("b")]
        port.open()
        remotes = [port.connect(pair) for pair in pairs]
        for remote in remotes:
            remote.say(
                request("named", salt="team", program_id="p", fork_group="f", priority=5),
                request("again", salt="team", priority=-5),
                request("plain"),
                Hint("hint", (Text("x"),), Origin("p", "f", "team")),
                Control("c", "info"),
            )
        await until(lambda: len(port.received) == 10)
        by_key: dict[bytes, dict[str, Any]] = {}
        for identity, message in port.received:
            if not isinstance(message, Control):
                by_key.setdefault(identity[:32], {})[message.id] = message.origin
        a, b = by_key.values()
        for origins in (a, b):
            assert origins["named"].salt == origins["again"].salt == origins["hint"].salt
            assert origins["plain"].salt not in ("", origins["named"].salt)
            assert origins["named"].priority == 0
            assert origins["again"].priority == -5
            assert origins["plain"].program_id == ""
            assert origins["hint"].program_id == origins["named"].program_id
        first, second = a["named"], b["named"]
        assert "team" != first.salt != second.salt
        assert "p" != first.program_id != second.program_id
        assert "f" != first.fork_group != second.fork_group

    play(tmp_path, story)


def test_what_shows_or_drops_the_cache_of_all_is_for_the_owner() -> None:
    for message in (Control("c", "flush_cache"), Control("c", "other"), Survey("s", 10, text=100)):
        assert of_the_owner(message) is not None
    for allowed in (
        Control("c", "info"),
        ReadStatus("r"),
        request("g"),
        ReadCaches("c"),
        Release("h"),
        Abort("g"),
        Ping(),
    ):
        assert of_the_owner(allowed) is None


def test_a_flood_from_clients_without_a_listed_key_reaches_no_one(tmp_path: Path) -> None:
    async def story(port: Port) -> None:
        listed = port.admit("listed")
        port.open()
        stranger = new_pair(port.server.public)
        of_another_server = KeyPair(listed.public, listed.secret, new_pair().public)
        flood = [port.connect(pair) for pair in (stranger, of_another_server, None) for _ in range(5)]
        for remote in flood:
            with contextlib.suppress(zmq.Again):  # libzmq drops what it cannot deliver to a server that refuses it
                for _ in range(200):
                    remote.socket.send_multipart([bytes(8), bytes(10_000)], flags=zmq.NOBLOCK)
        host, number = port.address.removeprefix("tcp://").split(":")
        with sockets.create_connection((host, int(number))) as raw:
            raw.sendall(b"\xff" + bytes(100_000))
            remote = port.connect(listed)
            remote.say(Ping())
            assert await remote.answered()
        assert [message for _, message in port.received] == [Ping()]
        assert len(port.clients._connections) == 1
        await until(lambda: port.clients.counters["remote_refused"] >= 5)
        assert port.clients.counters["remote_admitted"] == 1
        assert port.clients.counters["malformed"] == 0

    play(tmp_path, story)


def test_a_change_of_the_list_counts_for_the_next_connection(tmp_path: Path) -> None:
    async def story(port: Port) -> None:
        port.admit("first")
        port.open()
        late = port.admit("late")
        remote = port.connect(late)
        remote.say(Ping())
        assert await remote.answered()
        Path(port.listen.clients).write_text("no list")  # half of an edit: no one else comes in
        assert port.admission.name_of(bytes(32)) is None
        other = port.connect(late)
        other.say(Ping())
        await until(lambda: port.clients.counters["remote_refused"] == 1)
        remote.say(Ping())  # who is in stays in
        assert await remote.answered()

    play(tmp_path, story)


def test_a_port_that_is_taken_and_a_list_of_no_one_are_refused(tmp_path: Path) -> None:
    async def story(port: Port) -> None:
        Path(port.listen.clients).write_text("# none yet\n")
        with pytest.raises(ParameterError, match="lists no client, so none could come in"):
            port.open()
        port.admit("a")
        port.open()
        with pytest.raises(ParameterError, match="cannot be bound: Address already in use"):
            open_port(port.context, Listen(port.address, port.listen.key, port.listen.clients))

    play(tmp_path, story)
