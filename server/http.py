"""The ASGI application: from a request to an endpoint and back, the same for every dialect.

    request ─▶ Host, headers, key ─▶ route ─▶ body ─▶ endpoint ─▶ Reply        one JSON answer
                                                              └─▶ EventStream  server-sent events

An endpoint is a row in a table of its dialect: method, path, body struct, function. The table is also what the OpenAPI
document and the tests are made of. The function raises; errors become answers here, in the dialect's shape, or an event
of the stream when its first byte has been sent.

A client that disconnects cancels its endpoint, and closing the endpoint's iterators aborts the request in the engine.
"""

import asyncio
import logging
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import msgspec
from starlette.datastructures import Headers, QueryParams
from starlette.routing import Route, Router
from starlette.types import Receive, Scope, Send

from .access import Access, Caller
from .bodies import Body, Disconnected, decode, read_body, wrong
from .errors import Dialect, HttpError, http_error
from .limits import MAX_HEADER_BYTES, MAX_HEADERS
from .tracing import status_noted

if TYPE_CHECKING:
    from .front import Front

log = logging.getLogger("umbel.server")
B = TypeVar("B")
JSON, EVENTS = "application/json", "text/event-stream"
JSON_OR_EVENTS = (JSON, EVENTS)
encode = msgspec.json.Encoder().encode


@dataclass(slots=True)
class Asked(Generic[B]):
    """One request, as an endpoint sees it.

    Attributes:
        front: the server's state: runtime, models, limits.
        body: decoded; None for a route without a body.
        caller: the key it came with.
        id: of the request, in the headers of its answer and in the log.
        path: parameters of the path.
        query: parameters of the query, of those that the endpoint names.
        warnings: are sent as headers `umbel-warning` of the answer.
    """

    front: "Front"
    body: B
    caller: Caller
    id: str
    headers: Headers
    path: Mapping[str, str]
    query: Mapping[str, str]
    warnings: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Reply:
    """A whole answer: JSON of a struct or of plain values, or bytes of another media type."""

    content: Any  # what msgspec encodes
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    media: str = JSON


@dataclass(slots=True)
class EventStream:
    """An answer of server-sent events.

    Attributes:
        events: encoded events. Nothing is sent before the first one: an error before it is a whole answer.
        ping: an event that says that the stream is alive.
        failure: the event that ends a stream that fails after its first byte.
    """

    events: AsyncGenerator[bytes, None]
    ping: bytes = b": keep-alive\n\n"
    failure: Callable[[HttpError], bytes] | None = None


