"""A server process: started, waited for, weighed, ended with all its children."""

import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from .peer import PeerError


def free_port() -> int:
    """A port of 127.0.0.1 that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class ServerProcess:
    """Owns one child process group. The log file outlives it, for error messages and for a look afterwards."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        environment: Mapping[str, str] | None = None,
        folder: Path | None = None,
        log: Path | None = None,
    ) -> None:
        if log is None:
            descriptor, name = tempfile.mkstemp(prefix="peer-", suffix=".log")
            os.close(descriptor)
            log = Path(name)
        self.log = log
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                list(command),
                env={**os.environ, **(environment or {})},
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # one group, so that engines' worker processes can be ended with it
            )

    def wait_until(self, ready: Callable[[], bool], *, seconds: float) -> None:
        """Asks every 50 ms.

        Raises:
            PeerError: the process ended first, or the time is over (the process is ended then).
        """
        deadline = time.monotonic() + seconds
        while not ready():
            status = self._process.poll()
            if status is not None:
                raise PeerError(f"{self._process.args!r} ended with {status} before it answered:\n{self.log_tail()}")
            if time.monotonic() > deadline:
                self.stop()
                raise PeerError(f"{self._process.args!r} did not answer within {seconds} s:\n{self.log_tail()}")
            time.sleep(0.05)

    def log_tail(self, lines: int = 30) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def resident_bytes(self) -> int:
        """Resident memory of the process group; pages that two of its processes share count for both."""
        page = os.sysconf("SC_PAGE_SIZE")
        return sum(page * int((folder / "statm").read_text().split()[1]) for folder in self._members())

    def stop(self, *, grace_seconds: float = 10) -> None:
        """First asked, then killed, with everything in its group."""
        for sign in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(self._process.pid, sign)
            except ProcessLookupError:
                break
            deadline = time.monotonic() + grace_seconds
            while time.monotonic() < deadline and self._members():
                self._process.poll()  # reaps the first child, which is a zombie of ours until then
                time.sleep(0.02)
        self._process.wait()

    def _members(self) -> list[Path]:
        """/proc folders of the living processes of the group."""
        found = []
        for folder in Path("/proc").iterdir():
            if not folder.name.isdigit():
                continue
            try:
                # "pid (name) state parent group ...": the name may hold spaces and parentheses
                state, _, group = (folder / "stat").read_text().rpartition(")")[2].split()[:3]
            except (FileNotFoundError, ProcessLookupError):
                continue  # ended while we looked
            if int(group) == self._process.pid and state != "Z":
                found.append(folder)
        return found
