"""JSON over HTTP to a server of this machine, from asyncio.

Requests run on threads of our own with one kept connection each: no state of an event loop, so a peer may be used
from one `asyncio.run` after the other, and less processor time taken from the server than an asynchronous client
takes (both sides share the machine's few cores).
"""

import asyncio
import http.client
import json
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from .peer import PeerError

Json = Any  # what json.loads gives


class JsonClient:
    """Talks to `http://127.0.0.1:port`."""

    def __init__(self, port: int, *, connections: int, seconds: float = 600) -> None:
        self.port = port
        self._seconds = seconds
        self._threads = ThreadPoolExecutor(max_workers=connections, thread_name_prefix="peer")
        self._kept = threading.local()

    async def post(self, path: str, body: Mapping[str, Json]) -> Json:
        """
        Raises:
            PeerError: the server answered with an error; the message holds its text.
        """
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._post, path, body)

    def answers(self, path: str) -> bool:
        """Whether a GET gives 200. No server, or none yet: False."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
        try:
            connection.request("GET", path)
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _post(self, path: str, body: Mapping[str, Json]) -> Json:
        content = json.dumps(body).encode()
        for kept in (True, False):  # a kept connection may have been closed by the server: once more with a new one
            connection = self._connection(renew=not kept)
            try:
                connection.request("POST", path, content, {"Content-Type": "application/json"})
                response = connection.getresponse()
                text = response.read().decode()
                break
            except TimeoutError as error:
                raise PeerError(f"no answer from {path} within {self._seconds} s") from error
            except (OSError, http.client.HTTPException) as error:
                if not kept:
                    raise PeerError(f"POST {path}: {error!r}") from error
        if response.status != 200:
            raise PeerError(f"POST {path}: {response.status} {text[:500]}")
        return json.loads(text)

    def _connection(self, *, renew: bool) -> http.client.HTTPConnection:
        """The one of this thread."""
        connection: http.client.HTTPConnection | None = getattr(self._kept, "connection", None)
        if connection is None or renew:
            if connection is not None:
                connection.close()
            connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=self._seconds)
            self._kept.connection = connection
        return connection