Answer = Reply | EventStream


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A row of the table of routes.

    Attributes:
        body: the struct of the JSON body; None for routes without one.
        handle: answers; raises HttpError or any error of umbel.
        summary: one line for the OpenAPI document.
        answer, statuses, media: of the document: the type of the JSON answer, the statuses that it comes with, and its
            media types. An event stream takes the place of JSON where a body asks for it.
        errors: statuses of errors, for the document, next to those that follow from the other attributes.
        dialect: whose shape errors have.
        public: served without a key. admin: only with the admin key.
        raw: the body is bytes of another kind, up to the limit.
        not_offered: fields that are known and not offered → what to do instead.
        query: parameters of the query → their types in the document. Others are refused; an endpoint without any
            ignores the query, since clients add to it.
    """

    method: str
    path: str
    handle: Callable[[Asked[Any]], Awaitable[Answer]]
    summary: str
    body: type | None = None
    answer: Any = None
    statuses: tuple[int, ...] = (200,)
    media: tuple[str, ...] = (JSON,)
    errors: tuple[int, ...] = ()
    dialect: Dialect = "openai"
    public: bool = False
    admin: bool = False
    raw: bool = False
    not_offered: Mapping[str, str] = field(default_factory=dict)
    query: Mapping[str, Any] = field(default_factory=dict)


def present(endpoints: Iterable[Endpoint], access: Access) -> list[Endpoint]:
    """Returns the endpoints that a server has: administrative ones only where there is an administrator."""
    return [each for each in endpoints if not each.admin or access.administered]


class Application:
    """Serves a table of endpoints over ASGI. One per process; holds nothing of single requests."""

    def __init__(self, front: "Front", endpoints: Sequence[Endpoint]) -> None:
        self.front = front
        by_path: dict[str, dict[str, _Handler]] = {}
        for endpoint in present(endpoints, front.access):
            by_path.setdefault(endpoint.path, {})[endpoint.method] = _Handler(front, endpoint)
        routes = [Route(path, _Resource(methods)) for path, methods in by_path.items()]
        self._router = Router(routes, redirect_slashes=False, default=_not_found)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":  # no lifespan, no websockets
            return
        request_id = uuid.uuid4().hex
        scope["umbel"] = request_id
        try:
            _check_headers(scope["headers"])
            headers = Headers(scope=scope)
            self.front.access.check_host(headers.get("host", ""))
            self.front.access.check_origin(headers.get("origin"))
            scope["headers_read"] = headers
            await self._router(scope, receive, send)
        except HttpError as error:
            dialect: Dialect = "anthropic" if scope["path"].startswith("/v1/messages") else "openai"
            await send_error(send, error, spoken(scope, dialect), request_id)


class _Resource:
    """The methods of one path."""

    def __init__(self, methods: dict[str, "_Handler"]) -> None:
        self._methods = methods

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        method = "GET" if scope["method"] == "HEAD" else scope["method"]  # the HTTP server leaves the body out
        handler = self._methods.get(method)
        if handler is None:
            known = ", ".join(self._methods)
            raise HttpError(405, f"{scope['path']} takes {known}", "method_not_allowed", headers={"allow": known})
        await handler(scope, receive, send)


async def _not_found(scope: Scope, receive: Receive, send: Send) -> None:
    # Also without a key: which routes exist is no secret.
    raise HttpError(404, f"no route {scope['path'][:200]!r}; /openapi.json lists them, /ui is a page", "not_found")


class _Handler:
    """Runs one endpoint."""

    def __init__(self, front: "Front", endpoint: Endpoint) -> None:
        self._front = front
        self._endpoint = endpoint
        self._decoder: msgspec.json.Decoder[Any] = msgspec.json.Decoder(endpoint.body)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        tracer, endpoint = self._front.tracer, self._endpoint
        if tracer is None:
            await self._run(scope, receive, send)
            return
        with tracer.request(endpoint.method, endpoint.path, scope["headers_read"], scope["umbel"]) as tally:
            await self._run(scope, receive, status_noted(send, tally))

    async def _run(self, scope: Scope, receive: Receive, send: Send) -> None:
        request_id: str = scope["umbel"]
        task = asyncio.current_task()
        assert task is not None, "an application runs in a task"
        watch: asyncio.Task[None] | None = None
        out: _Out | None = None
        asked: Asked[Any] | None = None
        endpoint = self._endpoint
        try:
            asked = await self._asked(scope, receive, request_id)
            watch = asyncio.create_task(cancel_at_disconnect(receive, task))
            answer = await endpoint.handle(asked)
            headers = _headers(request_id, asked.warnings)
            if isinstance(answer, Reply):
                await _send_reply(send, answer, headers)
            else:
                out = _Out(send, headers, answer, self._front.limits.keep_alive)
                await out.stream()
        except Disconnected:
            self._front.disconnects += 1
        except asyncio.CancelledError:
            task.uncancel()
            if watch is not None and watch.done() and not watch.cancelled():
                self._front.disconnects += 1
            elif self._front.draining:
                await self._fail(scope, send, self._front.cut_off(), out)
            else:
                raise
        except Exception as error:
            body = None if asked is None else asked.body
            field_of = body.field_of if isinstance(body, Body) else None
            refused = http_error(error, self._front.limits.retry_after, field_of)
            if refused.status == 500:
                log.error("request %s failed", request_id, exc_info=error)
            await self._fail(scope, send, refused, out)
        finally:
            if watch is not None:
                watch.cancel()

    async def _fail(self, scope: Scope, send: Send, error: HttpError, out: "_Out | None") -> None:
        """Sends an error: as the whole answer, or as the last event of a stream that has begun."""
        dialect, request_id = self._endpoint.dialect, scope["umbel"]
        if out is None or not out.started:
            await send_error(send, error, spoken(scope, dialect), request_id)
        elif out.answer.failure is not None:
            await out.fail(out.answer.failure(error))
        else:
            await out.fail(sse(error.shape(dialect, request_id), "error" if dialect == "anthropic" else ""))

    async def _asked(self, scope: Scope, receive: Receive, request_id: str) -> Asked[Any]:
        endpoint, front = self._endpoint, self._front
        headers: Headers = scope["headers_read"]
        caller = Caller() if endpoint.public else front.access.caller(headers)
        if endpoint.admin and not caller.admin:
            raise HttpError(403, f"{endpoint.path} takes the admin key", "forbidden")
        query = _read_query(scope["query_string"], endpoint.query)
        body: Any = None
        if endpoint.raw or endpoint.body is not None:
            front.check_open()
            if "content-encoding" in headers and headers["content-encoding"] != "identity":
                raise HttpError(415, "send the body without Content-Encoding", "unsupported_media_type")
            data = await read_body(receive, headers.get("content-length"))
            body = data if endpoint.raw else decode(data, self._decoder, endpoint.not_offered)
        path: dict[str, str] = scope.get("path_params", {})
        return Asked(front, body, caller, request_id, headers, path, query)


def _read_query(sent: bytes, known: Collection[str]) -> dict[str, str]:
    """Returns the parameters of a query. Raises HttpError for one that the endpoint does not know, if it knows any."""
    if not known:
        return {}
    found = dict(QueryParams(sent))
    for name in found.keys() - set(known):
        names = " and ".join(known)
        raise wrong(name, f"no such parameter of the query; {names} may be written", "unknown_parameter")
    return found


async def cancel_at_disconnect(receive: Receive, task: "asyncio.Task[Any]") -> None:
    """Cancels a task once the client has hung up."""
    while (await receive())["type"] != "http.disconnect":
        pass
    task.cancel()


def _check_headers(headers: Sequence[tuple[bytes, bytes]]) -> None:
    if len(headers) > MAX_HEADERS or sum(len(name) + len(value) for name, value in headers) > MAX_HEADER_BYTES:
        raise HttpError(
            431, f"more than {MAX_HEADERS} headers or {MAX_HEADER_BYTES} bytes of them", "headers_too_large"
        )


def _headers(request_id: str, warnings: Iterable[str] = ()) -> list[tuple[bytes, bytes]]:
    value = request_id.encode()
    found = [(b"x-request-id", value), (b"request-id", value)]  # OpenAI's client reads one, Anthropic's the other
    for warning in warnings:
        line = " ".join(warning.split())[:500]
        found.append((b"umbel-warning", line.encode("ascii", "replace")))
    return found


async def _send_reply(send: Send, reply: Reply, headers: list[tuple[bytes, bytes]]) -> None:
    body = reply.content if isinstance(reply.content, bytes) else encode(reply.content)
    headers += [(b"content-type", reply.media.encode()), (b"content-length", str(len(body)).encode())]
    headers += [(name.encode(), value.encode()) for name, value in reply.headers.items()]
    await send({"type": "http.response.start", "status": reply.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def send_error(send: Send, error: HttpError, dialect: Dialect, request_id: str) -> None:
    """Sends an error as a whole answer."""
    reply = Reply(error.shape(dialect, request_id), error.status, error.headers)
    await _send_reply(send, reply, _headers(request_id))


def spoken(scope: Scope, dialect: Dialect) -> Dialect:
    """Returns the dialect for an error: Anthropic's clients name its version, on routes of others, too."""
    return "anthropic" if any(name == b"anthropic-version" for name, _ in scope["headers"]) else dialect


