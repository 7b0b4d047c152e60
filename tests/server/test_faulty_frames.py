"""Frames between a server and its gateway that are lost, repeated, late or damaged: requests end by their deadline."""

import asyncio
import contextlib
import os
import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import zmq
from umbel.interpreter.backends import runtime as runtime_module
from umbel.interpreter.backends import runtime_link
from umbel.interpreter.backends.runtime import Runtime
from umbel.interpreter.backends.runtime_gateway import LocalGateway
from umbel.interpreter.backends.runtime_link import Link
from umbel.lang.errors import ParameterError
from umbel.lang.programs import RunProgram
from umbel.lang.protocol import Failure
from umbel.lang.transport.exchange import GRACE
from umbel.lang.transport.link import Bye, Hello, Ping, Pong, ToGateway, Welcome
from umbel.lang.transport.process_life import ProcessSample, ProcessState
from umbel.server.app import application
from umbel.server.front import Front
from umbel.srt.gateway.clients import Clients, Connection, Received
from umbel.srt.in_process import LocalBackend

from benchmarks.round_trips.virtual_time import VirtualTime

from .client import AsgiClient

TIMEOUT = 20.0  # virtual seconds of each request
SLACK = 10.0  # to find a gateway hung, to join the next one
AT_ONCE = 3
UNCHECKED: Any = {"check_every_step": False}
ADDRESS = "inproc://gateway"
KINDS = ("lost", "repeated", "late", "damaged")


class FaultySocket:
    """A socket that loses, repeats, delays and damages what is sent, but not the first message of a connection."""

    def __init__(self, kind: int, socket: "zmq.Socket[bytes]", faults: "Faults") -> None:
        self._sender = "gateway" if kind == zmq.ROUTER else "server"
        self._socket = socket
        self._faults = faults
        self._greeted: set[bytes] = set()
        self._late: list[Sequence[bytes]] = []

    def __getattr__(self, name: str) -> Any:  # Any: as the library has it
        return getattr(self._socket, name)

    def bind(self, address: str) -> None:
        """Within the process, whatever the address: virtual time waits for no other thread."""
        self._socket.bind(ADDRESS)

    def send_multipart(self, parts: Sequence[bytes], flags: int = 0) -> None:
        *identity, number, payload = parts
        peer = b"".join(identity)
        fault = self._faults.draw(self._sender) if peer in self._greeted else ""
        self._greeted.add(peer)
        sent: list[Sequence[bytes]] = [parts]
        match fault:
            case "lost":
                sent = []
            case "repeated":
                sent = [parts, parts]
            case "late":
                self._late.append(parts)
                return
            case "damaged":
                sent = [(*identity, *self._faults.damaged(number, payload))]
        late, self._late = self._late, []
        for each in sent:
            self._socket.send_multipart(each, flags)
        for each in late:
            with contextlib.suppress(zmq.ZMQError):  # its peer may be gone, which is not that of this message
                self._socket.send_multipart(each, flags)


class Faults:
    """The context of all sockets. One frame in `every` is faulty."""

    def __init__(self, seed: int, every: int) -> None:
        self.dice = random.Random(seed)
        self.every = every
        self.drawn: Counter[tuple[str, str]] = Counter()  # sender, fault
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()

    def draw(self, sender: str) -> str:
        fault = "" if self.dice.randrange(self.every) else self.dice.choice(KINDS)
        self.drawn[sender, fault] += 1
        return fault

    def damaged(self, number: bytes, payload: bytes) -> tuple[bytes, ...]:
        at = self.dice.randrange(len(payload))
        return self.dice.choice(
            (
                (number, payload[:at]),
                (number, payload[:at] + b"\xc1" + payload[at:]),
                (number, b"\xc1" + payload),
                (number[1:], payload),
                (number, payload, payload),
                (payload,),
            )
        )

    def socket(self, kind: int) -> FaultySocket:
        return FaultySocket(kind, self._context.socket(kind), self)

    def close(self) -> None:
        self._context.destroy(linger=0)


class Process(LocalGateway):
    """A gateway process as links see it: it sleeps where it says nothing, and is ended when it hangs."""

    address = ADDRESS
    process_id = os.getpid()

    def __init__(self) -> None:
        super().__init__()
        self._ended: str | None = None

    def exit_descriptor(self) -> int | None:
        return None

    def exit_reason(self) -> str | None:
        return self._ended

    def sample(self) -> ProcessSample:
        return ProcessSample(ProcessState.ASLEEP)

    def end_hung(self, reason: str) -> None:
        self._ended = reason

    def close(self) -> None:
        """It is the test's own process."""


