"""The parent's side of a worker process that may be killed: runs one job after the other.

The process is started for the first job, or before. It stays for the next job, and is killed when a job takes too much
CPU time or the process hangs; the waiting jobs then get a new process. The child's side is child.py.

    start ──▶ ready ──▶ job ──▶ answer        the child's own start counts against no job

A busy machine makes a job late, and is no reason to end it. So jobs are limited in CPU time, which the child counts and
the parent reads from the system's accounts of the child. A child that uses none although it could is stopped or hangs.
A process that was killed, stopped or did not start says nothing about its job: the job gets one more try.
"""

import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections import Counter, deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, Generic, TypeVar

import msgspec

from ...lang.transport.process_life import ProcessSample, ProcessState, read_process
from ..core.config import WorkerLimits
from ..core.environment import worker_environment
from .child import HEADER, OUT_OF_MEMORY

log = logging.getLogger("umbel.gateway")

_ASLEEP = 0.002  # of a core: share of a process that only wakes up now and then
_NEVER_PAUSED = 1 << 30  # bytes: Python before 3.13 waits for ever for a process with a paused pipe
_PIECE = 1 << 18  # bytes written at a time: the rest that the pipe does not take is copied

# Signals by which a process ends itself: a library that aborts (without memory, say), a stack that ran over.
_OWN_SIGNALS = {signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGTRAP}

Job = TypeVar("Job")
Answer = TypeVar("Answer")
Result = TypeVar("Result")


class Cause(Enum):
    """Reasons for a missing answer."""

    CPU = auto()  # the job used up its CPU time
    MEMORY = auto()  # the job used up the memory that it may take
    CRASHED = auto()  # the process ended itself, in every try
    KILLED = auto()  # another process ended it, in every try
    HUNG = auto()  # it was stopped, or slept without an answer, in every try
    NOT_STARTED = auto()  # no process came to be ready, in every try
    BUSY = auto()  # the machine gave it too little CPU time
    UNREADABLE = auto()  # a mistake of ours


_TRIED_AGAIN = {Cause.CRASHED, Cause.KILLED, Cause.HUNG, Cause.NOT_STARTED}


@dataclass(frozen=True, slots=True)
class Trouble:
    """The reason for a missing answer, with figures.

    Attributes:
        how: the signal or the exit status that ended the process, or its observed state; or "".
        cpu_seconds: CPU time that the job used.
        wall_seconds: wall time that it took for that.
    """

    cause: Cause
    how: str = ""
    cpu_seconds: float = 0.0
    wall_seconds: float = 0.0


class Watch:
    """Decides from samples of a child whether to end it.

    The time between two samples counts for two usual intervals at most: the rest was the parent's own absence.

    Args:
        look: the first sample.
        limits: the longest stop or sleep at a stretch, and the time between samples.
        cpu_seconds: CPU time that it may use from now on, its own timer's delay included.
        wall_seconds: wall time that it may take, without the time in which it waited for a core.
        may_sleep: for a child that owes no answer yet: it loads, or waits for the rest of its job.
    """

    def __init__(
        self,
        look: Callable[[], ProcessSample],
        limits: WorkerLimits,
        *,
        cpu_seconds: float,
        wall_seconds: float,
        may_sleep: bool = False,
    ) -> None:
        self._look = look
        self._limits = limits
        self._cpu_seconds = cpu_seconds
        self._wall_seconds = wall_seconds
        self.may_sleep = may_sleep
        self._begin = self._last = look().computed
        self._idle = self._worked = self._starved = 0.0

    @property
    def used(self) -> float:
        """CPU seconds until the last sample."""
        return self._last - self._begin

    @property
    def waited(self) -> float:
        """Wall seconds until the last sample."""
        return self._worked + self._starved

    def judge(self, elapsed: float) -> Trouble | None:
        """Samples the child, `elapsed` seconds after the last sample → why to end it, or None."""
        elapsed = min(elapsed, 2 * self._limits.look)
        child = self._look()
        if child.state is ProcessState.GONE:
            self._worked += elapsed
        else:
            self._count(child, elapsed)
        if self.used > self._cpu_seconds:
            return self._trouble(Cause.CPU)
        if self._idle >= self._limits.idle_seconds:
            stopped = child.state is ProcessState.STOPPED
            return self._trouble(Cause.HUNG, "it was stopped" if stopped else "it slept and gave no answer")
        if self._worked > self._wall_seconds or self._starved > self._limits.starved_seconds:
            return self._trouble(Cause.BUSY)
        return None

    def _count(self, child: ProcessSample, elapsed: float) -> None:
        progress, self._last = child.computed - self._last, max(child.computed, self._last)
        sleeps = child.state is ProcessState.ASLEEP and not self.may_sleep
        if progress > _ASLEEP * elapsed or not (sleeps or child.state is ProcessState.STOPPED):
            self._idle = 0.0
        else:
            self._idle += elapsed
        if child.state is ProcessState.RUNNABLE and 2 * progress < elapsed:
            self._starved += elapsed
        else:
            self._worked += elapsed

    def _trouble(self, cause: Cause, how: str = "") -> Trouble:
        return Trouble(cause, how, self.used, self.waited)


