"""The process that compiles constraints: one at a time, within limits; its parent kills it when it does not stop."""

import msgspec

from ...lang.protocol import ConstraintEngine, ConstraintSpec
from ..core.config import CompilerLimits
from ..processes.child import cpu_limit, limit_memory, run
from .compiler import Compiled, Refused, compile_constraint


class CompileJob(msgspec.Struct, frozen=True, array_like=True):
    """A constraint to compile. `seconds`: limit of CPU time."""

    spec: ConstraintSpec
    engine: ConstraintEngine
    seconds: float


class _LateError(Exception):
    """Raised when the time of a job is over."""


def compile_within(job: CompileJob) -> Compiled | Refused:
    """Calls `compile_constraint`; refuses when it takes more CPU time. For the main thread, because of the signal.

    Such a refusal is not lasting: the same work takes more CPU time on a busy machine.
    """
    try:
        with cpu_limit(job.seconds, _LateError):
            return compile_constraint(job.spec, job.engine)
    except _LateError:
        return Refused(
            f"the constraint is too large: compiling it was not finished within {job.seconds:g} s of CPU time; write a "
            "smaller one",
            lasting=False,
        )


def main() -> None:
    limits = CompilerLimits()

    def prepare() -> None:
        compile_constraint(ConstraintSpec("regex", "a"), "fsm")
        compile_constraint(ConstraintSpec("json_schema", '{"type": "null"}'), "fsm")
        compile_constraint(ConstraintSpec("lark", 'start: "a"'), "auto")  # refused where llguidance is not installed
        limit_memory(limits.memory)

    run(limits.niceness, prepare, CompileJob, compile_within)


if __name__ == "__main__":
    main()
