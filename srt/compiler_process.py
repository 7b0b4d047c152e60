"""The gateway's end of the process that compiles constraints (constraint_worker.py)."""

from collections import Counter
from collections.abc import Callable

from ..lang.errors import BackendError, ConstraintError, OverloadedError
from ..lang.protocol import ConstraintEngine, ConstraintSpec
from .config import CompilerLimits
from .constraint_compiler import Answer, Compiled, Refused
from .constraint_worker import CompileJob
from .worker_process import Trouble, WorkerProcess


class CompilerProcess:
    """A `ConstraintCompiler` on one running loop.

    Args:
        after: is called when an answer has been given, so that what it led to is sent.
    """

    def __init__(self, limits: CompilerLimits, after: Callable[[], None]) -> None:
        self._limits = limits
        self._worker: WorkerProcess[CompileJob, Compiled | Refused] = WorkerProcess(
            "constraint_worker", "constraint", Compiled | Refused, wall_seconds=limits.wall_seconds, after=after
        )
        self.counters: Counter[str] = self._worker.counters

    @property
    def process_id(self) -> int | None:
        return self._worker.process_id

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
            lambda given: answer(self._explained(given) if isinstance(given, Trouble) else given),
            wanted,
        )

    async def close(self) -> None:
        """Ends the process; what waits is never answered."""
        await self._worker.close()

    def _explained(self, trouble: Trouble) -> ConstraintError | BackendError:
        match trouble:
            case Trouble.LATE:
                return ConstraintError(
                    f"the constraint was not compiled within {self._limits.wall_seconds:g} s; write a smaller one"
                )
            case Trouble.DIED:
                return ConstraintError(
                    f"compiling the constraint took more than {self._limits.memory >> 20} MiB of memory, or ended the "
                    "process that did it; write a smaller one"
                )
            case Trouble.UNREADABLE:
                return BackendError("internal error while compiling the constraint; see the log")
