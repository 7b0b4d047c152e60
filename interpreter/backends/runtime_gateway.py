"""Gateways as a link sees them: the process that a runtime starts, and one that another process owns.

    GatewayHandle                what a link asks of its gateway
    ├── LocalGateway             a process on this machine: the system says how it spends its time
    │   ├── GatewayProcess       started and ended by this process
    │   └── JoinedGateway        of another process of this user, which shares it (`SharedFolder`)
    └── RemoteGateway            on another machine (runtime_remote.py)

A gateway that this process starts has a private folder and a pipe, both removed at the end:

folder/lock      held by the gateway as long as it lives, with its process id; a folder whose lock is free is stale
folder/clients   the socket
standard input   the gateway's lifeline: closing it, or dying, ends the gateway and its engine

An owner that shares its runtime has a second folder, whose path stays the same when the gateway is replaced:

shared/lock      held by the owner
shared/gateway   a link to the folder of the gateway that runs now
"""

import asyncio
import atexit
import contextlib
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
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Protocol

import msgspec
import zmq

from ...lang.errors import BackendError, ConnectionLostError, ParameterError, shown
from ...lang.programs import PROGRAM_HOST
from ...lang.runtime_options import CLIENTS_SOCKET, LOCK_FILE, SAVE_SECONDS, GatewayStart, RuntimeOptions
from ...lang.transport.file_lock import lock_file
from ...lang.transport.keys import Listen
from ...lang.transport.lifeline import END_LINE
from ...lang.transport.process_life import (
    ProcessSample,
    TimeSpent,
    exit_in_words,
    memory_kills,
    read_process,
    read_session,
    share_in_words,
)

PREFIX = "umbel-runtime-"
MAX_FOLDER = 80  # bytes of path; a socket's whole path may have about 104
SAVED_SECONDS = SAVE_SECONDS + 2.0  # for a gateway whose engines save their caches; then it is ended
EXIT_SECONDS = 0.3  # to end by itself once its pipe is closed; then it is killed, which leaves nothing either
LINK_TO_GATEWAY = "gateway"  # in a shared folder
IPC = "ipc://"

# Seconds of a gateway that owes an answer, as `TimeSpent` counts them. It is to be found within 5 s on a quiet machine.
LONGEST_STOP = 1.5
LONGEST_SILENCE = 2.5  # asleep
LONGEST_COMPUTING = 60.0
LONGEST_DISK_WAIT = 300.0

REPLACEMENT_SECONDS = 5.0  # an owner that lives replaces its gateway in less
REPLACEMENT_LOOK = 0.05  # seconds

_OUR_FILES = re.compile(rf"{LOCK_FILE}|{CLIENTS_SOCKET}|{LINK_TO_GATEWAY}|(engine|pulse|ranks)-\d+")


class GatewayHandle(Protocol):
    """Reaches a gateway, and tells links how it is. Shared by the links of several threads."""

    was_ready: bool  # reported to a link; from then on it owes answers to every link

    def attach(self, socket: "zmq.Socket[bytes]") -> None:
        """Connects a new socket to the gateway."""

    def exit_descriptor(self) -> int | None:
        """Opens a descriptor that becomes readable at the gateway's end; None where there is none."""

    def exit_reason(self) -> str | None:
        """Returns why the gateway cannot be used any more, in words; None while it can."""

    def sample(self) -> ProcessSample:
        """Returns how the gateway's process spends its time."""

    def trouble(self, stay: TimeSpent) -> str | None:
        """Returns why a gateway that owes an answer hangs, or None. `stay`: its time since the answer is due."""

    def start_in_words(self) -> str:
        """Describes the share of the machine that a start has had, for errors."""

    def end_hung(self, reason: str) -> None:
        """Gives the gateway up, and ends it if it is ours. The first reason counts."""

    def close(self) -> None:
        """Ends what belongs to this process. May be called again."""


class LocalGateway(ABC):
    """A gateway on this machine: one that computes or waits for a core is alive, one that stops or sleeps hangs."""

    def __init__(self) -> None:
        self.owner = os.getpid()  # of this object; a forked process has it too, but must not use it
        self.was_ready = False
        self._hung: str | None = None  # why it was given up by a link

    @property
    @abstractmethod
    def address(self) -> str: ...

    @property
    @abstractmethod
    def process_id(self) -> int: ...

    @abstractmethod
    def exit_reason(self) -> str | None: ...

    @abstractmethod
    def end_hung(self, reason: str) -> None: ...

    @abstractmethod
    def close(self) -> None: ...

    def attach(self, socket: "zmq.Socket[bytes]") -> None:
        socket.connect(self.address)

    def exit_descriptor(self) -> int | None:
        if self.owner != os.getpid() or not hasattr(os, "pidfd_open"):
            return None
        try:
            return os.pidfd_open(self.process_id)
        except OSError:
            return None

    def sample(self) -> ProcessSample:
        return read_process(self.process_id)

    def trouble(self, stay: TimeSpent) -> str | None:
        """A starting gateway may be silent: imports hold the interpreter lock."""
        if stay.stopped > LONGEST_STOP:
            return f"its process was stopped for {stay.stopped:.1f} s (SIGSTOP, or a debugger)"
        if not self.was_ready:
            return None
        if stay.idle > LONGEST_SILENCE:
            return f"it has not answered for {stay.idle:.1f} s, in which it neither computed nor waited for a core"
        if stay.computed > LONGEST_COMPUTING:
            return f"it has computed for {stay.computed:.0f} s without an answer"
        if stay.on_disk > LONGEST_DISK_WAIT:
            return f"it has waited for a disk for {stay.on_disk:.0f} s without an answer"
        return None

    def start_in_words(self) -> str:
        return f"its processes {share_in_words(read_session(self.process_id))}"


