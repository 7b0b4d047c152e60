"""The process that compiles constraints: one after the other, within limits, and killed when it does not stop."""

import msgspec

from ..fsm.errors import LimitExceeded
from ..lang.protocol import ConstraintEngine, ConstraintSpec
from .config import CompilerLimits
from .constraint_compiler import Compiled, Refused, compile_constraint
from .worker_child import cpu_limit, limit_memory, run

_GROWTH = 256 << 20  # bytes of address space that the work may take, whatever the interpreter has taken before


class CompileJob(msgspec.Struct, frozen=True, array_like=True):
    spec: ConstraintSpec
    engine: ConstraintEngine


def compile_within(job: CompileJob, seconds: float) -> Compiled | Refused:
    """`compile_constraint`, refused when it takes more CPU time. The main thread's, because of the signal."""

    def late() -> LimitExceeded:
        return LimitExceeded(f"compiling took more than {seconds:g} s; write a smaller one")

    try:
        with cpu_limit(seconds, late):
            return compile_constraint(job.spec, job.engine)
    except LimitExceeded as error:  # it expired outside of what refuses
        return Refused(str(error))


def main() -> None:
    limits = CompilerLimits()

    def prepare() -> None:
        compile_constraint(ConstraintSpec("regex", "a"), "fsm")
        compile_constraint(ConstraintSpec("json_schema", '{"type": "null"}'), "fsm")
        limit_memory(_GROWTH, limits.memory)

    run(limits.niceness, prepare, CompileJob, lambda job: compile_within(job, limits.cpu_seconds))


if __name__ == "__main__":
    main()
