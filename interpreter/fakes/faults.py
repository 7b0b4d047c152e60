"""Faults of a provider's answer, and how a fake plays them.

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
import socket
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Self

from ...lang import checks
from .server import AnswerEvents, Exchange, in_lengths, inside_characters


class Fault(StrEnum):
    """One wrong answer. See the drawing above."""

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
_BEFORE = {*_STATUSES, Fault.DISCONNECT, Fault.SILENCE, Fault.HTML, Fault.GZIP_BOMB, Fault.REDIRECT}
_SPLIT = 7  # bytes of a piece: shorter than "data: {"
_BOMB_BLOCKS = 1024  # of a mebibyte each
_BLANKS = b" " * 65536  # JSON may begin with any number of them


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


def at(faults: Faults, number: int) -> Fault | int | None:
    """Returns the fault of the k-th request, counted from 1; None after the end of a list."""
    if callable(faults):
        return faults(number)
    return faults[number - 1] if number <= len(faults) else None


@dataclass(frozen=True, slots=True)
class Scene:
    """Plays a fault on one exchange.

    Attributes:
        exchange: where.
        headers: of every answer of the provider.
        failure: status → the body of an error, in the provider's shape.
        error_event: the same as an event of a stream.
        retry_after: the header's value.
        elsewhere: where a redirect points.
    """

    exchange: Exchange
    headers: Mapping[str, str]
    failure: Callable[[int], bytes]
    error_event: bytes
    retry_after: str
    elsewhere: str

    async def instead(self, fault: Fault | int | None) -> bool:
        """Plays a fault instead of an answer. Returns False for a fault within an answer, and for none."""
        if not isinstance(fault, Fault):
            if fault is not None:
                await self._json(fault, self.failure(fault))
            return fault is not None
        if fault not in _BEFORE:
            return False
        match fault:
            case Fault.DISCONNECT:
                self.exchange.drop()
            case Fault.SILENCE:
                await _forever()
            case Fault.HTML:
                page = b"<!DOCTYPE html><html><head><title>Welcome</title></head><body>Please log in.</body></html>"
                await self.exchange.respond(200, {**self.headers, "content-type": "text/html"}, page)
            case Fault.GZIP_BOMB:
                await self._explode()
            case Fault.REDIRECT:
                await self.exchange.respond(307, {**self.headers, "location": self.elsewhere}, b"")
            case _:
                status = _STATUSES[fault]
                when = {"retry-after": self.retry_after} if fault is Fault.RATE_LIMIT_AND_WHEN else {}
                await self._json(status, self.failure(status), when)
        return True

    async def stream(self, fault: Fault | int | None, told: AnswerEvents) -> None:
        """Plays a fault in the middle of a stream."""
        await self.exchange.start(200, {**self.headers, "content-type": "text/event-stream; charset=utf-8"})
        match fault:
            case Fault.IDLE:
                await self._send(told.begun())
                await _forever()
            case Fault.CUT:
                await self._send(told.begun())
                await self.exchange.send(told.all()[-1][: _SPLIT + 1])
                self.exchange.drop()
                return
            case Fault.SPLIT_UTF8:
                await self._send(inside_characters(b"".join(told.all())))
            case Fault.SPLIT_JSON:
                await self._send(in_lengths(b"".join(told.all()), _SPLIT))
            case Fault.ERROR_EVENT:
                await self._send((*told.begun(), self.error_event))
            case Fault.NO_DONE:
                await self._send((*told.opening, *told.pieces, *told.closing))
            case Fault.ENDLESS:
                await self._send((*told.opening, *told.pieces))
                while True:
                    await self.exchange.send(told.pieces[-1] if told.pieces else told.opening[-1])
                    await asyncio.sleep(0)  # a fast client must not keep the loop from others
            case _:
                raise AssertionError(f"{fault!r} is no fault of a stream")
        await self.exchange.end()

    async def whole(self, fault: Fault | int | None, body: bytes) -> None:
        """Plays a fault in the middle of an unstreamed answer."""
        if fault is Fault.ERROR_EVENT:
            await self._json(200, self.failure(500))
            return
        headers = {**self.headers, "content-type": "application/json"}
        if fault in (Fault.IDLE, Fault.CUT):
            headers["content-length"] = str(len(body))
        await self.exchange.start(200, headers)
        match fault:
            case Fault.IDLE:
                await self.exchange.send(body[: len(body) // 2])
                await _forever()
            case Fault.CUT:
                await self.exchange.send(body[: len(body) // 2])
                self.exchange.drop()
                return
            case Fault.SPLIT_UTF8:
                await self._send(inside_characters(body))
            case Fault.SPLIT_JSON:
                await self._send(in_lengths(body, _SPLIT))
            case Fault.NO_DONE:
                await self.exchange.send(body)
                self.exchange.drop()
                return
            case Fault.ENDLESS:
                while True:
                    await self.exchange.send(_BLANKS)
                    await asyncio.sleep(0)
            case _:
                raise AssertionError(f"{fault!r} is no fault of a whole answer")
        await self.exchange.end()

    async def _send(self, pieces: Iterable[bytes]) -> None:
        for piece in pieces:
            await self.exchange.send(piece)

    async def _json(self, status: int, body: bytes, more: Mapping[str, str] | None = None) -> None:
        headers = {**self.headers, "content-type": "application/json", **(more or {})}
        await self.exchange.respond(status, headers, body)

    async def _explode(self) -> None:
        """Sends blanks in a gzip stream: a mebibyte of them takes about a kilobyte."""
        packer = zlib.compressobj(9, zlib.DEFLATED, 31)
        await self.exchange.start(200, {**self.headers, "content-type": "application/json", "content-encoding": "gzip"})
        block = b" " * (1 << 20)
        for _ in range(_BOMB_BLOCKS):
            await self.exchange.send(packer.compress(block) + packer.flush(zlib.Z_SYNC_FLUSH))
        await self.exchange.send(packer.flush())
        await self.exchange.end()


async def _forever() -> None:
    """Waits until the client leaves or the server closes: both cancel."""
    await asyncio.get_running_loop().create_future()


class Unreachable:
    """An address where no connection can be made: its queue is full, so the system does not answer.

    with Unreachable() as nowhere:
        backend = OpenAI("gpt-4o", base_url=nowhere.base_url, connect_timeout=0.1)
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
        return f"http://127.0.0.1:{self._listener.getsockname()[1]}/v1"
