"""Headless Chromium, driven over a pipe by its own protocol (CDP): JSON messages, each with a zero byte after it."""

import base64
import fcntl
import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium")
_OPTIONS = "--headless --no-sandbox --disable-gpu --disable-dev-shm-usage --no-first-run --remote-debugging-pipe"


class Browser:
    """One page in a browser process. Every call waits for its answer, so a test hangs no longer than its own limit.

    Attributes:
        complaints: lines of the console, exceptions, and what was refused by the policy of the page.
    """

    def __init__(self, width: int = 1280, height: int = 900) -> None:
        assert CHROMIUM is not None, "chromium is not on PATH"
        self._profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        pipes = (*os.pipe(), *os.pipe())
        # The protocol is spoken on descriptors 3 and 4, so neither may be an end of a pipe before.
        read, self._to, self._from, write = (fcntl.fcntl(each, fcntl.F_DUPFD_CLOEXEC, 10) for each in pipes)
        for each in pipes:
            os.close(each)
        command = f'exec "$0" {_OPTIONS} --user-data-dir="$1" about:blank 3<&{read} 4>&{write}'
        self._process = subprocess.Popen(
            ["bash", "-c", command, CHROMIUM, self._profile.name],
            pass_fds=(read, write),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(read)
        os.close(write)
        self._rest = b""
        self._asked = 0
        self._session = ""
        self.complaints: list[str] = []
        pages = self.ask("Target.getTargets")["targetInfos"]
        target = next(each["targetId"] for each in pages if each["type"] == "page")
        self._session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.ask(f"{domain}.enable")
        self.resize(width, height)

    def ask(self, method: str, **params: Any) -> Any:
        """Sends a command. Returns its result."""
        self._asked += 1
        message = {"id": self._asked, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while (answer := self._receive()).get("id") != self._asked:
            self._note(answer)
        assert "error" not in answer, (method, answer["error"])
        return answer["result"]

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            data = os.read(self._from, 1 << 20)
            assert data, "the browser has ended"
            self._rest += data
        message, _, self._rest = self._rest.partition(b"\0")
        found: dict[str, Any] = json.loads(message)
        return found

    def _note(self, event: dict[str, Any]) -> None:
        params = event.get("params", {})
        match event.get("method"):
            case "Runtime.consoleAPICalled":
                self.complaints.append(" ".join(str(each.get("value")) for each in params["args"]))
            case "Runtime.exceptionThrown":
                self.complaints.append(str(params["exceptionDetails"]))
            case "Log.entryAdded":
                self.complaints.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")

    def open(self, address: str) -> None:
        self.ask("Page.navigate", url=address)

    def resize(self, width: int, height: int) -> None:
        self.ask(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )

    def prefer(self, scheme: str) -> None:
        """Prefers "dark" or "light" colours."""
        self.ask("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def value(self, expression: str) -> Any:
        """Returns the JSON value of an expression of the page, awaited."""
        answer = self.ask("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def type(self, selector: str, text: str) -> None:
        """Puts a text into a field, and sends its form."""
        field = f"document.querySelector({json.dumps(selector)})"
        self.value(f"{field}.value = {json.dumps(text)}; {field}.form.requestSubmit()")

    def press(self, key: str) -> None:
        for kind in ("keyDown", "keyUp"):
            self.ask("Input.dispatchKeyEvent", type=kind, key=key)

    def picture(self, file: Path, whole: bool = True) -> None:
        """Writes a PNG of the page."""
        clip = {"clip": self._whole()} if whole else {}
        answer = self.ask("Page.captureScreenshot", captureBeyondViewport=whole, **clip)
        file.write_bytes(base64.b64decode(answer["data"]))

    def _whole(self) -> dict[str, float]:
        size = self.ask("Page.getLayoutMetrics")["cssContentSize"]
        return {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._to)
        os.close(self._from)
        self._profile.cleanup()
