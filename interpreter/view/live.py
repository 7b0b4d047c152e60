"""Serves the page of a growing file on this machine alone: `umbel view --live run.jsonl`.

    browser ── GET /TOKEN/ ──────────► the page, with live.js
            ── GET /TOKEN/N ─────────► the lines of the file from byte N on, as far as they are complete

An answer with lines names the batch in its header `View`, a digest of the first line: a batch may begin the file anew,
and the page then reads from byte 0 on.

The address has a random token, and the host has to be the one that it names: neither another user of the machine nor a
page of another site reads prompts here.
"""

import contextlib
import hashlib
import os
import secrets
import webbrowser
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from pathlib import Path
from typing import Any

from ...lang import checks
from ...lang.errors import ParameterError, shown
from .data import BATCH_BEGINNING
from .page import RunRecord

MOST_SENT = 4 * 2**20  # bytes of an answer

_POLICY = "img-src data:"


class LiveServer(ThreadingHTTPServer):
    """Serves one file on a loopback port. A context manager; `serve_forever()` serves.

    Args:
        path: of the file, which need not be there yet.
        port: 0 takes any that is free.

    Raises:
        ParameterError: a port that is none, or is taken.
    """

    daemon_threads = True

    def __init__(self, path: str | os.PathLike[str], port: int = 0) -> None:
        self.path = Path(path)
        self.token = secrets.token_urlsafe(16)
        checks.integer("--port", port, 0, 65535)
        try:
            super().__init__(("127.0.0.1", port), _Handler)
        except OSError as error:
            raise ParameterError(f"port {port} cannot be listened on: {error.strerror}; write --port 0") from None
        self.host = f"127.0.0.1:{self.server_address[1]}"
        self.url = f"http://{self.host}/{self.token}/"

    def page(self) -> str:
        script = (files(__package__) / "live.js").read_text(encoding="utf-8")
        page = RunRecord("").page().replace(_POLICY, f"{_POLICY}; connect-src 'self'", 1)
        return page.replace("</body>", f"<script>\n{script}</script>\n</body>")

    def lines(self, start: int) -> tuple[bytes, str]:
        """Returns the complete lines from this byte on (of a line that is longer than MOST_SENT all) and the digest of
        the file's first line; "" for no digest where the file is not there or has become shorter."""
        try:
            with open(self.path, "rb") as file:
                file.seek(start)
                data = file.read(MOST_SENT)
                if data and b"\n" not in data:
                    data += file.readline()
                if start > file.seek(0, os.SEEK_END):
                    return b"", ""
                file.seek(0)
                first = file.readline()  # after the lines: if a batch begins in between, the digest is not theirs
        except FileNotFoundError:
            return b"", ""
        return data[: data.rfind(b"\n") + 1], hashlib.sha256(first).hexdigest()[:32]


class _Handler(BaseHTTPRequestHandler):
    server: LiveServer
    server_version, sys_version = "umbel", ""

    def do_GET(self) -> None:
        """Answers with the page or with lines."""
        begin, token, rest = [*self.path.split("/", 2), "", ""][:3]
        known = secrets.compare_digest(token.encode(), self.server.token.encode())
        if begin or not known or self.headers.get("Host") != self.server.host:
            self._answer(404, b"not found\n", "text/plain")
        elif not rest:
            self._answer(200, self.server.page().encode(), "text/html; charset=utf-8")
        elif rest.isascii() and rest.isdigit() and len(rest) < 18:
            data, view = self.server.lines(int(rest))
            self._answer(200, data, "application/jsonl", view)
        else:
            self._answer(404, b"not found\n", "text/plain")

    def _answer(self, status: int, body: bytes, kind: str, view: str = "") -> None:
        with contextlib.suppress(ConnectionError):  # the page was closed
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            if view:
                self.send_header("View", view)
            self.send_header("Cache-Control", "no-store")
            self.send_header("Referrer-Policy", "no-referrer")
            self.send_header("X-Content-Type-Options", "nosniff")
            self.end_headers()
            self.wfile.write(body)

    def log_message(self, format: str, *arguments: Any) -> None:
        """Logs nothing: the terminal is the user's."""


def follow(path: str, port: int, *, opens: bool) -> int:
    """Serves the page of a file until Ctrl-C, which is no failure: returns 0. `opens`: in a browser."""
    _check(path)
    with LiveServer(path, port) as server:
        print(f"{server.url} follows {path}; Ctrl-C ends it", flush=True)
        if opens:
            webbrowser.open(server.url)
        with contextlib.suppress(KeyboardInterrupt):
            server.serve_forever()
    return 0


def _check(path: str) -> None:
    """Raises ParameterError for a path that no batch can have as its view. The file need not be there yet."""
    file = Path(checks.path("path", path))
    folder = file.resolve().parent
    if not folder.is_dir():
        raise ParameterError(f"{shown(path)}: there is no folder {folder}; write the path that view= has")
    if file.exists() and not file.is_file():
        raise ParameterError(f"{shown(path)} is a folder or a device; write the path that view= has")
    try:
        with open(file, "rb") as opened:
            beginning = opened.read(len(BATCH_BEGINNING))
    except FileNotFoundError:
        return
    except OSError as error:
        raise ParameterError(f"{shown(path)} cannot be read: {error.strerror}") from None
    if beginning and beginning != BATCH_BEGINNING.encode():
        raise ParameterError(
            f"{shown(path)} is not the view of a batch; write the path that run_batch(..., view=FILE) has. "
            "A saved run is opened without --live"
        )
