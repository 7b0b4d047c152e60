"""The parent's side of chat templates that come from elsewhere: one child for each process, made when it is needed.

Templates come with downloaded models, and Jinja's sandbox keeps them from files but not from loops of ten thousand
million steps or texts of four gigabytes. The child (child.py) runs them within limits and may be killed;
whatever happens to it is a TemplateError. Calls wait for the child, so event loops make them in a thread.
"""

import atexit
import contextlib
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from functools import cache
from typing import IO, Any

import msgspec

from ..chat_template import TemplateUnanswered
from ..errors import TemplateError
from .child import CPU_SECONDS, HEADER, OUT_OF_CPU, Answer, Job

# A child that uses its CPU time ends by itself, however long that takes on a busy machine. This is for one that was
# stopped by a signal, say.
SILENCE_SECONDS = 300.0
REST_SECONDS = 5.0  # for a process whose pipe is closed to be gone
_MOST_BYTES_OF_A_CHARACTER = 4
_POLLS = hasattr(select, "poll")  # not on Windows: pipes block there, and no signal stops a child
_OUT_OF_CPU = {OUT_OF_CPU, *(-number for number in signal.Signals if number.name == "SIGXCPU")}  # statuses
_POLLOUT, _POLLIN = getattr(select, "POLLOUT", 0), getattr(select, "POLLIN", 0)
_PASSED_ON = ("PYTHON", "LD_", "DYLD_", "LC_", "LANG", "TZ", "PATH", "VIRTUAL_ENV", "TMPDIR", "HOME", "SYSTEMROOT")


class TemplateLimit(TemplateError):
    """A template took more time or memory than it may."""


def render_elsewhere(source: str, variables: Mapping[str, Any] | None, most: int) -> str:
    """Compile a template in this process's child, and render it unless `variables` is None. Blocks.

    Args:
        variables: plain data; text, numbers, lists and dictionaries.
        most: characters of the text.

    Raises:
        TemplateError: and nothing else; the message is the reason. TemplateLimit where it took too much,
            TemplateUnanswered where the child does not start, or ended twice without an answer.
    """
    return child_of(os.getpid()).ask(encoded(source, variables, most), most)


def encoded(source: str, variables: Mapping[str, Any] | None, most: int) -> bytes:
    """A job for the child. Raises TemplateError where the variables are no plain data."""
    try:
        return msgspec.msgpack.encode(Job(source, None if variables is None else dict(variables), most))
    except (TypeError, ValueError, RecursionError, OverflowError) as error:  # half a surrogate pair among them
        raise TemplateError(
            f"what the template is given is no plain data ({str(error)[:200]}); give text, numbers, lists and "
            "dictionaries"
        ) from None


@cache
def child_of(process_id: int) -> "TemplateChild":
    """By process: one that was forked must not read its parent's answers."""
    return TemplateChild()


