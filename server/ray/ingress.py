"""The ingress: takes HTTP requests from Ray's proxies, has each placed, and passes on what its replica answers.

    proxy of Ray ─▶ Ingress ── choose_replica ─▶ router: Placements       counts the call until its answer has ended
                       └────── HTTP ──────────▶ the replica's socket      bytes come back as they are

It reads a body for its routing key and changes nothing of it: keys, limits and errors are the replica's. A request
whose replica is lost before a byte of the answer has gone out is sent to another one; after that its stream ends with
an error event. A replica that answers 503 is full or stopping, so another one is asked; other errors are answers.
"""

import asyncio
import contextlib
import logging
import re
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Protocol

import aiohttp
from starlette.datastructures import Headers
from starlette.types import Message, Receive, Scope, Send

from ..bodies import Disconnected, read_body
from ..errors import Dialect, HttpError, busy_headers
from ..http import EVENTS, cancel_at_disconnect, send_error, spoken, sse
from .keys import Reach, RoutingKey, routing_key
from .placements import Call, NoReplicaError
from .replica import TOKEN_HEADER

log = logging.getLogger("umbel.server")
MOST_TRIES = 4  # replicas that a request is sent to
CHOICE_SECONDS = 30.0  # for the router, which waits for nothing but its own start
CONNECT_SECONDS = 5.0
RETRY_AFTER = 1
PLACED_HEADER = b"umbel-placement"
_HOP_BY_HOP = {"connection", "keep-alive", "proxy-connection", "te", "trailer", "transfer-encoding", "upgrade"}
_NOT_SENT = _HOP_BY_HOP | {"content-length", "expect", TOKEN_HEADER}


class Selection(Protocol):
    """A replica that was chosen, as Ray describes it."""

    replica_id: str
    replica_metadata: dict[str, str]


Choose = Callable[[Call], AbstractAsyncContextManager[Selection]]
All = Callable[[], Awaitable[Sequence[Mapping[str, str]]]]


class LostReplicaError(Exception):
    """The replica was lost before the client got a byte. `unreachable`: nothing listens there."""

    def __init__(self, message: str, unreachable: bool = False) -> None:
        super().__init__(message)
        self.unreachable = unreachable


