"""The program's end of the socket to the gateway, on one event loop, and the gateway's process.

The link tracks three things that the socket does not tell: whether the runtime is ready, whether the gateway is
alive, and whether a frame was lost. When the gateway is gone, every request in flight ends with
ConnectionLostError at once.

It samples the process of a gateway that owes an answer. One that computes or waits for a core is
alive. One that is stopped, or sleeps, hangs: the link ends it, so that the next request starts another.

The process has a private folder and a pipe, both removed at the end:

folder/lock      held by the gateway as long as it lives; a folder whose lock is free is stale
folder/clients   the socket
standard input   the gateway's lifeline: closing it, or dying, ends the gateway and its engine
"""

import asyncio
import atexit
import contextlib
import fcntl
import itertools
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
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path

import msgspec
import zmq

from ...lang.errors import WIRE_ERRORS, BackendError, ConnectionLostError, MissingExtraError, RequestError, UmbelError
from ...lang.programs import PROGRAM_HOST
from ...lang.runtime_options import CLIENTS_SOCKET, LOCK_FILE, GatewayStart, RuntimeOptions
from ...lang.transport.exchange import Exchange
from ...lang.transport.inlet import Inlet, prepare
from ...lang.transport.link import (
    FRAME_HEADER,
    MAX_FRAME,
    MOST_MESSAGES,
    Bye,
    Codec,
    FrameError,
    FromGateway,
    Hello,
    Inbound,
    Outbound,
    Ping,
    Pong,
    Progress,
    StartFailed,
    ToGateway,
    Welcome,
)
from ...lang.transport.process_life import (
    TimeSpent,
    exit_in_words,
    machine_in_words,
    memory_kills,
    read_process,
    read_session,
    read_this_thread,
    share_in_words,
)

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

PERIOD = 0.5  # seconds between two samples of a gateway that owes an answer; every other one sends a ping
EXIT_LOOKS = 3  # per period, where the system does not report a process's end
# Seconds of a gateway that owes an answer, as `TimeSpent` counts them. It is to be found within 5 s on a quiet machine.
LONGEST_STOP = 1.5
LONGEST_SILENCE = 2.5  # asleep
LONGEST_COMPUTING = 60.0
LONGEST_DISK_WAIT = 300.0

MakeError = Callable[[], UmbelError]


@cache
def _context_of(process_id: int) -> "zmq.Context[zmq.Socket[bytes]]":
    return zmq.Context()


def _context() -> "zmq.Context[zmq.Socket[bytes]]":
    """Returns the context of this process, never ended: that would wait for sockets whose loops may be gone."""
    return _context_of(os.getpid())