class TemplateChild:
    """A child process that renders, for any number of threads; started with the first job, and again when it ended.

    Args:
        cpu_seconds: of one job.

    Attributes:
        started: processes so far.
    """

    def __init__(self, cpu_seconds: float = CPU_SECONDS) -> None:
        self.started = 0
        self._cpu_seconds = cpu_seconds
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def ask(self, content: bytes, most: int) -> str:
        """The answer to one encoded job. Raises TemplateError."""
        with self._lock:
            try:
                answer = self._ask(content, most)
            except _NoAnswer:  # it may have been killed for something else: once more, with a new one
                try:
                    answer = self._ask(content, most)
                except _NoAnswer as error:
                    raise TemplateUnanswered(f"{error}; try again") from None
        if answer.last:
            raise TemplateLimit(answer.reason)
        if answer.reason is not None:
            raise TemplateError(answer.reason)
        return answer.text

    def close(self) -> None:
        """End the process, if there is one."""
        with self._lock:
            self._end()

    @property
    def process_id(self) -> int | None:
        process = self._process
        return None if process is None else process.pid

    def _ask(self, content: bytes, most: int) -> Answer:
        process = self._running()
        assert process.stdin is not None, "it was made with a pipe"
        assert process.stdout is not None, "it was made with a pipe"
        end = time.monotonic() + SILENCE_SECONDS
        try:
            _write(process.stdin, len(content).to_bytes(HEADER, "little") + content, end)
            length = int.from_bytes(_read(process.stdout, HEADER, end), "little")
            if length > most * _MOST_BYTES_OF_A_CHARACTER + 8192:
                raise TemplateLimit(f"it writes more than {most} characters")
            answer = msgspec.msgpack.decode(_read(process.stdout, length, end), type=Answer)
        except (OSError, EOFError, msgspec.DecodeError) as error:
            status = self._end(patience=0.0 if isinstance(error, TimeoutError) else REST_SECONDS)
            if status in _OUT_OF_CPU:
                raise TemplateLimit(f"it takes more than {self._cpu_seconds:g} s of CPU time") from None
            raise _NoAnswer(f"the process that renders it ended (status {status}, {error})") from error
        except BaseException:  # an answer that no call reads must not be taken for the next one's
            self._end()
            raise
        if answer.last:
            self._end()
        return answer

    def _running(self) -> "subprocess.Popen[bytes]":
        if self._process is None:
            try:
                self._process = self._start()
            except OSError as error:  # no descriptors, memory or processes are left
                raise _NoAnswer(f"the process that renders it does not start ({error})") from error
            self.started += 1
            atexit.register(self.close)
        return self._process

    def _start(self) -> "subprocess.Popen[bytes]":
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", f"{__package__}.child", str(self._cpu_seconds)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=_environment(),
            process_group=0,  # not told of Ctrl-C
        )
        assert process.stdin is not None, "it was made with a pipe"
        if _POLLS:
            os.set_blocking(process.stdin.fileno(), False)  # a job is longer than a pipe, and the child may be stopped
        return process

    def _end(self, patience: float = 0.0) -> int | None:
        """Ends the process → its status, if it ended by itself within so many seconds."""
        process, self._process = self._process, None
        if process is None:
            return None
        atexit.unregister(self.close)
        assert process.stdin is not None, "it was made with a pipe"
        assert process.stdout is not None, "it was made with a pipe"
        status = process.poll()
        with contextlib.suppress(OSError):  # what was not written yet
            process.stdin.close()  # a child that waits for a job ends now
        with contextlib.suppress(subprocess.TimeoutExpired):
            status = process.wait(patience)
        process.kill()
        process.stdout.close()
        process.wait()
        return status


def _environment() -> dict[str, str]:
    """Keeps what Python needs, and no secrets. The child finds umbel and Jinja where its parent found them."""
    passed_on = {name: value for name, value in os.environ.items() if name.startswith(_PASSED_ON)}
    return {**passed_on, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


class _NoAnswer(Exception):
    """The child is gone; the message says what is known."""


def _write(pipe: IO[bytes], content: bytes, end: float) -> None:
    """Raises TimeoutError when the pipe, which does not block, takes nothing more until `end` on the monotonic clock,
    and OSError when it is closed."""
    left = memoryview(content)
    while left:
        _wait(pipe, _POLLOUT, end)
        left = left[os.write(pipe.fileno(), left) :]


def _read(pipe: IO[bytes], count: int, end: float) -> bytes:
    """Raises EOFError when the pipe ends before, TimeoutError at `end`."""
    pieces, missing = list[bytes](), count
    while missing:
        _wait(pipe, _POLLIN, end)
        piece = os.read(pipe.fileno(), min(missing, 1 << 20))
        if not piece:
            raise EOFError("its pipe is closed")
        pieces.append(piece)
        missing -= len(piece)
    return b"".join(pieces)


def _wait(pipe: IO[bytes], for_what: int, end: float) -> None:
    if not _POLLS:
        return
    poll = select.poll()
    poll.register(pipe.fileno(), for_what)
    if not poll.poll(max(0.0, end - time.monotonic()) * 1000):
        raise TimeoutError(f"no answer for {SILENCE_SECONDS:.0f} s")