class Ingress:
    """An ASGI application in front of all replicas.

    Args:
        choose: names the replica of a call by placement.
        everywhere: asks all replicas for their metadata.
    """

    def __init__(self, choose: Choose, everywhere: All) -> None:
        self._choose = choose
        self._everywhere = everywhere
        self._session: aiohttp.ClientSession | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._live(receive, send)
        elif scope["type"] == "http":
            await self._serve(scope, receive, send)

    async def _live(self, receive: Receive, send: Send) -> None:
        while True:
            message = await receive()
            if message["type"] == "lifespan.shutdown" and self._session is not None:
                await self._session.close()
            await send({"type": f"{message['type']}.complete"})
            if message["type"] == "lifespan.shutdown":
                return

    @property
    def _client(self) -> aiohttp.ClientSession:
        if self._session is None or self._session.closed:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, ttl_dns_cache=None),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS),
                auto_decompress=False,
                cookie_jar=aiohttp.DummyCookieJar(),
                trust_env=False,
            )
        return self._session

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        request_id = uuid.uuid4().hex
        dialect: Dialect = "anthropic" if scope["path"].startswith("/v1/messages") else "openai"
        task = asyncio.current_task()
        assert task is not None, "an application runs in a task"
        watch: asyncio.Task[None] | None = None
        try:
            headers = Headers(scope=scope)
            body = await read_body(receive, headers.get("content-length"))
            watch = asyncio.create_task(cancel_at_disconnect(receive, task))
            key = routing_key(scope["method"], scope["path"], headers, body)
            passed = _Passed(scope, headers, body, key, dialect, request_id)
            match key.reach:
                case Reach.ONE:
                    await self._to_one(passed, key, send)
                case Reach.ALL:
                    await self._to_all(passed, send)
                case Reach.NONE:
                    raise HttpError(400, _KEPT_BY_ONE, "several_replicas")
        except Disconnected:
            pass
        except HttpError as error:
            await send_error(send, error, spoken(scope, dialect), request_id)
        except asyncio.CancelledError:
            if watch is None or not watch.done() or watch.cancelled():
                raise
            task.uncancel()  # the client has hung up
        finally:
            if watch is not None:
                watch.cancel()

    # ------------------------------------------------------------------ one replica

    async def _to_one(self, passed: "_Passed", key: RoutingKey, send: Send) -> None:
        """Sends a request to the replica of its placement, and to another one while nothing was answered."""
        call = Call(key)
        refused: _Answer | None = None
        for _ in range(MOST_TRIES):
            try:
                async with asyncio.timeout(CHOICE_SECONDS), self._choose(call) as selection:
                    replica = selection.replica_metadata
                answer = await self._ask(passed, replica)
                if answer.status != 503:
                    await self._pass_on(passed, call, answer, send)
                    return
                refused = await answer.kept()
                call.refused()
            except (NoReplicaError, TimeoutError):
                break
            except LostReplicaError as error:
                log.warning("request %s: replica %s: %s", passed.id, call.replica, error)
                call.refused(error.unreachable)
            finally:
                call.end()
        if refused is None:
            raise HttpError(503, "no replica is ready; try again", "no_replica", headers=busy_headers(RETRY_AFTER))
        await refused.send(send)

    async def _ask(self, passed: "_Passed", replica: Mapping[str, str]) -> "_Answer":
        """Sends the request to a replica → its status and the first bytes of its answer.

        Raises:
            LostReplicaError: the replica is gone, or was lost before there was a byte for the client.
        """
        headers = [*passed.headers, (TOKEN_HEADER, replica["token"])]
        url = aiohttp.client.URL(replica["url"] + passed.target, encoded=True)
        try:
            response = await self._client.request(
                passed.method, url, data=passed.body, headers=headers, allow_redirects=False, skip_auto_headers=_OWN
            )
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            unreachable = isinstance(error, aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError)
            raise LostReplicaError(f"{type(error).__name__}: {error}", unreachable) from None
        try:
            streamed = response.headers.get("content-type", "").startswith(EVENTS)
            first = await (response.content.readany() if streamed else response.content.read())
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            response.close()
            raise LostReplicaError(f"{type(error).__name__}: {error}") from None
        except BaseException:
            response.close()
            raise
        return _Answer(response, first, streamed)

    async def _pass_on(self, passed: "_Passed", call: Call, answer: "_Answer", send: Send) -> None:
        """Sends the answer as it comes. One that breaks off ends with an error event."""
        placed = [(PLACED_HEADER, call.said.encode("ascii", "replace"))] if call.said else []
        try:
            if answer.status < 400:
                call.begin()
            await send(answer.start(placed))
            await send(_body(answer.first, more=answer.streamed))
            if not answer.streamed:
                return
            try:
                async for piece in answer.rest():
                    await send(_body(piece))
            except (aiohttp.ClientError, OSError) as error:
                log.warning("request %s: its stream broke off: %s", passed.id, error)
                await send(_body(passed.broken_off()))
            await send(_body(b"", more=False))
        finally:
            answer.close()

    # ------------------------------------------------------------------ all replicas

    async def _to_all(self, passed: "_Passed", send: Send) -> None:
        """Sends a request to every replica; its answer is that of the first one that fails, or of the last. Metrics are
        those of all, with the replica as a label."""
        answer: _Answer | None = None
        metrics: dict[str, bytes] = {}
        for replica in await self._everywhere():
            try:
                answer = await (await self._ask(passed, replica)).kept()
            except LostReplicaError:
                continue  # its cache is lost, too
            if answer.status >= 400:
                break
            metrics[replica["name"]] = answer.first
        else:
            if answer is not None and passed.target.startswith("/metrics"):
                answer.first = labelled(metrics)
        if answer is None:
            raise HttpError(503, "no replica is ready; try again", "no_replica", headers=busy_headers(RETRY_AFTER))
        await answer.send(send)


