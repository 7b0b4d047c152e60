"""The ingress in front of replicas that are applications in this process, on sockets, without Ray."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import pytest

pytest.importorskip("aiohttp", reason="aiohttp comes with the extra umbel[ray], which is not installed")

from umbel.server.ray.ingress import Ingress
from umbel.server.ray.placements import Call, Placements

PROMPT = "a prompt that goes to one replica, where it is cached afterwards; " * 4


@dataclass
class Chosen:
    replica_id: str
    replica_metadata: dict[str, str]


@dataclass
class FakeReplica:
    """Answers by a script: what it writes to the socket for each request, where None hangs up."""

    name: str
    script: Callable[[bytes], Sequence[bytes | None]]
    seen: list[bytes] = field(default_factory=list)
    left: int = 0  # requests whose connection the ingress has closed before the end
    url: str = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            await self._serve(reader, writer)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while head := await reader.readuntil(b"\r\n\r\n"):
            length = next(
                (int(line[15:]) for line in head.lower().split(b"\r\n") if line[:15] == b"content-length:"), 0
            )
            request = head + await reader.readexactly(length)
            self.seen.append(request)
            for piece in self.script(request):
                if piece is None:
                    writer.close()
                    return
                if piece == b"WAIT":
                    await reader.read(1)
                    self.left += 1
                    return
                writer.write(piece)
                await writer.drain()


def whole(body: bytes, status: int = 200) -> bytes:
    return b"HTTP/1.1 %d X\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%s" % (
        status,
        len(body),
        body,
    )


STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


class World:
    """An ingress, its placements, and replicas by name."""

    def __init__(self, **scripts: Callable[[bytes], Sequence[bytes | None]]) -> None:
        self.replicas = {name: FakeReplica(name, script) for name, script in scripts.items()}
        self.placements = Placements("added-delay")
        self.placements.set_replicas({name: {} for name in scripts})
        self.ingress = Ingress(self.choose, self.everywhere)

    @asynccontextmanager
    async def choose(self, call: Call) -> AsyncIterator[Chosen]:
        replica = self.replicas[self.placements.place(call)]
        yield Chosen(replica.name, {"url": replica.url, "token": f"token of {replica.name}"})

    async def everywhere(self) -> Sequence[Mapping[str, str]]:
        return [{"name": each.name, "url": each.url, "token": "t"} for each in self.replicas.values()]

    @asynccontextmanager
    async def served(self) -> AsyncIterator["World"]:
        async with AsyncExitStack() as stack:
            for replica in self.replicas.values():
                server = await asyncio.start_server(replica.serve, "127.0.0.1", 0)
                stack.callback(server.close)
                replica.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            try:
                yield self
            finally:
                await self.ended()

    async def ended(self) -> None:
        await self.asked("", [{"type": "lifespan.shutdown"}], kind="lifespan")
        assert set(self.placements.calls().values()) <= {0}

    async def asked(
        self, path: str, received: list[dict[str, Any]], method: str = "POST", kind: str = "http", after: Any = None
    ) -> list[dict[str, Any]]:
        """Sends ASGI messages → those of the answer. `after`: is called with each of them."""
        waiting, sent = iter(received), []

        async def receive() -> dict[str, Any]:
            message = next(waiting, None)
            if message is None:
                await hung_up.wait()
                return {"type": "http.disconnect"}
            return message

        async def send(message: dict[str, Any]) -> None:
            sent.append(message)
            if after is not None and after(message):
                hung_up.set()

        hung_up = asyncio.Event()
        headers = [
            (b"host", b"localhost"),
            (b"x-own", b"1"),
            (b"x-umbel-replica", b"forged"),
            (b"connection", b"close"),
        ]
        scope = {"type": kind, "method": method, "path": path, "query_string": b"a=1", "headers": headers}
        await self.ingress(scope, receive, send)
        return sent

    async def post(self, body: Any, path: str = "/v1/completions", after: Any = None) -> tuple[int, bytes]:
        """Returns status and body of an answer."""
        message = {"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}
        sent = await self.asked(path, [message], after=after)
        assert not sent or not sent[-1].get("more_body", False) or after is not None
        return (sent[0]["status"] if sent else 0), b"".join(each.get("body", b"") for each in sent)


def on(world: World, work: Callable[[World], Any]) -> None:
    async def scenario() -> None:
        async with world.served():
            await work(world)

    asyncio.run(asyncio.wait_for(scenario(), 120))


def writes(*pieces: bytes | None) -> Callable[[bytes], Sequence[bytes | None]]:
    return lambda _: pieces


def said(text: bytes) -> Callable[[bytes], Sequence[bytes | None]]:
    return writes(whole(text))


def gone(_: bytes) -> Sequence[bytes | None]:
    return [None]


def test_a_request_reaches_one_replica_as_it_was_sent() -> None:
    async def work(world: World) -> None:
        for _ in range(3):
            assert await world.post({"prompt": PROMPT}) == (200, b"hello")
        (replica,) = [each for each in world.replicas.values() if each.seen]
        request = replica.seen[0]
        assert request.startswith(b"POST /v1/completions?a=1 HTTP/1.1\r\n")
        assert request.endswith(json.dumps({"prompt": PROMPT}).encode())
        assert b"x-own: 1\r\n" in request
        assert b"x-umbel-replica: token of %s\r\n" % replica.name.encode() in request
        assert b"forged" not in request
        assert len(replica.seen) == 3

    on(World(a=said(b"hello"), b=said(b"hello")), work)


def test_a_call_whose_replica_is_lost_before_a_byte_is_sent_again() -> None:
    async def work(world: World) -> None:
        for number in range(6):
            assert await world.post({"prompt": f"{number} {PROMPT}"}) == (200, b"hello")
        assert world.replicas["lost"].seen

    on(World(lost=gone, kept=said(b"hello")), work)


@pytest.mark.parametrize("cut", [b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nhal", STREAM, b"HTTP/1.1 2"])
def test_an_answer_that_was_cut_before_a_byte_went_out_is_none(cut: bytes) -> None:
    async def work(world: World) -> None:
        for number in range(4):
            assert await world.post({"prompt": f"{number} {PROMPT}"}) == (200, b"hello")
        assert world.replicas["lost"].seen

    on(World(lost=writes(cut, None), kept=said(b"hello")), work)


@pytest.mark.parametrize(
    ("path", "event"), [("/v1/completions", b"data: {"), ("/v1/messages", b"event: error\ndata: {")]
)
def test_a_stream_whose_replica_is_lost_ends_with_an_error_event(path: str, event: bytes) -> None:
    async def work(world: World) -> None:
        status, body = await world.post({"prompt": PROMPT}, path)
        assert status == 200
        begin, end = body.split(b"\n\n", 1)
        assert begin == b"data: one"
        assert end.lstrip().startswith(event)
        assert b"lost" in end
        assert sum(len(each.seen) for each in world.replicas.values()) == 1  # it is not sent again

    script = writes(STREAM + chunk(b"data: one\n\n"), None)
    on(World(a=script, b=script), work)


def test_a_replica_that_is_full_or_stopping_is_left_and_its_answer_is_the_last_resort() -> None:
    async def work(world: World) -> None:
        for number in range(4):
            assert await world.post({"prompt": f"{number} {PROMPT}"}) == (200, b"hello")
        world.placements.lost("free")
        assert await world.post({"prompt": PROMPT}) == (503, b"full")

    on(World(full=writes(whole(b"full", 503)), free=said(b"hello")), work)


@pytest.mark.parametrize("status", [400, 401, 404, 422, 500])
def test_an_error_is_an_answer_and_counts_against_no_replica(status: int) -> None:
    async def work(world: World) -> None:
        for _ in range(20):
            assert await world.post({"prompt": PROMPT}) == (status, b"no")
        assert sorted(len(each.seen) for each in world.replicas.values()) == [0, 20]

    script = writes(whole(b"no", status))
    on(World(a=script, b=script), work)


def test_without_a_replica_the_answer_is_503_at_once() -> None:
    async def work(world: World) -> None:
        status, body = await world.post({"prompt": PROMPT})
        assert status == 503
        assert json.loads(body)["error"]["code"] == "no_replica"

    on(World(), work)
    on(World(a=gone, b=gone, c=gone, d=gone, e=gone), work)


def test_a_client_that_hangs_up_ends_its_request_at_the_replica() -> None:
    async def work(world: World) -> None:
        await world.post({"prompt": PROMPT}, after=lambda message: message.get("body"))
        while not sum(each.left for each in world.replicas.values()):
            await asyncio.sleep(0)

    script = writes(STREAM + chunk(b"data: one\n\n"), b"WAIT")
    on(World(a=script, b=script), work)


def test_a_flush_reaches_all_and_what_one_would_keep_is_refused() -> None:
    async def work(world: World) -> None:
        assert await world.post({}, "/flush_cache") == (200, b"flushed")
        assert [len(each.seen) for each in world.replicas.values()] == [1, 1, 1]
        status, body = await world.post({"messages": []}, "/v1/caches")
        assert status == 400
        assert json.loads(body)["error"]["code"] == "several_replicas"
        assert [len(each.seen) for each in world.replicas.values()] == [1, 1, 1]

    on(World(a=said(b"flushed"), b=said(b"flushed"), c=said(b"flushed")), work)


METRICS = b"""# HELP umbel_running Requests that run.
# TYPE umbel_running gauge
umbel_running 3.0
# HELP umbel_requests_total Requests.
# TYPE umbel_requests_total counter
umbel_requests_total{ending="finished"} 4.0
"""
ALL_METRICS = b"""# HELP umbel_running Requests that run.
# TYPE umbel_running gauge
umbel_running{replica="a"} 3.0
umbel_running{replica="b"} 3.0
# HELP umbel_requests_total Requests.
# TYPE umbel_requests_total counter
umbel_requests_total{replica="a",ending="finished"} 4.0
umbel_requests_total{replica="b",ending="finished"} 4.0
"""


def test_metrics_are_those_of_all_replicas() -> None:
    async def work(world: World) -> None:
        assert await world.post({}, "/metrics") == (200, ALL_METRICS)

    on(World(a=said(METRICS), b=said(METRICS)), work)


def test_a_stream_is_passed_on_in_the_pieces_that_come() -> None:
    async def work(world: World) -> None:
        status, body = await world.post({"prompt": PROMPT})
        assert (status, body) == (200, b"data: one\n\ndata: two\n\n")

    on(World(a=writes(STREAM + chunk(b"data: one\n\n") + chunk(b"data: two\n\n") + chunk(b""))), work)