class _Closable(Protocol):
    def close(self) -> None: ...


_living: "weakref.WeakSet[_Closable]" = weakref.WeakSet()


class GatewayProcess(LocalGateway):
    """Starts a gateway and its engine; `close` ends both and removes the folder.

    Args:
        startup_timeout: seconds; no start of an engine may take longer.
        listen: on a TCP port, too.

    Raises:
        BackendError: the process or its folder could not be made.
    """

    def __init__(self, options: RuntimeOptions, startup_timeout: float, listen: Listen | None = None) -> None:
        if not hasattr(os, "killpg"):
            raise BackendError(
                "a Runtime needs Linux or macOS; on Windows run the program in WSL, or use a runtime on another "
                'machine: ul.Runtime(address="tcp://HOST:PORT", key=...)'
            )
        remove_stale_folders()
        super().__init__()
        self._saves = options.disk_cache is not None or options.shared_cache is not None
        self._ending = threading.Lock()  # links of several threads may find that it hangs
        self._memory_kills = memory_kills()
        try:
            self.folder = _private_folder()
            lock = _hold_lock(self.folder)
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-P", "-m", "umbel.srt.gateway"],
                    stdin=subprocess.PIPE,
                    stdout=2,  # libraries must not print into the program's output
                    pass_fds=(lock,),
                    start_new_session=True,  # Ctrl-C in the terminal is for the program
                )
                os.pwrite(lock, str(self._process.pid).encode(), 0)
            finally:
                os.close(lock)
        except OSError as error:
            raise BackendError(f"the runtime's process could not be started: {error}") from error
        _living.add(self)
        assert self._process.stdin is not None, "a pipe was asked for"
        with contextlib.suppress(BrokenPipeError):  # it died already; `exit_reason` says so
            start = GatewayStart(str(self.folder), self.owner, options, startup_timeout, PROGRAM_HOST, listen)
            self._process.stdin.write(msgspec.json.encode(start) + b"\n")
            self._process.stdin.flush()

    @property
    def address(self) -> str:
        return f"{IPC}{self.folder / CLIENTS_SOCKET}"

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
        """Ends gateway and engine, and removes the folder. May be called again.

        Engines with a tier of the cache that outlives them have SAVE_SECONDS to save pages. A KeyboardInterrupt
        meanwhile, or `end_at_once` from another thread, ends them at once.
        """
        if os.getpid() == self.owner and self._saves and self in _living and self.was_ready:
            assert self._process.stdin is not None, "a pipe was asked for"
            try:
                with contextlib.suppress(OSError, ValueError, subprocess.TimeoutExpired):  # it has ended, or hangs
                    self._process.stdin.write(END_LINE)
                    self._process.stdin.flush()
                    self._process.wait(SAVED_SECONDS)
            finally:
                self.end_at_once()
            return
        self.end_at_once()

    def end_at_once(self) -> None:
        """As `close`, without time for saving pages."""
        if os.getpid() != self.owner:
            return
        _living.discard(self)
        assert self._process.stdin is not None, "a pipe was asked for"
        with contextlib.suppress(OSError, ValueError):
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


class JoinedGateway(LocalGateway):
    """A gateway that another process of this user owns. Nothing here starts or ends it.

    Args:
        shared: the owner's shared folder.

    Raises:
        OSError: the link in it leads to no folder of a living gateway.
    """

    def __init__(self, shared: Path) -> None:
        super().__init__()
        self._shared = shared
        # Resolved once: through the link a socket would connect itself to the next gateway without a word.
        self._folder = (shared / LINK_TO_GATEWAY).resolve(strict=True)
        if not _made_by_us(self._folder):
            raise PermissionError(f"{self._folder} is not a private folder of this user with files of a gateway only")
        if _lock_is_free(self._folder / LOCK_FILE):
            raise ProcessLookupError(f"the gateway of {self._folder} has ended")
        self._process_id = _noted_process(self._folder)

    @property
    def address(self) -> str:
        return f"{IPC}{self._folder / CLIENTS_SOCKET}"

    @property
    def process_id(self) -> int:
        return self._process_id

    def exit_reason(self) -> str | None:
        if os.getpid() != self.owner:
            return "it was joined by the process that this one was forked from"
        if self._hung is not None:
            return self._hung
        try:
            ended = _lock_is_free(self._folder / LOCK_FILE)
        except OSError:  # the folder is removed
            ended = True
        return f"the owner of {IPC}{self._shared} has ended it or lost it" if ended else None

    def end_hung(self, reason: str) -> None:
        """Gives it up for this process. Its owner's link finds the same, and ends it."""
        self._hung = self._hung or f"{reason}; only the owner of {IPC}{self._shared} can end it and start another"

    def close(self) -> None:
        """Does nothing: it is not ours."""


