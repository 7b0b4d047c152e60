"""The parent's side of the gateway process: a private folder and a pipe, both removed at the end.

folder/lock      held by the gateway as long as it lives; a folder whose lock is free is stale
folder/clients   the socket
standard input   the gateway's lifeline: closing it, or dying, ends the gateway and its engine
"""

import atexit
import contextlib
import fcntl
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import weakref
from pathlib import Path

import msgspec

from ...lang.errors import BackendError
from ...lang.programs import PROGRAM_HOST
from ...lang.runtime_options import CLIENTS_SOCKET, LOCK_FILE, GatewayStart, RuntimeOptions
from ...lang.transport.process_life import exit_in_words, memory_kills

PREFIX = "umbel-runtime-"
MAX_FOLDER = 80  # bytes of path; a socket's whole path may have about 104
EXIT_SECONDS = 0.3  # to end by itself once its pipe is closed; then it is killed, which leaves nothing either

_OUR_FILES = re.compile(rf"{LOCK_FILE}|{CLIENTS_SOCKET}|(engine|pulse)-\d+")

_living: "weakref.WeakSet[GatewayProcess]" = weakref.WeakSet()


class GatewayProcess:
    """Starts a gateway and its engine; `close` ends both and removes the folder.

    Args:
        startup_timeout: seconds; no start of an engine may take longer.

    Raises:
        BackendError: the process or its folder could not be made.
    """

    def __init__(self, options: RuntimeOptions, startup_timeout: float) -> None:
        remove_stale_folders()
        self.owner = os.getpid()  # a forked process has this object too, but must not end it
        self.was_ready = False  # reported to a link; from then on it owes answers to every link
        self._hung: str | None = None  # why it was ended by a link
        self._ending = threading.Lock()  # links of several threads may find that it hangs
        self._memory_kills = memory_kills()
        try:
            self.folder = _private_folder()
            lock = _hold_lock(self.folder)
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-P", "-m", "umbel.srt.gateway.server"],
                    stdin=subprocess.PIPE,
                    stdout=2,  # libraries must not print into the program's output
                    pass_fds=(lock,),
                    start_new_session=True,  # Ctrl-C in the terminal is for the program
                )
            finally:
                os.close(lock)
        except OSError as error:
            raise BackendError(f"the runtime's process could not be started: {error}") from error
        _living.add(self)
        assert self._process.stdin is not None, "a pipe was asked for"
        with contextlib.suppress(BrokenPipeError):  # it died already; `exit_reason` says so
            start = GatewayStart(str(self.folder), self.owner, options, startup_timeout, PROGRAM_HOST)
            self._process.stdin.write(msgspec.json.encode(start) + b"\n")
            self._process.stdin.flush()

    @property
    def address(self) -> str:
        return f"ipc://{self.folder / CLIENTS_SOCKET}"

    @property
    def process_id(self) -> int:
        return self._process.pid

    def exit_reason(self) -> str | None:
        """Returns how the process ended, in words; None while it lives."""
        if os.getpid() != self.owner:
            return "it belongs to the process that this one was forked from"
        if self._hung is not None:
            return self._hung
        code = self._process.poll()
        return None if code is None else exit_in_words(code, self._memory_kills)

    def end_hung(self, reason: str) -> None:
        """Kills gateway, engine and their helpers, which may be stopped. The first reason counts."""
        with self._ending:
            if self.exit_reason() is None:
                self._hung = reason
                self._kill()

    def close(self) -> None:
        """Ends gateway and engine, and removes the folder. May be called again."""
        if os.getpid() != self.owner:
            return
        _living.discard(self)
        assert self._process.stdin is not None, "a pipe was asked for"
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(EXIT_SECONDS)
        except subprocess.TimeoutExpired:
            self._kill()
            self._process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)  # a session of its own: gateway and engine


def remove_stale_folders() -> None:
    """Removes folders of gateways that were killed with their parents: only ours, only with a free lock."""
    for place in {tempfile.gettempdir(), "/tmp"}:
        for folder in Path(place).glob(f"{PREFIX}*"):
            with contextlib.suppress(OSError):
                if _made_by_us(folder) and _lock_is_free(folder / LOCK_FILE):
                    shutil.rmtree(folder, ignore_errors=True)


def _made_by_us(folder: Path) -> bool:
    """Returns whether this is a real, private folder of this user with files of a gateway only."""
    state = folder.lstat()
    if not stat.S_ISDIR(state.st_mode) or state.st_uid != os.getuid() or state.st_mode & 0o077:
        return False
    return all(_OUR_FILES.fullmatch(entry.name) for entry in folder.iterdir())


def _private_folder() -> Path:
    """Makes a folder, 0700, with a random name and a path short enough for sockets in it."""
    folder = Path(tempfile.mkdtemp(prefix=PREFIX))
    if len(os.fsencode(folder)) > MAX_FOLDER:
        folder.rmdir()
        folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir="/tmp"))
    return folder


def _hold_lock(folder: Path) -> int:
    """Makes the lock file, locked before it gets its name, so no process finds it free → its descriptor."""
    unnamed = folder / f"{LOCK_FILE}.new"
    descriptor = os.open(unnamed, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    unnamed.rename(folder / LOCK_FILE)
    return descriptor


def _lock_is_free(path: Path) -> bool:
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    else:
        return True
    finally:
        os.close(descriptor)


def _close_all() -> None:
    for process in list(_living):
        process.close()


atexit.register(_close_all)