@dataclass(frozen=True, slots=True, eq=False)
class _Waiting(Generic[Job, Answer]):
    job: Job
    cpu_seconds: float
    answer: Callable[[Answer | Trouble | None], None]
    wanted: Callable[[], bool]


class WorkerProcess(Generic[Job, Answer]):
    """Runs jobs in a module that calls `child.run`, on one running loop.

    Args:
        module: its full name, "umbel.srt.constraints.compiler_worker".
        name: name of its subject, for counters.
        answers: the type of the child's answers; given as an object, because a union is not a class.
        after: called after each answer, to flush the messages that it led to.
        limits: limits for processes that hang.

    Attributes:
        counters: "<name>_processes" that were started, and "<name>_kills" of those that ended without an answer.
    """

    def __init__(
        self,
        module: str,
        name: str,
        answers: Any,  # Any: a union type is no `type`
        *,
        after: Callable[[], None],
        limits: WorkerLimits | None = None,
    ) -> None:
        self._module = module
        self._processes, self._kills = f"{name}_processes", f"{name}_kills"
        self._limits = limits or WorkerLimits()
        self._after = after
        self._queue: deque[_Waiting[Job, Answer]] = deque()
        self._worker: asyncio.Task[None] | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._ready = False
        self._decoder: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(answers)
        self.counters: Counter[str] = Counter({self._processes: 0, self._kills: 0})

    @property
    def process_id(self) -> int | None:
        return self._process.pid if self._process is not None else None

    @property
    def waiting(self) -> int:
        """Jobs that have not begun."""
        return len(self._queue)

    def start(self) -> None:
        """Starts the process before there is a job. After a failure the first job starts it again."""
        self._run()

    def submit(
        self,
        job: Job,
        answer: Callable[[Answer | Trouble | None], None],
        wanted: Callable[[], bool],
        *,
        cpu_seconds: float,
    ) -> None:
        """Queues a job; calls `answer` once, later.

        Args:
            wanted: called when the job would begin; where it returns False the answer is None.
            cpu_seconds: CPU time after which the child ends the job. The process is killed when it takes more.
        """
        self._queue.append(_Waiting(job, cpu_seconds, answer, wanted))
        self._run()

    def _run(self) -> None:
        if self._worker is None or self._worker.done():
            self._worker = asyncio.get_running_loop().create_task(self._work_off(), name=self._module)

    async def close(self) -> None:
        """Ends the process; waiting jobs are never answered."""
        self._queue.clear()
        if self._worker is not None:
            self._worker.cancel()
            await asyncio.gather(self._worker, return_exceptions=True)
        await self._end()

    async def _work_off(self) -> None:
        if not self._queue:
            trouble = await self._start()
            if trouble is not None:
                log.warning("%s did not start: %s", self._module, trouble.how)
        while self._queue:
            try:
                await self._serve(self._queue.popleft())
            except Exception:
                log.exception("an answer of %s could not be used", self._module)
            self._after()

    async def _serve(self, waiting: _Waiting[Job, Answer]) -> None:
        answer, seconds = waiting.answer, waiting.cpu_seconds
        asking = self._ask(msgspec.msgpack.encode(waiting.job), seconds) if waiting.wanted() else None
        del waiting  # a job may be large
        answer(None if asking is None else await asking)

    async def _ask(self, content: bytes, cpu_seconds: float) -> Answer | Trouble:
        answer = await self._try(content, cpu_seconds)
        for _ in range(self._limits.more_tries):
            if not isinstance(answer, Trouble) or answer.cause not in _TRIED_AGAIN:
                break
            log.warning("%s has not answered (%s); the job is tried again", self._module, answer.how)
            answer = await self._try(content, cpu_seconds)
        return answer

    async def _try(self, content: bytes, cpu_seconds: float) -> Answer | Trouble:
        trouble = await self._start()
        if trouble is not None:
            return trouble
        process = self._process
        assert process is not None, "it has started"
        limits = self._limits
        watch = Watch(
            lambda: read_process(process.pid),
            limits,
            cpu_seconds=cpu_seconds + limits.overtime,
            wall_seconds=limits.wall_seconds,
            may_sleep=True,
        )
        return await self._watched(self._exchange(process, content, watch), watch)

    async def _start(self) -> Trouble | None:
        """Starts a process and waits until it is ready → the trouble, or None."""
        if self._ready and self._process is not None and self._process.returncode is None:
            return None
        await self._end()
        try:
            self._process = process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-m", self._module, str(os.getpid())),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                limit=_NEVER_PAUSED,
                env=worker_environment(),
            )
        except OSError as error:
            return Trouble(Cause.NOT_STARTED, error.strerror or str(error))
        self.counters[self._processes] += 1
        limits = self._limits
        watch = Watch(
            lambda: read_process(process.pid),
            limits,
            cpu_seconds=limits.start_seconds,
            wall_seconds=limits.start_seconds,
            may_sleep=True,
        )
        answer = await self._watched(self._handshake(process), watch)
        if isinstance(answer, Trouble):
            how = answer.how or f"not ready after {answer.wall_seconds:.0f} s, {answer.cpu_seconds:.1f} s of CPU time"
            return Trouble(Cause.NOT_STARTED, how, answer.cpu_seconds, answer.wall_seconds)
        self._ready = True
        return None

    async def _watched(self, work: Coroutine[Any, Any, Result], watch: Watch) -> Result | Trouble:
        """Awaits `work` of the process while watching it → the result, or why the process ended or was ended."""
        loop = asyncio.get_running_loop()
        task, last = loop.create_task(work), loop.time()
        trouble: Trouble | None = None
        try:
            while trouble is None and not task.done():
                await asyncio.wait([task], timeout=self._limits.look)
                now = loop.time()
                if not task.done():
                    trouble = watch.judge(now - last)
                last = now
            if trouble is None:
                return task.result()
        except (OSError, asyncio.IncompleteReadError):
            trouble = await self._ending(watch)
        except msgspec.DecodeError:
            log.exception("%s gave no answer that can be read", self._module)
            trouble = Trouble(Cause.UNREADABLE)
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        self.counters[self._kills] += trouble.cause is not Cause.UNREADABLE
        await self._end()
        return trouble

    async def _handshake(self, process: asyncio.subprocess.Process) -> None:
        """Waits for the child's first frame, which is empty: it is ready."""
        assert process.stdout is not None, "it was made with a pipe"
        await process.stdout.readexactly(HEADER)

    async def _exchange(self, process: asyncio.subprocess.Process, content: bytes, watch: Watch) -> Answer:
        assert process.stdin is not None, "it was made with a pipe"
        assert process.stdout is not None, "it was made with a pipe"
        process.stdin.write(len(content).to_bytes(HEADER, "little"))
        for start in range(0, len(content), _PIECE):
            process.stdin.write(content[start : start + _PIECE])
            await process.stdin.drain()
        watch.may_sleep = False  # the child has all of its job
        length = int.from_bytes(await process.stdout.readexactly(HEADER), "little")
        return self._decoder.decode(await process.stdout.readexactly(length))

    async def _ending(self, watch: Watch) -> Trouble:
        """Returns why the process has closed its end of a pipe."""
        process = self._process
        assert process is not None, "it was watched"
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), self._limits.idle_seconds)
        cause, how = _reading(process.returncode)
        return Trouble(cause, how, watch.used, watch.waited)

    async def _end(self) -> None:
        process, self._process, self._ready = self._process, None, False
        if process is not None and process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()


def _reading(status: int | None) -> tuple[Cause, str]:
    """Interprets an exit status → the cause, and its words."""
    if status is None:
        return Cause.HUNG, "it closed its pipe and went on"
    if status == OUT_OF_MEMORY:
        return Cause.MEMORY, "it ran out of memory"
    if status >= 0:
        return Cause.CRASHED, f"it ended with exit status {status}"
    number = -status
    name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
    return (Cause.CRASHED if number in _OWN_SIGNALS else Cause.KILLED), f"it was ended by {name}"
