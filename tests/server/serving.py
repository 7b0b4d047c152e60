"""A server process with keys, and plain requests to it."""

import json
import urllib.request
from collections.abc import Mapping
from typing import Any

from ..serving import PATIENCE, ServerProcess, until

KEY, ADMIN_KEY = "sk-team", "sk-admin"


class Serving(ServerProcess):
    """A server process with the key "team" and the admin key.

    Args:
        options: of `umbel serve`.
    """

    def __init__(self, *options: str) -> None:
        super().__init__("--api-key", f"team={KEY}", "--admin-key", ADMIN_KEY, *options)

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