class Link:
    """Owns one socket to one gateway. Made on a running loop; used and closed on it.

    Args:
        show: called with the phases of the start.
    """

    def __init__(self, process: GatewayProcess, show: Callable[[str], None]) -> None:
        self.process = process
        self._show = show
        self._socket = prepare(_context().socket(zmq.DEALER), MAX_FRAME)
        self._socket.connect(process.address)
        self._loop = asyncio.get_running_loop()
        self._counters: Counter[str] = Counter()
        self._codec: Codec[ToGateway] = Codec(ToGateway)
        self._outbound: Outbound[ToGateway] = Outbound(self._codec)
        self._inbound: Inbound[FromGateway] = Inbound(Codec(FromGateway), self._counters)
        self._outbox: list[msgspec.Raw] = []  # messages of this turn of the loop
        self._outbox_bytes = 0
        self._owed = False  # an answer is due since the last ping
        self._stay = TimeSpent()  # since then
        self._phase, self._phase_since = "starting the gateway", self._loop.time()
        self._broken: MakeError | None = None
        self.exchange: Exchange | None = None  # set when the runtime is ready
        self.welcome: Welcome | None = None
        self._decided = asyncio.Event()  # ready, or broken
        self._inlet = Inlet(self._socket, self._read, self._failed)
        self._exit_descriptor = _exit_descriptor(process)
        if self._exit_descriptor is not None:
            self._loop.add_reader(self._exit_descriptor, self._look)
        self._watching = asyncio.create_task(self._watch())
        self._watching.add_done_callback(self._task_done)
        self._send(Hello())

    @property
    def broken(self) -> bool:
        return self._broken is not None

    async def ready(self) -> Exchange:
        """Waits until the runtime has made a token. Raises the error that kept it from starting."""
        await self._decided.wait()
        if self._broken is not None:
            raise self._broken()
        assert self.exchange is not None, "decided and not broken is ready"
        return self.exchange

    def start_in_words(self) -> str:
        """Returns the phase of the start and its share of the machine, in words for errors."""
        seconds = self._loop.time() - self._phase_since
        share = share_in_words(read_session(self.process.process_id))
        return f"it has been {self._phase} for {seconds:.0f} s, its processes {share}, and {machine_in_words()}"

    def break_off(self, make_error: MakeError) -> None:
        """Ends every request, present and later, with this error, and stops reading. The first error counts."""
        if self._broken is not None:
            return
        self._broken = make_error
        self._stop_listening()
        self._decided.set()
        if self.exchange is not None:
            self.exchange.fail(make_error)

    async def close(self) -> None:
        """Tells the gateway and closes. Requests in flight end with an error."""
        if not self.broken:
            self._send(Bye())
            self._flush()
        self.break_off(lambda: BackendError("the runtime was closed"))
        self._watching.cancel()
        await asyncio.gather(self._watching, return_exceptions=True)
        self._socket.close(linger=0)

    def abandon(self) -> None:
        """Frees the socket when its loop is gone."""
        if self._exit_descriptor is not None:
            os.close(self._exit_descriptor)
            self._exit_descriptor = None
        if not self._socket.closed:
            self._socket.close(linger=0)

    # ------------------------------------------------------------------ how

    def _send(self, message: ToGateway) -> None:
        """Queues a message. The messages of one turn of the loop go out as one frame, at its end.

        Raises:
            RequestError: the message is too large for a frame.
            ParameterError: it holds a string that is no text.
            ConnectionLostError: the runtime cannot be reached.
        """
        if self._broken is not None:
            raise self._broken()
        payload = self._codec.encode_one(message)
        size = len(payload) + FRAME_HEADER
        if size > self._codec.max_bytes:
            raise RequestError(
                f"the request has {len(payload)} bytes and {self._codec.max_bytes} are accepted; shorten the prompt, "
                "or make its pictures smaller"
            )
        if self._outbox_bytes + size > self._codec.max_bytes or len(self._outbox) == MOST_MESSAGES:
            self._flush()
        if not self._outbox:
            self._loop.call_soon(self._flush)
        self._outbox.append(payload)
        self._outbox_bytes += size

    def _flush(self) -> None:
        if not self._outbox or self._socket.closed:
            return
        messages, self._outbox, self._outbox_bytes = self._outbox, [], 0
        try:
            self._socket.send_multipart(self._outbound.write(messages), flags=zmq.NOBLOCK)
        except zmq.ZMQError as error:
            reason = str(error)
            self.break_off(lambda: ConnectionLostError(f"the runtime cannot be reached: {reason}"))
        else:
            self._inlet.look()

    def _read(self, frames: list[list[bytes]]) -> None:
        self._owed = False
        self._stay.begin()
        for pair in frames:
            try:
                messages = self._inbound.read(pair)
            except FrameError as error:
                self._unreadable(str(error))
                return
            if self._counters["lost"]:  # it is unknown whose answers the frames held
                self.break_off(lambda: ConnectionLostError("messages of the runtime were lost; run again"))
            for message in messages:
                self._hear(message)

    def _hear(self, message: FromGateway) -> None:
        match message:
            case Pong():
                pass
            case Progress(phase):
                if phase != self._phase:
                    self._phase, self._phase_since = phase, self._loop.time()
                self._show(phase)
            case Welcome():
                self.process.was_ready = True
                self.welcome = message
                self.exchange = Exchange(
                    self._send,
                    window=message.max_queue,
                    programs=message.max_programs,
                    longest=message.request_timeout,
                )
                self._decided.set()
            case StartFailed(kind, text):
                self.break_off(lambda: _start_error(kind, text))
            case _ if self.exchange is not None:
                self.exchange.deliver(message)
            case _:
                pass  # it belongs to no request: none is sent before the welcome

    async def _watch(self) -> None:
        """Sends pings, and samples the process of a gateway that owes an answer."""
        looks = 1 if self._exit_descriptor is not None else EXIT_LOOKS
        for turn in itertools.count():
            self._inlet.look()  # this program may have been stopped itself, and the answer be there
            await asyncio.sleep(0)  # it is read first
            if self._owed:
                self._examine()
            elif turn % 2 == 1 and not self.broken:
                self._owed = True
                self._send(Ping())
                self._inlet.look()
            for _ in range(looks):
                self._look()
                if self.broken:
                    return
                await asyncio.sleep(PERIOD / looks)

    def _examine(self) -> None:
        self._stay.look(self._loop.time(), read_process(self.process.process_id), read_this_thread())
        reason = self._trouble(self._stay)
        if reason is not None:
            self.process.end_hung(f"{reason}; {machine_in_words()}")
            self._look()

    def _trouble(self, stay: TimeSpent) -> str | None:
        """Returns why the gateway hangs, or None. A starting one may be silent: imports hold the interpreter lock."""
        if stay.stopped > LONGEST_STOP:
            return f"its process was stopped for {stay.stopped:.1f} s (SIGSTOP, or a debugger)"
        if not self.process.was_ready:
            return None
        if stay.idle > LONGEST_SILENCE:
            return f"it has not answered for {stay.idle:.1f} s, in which it neither computed nor waited for a core"
        if stay.computed > LONGEST_COMPUTING:
            return f"it has computed for {stay.computed:.0f} s without an answer"
        if stay.on_disk > LONGEST_DISK_WAIT:
            return f"it has waited for a disk for {stay.on_disk:.0f} s without an answer"
        return None

    def _look(self) -> None:
        reason = self.process.exit_reason()
        if reason is not None:
            self._gone(reason)

    def _unreadable(self, reason: str) -> None:
        self.break_off(lambda: ConnectionLostError(f"the runtime said something unreadable: {reason}"))

    def _stop_listening(self) -> None:
        self._inlet.close()
        if self._exit_descriptor is not None:
            self._loop.remove_reader(self._exit_descriptor)
            os.close(self._exit_descriptor)
            self._exit_descriptor = None

    def _task_done(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._failed(error)

    def _failed(self, error: BaseException) -> None:
        """Breaks the link after an error of reading or watching: no request would be answered any more."""
        reason = f"{type(error).__name__}: {error}"
        self.break_off(lambda: ConnectionLostError(f"the link to the runtime failed: {reason}"))

    def _gone(self, reason: str) -> None:
        when = "while it started" if self.welcome is None else "while requests were running"
        self.break_off(lambda: ConnectionLostError(f"the runtime's gateway is gone {when}: {reason}; run it again"))


def _exit_descriptor(process: GatewayProcess) -> int | None:
    """Returns a descriptor that becomes readable at the process's end; None where that is not supported."""
    if process.owner != os.getpid() or not hasattr(os, "pidfd_open"):
        return None
    try:
        return os.pidfd_open(process.process_id)
    except OSError:
        return None


def _start_error(kind: str, message: str) -> UmbelError:
    if kind == MissingExtraError.__name__:
        error = MissingExtraError.__new__(MissingExtraError, message)  # its message is made already
        return error
    return WIRE_ERRORS.get(kind, BackendError)(message)