class GatewayEnd(Clients):
    """The gateway's end of the socket: the gateway is that of a LocalBackend."""

    def __init__(self, faults: Faults, path: Path, backend: LocalBackend) -> None:
        self._backend = backend
        self._flushing = False
        super().__init__(
            faults,  # type: ignore[arg-type]  # it makes sockets
            path,
            1 << 20,
            clock=backend._clock,
            on_frames=self._on_received,
            on_error=self._on_failure,
        )
        self.errors: list[BaseException] = []

    def deliver(self, identity: bytes, message: Any) -> None:
        super().deliver(identity, message)
        if not self._flushing:
            self._flushing = True
            asyncio.get_running_loop().call_soon(self._send_all)

    def _send_all(self) -> None:
        self._flushing = False
        for client in self.flush():
            self.gateway.client_lost(client)

    @property
    def gateway(self) -> Any:
        return self._backend._gateway

    def _on_failure(self, error: BaseException) -> None:
        self.errors.append(error)

    def _on_received(self, frames: list[Received]) -> None:
        for received in frames:
            for label in received.error.labels if received.error is not None else ():
                reason = f"the request could not be read: {received.error}"
                received.connection.client.deliver(Failure(label, ParameterError.__name__, reason))
            for message in received.messages:
                self._on_message(received.connection, message)

    def _on_message(self, connection: Connection, message: ToGateway) -> None:
        match message:
            case Ping():
                connection.client.deliver(Pong(self.gateway.state))  # type: ignore[arg-type]  # of the link
            case Hello():
                connection.client.deliver(self._welcome())  # type: ignore[arg-type]  # of the link
            case Bye():
                self.forget(connection.client)
                self.gateway.client_lost(connection.client)
            case RunProgram():
                raise AssertionError("no request here is a program")
            case _:
                self.gateway.receive(connection.client, message)

    def _welcome(self) -> Welcome:
        local = self._backend
        context = local.engine.runner.context_length
        return Welcome("oracle", context, local.vocabulary, 1 << 16, 64, 600.0, None, {}, 8)


PROMPTS = [f"a prompt that is number {number}, and somewhat longer than a chunk of the engine: " for number in range(9)]


def body(number: int) -> dict[str, Any]:
    asked = {"model": "oracle", "prompt": PROMPTS[number % 9], "max_tokens": 6, "temperature": 0, "ignore_eos": True}
    return {**asked, "stream": number % 3 == 0, "umbel": {"timeout": TIMEOUT}}


def read(answer: Any) -> tuple[str, str]:
    """The text of an answer as far as it came, and its error."""
    if answer.headers["content-type"].startswith("text/event-stream"):
        events = [data for _, data in answer.events if data != "[DONE]"]
    else:
        events = [answer.json]
    text = "".join(choice["text"] for event in events for choice in event.get("choices", ()))
    return text, events[-1].get("error", {}).get("message", "")


class World:
    """A server over a faulty socket, and clients of it, in virtual time."""

    def __init__(self, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.time = VirtualTime()
        self.faults = Faults(seed, every=10)
        self.links: list[Link] = []
        self.statuses: Counter[int] = Counter()
        self.expected: list[str] = []
        self.backend = LocalBackend(clock=self.time, step_seconds=0.01, pool_tokens=4_096, debug=UNCHECKED)
        self.process = Process()
        monkeypatch.setattr(runtime_link, "context", lambda: self.faults)
        monkeypatch.setattr(runtime_module, "Link", self._link)
        monkeypatch.setattr(runtime_module, "time", SimpleNamespace(monotonic=self.time.now))
        monkeypatch.setattr(Runtime, "_running_process", lambda _: self._living_process())

    def _link(self, gateway: Any, show: Any) -> Link:
        self.links.append(Link(gateway, show))
        return self.links[-1]

    def _living_process(self) -> Process:
        if self.process.exit_reason() is not None:
            self.process = Process()
        return self.process

    def run(self, requests: int) -> None:
        with self.time:
            self.time.run(self._run(requests))
        self.faults.close()

    async def _run(self, requests: int) -> None:
        front = Front(self.backend)
        await front.start()
        client = AsgiClient(application(front))
        self.expected = [read(await client.post("/v1/completions", body(number)))[0] for number in range(9)]
        self.end = GatewayEnd(self.faults, Path("clients"), self.backend)
        runtime = Runtime("oracle")
        front = Front(runtime)
        await front.start()
        client = AsgiClient(application(front))
        numbers = iter(range(requests))

        async def ask() -> None:
            for number in numbers:
                began = self.time.now()
                answer = await client.post("/v1/completions", body(number))
                assert self.time.now() - began <= TIMEOUT + GRACE + SLACK
                self._judge(number, answer)

        await asyncio.gather(*(ask() for _ in range(AT_ONCE)))
        assert front.in_flight == 0
        await asyncio.sleep(TIMEOUT)  # for requests whose abort was lost
        await runtime.close()
        assert (await self.backend.status()).in_flight == 0
        await self.backend.close()

    def _judge(self, number: int, answer: Any) -> None:
        text, error = read(answer)
        whole = self.expected[number % 9]
        assert whole.startswith(text)
        assert (answer.status, error) == (200, "") if text == whole else error
        assert answer.status in (200, 400, 503, 504), answer
        self.statuses[answer.status] += 1


@pytest.mark.parametrize("requests", [120, pytest.param(5_000, marks=pytest.mark.nightly)])
def test_requests_over_a_faulty_link_end_by_their_deadline(requests: int, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(1, monkeypatch)
    world.run(requests)
    faults, counters = world.faults.drawn, world.end.counters
    print(dict(faults), dict(counters), dict(world.statuses), len(world.links))
    assert world.end.errors == []
    assert all(faults[sender, kind] > 0 for sender in ("server", "gateway") for kind in KINDS)
    assert counters["malformed"] == faults["server", "damaged"]
    repeated, late = faults["server", "repeated"], faults["server", "late"]
    assert repeated <= counters["repeated"] <= repeated + late
    assert counters["lost"] > 0
    assert world.statuses.total() == requests
    assert world.statuses[200] > requests / 4