def sse(data: Any, event: str = "") -> bytes:
    """Encodes one server-sent event, of JSON."""
    line = b"data: " + encode(data) + b"\n\n"
    return b"event: " + event.encode() + b"\n" + line if event else line


MOST_UNWRITTEN = 64  # events, of a client that reads slowly
DONE = b"data: [DONE]\n\n"
_STREAM_HEADERS = [
    (b"content-type", f"{EVENTS}; charset=utf-8".encode()),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class _Out:
    """Writes a stream: one write for all events of an engine step.

    Events are put into a buffer; a task of the loop writes it once the endpoint waits for its next event. The endpoint
    does not run ahead of a slow client: it waits while a write is held up.
    """

    def __init__(self, send: Send, headers: list[tuple[bytes, bytes]], answer: EventStream, silence: float) -> None:
        self._send = send
        self._headers = headers + _STREAM_HEADERS
        self.answer = answer
        self._silence = silence
        self._buffer: list[bytes] = []
        self._writing: asyncio.Task[None] | None = None
        self._alarm: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()
        self._spoke = 0.0  # time of the last write
        self.started = False

    async def stream(self) -> None:
        self._spoke = self._loop.time()
        self._alarm = self._loop.call_at(self._spoke + self._silence, self._on_silence)
        try:
            async with aclosing(self.answer.events) as events:
                async for event in events:
                    self._buffer.append(event)
                    if self._writing is None:
                        self._writing = self._loop.create_task(self._write())
                    elif len(self._buffer) > MOST_UNWRITTEN:
                        await self._writing
            await self._end()
        except asyncio.CancelledError:
            if self._writing is not None:
                self._writing.cancel()
                self._writing = None
            raise
        finally:
            self._alarm.cancel()

    async def fail(self, event: bytes) -> None:
        """Ends the stream with an error event."""
        self._buffer.append(event)
        await self._end()

    async def _end(self) -> None:
        if self._writing is not None:
            await self._writing
        await self._write(more=False)

    async def _write(self, more: bool = True) -> None:
        if not self.started:
            self.started = True
            await self._send({"type": "http.response.start", "status": 200, "headers": self._headers})
        while self._buffer or not more:
            data = b"".join(self._buffer)
            self._buffer.clear()
            self._spoke = self._loop.time()
            await self._send({"type": "http.response.body", "body": data, "more_body": more})
            if not more:
                return
        self._writing = None

    def _on_silence(self) -> None:
        due = self._spoke + self._silence
        if self._writing is None and self._loop.time() >= due:
            self._buffer.append(self.answer.ping)
            self._writing = self._loop.create_task(self._write())
            due = self._loop.time() + self._silence
        self._alarm = self._loop.call_at(max(due, self._loop.time() + 0.01), self._on_silence)