class NoGatewayError(ConnectionLostError):
    """No gateway is at an address, and it was waited for: to ask once more is in vain."""


async def join(shared: Path) -> JoinedGateway:
    """Finds the gateway of a shared folder. Waits some seconds for one that the owner replaces.

    Raises:
        BackendError: nothing is shared at this path.
        NoGatewayError: the owner has ended, or has not replaced its gateway in time.
    """
    address = f"{IPC}{shared}"
    clock = asyncio.get_running_loop().time
    until = clock() + REPLACEMENT_SECONDS
    while True:
        try:
            ended = _lock_is_free(shared / LOCK_FILE)
        except OSError:
            raise BackendError(
                f"no runtime is shared at {address}; its owner writes address = runtime.share(), and passes the address"
            ) from None
        if ended:
            raise NoGatewayError(
                f"the process that shared its runtime at {address} has ended; start it again, and share it anew"
            )
        try:
            return JoinedGateway(shared)
        except PermissionError as error:
            raise BackendError(f"{address} cannot be joined: {error}") from None
        except (OSError, ValueError) as error:
            if clock() >= until:
                raise NoGatewayError(
                    f"the gateway at {address} has ended, and its owner has started no other: {error}; "
                    "restart the owner, or let it send a request"
                ) from None
        await asyncio.sleep(REPLACEMENT_LOOK)


class SharedFolder:
    """Owns a folder through which other processes of this user find the gateway that runs now.

    Args:
        path: where it is made; None takes a private folder with a random name.

    Raises:
        ParameterError: the path is taken, too long for a socket, or cannot be made.
    """

    def __init__(self, path: Path | None) -> None:
        self._owner = os.getpid()
        try:
            self.path = _private_folder() if path is None else _own_folder(path)
            self._lock = _hold_lock(self.path)
        except OSError as error:
            raise ParameterError(f"share(): no folder can be made at {shown(str(path))}: {error}") from None
        _living.add(self)

    @property
    def address(self) -> str:
        return f"{IPC}{self.path}"

    def lead_to(self, gateway: GatewayProcess) -> None:
        """Leads joining processes to this gateway, at once and whole: no process finds the path without a link."""
        link = self.path / f"{LINK_TO_GATEWAY}.new"
        link.unlink(missing_ok=True)
        link.symlink_to(gateway.folder)
        link.rename(self.path / LINK_TO_GATEWAY)

    def close(self) -> None:
        """Removes the folder. May be called again."""
        if os.getpid() != self._owner or self not in _living:
            return
        _living.discard(self)
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


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


def _own_folder(path: Path) -> Path:
    """Makes a folder, 0700, at a path; takes one over that a killed owner has left."""
    path = path.absolute()
    with contextlib.suppress(FileNotFoundError):
        if not _made_by_us(path) or not _lock_is_free(path / LOCK_FILE):
            raise ParameterError(f"share(): {shown(str(path))} is taken; write a path at which nothing is")
        shutil.rmtree(path)
    path.mkdir(mode=0o700)
    return path


def _hold_lock(folder: Path) -> int:
    """Makes the lock file, locked before it gets its name, so no process finds it free → its descriptor."""
    unnamed = folder / f"{LOCK_FILE}.new"
    descriptor = os.open(unnamed, os.O_RDWR | os.O_CREAT, 0o600)
    if not lock_file(descriptor):
        raise OSError(f"{unnamed} cannot be locked")
    unnamed.rename(folder / LOCK_FILE)
    return descriptor


def _lock_is_free(path: Path) -> bool:
    """Looks whether a lock is held. The look itself is a shared lock, so that two looks do not meet each other."""
    descriptor = os.open(path, os.O_RDWR)
    try:
        return lock_file(descriptor, shared=True)
    finally:
        os.close(descriptor)


def _noted_process(folder: Path) -> int:
    """Reads the process id that stands in a gateway's lock file. Raises ValueError when it is not there yet."""
    return int((folder / LOCK_FILE).read_text(encoding="ascii"))


def _close_all() -> None:
    for each in list(_living):
        each.close()


atexit.register(_close_all)
