"""A client of an ASGI application in the same process: no sockets, and disconnects at will."""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from umbel.server.app import application
from umbel.server.front import Front
from umbel.srt.in_process import LocalBackend


@dataclass
class Answered:
    status: int
    headers: dict[str, str]
    content: bytes
    writes: int  # messages that carried a body

    @property
    def json(self) -> Any:
        return json.loads(self.content)

    @property
    def events(self) -> list[tuple[str, Any]]:
        """Server-sent events: (name, data), the data as JSON unless it is "[DONE]". Comments are left out."""
        found = []
        for block in self.content.decode().split("\n\n"):
            lines = [line.partition(": ") for line in block.split("\n") if line and not line.startswith(":")]
            fields = {name: value for name, _, value in lines}
            if "data" in fields:
                data = fields["data"]
                found.append((fields.get("event", ""), data if data == "[DONE]" else json.loads(data)))
        return found


class Live:
    """One request in flight: what has come of its answer, and a way to hang up."""

    def __init__(self, app: Any, method: str, path: str, body: bytes, headers: Mapping[str, str]) -> None:
        path, _, query = path.partition("?")
        all_headers = {"host": "localhost", "content-length": str(len(body)), **headers}
        scope = {
            "type": "http",
            "method": method,
            "path": path,
            "raw_path": path.encode(),
            "root_path": "",
            "query_string": query.encode(),
            "headers": [(name.lower().encode(), value.encode()) for name, value in all_headers.items()],
        }
        self._body: bytes | None = body
        self._gone = asyncio.Event()
        self._changed = asyncio.Event()
        self.status = 0
        self.headers: dict[str, str] = {}
        self.content = b""
        self.writes = 0
        self.task = asyncio.ensure_future(app(scope, self._receive, self._send))

    async def _receive(self) -> dict[str, Any]:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.headers = {name.decode(): value.decode() for name, value in message["headers"]}
        else:
            self.content += message["body"]
            self.writes += 1
        self._changed.set()

    async def until(self, sign: bytes) -> None:
        """Waits until the answer contains a text."""
        while sign not in self.content:
            assert not self.task.done(), f"the answer ended without {sign!r}: {self.content!r}"
            self._changed.clear()
            waiting = asyncio.ensure_future(self._changed.wait())
            await asyncio.wait([waiting, self.task], return_when=asyncio.FIRST_COMPLETED)
            waiting.cancel()

    async def hang_up(self) -> None:
        """Disconnects, and waits until the application has ended the request."""
        self._gone.set()
        await self.task

    async def ended(self) -> Answered:
        await self.task
        return Answered(self.status, self.headers, self.content, self.writes)


class AsgiClient:
    """Sends requests to an application."""

    def __init__(self, app: Any, headers: Mapping[str, str] | None = None) -> None:
        self.app = app
        self._headers = dict(headers or {})

    def begin(self, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None) -> Live:
        data = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
        return Live(self.app, method, path, data, {**self._headers, **(headers or {})})

    async def get(self, path: str, **headers: str) -> Answered:
        return await self.begin("GET", path, headers=headers).ended()

    async def post(self, path: str, body: Any, **headers: str) -> Answered:
        return await self.begin("POST", path, body, headers).ended()


@asynccontextmanager
async def served(backend: LocalBackend | None = None, **front: Any) -> AsyncIterator[AsgiClient]:
    """A server on the oracle, or on another backend, and a client of it. `client.app.front` is its front."""
    backend = backend or LocalBackend()
    whole = Front(backend, **front)
    await whole.start()
    try:
        yield AsgiClient(application(whole))
    finally:
        await backend.close()
