"""The parent's side of work in a process that may be killed: one job after the other.

It is started when there is something to do, stays for the next job, and is killed when a job takes too long. Whoever
waited for that one is told; those behind it get a new process and notice nothing. The child's side is worker_child.py.
"""

import asyncio
import contextlib
import logging
import os
import sys
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, Generic, TypeVar

import msgspec

from .config import worker_environment
from .worker_child import HEADER

log = logging.getLogger("umbel.gateway")

_PIECE = 1 << 18  # bytes written at a time: what the pipe does not take is copied

Job = TypeVar("Job")
Answer = TypeVar("Answer")


class Trouble(Enum):
    """Why there is no answer."""

    LATE = auto()  # it was killed, because it took too long
    DIED = auto()  # it ended by itself: memory, most likely
    UNREADABLE = auto()  # our mistake


@dataclass(frozen=True, slots=True, eq=False)
class _Waiting(Generic[Job, Answer]):
    job: Job
    answer: Callable[[Answer | Trouble | None], None]
    wanted: Callable[[], bool]


class WorkerProcess(Generic[Job, Answer]):
    """Jobs for a module that calls `worker_child.run`, on one running loop.

    Args:
        module: of this package, by its name in it.
        name: of what it works on, for counters.
        answers: the type of what the child answers; given as an object, because a union is not a class.
        wall_seconds: of one job; then the process is killed, whatever it does.
        after: is called when an answer has been given, so that what it led to is sent.

    Attributes:
        counters: "<name>_processes" that were started, and "<name>_kills": those that ended before they had answered.
    """

    def __init__(
        self,
        module: str,
        name: str,
        answers: Any,  # Any: a union type is no `type`
        *,
        wall_seconds: float,
        after: Callable[[], None],
    ) -> None:
        self._module = module
        self._processes, self._kills = f"{name}_processes", f"{name}_kills"
        self._wall_seconds = wall_seconds
        self._after = after
        self._queue: deque[_Waiting[Job, Answer]] = deque()
        self._worker: asyncio.Task[None] | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._decoder: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(answers)
        self.counters: Counter[str] = Counter({self._processes: 0, self._kills: 0})

    @property
    def process_id(self) -> int | None:
        return self._process.pid if self._process is not None else None

    @property
    def waiting(self) -> int:
        """Jobs that have not begun."""
        return len(self._queue)

    def submit(self, job: Job, answer: Callable[[Answer | Trouble | None], None], wanted: Callable[[], bool]) -> None:
        """Calls `answer` once, later.

        Args:
            wanted: asked when the job would begin; without it the answer is None.
        """
        self._queue.append(_Waiting(job, answer, wanted))
        if self._worker is None or self._worker.done():
            self._worker = asyncio.get_running_loop().create_task(self._work_off(), name=self._module)

    async def close(self) -> None:
        """Ends the process; what waits is never answered."""
        self._queue.clear()
        if self._worker is not None:
            self._worker.cancel()
            await asyncio.gather(self._worker, return_exceptions=True)
        await self._end()

    async def _work_off(self) -> None:
        while self._queue:
            try:
                await self._serve(self._queue.popleft())
            except Exception:
                log.exception("an answer of %s could not be used", self._module)
            self._after()

    async def _serve(self, waiting: _Waiting[Job, Answer]) -> None:
        answer = waiting.answer
        asking = self._ask(msgspec.msgpack.encode(waiting.job)) if waiting.wanted() else None
        del waiting  # a job may be large: it goes when the child has it
        answer(None if asking is None else await asking)

    async def _ask(self, content: bytes) -> Answer | Trouble:
        try:
            async with asyncio.timeout(self._wall_seconds):
                process = await self._started()
                assert process.stdin is not None, "it was made with a pipe"
                assert process.stdout is not None, "it was made with a pipe"
                process.stdin.write(len(content).to_bytes(HEADER, "little"))
                for start in range(0, len(content), _PIECE):
                    process.stdin.write(content[start : start + _PIECE])
                    await process.stdin.drain()
                del content
                length = int.from_bytes(await process.stdout.readexactly(HEADER), "little")
                return self._decoder.decode(await process.stdout.readexactly(length))
        except TimeoutError:
            self.counters[self._kills] += 1
            await self._end()
            return Trouble.LATE
        except (OSError, asyncio.IncompleteReadError):
            self.counters[self._kills] += 1
            await self._end()
            return Trouble.DIED
        except msgspec.DecodeError:
            log.exception("%s gave no answer that can be read", self._module)
            await self._end()
            return Trouble.UNREADABLE

    async def _started(self) -> asyncio.subprocess.Process:
        if self._process is None or self._process.returncode is not None:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-m", f"{__package__}.{self._module}", str(os.getpid())),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                env=worker_environment(),
            )
            self.counters[self._processes] += 1
        return self._process

    async def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None and process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
