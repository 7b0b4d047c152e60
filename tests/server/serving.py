"""`umbel serve` as a process of its own, on a free port."""

import json
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Mapping
from typing import Any

PATIENCE = 120.0  # seconds until a condition that must come counts as missing
KEY, ADMIN_KEY = "sk-team", "sk-admin"
_PROGRAM = "import sys; from umbel.interpreter.cli import main; sys.exit(main(sys.argv[1:]))"


def until(condition: Callable[[], Any], what: str) -> Any:
    """Waits until a condition is true. Returns what it gave."""
    deadline = time.monotonic() + PATIENCE
    while not (found := condition()):
        assert time.monotonic() < deadline, what
        time.sleep(0.01)
    return found


class Serving:
    """A server process.

    Args:
        options: of `umbel serve`. The key "team" and the admin key are set.

    Attributes:
        address: "http://127.0.0.1:PORT"; known once the process listens, before the model is loaded.
    """

    def __init__(self, *options: str) -> None:
        # A file, since a pipe that is not read would stop the server; and appended to, since its place is shared.
        self._log = tempfile.TemporaryFile("a+")  # noqa: SIM115 - closed by `end`
        keys = ("--api-key", f"team={KEY}", "--admin-key", ADMIN_KEY)
        command = [sys.executable, "-c", _PROGRAM, "serve", "--port", "0", *keys, *options]
        self.process = subprocess.Popen(command, stderr=self._log, stdin=subprocess.DEVNULL)
        try:
            self.address: str = until(lambda: self.said(r"listening on (http://[\d.]+:\d+)"), "it does not listen")
        except BaseException:
            self.end()
            raise

    @property
    def log(self) -> str:
        """All lines that the server has logged."""
        self._log.seek(0)
        return self._log.read()

    def said(self, pattern: str) -> str:
        """Returns the first group of a pattern in the log, or "". Fails when the process has ended without it."""
        ended = self.process.poll()
        found = re.search(pattern, self.log)
        assert found is not None or ended is None, f"the server ended with {ended}:\n{self.log}"
        return "" if found is None else found[1]

    def ready(self) -> "Serving":
        """Waits until requests are served."""
        until(lambda: self.said("(ready): "), "the server is not ready")
        return self

    def ask(self, path: str, body: Any = None, headers: Mapping[str, str] | None = None) -> Any:
        """Sends a request on a connection of its own. Returns the JSON of its answer."""
        data = None if body is None else json.dumps(body).encode()
        all_headers = {"authorization": f"Bearer {KEY}", "content-type": "application/json", **(headers or {})}
        request = urllib.request.Request(self.address + path, data, all_headers)
        with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
            return json.loads(answer.read())

    def attempt(self, path: str, body: Any = None) -> Any:
        """Asks as `ask` does. Returns None while nothing listens, or nothing is served yet."""
        try:
            return self.ask(path, body)
        except OSError:
            return None

    def end(self) -> None:
        """Kills the process; its runtime ends with it."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self._log.close()
