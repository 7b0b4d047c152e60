"""`umbel serve` as a process of its own, on a free port; tests of clients and stress tests add their ways to ask."""

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

PATIENCE = 120.0  # seconds until what must come counts as missing, on a machine that does something else
_PROGRAM = "import sys; from umbel.interpreter.cli import main; sys.exit(main(sys.argv[1:]))"


def until(condition: Callable[[], Any], what: str, patience: float = PATIENCE) -> Any:
    """Waits until a condition is true. Returns what it gave."""
    deadline = time.monotonic() + patience
    while not (found := condition()):
        assert time.monotonic() < deadline, what
        time.sleep(0.01)
    return found


class ServerProcess:
    """A server process.

    Args:
        options: of the command.
        command: that serves.
        listens: what its log says of the address.
        patience: seconds until it has to listen.

    Attributes:
        host, port, address: known once the process listens; of `umbel serve`, before the model is loaded.
    """

    def __init__(
        self,
        *options: str,
        command: str = "serve",
        listens: str = r"listening on (http://[\d.]+:\d+)",
        patience: float = PATIENCE,
    ) -> None:
        # A file, since a pipe that is not read would stop the server.
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `end`
        arguments = [sys.executable, "-c", _PROGRAM, command, "--port", "0", *options]
        self.process = subprocess.Popen(arguments, stdout=self._log, stderr=self._log, stdin=subprocess.DEVNULL)
        try:
            self.address: str = until(lambda: self.said(listens), "it does not listen", patience)
        except BaseException:
            self.end()
            raise
        self.host, _, port = self.address.removeprefix("http://").partition(":")
        self.port = int(port)

    @property
    def log(self) -> str:
        """All lines that the server has logged."""
        file = self._log.fileno()
        return os.pread(file, os.fstat(file).st_size, 0).decode()  # seeking would move the place of the server's writes

    def said(self, pattern: str) -> str:
        """Returns the first group of a pattern in the log, or "". Fails when the process has ended without it."""
        ended = self.process.poll()
        found = re.search(pattern, self.log)
        assert found is not None or ended is None, f"the server ended with {ended}:\n{self.log}"
        return "" if found is None else found[1]

    def end(self) -> None:
        """Kills the process; its runtime ends with it."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self._log.close()
