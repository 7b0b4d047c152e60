"""An HTTP server on loopback, in a thread with an event loop of its own, and what can be wrong with its answers.

All fake providers stand on it. It parses with h11, writes server-sent events, and does what a broken server does:

    before the model is asked                       in the middle of its answer
    RATE_LIMIT_AND_WHEN  429 with Retry-After       IDLE           half of it, then silence
    RATE_LIMIT           429 without                CUT            half of it, then the connection closes
    SERVER_ERROR         500                        SPLIT_UTF8     in pieces that end inside characters (legal)
    UNAVAILABLE          503                        SPLIT_JSON     in pieces of a few bytes (legal)
    DISCONNECT           closed without an answer   ERROR_EVENT    half of it, then an error; or one, with 200
    SILENCE              no byte ever               NO_DONE        all of it, but its end is never told
    HTML                 a page, with 200           ENDLESS        it never ends
    GZIP_BOMB            much in few bytes
    REDIRECT             ask another host

A connection that cannot be made at all is `Unreachable`: no request arrives there, so nothing can be counted.
"""

import asyncio
import contextlib
import socket
import threading
import zlib
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Self, TypeVar

import h11
import msgspec

from ...lang import checks

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
    """An answer as it is sent, in order: the events of a stream, or JSON that comes at once.

    opening   before any text
    pieces    of the text, at least one if there is any text
    closing   why it ended, and what it cost
    last      what says that nothing follows; () for JSON
    """

    opening: tuple[bytes, ...]
    pieces: tuple[bytes, ...]
    closing: tuple[bytes, ...] = ()
    last: tuple[bytes, ...] = ()

    def all(self) -> tuple[bytes, ...]:
        return (*self.opening, *self.pieces, *self.closing, *self.last)

    def begun(self) -> tuple[bytes, ...]:
        """Returns the opening and the first half of the text."""
        return (*self.opening, *self.pieces[: (len(self.pieces) + 1) // 2])


def at_once(answer: object) -> AnswerEvents:
    """Writes an answer as JSON, in halves."""
    data = msgspec.json.encode(answer)
    return AnswerEvents((), (data[: len(data) // 2], data[len(data) // 2 :]))


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


class Fault(StrEnum):
    """Names one wrong answer of a fake provider, which its option `faults` plays.

    SPLIT_UTF8 and SPLIT_JSON are legal, and a client has to read them; the other ones are failures.

    Attributes:
        RATE_LIMIT_AND_WHEN: status 429 with the header Retry-After.
        RATE_LIMIT: status 429 without that header.
        SERVER_ERROR: status 500.
        UNAVAILABLE: status 503.
        DISCONNECT: the connection is closed without an answer.
        SILENCE: no byte ever comes.
        IDLE: half of the answer comes, then nothing more.
        CUT: half of the answer comes, then the connection is closed.
        SPLIT_UTF8: the answer comes in pieces that end inside characters.
        SPLIT_JSON: the answer comes in pieces of a few bytes.
        HTML: a web page comes, with status 200.
        ERROR_EVENT: an error comes, with status 200, after half of a stream.
        NO_DONE: all of the answer comes, and its end is never told.
        ENDLESS: the answer never ends.
        GZIP_BOMB: a gigabyte comes in a megabyte.
        REDIRECT: another host is to be asked.

    Examples:
        >>> from umbel.testing import FakeOpenAI, Fault
        >>> faults = [Fault.RATE_LIMIT_AND_WHEN]  # of the first request
        >>> with FakeOpenAI(["Paris"], faults=faults, retry_after="0") as server:
        ...     model = ul.OpenAI("gpt-4o", base_url=server.base_url, api_key=server.api_key)
        ...     model("What is the capital of France?", max_tokens=8)
        ...     ul.get_server_info(model)["retries_429"]
        'Paris'
        1
    """

    RATE_LIMIT_AND_WHEN = "429 with Retry-After"
    RATE_LIMIT = "429 without Retry-After"
    SERVER_ERROR = "500"
    UNAVAILABLE = "503"
    DISCONNECT = "connection closed without an answer"
    SILENCE = "no first byte"
    IDLE = "silence in the middle"
    CUT = "connection closed in the middle"
    SPLIT_UTF8 = "characters arrive in pieces"
    SPLIT_JSON = "events arrive in pieces"
    HTML = "an HTML page with status 200"
    ERROR_EVENT = "an error inside an answer with status 200"
    NO_DONE = "the end is not told"
    ENDLESS = "the answer never ends"
    GZIP_BOMB = "a gigabyte in a megabyte"
    REDIRECT = "a redirect to another host"


Faults = Callable[[int], "Fault | int | None"] | Sequence["Fault | int | None"]

_STATUSES = {
    Fault.RATE_LIMIT_AND_WHEN: 429,
    Fault.RATE_LIMIT: 429,
    Fault.SERVER_ERROR: 500,
    Fault.UNAVAILABLE: 503,
}
_SPLIT = 7  # bytes of a piece: shorter than "data: {"
_BOMB_BLOCKS = 1024  # of a mebibyte each
_BLANKS = b" " * 65536  # JSON may end with any number of them
_JSON = "application/json"


def checked_faults(faults: object) -> Faults:
    """Checks faults. Raises ParameterError for anything else; a function's results are checked when it is called."""
    if callable(faults) and not isinstance(faults, type):
        return faults
    wanted = "a list with a Fault, a status of HTTP or None for each request, or a function of its number"
    if isinstance(faults, Fault):
        wanted = f"[Fault.{faults.name}], one for each request"
    given = checks.members("faults", faults, 100_000, wanted)
    for fault in given:
        if fault is not None and not isinstance(fault, Fault):
            checks.integer("faults: a status", fault, 400, 599)
    return given


def fault_at(faults: Faults, number: int) -> Fault | int | None:
    """Returns the fault of the k-th request, counted from 1; None after the end of a list."""
    if callable(faults):
        return faults(number)
    return faults[number - 1] if number <= len(faults) else None


@dataclass(frozen=True, slots=True)
class Scene:
    """Sends one answer, as it is or with a fault.

    Attributes:
        exchange: where.
        headers: of every answer of the provider.
        failure: status → the body of an error, in the provider's shape.
        error_event: the same as an event of a stream.
        retry_after: the header's value.
        elsewhere: where a redirect points.
        stream_type: the content type of streams.
    """

    exchange: Exchange
    headers: Mapping[str, str]
    failure: Callable[[int], bytes]
    error_event: bytes
    retry_after: str
    elsewhere: str
    stream_type: str = "text/event-stream; charset=utf-8"

    async def instead(self, fault: Fault | int | None) -> bool:
        """Plays a fault instead of an answer. Returns False for a fault within an answer, and for none."""
        match fault:
            case int():
                await self._respond(fault, self.failure(fault))
            case Fault.DISCONNECT:
                self.exchange.drop()
            case Fault.SILENCE:
                await _forever()
            case Fault.HTML:
                page = b"<!DOCTYPE html><html><head><title>Welcome</title></head><body>Please log in.</body></html>"
                await self._respond(200, page, {"content-type": "text/html"})
            case Fault.GZIP_BOMB:
                await self._explode()
            case Fault.REDIRECT:
                await self.exchange.respond(307, {**self.headers, "location": self.elsewhere}, b"")
            case Fault() if fault in _STATUSES:
                when = {"retry-after": self.retry_after} if fault is Fault.RATE_LIMIT_AND_WHEN else {}
                await self._respond(_STATUSES[fault], self.failure(_STATUSES[fault]), when)
            case _:
                return False
        return True

    async def play(self, events: AnswerEvents, fault: Fault | None, passes: Callable[[], Awaitable[None]]) -> None:
        """Sends an answer, with a fault in its middle.

        Args:
            passes: awaited before each piece of a stream without a fault.
        """
        streams = bool(events.last)
        if not streams and fault in (None, Fault.ERROR_EVENT):
            await self._respond(200, b"".join(events.all()) if fault is None else self.failure(500))
            return
        headers = {**self.headers, "content-type": self.stream_type if streams else _JSON}
        if not streams and fault in (Fault.IDLE, Fault.CUT):
            headers["content-length"] = str(sum(map(len, events.all())))
        await self.exchange.start(200, headers)
        match fault:
            case None:
                for event in events.all():
                    if event in events.pieces:
                        await passes()
                    await self.exchange.send(event)
            case Fault.IDLE:
                await self._send(events.begun())
                await _forever()
            case Fault.CUT:
                await self._send((*events.begun(), events.all()[-1][: _SPLIT + 1]))
                self.exchange.drop()
                return
            case Fault.SPLIT_UTF8:
                await self._send(inside_characters(b"".join(events.all())))
            case Fault.SPLIT_JSON:
                await self._send(in_lengths(b"".join(events.all()), _SPLIT))
            case Fault.ERROR_EVENT:
                await self._send((*events.begun(), self.error_event))
            case Fault.NO_DONE:
                await self._send((*events.opening, *events.pieces, *events.closing))
                if not streams:
                    self.exchange.drop()
                    return
            case Fault.ENDLESS:
                await self._send((*events.opening, *events.pieces))
                again = (events.pieces or events.opening)[-1] if streams else _BLANKS
                while True:
                    await self.exchange.send(again)
                    await asyncio.sleep(0)  # a fast client must not keep the loop from others
            case _:
                raise AssertionError(f"{fault!r} is no fault in the middle of an answer")
        await self.exchange.end()

    async def _send(self, pieces: Iterable[bytes]) -> None:
        for piece in pieces:
            await self.exchange.send(piece)

    async def _respond(self, status: int, body: bytes, more: Mapping[str, str] | None = None) -> None:
        await self.exchange.respond(status, {**self.headers, "content-type": _JSON, **(more or {})}, body)

    async def _explode(self) -> None:
        """Sends blanks in a gzip stream: a mebibyte of them takes about a kilobyte."""
        packer = zlib.compressobj(9, zlib.DEFLATED, 31)
        await self.exchange.start(200, {**self.headers, "content-type": _JSON, "content-encoding": "gzip"})
        block = b" " * (1 << 20)
        for _ in range(_BOMB_BLOCKS):
            await self.exchange.send(packer.compress(block) + packer.flush(zlib.Z_SYNC_FLUSH))
        await self.exchange.send(packer.flush())
        await self.exchange.end()


async def _forever() -> None:
    """Waits until the client leaves or the server closes: both cancel."""
    await asyncio.get_running_loop().create_future()


class Unreachable:
    """Holds an address where no connection can be made: its queue is full, so the system does not answer.

    Examples:
        >>> from umbel.testing import Unreachable
        >>> with Unreachable() as nowhere:
        ...     where = {"base_url": nowhere.base_url, "api_key": "none"}
        ...     try:
        ...         ul.OpenAI("gpt-4o", connect_timeout=0.05, max_retries=0, **where)("Why?")
        ...     except ul.ConnectionLostError as error:
        ...         print(error)
        openai gpt-4o: no connection to http://127.0.0.1:... in time
    """

    def __init__(self) -> None:
        self._listener = socket.socket()
        self._callers: list[socket.socket] = []

    def __enter__(self) -> Self:
        self._listener.bind(("127.0.0.1", 0))
        self._listener.listen(0)
        for _ in range(4):  # the queue holds one or two; they are never taken out
            caller = socket.socket()
            caller.setblocking(False)
            caller.connect_ex(self._listener.getsockname())
            self._callers.append(caller)
        return self

    def __exit__(self, *raised: object) -> None:
        for caller in (*self._callers, self._listener):
            caller.close()

    @property
    def base_url(self) -> str:
        """The address, as `base_url` of a backend takes it."""
        return f"http://127.0.0.1:{self._listener.getsockname()[1]}/v1"