_OWN = ("User-Agent", "Accept", "Accept-Encoding", "Content-Type")  # headers that aiohttp would add
_KEPT_BY_ONE = (
    "the deployment has several replicas, and one of them alone would keep or show this: offer programs by --program, "
    "mark prefixes by cache_control, hang up to end a request, and read /metrics"
)


class _Passed:
    """A request as it is sent on."""

    def __init__(
        self, scope: Scope, headers: Headers, body: bytes, key: RoutingKey, dialect: Dialect, request_id: str
    ) -> None:
        self.method: str = scope["method"]
        query = scope.get("query_string", b"").decode("ascii", "replace")
        path = (scope.get("raw_path") or scope["path"].encode()).decode("ascii", "replace")
        self.target = path + (f"?{query}" if query else "")
        left_out = _NOT_SENT | {"accept"} if key.reach is Reach.ALL else _NOT_SENT
        self.headers = [(name, value) for name, value in headers.items() if name not in left_out]
        self.body = body if body or "content-length" in headers else None
        self.id = request_id
        self._dialect = spoken(scope, dialect)

    def broken_off(self) -> bytes:
        """Returns the event that ends a stream whose replica was lost."""
        error = HttpError(503, "the replica was lost before the answer had ended; ask again", "replica_lost")
        event = sse(error.shape(self._dialect, self.id), "error" if self._dialect == "anthropic" else "")
        return b"\n\n" + event  # an event may have been cut


class _Answer:
    """The answer of a replica, of which the first bytes have come; all of them where it is no stream."""

    def __init__(self, response: aiohttp.ClientResponse, first: bytes, streamed: bool) -> None:
        self._response = response
        self.status: int = response.status
        self.first = first
        self.streamed = streamed

    def start(self, placed: Sequence[tuple[bytes, bytes]] = ()) -> Message:
        headers = [(name.lower(), value) for name, value in self._response.raw_headers]
        headers = [(name, value) for name, value in headers if name.decode("latin-1") not in _HOP_BY_HOP]
        if not self.streamed:
            headers = [(name, value) for name, value in headers if name != b"content-length"]
            headers.append((b"content-length", str(len(self.first)).encode()))
        return {"type": "http.response.start", "status": self.status, "headers": [*headers, *placed]}

    def rest(self) -> AsyncIterator[bytes]:
        found: AsyncIterator[bytes] = self._response.content.iter_any()
        return found

    async def kept(self) -> "_Answer":
        """Reads what is left, so that the answer can be sent after its place was given back."""
        with contextlib.suppress(aiohttp.ClientError, OSError):
            self.first += await self._response.content.read()
        self.streamed = False
        self.close()
        return self

    async def send(self, send: Send) -> None:
        await send(self.start())
        await send(_body(self.first, more=False))

    def close(self) -> None:
        """Hangs up where the replica has more to say: so it ends the request. A whole answer leaves the connection."""
        if self._response.content.at_eof():
            self._response.release()
        else:
            self._response.close()


def labelled(metrics: Mapping[str, bytes]) -> bytes:
    """Joins metrics of replicas, in Prometheus' text format: family by family, with a label `replica` in each line.

    Args:
        metrics: the name of a replica → its metrics.
    """
    families: dict[str, list[str]] = {}
    for replica, text in metrics.items():
        family: list[str] = []
        for line in text.decode("utf-8", "replace").splitlines():
            if line.startswith("# HELP "):
                family = families.setdefault(line.split(" ", 3)[2], [])
            if line.startswith("#"):
                if line not in family[:2]:
                    family.append(line)
            elif found := _SAMPLE.fullmatch(line):
                labels = f'replica="{replica}"' + (f",{found['labels']}" if found["labels"] else "")
                family.append(f"{found['name']}{{{labels}}}{found['value']}")
    return "".join(f"{line}\n" for family in families.values() for line in family).encode()


_SAMPLE = re.compile(r"(?P<name>[a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(?P<labels>.*)\})?(?P<value> .*)")


def _body(data: bytes, more: bool = True) -> Message:
    return {"type": "http.response.body", "body": data, "more_body": more}
