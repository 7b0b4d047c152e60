"""`umbel serve --http-workers N`: several processes that serve one listening socket, on one runtime.

    parent       binds the socket, owns the runtime and shares it, starts the workers and replaces those that end
    worker 1…N   joins the runtime, and accepts connections of the same socket

HTTP costs CPU time of its own, and one process has one interpreter lock. All workers share the gateway, so the prefix
cache is one, and the salts are made with one secret. A worker ends with its parent (`lang/transport/lifeline.py`).
What a front keeps for itself, such as the names of requests that may be aborted, would be known to one worker only: it
refuses that (`Front.check_alone`).
"""

import asyncio
import contextlib
import ipaddress
import logging
import shutil
import signal
import socket
import sys

import msgspec

from ..interpreter.backends.runtime import Runtime
from ..lang.errors import BackendError, UmbelError
from .activity import COLUMNS, Activity, Counts, keep, open_shared
from .limits import HttpLimits
from .program_store import open_folder

log = logging.getLogger("umbel.server")
MOST_WORKERS = 64
MOST_FAILED_STARTS = 3  # of a worker, one after the other; then the server ends
LAST_SECONDS = 5.0  # a worker that runs so long after the drain, or after the second signal, is killed


class WorkerStart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The first line that a worker reads on its standard input, as JSON; the pipe then is its lifeline.

    Attributes:
        parent: process id.
        runtime: address of the shared runtime.
        listening: descriptor of the bound socket, which the worker inherits.
        workers: how many there are.
        secret: of the salts.
        alias: what the command line calls the model.
        record: the file to which all of them append.
        ignored: patterns of lines that are dropped.
        limits: of one worker.
        counts: descriptor of the file in which all of them count, which the worker inherits.
        row: of this worker in it.
        kept: the folder in which they keep programs for each other.
    """

    parent: int
    runtime: str
    listening: int
    workers: int
    secret: bytes
    keys: dict[str, str]
    admin_key: str | None
    hosts: tuple[str, ...]
    names: tuple[str, ...]
    alias: str
    programs: tuple[str, ...]
    record: str | None
    ignored: tuple[str, ...]
    limits: HttpLimits
    counts: int = -1
    row: int = 0
    kept: str = ""


def share_of(limits: HttpLimits, workers: int) -> HttpLimits:
    """Returns the limits of one of several workers, which together let in as many requests as one would."""
    return msgspec.structs.replace(limits, most_in_flight=-(-limits.most_in_flight // workers))


def address_of(listening: socket.socket) -> str:
    """Returns the URL of a bound socket."""
    host, port = listening.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def on_loopback(listening: socket.socket) -> bool:
    """Returns whether only programs on this machine reach a bound socket."""
    return ipaddress.ip_address(listening.getsockname()[0]).is_loopback


class Ending:
    """Ends the runtime of a server, which may save pages of its cache for some seconds first."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._hurried = False
        self._closing: asyncio.Task[None] | None = None

    def hurry(self) -> None:
        """Saves nothing more: the user has asked for the end a second time."""
        self._hurried = True
        if self._closing is not None:
            self._closing.cancel()

    async def run(self) -> None:
        """Ends the runtime."""
        if self._hurried:
            await self._runtime.end_at_once()
            return
        self._closing = asyncio.create_task(self._runtime.close())
        with contextlib.suppress(asyncio.CancelledError):
            await self._closing


class Workers:
    """Runs the workers of a server until a signal ends it.

    Args:
        runtime: owned by this process; closed at the end.
        listening: bound; this process accepts nothing itself.
        start: of every worker, but for the address of the runtime.
    """

    def __init__(self, runtime: Runtime, listening: socket.socket, start: WorkerStart) -> None:
        self._runtime = runtime
        self._listening = listening
        self._counts = open_shared(start.workers)
        self._kept = open_folder(start.workers)
        self._start = msgspec.structs.replace(start, counts=self._counts.fileno(), kept=str(self._kept))
        self._processes: dict[int, asyncio.subprocess.Process] = {}
        self._ending = asyncio.Event()
        self._runtime_end = Ending(runtime)
        self.failed: UmbelError | None = None

    def run(self) -> int:
        """Blocks until all workers have ended. Returns the exit status."""
        asyncio.run(self._serve())
        if self.failed is not None:
            raise self.failed
        return 0

    def end(self) -> None:
        """Has every worker drain; a second call has them end at once."""
        seconds = LAST_SECONDS
        if not self._ending.is_set():
            drain = self._start.limits.drain
            log.info("stopping: requests in flight have %g s to end; Ctrl-C again ends at once", drain)
            seconds += drain
        else:
            self._runtime_end.hurry()
        self._ending.set()
        for process in self._processes.values():
            process.terminate()
        asyncio.get_running_loop().call_later(seconds, self._kill)

    def _kill(self) -> None:
        """Kills the workers that are left: they hang."""
        for number, process in self._processes.items():
            log.warning("worker %d does not end, and is killed", number)
            process.kill()

    async def _serve(self) -> None:
        loop = asyncio.get_running_loop()
        for each in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(each, self.end)
        log.info("listening on %s; loading the model ...", address_of(self._listening))
        starting = loop.create_task(self._start_runtime())
        try:
            self._start = msgspec.structs.replace(self._start, runtime=self._runtime.share())
            await asyncio.gather(*(self._keep(number) for number in range(1, self._start.workers + 1)))
        finally:
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)
            await self._runtime_end.run()
            shutil.rmtree(self._kept, ignore_errors=True)

    async def _start_runtime(self) -> None:
        try:
            await self._runtime.start()
        except UmbelError as error:
            self._fail(error)
        else:
            log.info("ready: %d processes on %s", self._start.workers, address_of(self._listening))
            if self._runtime.listens_on:
                log.info("programs on other machines join at %s", self._runtime.listens_on)
            await keep(self._runtime, Activity())

    async def _keep(self, number: int) -> None:
        """Starts a worker, and another one when it ends, until the server ends."""
        failures = 0
        while not self._ending.is_set():
            counts = Counts(self._start.workers, self._counts.fileno(), number - 1)
            process = self._processes[number] = await self._open(number)
            if self._ending.is_set():  # since the process was asked for
                process.terminate()
            status = await process.wait()
            del self._processes[number]
            failures = 0 if counts.own[COLUMNS.index("started")] else failures + 1
            if self._ending.is_set():
                return
            log.error("worker %d has ended with status %d", number, status)
            if failures == MOST_FAILED_STARTS:
                self._fail(BackendError(f"worker {number} ended {failures} times while it started; see the log"))

    async def _open(self, number: int) -> asyncio.subprocess.Process:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-P",
            "-m",
            "umbel.server.worker",
            stdin=asyncio.subprocess.PIPE,
            pass_fds=(self._listening.fileno(), self._counts.fileno()),
            start_new_session=True,  # Ctrl-C in the terminal is for this process, which tells the workers
        )
        assert process.stdin is not None, "a pipe was asked for"
        start = msgspec.structs.replace(self._start, row=number - 1)
        process.stdin.write(msgspec.json.encode(start) + b"\n")
        return process

    def _fail(self, error: UmbelError) -> None:
        """Ends the server with an error, the first one."""
        if self.failed is None and not self._ending.is_set():
            self.failed = error
            self.end()
