"""The gateway's end of the process that compiles constraints (constraint_worker.py)."""

from collections import Counter
from collections.abc import Callable
from typing import assert_never

from ..lang.errors import BackendError, ConstraintError, OverloadedError
from ..lang.protocol import ConstraintEngine, ConstraintSpec
from .config import CompilerLimits, WorkerLimits
from .constraint_compiler import Answer, Compiled, Refused
from .constraint_worker import CompileJob
from .worker_process import Cause, Trouble, WorkerProcess


class CompilerProcess:
    """A `ConstraintCompiler` on one running loop.

    Args:
        after: is called when an answer has been given, so that what it led to is sent.
        worker_limits: of a process that hangs.
    """

    def __init__(
        self, limits: CompilerLimits, after: Callable[[], None], worker_limits: WorkerLimits | None = None
    ) -> None:
        self._limits = limits
        self._worker: WorkerProcess[CompileJob, Compiled | Refused] = WorkerProcess(
            "constraint_worker", "constraint", Compiled | Refused, after=after, limits=worker_limits
        )
        self.counters: Counter[str] = self._worker.counters

    @property
    def process_id(self) -> int | None:
        return self._worker.process_id

    def start(self) -> None:
        """Starts the process before the first constraint comes."""
        self._worker.start()

    def compile(
        self,
        spec: ConstraintSpec,
        engine: ConstraintEngine,
        answer: Callable[[Answer | None], None],
        wanted: Callable[[], bool],
    ) -> None:
        if self._worker.waiting >= self._limits.most_waiting:
            raise OverloadedError(
                f"{self._limits.most_waiting} constraints wait to be compiled; try again when some have been"
            )
        self._worker.submit(
            CompileJob(spec, engine),
            lambda given: answer(explained(given, self._limits) if isinstance(given, Trouble) else given),
            wanted,
            cpu_seconds=self._limits.cpu_seconds,
        )

    async def close(self) -> None:
        """Ends the process; what waits is never answered."""
        await self._worker.close()


def explained(trouble: Trouble, limits: CompilerLimits) -> ConstraintError | BackendError:
    """The constraint is blamed for what it has used up, and for nothing else."""
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
