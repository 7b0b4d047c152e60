"""The gateway's end of the process that compiles constraints (constraint_worker.py).

It is started when there is something to compile, stays for the next, and is killed when a constraint takes too long.
Whoever waited for that one is told; those behind it get a new process and notice nothing.
"""

import asyncio
import contextlib
import logging
import os
import sys
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from ..lang.errors import BackendError, ConstraintError, OverloadedError
from ..lang.protocol import ConstraintEngine, ConstraintSpec
from .config import CompilerLimits, compiler_environment
from .constraint_compiler import Answer, Compiled, Refused
from .constraint_worker import HEADER, CompileJob, frame

log = logging.getLogger("umbel.gateway")


@dataclass(frozen=True, slots=True, eq=False)
class _Waiting:
    job: CompileJob
    answer: Callable[[Answer | None], None]
    wanted: Callable[[], bool]


class CompilerProcess:
    """A `ConstraintCompiler` on one running loop.

    Args:
        after: is called when an answer has been given, so that what it led to is sent.
    """

    def __init__(self, limits: CompilerLimits, after: Callable[[], None]) -> None:
        self._limits = limits
        self._after = after
        self._queue: deque[_Waiting] = deque()
        self._worker: asyncio.Task[None] | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._decoder: msgspec.msgpack.Decoder[Compiled | Refused] = msgspec.msgpack.Decoder(Compiled | Refused)
        self.counters: Counter[str] = Counter({"constraint_processes": 0, "constraint_kills": 0})

    @property
    def process_id(self) -> int | None:
        return self._process.pid if self._process is not None else None

    def compile(
        self,
        spec: ConstraintSpec,
        engine: ConstraintEngine,
        answer: Callable[[Answer | None], None],
        wanted: Callable[[], bool],
    ) -> None:
        if len(self._queue) >= self._limits.most_waiting:
            raise OverloadedError(
                f"{self._limits.most_waiting} constraints wait to be compiled; try again when some have been"
            )
        self._queue.append(_Waiting(CompileJob(spec, engine), answer, wanted))
        if self._worker is None or self._worker.done():
            self._worker = asyncio.get_running_loop().create_task(self._work_off(), name="constraints")

    async def close(self) -> None:
        """Ends the process; what waits is never answered."""
        self._queue.clear()
        if self._worker is not None:
            self._worker.cancel()
            await asyncio.gather(self._worker, return_exceptions=True)
        await self._end()

    async def _work_off(self) -> None:
        while self._queue:
            waiting = self._queue.popleft()
            try:
                waiting.answer(await self._ask(waiting.job) if waiting.wanted() else None)
            except Exception:
                log.exception("an answer of the constraint compiler could not be used")
            self._after()

    async def _ask(self, job: CompileJob) -> Answer:
        try:
            async with asyncio.timeout(self._limits.wall_seconds):
                process = await self._started()
                assert process.stdin is not None, "it was made with a pipe"
                assert process.stdout is not None, "it was made with a pipe"
                process.stdin.write(frame(msgspec.msgpack.encode(job)))
                await process.stdin.drain()
                length = int.from_bytes(await process.stdout.readexactly(HEADER), "little")
                return self._decoder.decode(await process.stdout.readexactly(length))
        except TimeoutError:
            self.counters["constraint_kills"] += 1
            await self._end()
            return ConstraintError(
                f"the constraint was not compiled within {self._limits.wall_seconds:g} s; write a smaller one"
            )
        except (OSError, asyncio.IncompleteReadError):
            self.counters["constraint_kills"] += 1
            await self._end()
            return ConstraintError(
                f"compiling the constraint took more than {self._limits.memory >> 20} MiB of memory, or ended the "
                "process that did it; write a smaller one"
            )
        except msgspec.DecodeError:
            log.exception("the constraint compiler gave no answer that can be read")
            await self._end()
            return BackendError("internal error while compiling the constraint; see the log")

    async def _started(self) -> asyncio.subprocess.Process:
        if self._process is None or self._process.returncode is not None:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-m", "umbel.srt.constraint_worker", str(os.getpid())),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                env=compiler_environment(),
            )
            self.counters["constraint_processes"] += 1
        return self._process

    async def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None and process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
