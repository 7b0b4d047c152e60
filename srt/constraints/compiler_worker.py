"""The process that compiles constraints: one after the other, within limits, and killed when it does not stop."""

import msgspec

from ...lang.protocol import ConstraintEngine, ConstraintSpec
from ..core.config import CompilerLimits
from ..processes.worker_child import cpu_limit, limit_memory, run
from .compiler import Compiled, Refused, compile_constraint


class CompileJob(msgspec.Struct, frozen=True, array_like=True):
    """`seconds`: of CPU time that it may take."""

    spec: ConstraintSpec
    engine: ConstraintEngine
    seconds: float


class _LateError(Exception):
    """The time of a job is over."""


def compile_within(job: CompileJob) -> Compiled | Refused:
    """`compile_constraint`, refused when it takes more CPU time. The main thread's, because of the signal.

    Such a refusal is not lasting: the same work takes more CPU time on a machine that does much else.
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
