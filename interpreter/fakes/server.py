"""An HTTP server on loopback, in a thread with an event loop of its own, and the server-sent events that it writes.

All fake providers stand on it. It parses with h11 and lets a handler do what a broken server does: stop in the middle,
say nothing, never end.
"""

import asyncio
import contextlib
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import h11
import msgspec

_LARGEST_BODY = 64 << 20  # bytes of a request; a test that sends more has a mistake in it
_PATIENCE = 10.0  # seconds until the thread must have started, or ended

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class HttpRequest:
    """A request as it came. Names of headers are in lower case."""

    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes


class Exchange:
    """One connection while a request on it is answered."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._protocol = h11.Connection(h11.SERVER)

    async def receive(self) -> HttpRequest | None:
        """Reads the next request; None when the client has gone, or sends no HTTP."""
        if self._protocol.our_state is h11.MUST_CLOSE or self._protocol.our_state is h11.CLOSED:
            return None
        if self._protocol.our_state is h11.DONE and self._protocol.their_state is h11.DONE:
            self._protocol.start_next_cycle()
        head: h11.Request | None = None
        body = bytearray()
        while len(body) <= _LARGEST_BODY:
            try:
                event = self._protocol.next_event()
            except h11.RemoteProtocolError:
                return None
            match event:
                case h11.NEED_DATA:
                    self._protocol.receive_data(await self._reader.read(1 << 16))
                case h11.Request():
                    head = event
                case h11.Data(data):
                    body += data
                case h11.EndOfMessage():
                    assert head is not None, "h11 gives the head of a request before its end"
                    headers = {name.decode("ascii"): value.decode("latin-1") for name, value in head.headers}
                    return HttpRequest(head.method.decode("ascii"), head.target.decode("ascii"), headers, bytes(body))
                case _:
                    return None
        return None

    async def left(self) -> None:
        """Returns when the client closes the connection."""
        while data := await self._reader.read(1 << 16):
            self._protocol.receive_data(data)

    async def respond(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
        """Sends a whole answer."""
        await self.start(status, {**headers, "content-length": str(len(body))})
        await self.send(body)
        await self.end()

    async def start(self, status: int, headers: Mapping[str, str]) -> None:
        """Sends the head of an answer; without a length, each `send` is one HTTP chunk."""
        await self._write(h11.Response(status_code=status, headers=list(headers.items()), reason=b""))

    async def send(self, data: bytes) -> None:
        if data:
            await self._write(h11.Data(data=data))

    async def end(self) -> None:
        await self._write(h11.EndOfMessage())

    def drop(self) -> None:
        """Closes the connection in the middle of the answer."""
        self._protocol.send_failed()
        self._writer.close()

    async def _write(self, event: h11.Response | h11.Data | h11.EndOfMessage) -> None:
        data = self._protocol.send(event)
        if data:
            self._writer.write(data)
            await self._writer.drain()


Handler = Callable[[HttpRequest, Exchange], Awaitable[None]]


class Server:
    """Listens on a free port of 127.0.0.1 from `start` to `close`; both may be called from any thread.

    Args:
        handler: answers a request, on the server's loop. It is cancelled when the client leaves.
        name: of the thread.
    """

    def __init__(self, handler: Handler, name: str) -> None:
        self._handler = handler
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._connections: set[asyncio.Task[None]] = set()
        self._listener: asyncio.Server | None = None
        self.port = 0

    def start(self) -> None:
        self._thread.start()
        self.run(self._listen())

    def close(self) -> None:
        """Idempotent. Answers that hang are given up."""
        if self._loop.is_closed():
            return
        if self._thread.is_alive():
            self.run(self._stop())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(_PATIENCE)
        self._loop.close()

    def run(self, work: Coroutine[Any, Any, T]) -> T:  # Any: what a coroutine yields and is sent is asyncio's own
        """Runs a coroutine on the server's loop, and waits for it."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(_PATIENCE)

    async def _listen(self) -> None:
        self._listener = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = self._listener.sockets[0].getsockname()[1]

    async def _stop(self) -> None:
        assert self._listener is not None, "a thread that runs has begun to listen"
        self._listener.close()
        for connection in self._connections:
            connection.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None, "asyncio runs this in a task"
        self._connections.add(task)
        try:
            # What a client does to its connection is no failure of the server.
            with contextlib.suppress(ConnectionError, asyncio.CancelledError, h11.LocalProtocolError):
                await self._serve(Exchange(reader, writer))
        finally:
            self._connections.discard(task)
            writer.close()

    async def _serve(self, exchange: Exchange) -> None:
        while (request := await exchange.receive()) is not None:
            handling = asyncio.ensure_future(self._handler(request, exchange))
            leaving = asyncio.ensure_future(exchange.left())
            try:
                await asyncio.wait({handling, leaving}, return_when=asyncio.FIRST_COMPLETED)
                if not handling.done():
                    return
                await handling
            finally:
                for task in (handling, leaving):
                    task.cancel()
                await asyncio.gather(handling, leaving, return_exceptions=True)


DONE = b"data: [DONE]\n\n"


def event(data: object, name: str = "") -> bytes:
    """Writes one event. `data` becomes JSON, in one line; `name` is its type, where the dialect names types."""
    head = f"event: {name}\n" if name else ""
    return f"{head}data: ".encode() + msgspec.json.encode(data) + b"\n\n"


@dataclass(frozen=True, slots=True)
class AnswerEvents:
    """An answer as the events of a stream, in order.

    opening   before any text
    pieces    of the text, at least one event if there is any text
    closing   why it ended, and what it cost
    last      what says that nothing follows
    """

    opening: tuple[bytes, ...]
    pieces: tuple[bytes, ...]
    closing: tuple[bytes, ...]
    last: tuple[bytes, ...]

    def all(self) -> tuple[bytes, ...]:
        return (*self.opening, *self.pieces, *self.closing, *self.last)

    def begun(self) -> tuple[bytes, ...]:
        """Returns the opening events and the first half of the text."""
        return (*self.opening, *self.pieces[: (len(self.pieces) + 1) // 2])


def inside_characters(data: bytes) -> Iterable[bytes]:
    """Cuts inside every character of more than one byte, as a network may."""
    start = 0
    for place in range(1, len(data)):
        if data[place] & 0xC0 == 0x80:  # a byte that continues a character
            yield data[start:place]
            start = place
    yield data[start:]


def in_lengths(data: bytes, length: int) -> Iterable[bytes]:
    """Cuts into pieces of `length` bytes."""
    for start in range(0, len(data), length):
        yield data[start : start + length]
