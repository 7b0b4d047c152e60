"""Watches the runtime under a server: logs its work once a second, keeps readings, starts it again when it is gone.

    prefill: 1 request, 7 new tokens, 1 cached; pool 3 % · decode: 4 running, 121 tok/s

The line is the difference of two readings of the runtime's status, so it says how much was done and nothing of what.

Requests over HTTP are counted here too, over all processes of a server. A worker of `--http-workers` counts in memory
that all workers share, in a row that no other one writes, so each of them can tell the sums, and no lock is needed:

    worker 1   in_flight   refused   disconnects   malformed   started
    worker 2   in_flight   refused   disconnects   malformed   started

A worker that replaces another one goes on with its row. A server of one process has one row. `started` is 1 as soon as
the worker has answered for the model, by which the parent tells a worker that ended from one that never began.
"""

import asyncio
import logging
import mmap
import os
import tempfile
from collections import deque
from typing import IO, TYPE_CHECKING, Protocol

import msgspec

from ..lang.errors import UmbelError
from ..lang.status import EngineState, Observable, RuntimeState, RuntimeStatus
from .limits import READINGS

if TYPE_CHECKING:
    from .front import Front

log = logging.getLogger("umbel.server")

PERIOD = 1.0  # seconds between two readings


class Reading(msgspec.Struct, frozen=True):
    """The gauges of a runtime at one moment, and its counts of tokens since its start.

    Attributes:
        at: seconds on a clock of this machine, when the engine counted.
        running, waiting: requests in the engine.
        total, free, cached, pinned: slots of the KV pool.
        prompt_tokens: of requests that were admitted: `cached_tokens` were found, `computed_tokens` computed.
        generated_tokens: of all requests.
    """

    at: float
    running: int
    waiting: int
    total: int
    free: int
    cached: int
    pinned: int
    prompt_tokens: int
    cached_tokens: int
    computed_tokens: int
    generated_tokens: int

    @classmethod
    def of(cls, status: RuntimeStatus, now: float) -> "Reading":
        """Takes what the live page shows out of a status that was read at `now`."""
        pool, counted = status.pool, status.counters
        return cls(
            at=now - (status.heartbeat_age or 0.0),
            running=status.running,
            waiting=status.waiting,
            total=pool.total,
            free=pool.free,
            cached=pool.cached,
            pinned=pool.pinned,
            prompt_tokens=int(counted.get("prompt_tokens", 0)),
            cached_tokens=int(counted.get("cached_tokens", 0)),
            computed_tokens=int(counted.get("computed_prompt_tokens", 0)),
            generated_tokens=int(counted.get("completion_tokens", 0)),
        )


class Activity:
    """Describes the work of the engine between two readings of its status.

    Attributes:
        tokens_per_second: that were generated between the last two.
        readings: of the last minutes, oldest first.
    """

    def __init__(self) -> None:
        self._before: RuntimeStatus | None = None
        self._at = 0.0  # when the engine counted what `_before` says
        self.tokens_per_second = 0.0
        self.readings: deque[Reading] = deque(maxlen=READINGS)

    def line(self, status: RuntimeStatus, now: float) -> str:
        """Takes a reading → the line for a person; "" for the first one, and where nothing was done since the last.

        Args:
            now: seconds on a clock that is the same at each call.
        """
        at = now - (status.heartbeat_age or 0.0)
        before, seconds = self._before, at - self._at
        if before is None or seconds > 0:
            self._before, self._at = status, at
            if status.engine is EngineState.READY:  # without one all gauges are 0
                self.readings.append(Reading.of(status, now))
        if before is None or seconds <= 0:
            return ""

        def new(counter: str) -> int:
            more = int(status.counters.get(counter, 0) - before.counters.get(counter, 0))
            return max(0, more)  # another engine counts anew

        generated, computed, cached = new("completion_tokens"), new("computed_prompt_tokens"), new("cached_tokens")
        self.tokens_per_second = generated / seconds
        if not (generated or computed or cached):
            return ""
        total = status.pool.total  # 0 where the engine is gone
        parts = [f"pool {100 * (total - status.pool.free) / total:.0f} %"] if total else []
        if computed or cached:
            requests = new("queue_seconds_count")
            count = f"{requests} request{'s' if requests > 1 else ''}, " if requests else ""  # 0 for scores and hints
            prefill = f"prefill: {count}{computed} new token{'s' if computed != 1 else ''}, {cached} cached"
            parts = ["; ".join([prefill, *parts])]
        if status.running or generated:
            waiting = f", {status.waiting} waiting" if status.waiting else ""
            parts.append(f"decode: {status.running} running{waiting}, {self.tokens_per_second:.0f} tok/s")
        return " · ".join(parts)


class Watched(Observable, Protocol):
    """A backend that tells its state, and can be started again."""

    async def start(self) -> None: ...


async def read_status(backend: object) -> RuntimeStatus | None:
    """Reads the status of a backend; None where it is not ready, or has none."""
    if not isinstance(backend, Observable):
        return None
    try:
        return await backend.status()
    except UmbelError:  # it is gone or starts again: `health` has the reason
        return None


async def keep(backend: Watched, activity: Activity) -> None:
    """Logs what the engine does, and starts a runtime again that is gone. Runs until it is cancelled.

    Without it a runtime that broke would come back with the next request only, which a load balancer that looks at
    `/health` would never send.
    """
    clock = asyncio.get_running_loop().time
    state = RuntimeState.READY
    while True:
        health = backend.health()
        if health.state is not state:
            state = health.state
            log.warning("the runtime is %s%s", state.value, f": {health.cause}" if health.cause else "")
        if state is RuntimeState.BROKEN:
            try:
                await backend.start()
            except UmbelError as error:
                log.error("the runtime could not be started again: %s", error)
        elif (status := await read_status(backend)) is not None:
            line = activity.line(status, clock())
            if line:
                log.info("%s", line)
        await asyncio.sleep(PERIOD)


# --------------------------------------------------------------------------------------- requests over HTTP

COLUMNS = ("in_flight", "refused", "disconnects", "malformed", "started")
_BYTES = 8  # of a count


class Counts:
    """The counts of all processes of a server.

    Args:
        workers: how many processes there are.
        descriptor: of the file that `open_shared` made; None for counts of this process alone.
        row: that of this process.
    """

    def __init__(self, workers: int = 1, descriptor: int | None = None, row: int = 0) -> None:
        size = _size(workers)
        memory = mmap.mmap(-1, size) if descriptor is None else mmap.mmap(descriptor, size)
        self._cells = memoryview(memory).cast("q")
        self.own = self._cells[row * len(COLUMNS) : (row + 1) * len(COLUMNS)]
        for name in ("in_flight", "started"):  # of the worker that it replaces
            self.own[COLUMNS.index(name)] = 0

    def total(self, name: str) -> int:
        """Returns the sum over all processes."""
        return sum(self._cells[COLUMNS.index(name) :: len(COLUMNS)])


class Counted:
    """An attribute of a front: the count of this process under the attribute's name."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._column = COLUMNS.index(name)

    def __get__(self, front: "Front", owner: type | None = None) -> int:
        return front.counts.own[self._column]

    def __set__(self, front: "Front", value: int) -> None:
        front.counts.own[self._column] = value


def open_shared(workers: int) -> IO[bytes]:
    """Makes the file, without a name, in which the workers count. Its descriptor goes to each of them."""
    file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 - closed by its owner
    os.ftruncate(file.fileno(), _size(workers))
    return file


def _size(workers: int) -> int:
    return workers * len(COLUMNS) * _BYTES
