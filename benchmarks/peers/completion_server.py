"""An HTTP front for an engine that its package ships without a server.

Runs under the peer's interpreter, with the standard library only. One thread a connection: it parses a request, hands
it to the engine and blocks until the engine has an answer.
"""

import json
from collections.abc import Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Protocol

Request = Mapping[str, Any]  # Any: JSON; the fields are the arguments of `Peer.generate` and `Peer.score`


class Engine(Protocol):
    """Both verbs are called from many threads at once."""

    def generate(self, request: Request) -> str: ...

    def score(self, request: Request) -> int: ...


def serve(engine: Engine, port: int) -> None:
    """`/generate` and `/score` on 127.0.0.1, until the process is ended."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"  # connections are kept
        disable_nagle_algorithm = True  # else a kept connection waits 40 ms for an acknowledgement

        def do_GET(self) -> None:
            self._answer(200, {"ready": True})

        def do_POST(self) -> None:
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            try:
                match self.path:
                    case "/generate":
                        self._answer(200, {"text": engine.generate(request)})
                    case "/score":
                        self._answer(200, {"best": engine.score(request)})
                    case _:
                        self._answer(404, {"error": f"no {self.path} here"})
            except Exception as error:  # this request's; the server goes on
                self._answer(500, {"error": repr(error)})

        def _answer(self, status: int, body: Mapping[str, Any]) -> None:
            content = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *arguments: object) -> None:
            """No line a request: the log is for the engine's messages."""

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        request_queue_size = 128

    Server(("127.0.0.1", port), Handler).serve_forever()


def cut_at_stop(text: str, stop: list[str]) -> str:
    """The text before the earliest stop string in it."""
    return text[: min((place for place in map(text.find, stop) if place >= 0), default=len(text))]


def shared_length(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens two sequences have in common from the start."""
    for place, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return place
    return min(len(one), len(other))
