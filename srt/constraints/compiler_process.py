"""The gateway's end of the processes that compile constraints (compiler_worker).

quick   every constraint begins here, with a fraction of a second: enough for real ones
slow    longer ones begin anew here, so that they delay each other only; started for the first of them
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import assert_never

from ...lang.errors import BackendError, ConstraintError, OverloadedError
from ...lang.protocol import ConstraintEngine, ConstraintSpec
from ..core.config import CompilerLimits, WorkerLimits
from ..processes.worker import Cause, Trouble, WorkerProcess
from .compiler import Answer, Compiled, Refused
from .compiler_worker import CompileJob

_QUICK_OVERTIME = 0.1  # seconds of CPU time: a job that is ended too early just begins anew

_Given = Compiled | Refused | Trouble | None


class CompilerProcess:
    """Compiles constraints in two processes, as a `ConstraintCompiler` on one running loop.

    Args:
        after: called after each answer, to flush the messages that it led to.
        worker_limits: limits for processes that hang.
    """

    def __init__(
        self, limits: CompilerLimits, after: Callable[[], None], worker_limits: WorkerLimits | None = None
    ) -> None:
        self._limits = limits
        patience = worker_limits or WorkerLimits()
        self._quick = _worker(after, replace(patience, overtime=min(patience.overtime, _QUICK_OVERTIME)))
        self._slow = _worker(after, patience)

    @property
    def counters(self) -> Counter[str]:
        """Counters of both processes."""
        found = Counter(self._quick.counters)
        found.update(self._slow.counters)
        return found

    @property
    def process_ids(self) -> list[int]:
        """Ids of the running processes, the quick one first."""
        found = (self._quick.process_id, self._slow.process_id)
        return [process_id for process_id in found if process_id is not None]

    def start(self) -> None:
        """Starts the quick process before the first constraint comes."""
        self._quick.start()

    def compile(
        self,
        spec: ConstraintSpec,
        engine: ConstraintEngine,
        answer: Callable[[Answer | None], None],
        wanted: Callable[[], bool],
    ) -> None:
        if self._quick.waiting + self._slow.waiting >= self._limits.most_waiting:
            raise OverloadedError(
                f"{self._limits.most_waiting} constraints wait to be compiled; try again when some have been"
            )
        quick = CompileJob(spec, engine, min(self._limits.quick_seconds, self._limits.cpu_seconds))
        slow = CompileJob(spec, engine, self._limits.cpu_seconds)

        def hear_slow(given: _Given) -> None:
            answer(explained(given, self._limits) if isinstance(given, Trouble) else given)

        def hear_quick(given: _Given) -> None:
            if _took_long(given) and quick != slow:
                self._slow.submit(slow, hear_slow, wanted, cpu_seconds=slow.seconds)
            else:
                hear_slow(given)

        self._quick.submit(quick, hear_quick, wanted, cpu_seconds=quick.seconds)

    async def close(self) -> None:
        """Ends the processes; waiting jobs are never answered."""
        await self._quick.close()
        await self._slow.close()


def _worker(after: Callable[[], None], limits: WorkerLimits) -> WorkerProcess[CompileJob, Compiled | Refused]:
    return WorkerProcess(
        "umbel.srt.constraints.compiler_worker", "constraint", Compiled | Refused, after=after, limits=limits
    )


def _took_long(given: _Given) -> bool:
    """Returns whether a job ran out of time, and might finish with more."""
    match given:
        case Refused(lasting=lasting):
            return not lasting
        case Trouble(cause=cause):
            return cause is Cause.CPU
        case _:
            return False


def explained(trouble: Trouble, limits: CompilerLimits) -> ConstraintError | BackendError:
    """Makes the error for a failed job. It blames the constraint only for exceeding its CPU time or memory."""
    not_its_fault = "the constraint is not the cause; send the request again"
    match trouble.cause:
        case Cause.CPU:
            return ConstraintError(
                f"the constraint is too large: compiling it took {trouble.cpu_seconds:.1f} s of CPU time and was not "
                f"finished, {limits.cpu_seconds:g} s are allowed; write a smaller one"
            )
        case Cause.MEMORY:
            return ConstraintError(
                f"the constraint is too large: compiling it took the {limits.memory >> 20} MiB of memory that are "
                "allowed and wanted more; write a smaller one"
            )
        case Cause.CRASHED:
            return ConstraintError(
                f"compiling the constraint ended the process that did it, in every try ({trouble.how}): a library that "
                f"reads it has most likely run out of the {limits.memory >> 20} MiB or of the depth that are allowed; "
                "write a smaller or flatter one"
            )
        case Cause.KILLED:
            return BackendError(
                f"the process that compiles constraints was killed from outside, in every try ({trouble.how}; the "
                f"system does so when memory runs out); {not_its_fault}"
            )
        case Cause.HUNG:
            return BackendError(
                f"the process that compiles constraints gave no sign of work, in every try ({trouble.how}); "
                f"{not_its_fault}"
            )
        case Cause.NOT_STARTED:
            return BackendError(
                f"no process could be started to compile the constraint ({trouble.how}); the log has more; "
                f"{not_its_fault}"
            )
        case Cause.BUSY:
            return OverloadedError(
                f"the machine is busy: compiling the constraint got {trouble.cpu_seconds:.1f} s of CPU time in "
                f"{trouble.wall_seconds:.0f} s; {not_its_fault} when it has less to do"
            )
        case Cause.UNREADABLE:
            return BackendError("internal error while compiling the constraint; see the log")
        case _:
            assert_never(trouble.cause)
