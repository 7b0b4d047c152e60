"""One engine process, as its parent sees it: the start, its first line, the end.

A process is started before it has anything to do: it loads its modules, which takes a quarter of a second, and then
reads the line that tells it what to run.
"""

import contextlib
import subprocess
import sys

from ...lang.transport.process_life import exit_in_words, memory_kills
from ..core.environment import engine_environment


class EngineProcess:
    """Starts an engine process. Make it on the main thread: Linux ends the process with the thread that started it.

    Raises:
        OSError: no process can be made.
    """

    def __init__(self) -> None:
        self._memory_kills = memory_kills()
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "umbel.srt.engine.process"],
            stdin=subprocess.PIPE,
            env=engine_environment(),
            stdout=2,  # libraries must not print into the program's output
        )

    @property
    def process_id(self) -> int:
        return self._process.pid

    def tell(self, line: bytes) -> None:
        """Writes its first line. One that has ended already reads nothing: `wait` says so."""
        assert self._process.stdin is not None, "a pipe was asked for"
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(line + b"\n")
            self._process.stdin.flush()

    def wait(self) -> str:
        """Blocks until it has ended → the reason, in words."""
        return exit_in_words(self._process.wait(), self._memory_kills)

    def kill(self) -> None:
        """Ends it, if it has not ended by itself."""
        self._process.kill()

    def close(self) -> None:
        """Closes the pipe, which ends the process if it runs."""
        assert self._process.stdin is not None, "a pipe was asked for"
        with contextlib.suppress(OSError):
            self._process.stdin.close()
