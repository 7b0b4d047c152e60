"""The process that compiles constraints: one after the other, within limits, and killed when it does not stop.

    standard input     [length, 4 bytes][CompileJob]    ──▶
    standard output    [length, 4 bytes][Compiled | Refused]

Time is limited from inside by a timer of CPU time, which ends a constraint with a message, and from outside by the
parent, which ends the process. Memory is limited by the address space: without any left the process ends.
"""

import contextlib
import os
import resource
import signal
import sys
from types import FrameType
from typing import BinaryIO

import msgspec

from ..fsm.errors import LimitExceeded
from ..lang.protocol import ConstraintEngine, ConstraintSpec
from . import lifeline
from .config import CompilerLimits
from .constraint_compiler import Compiled, Refused, compile_constraint

HEADER = 4  # bytes
_GROWTH = 256 << 20  # bytes of address space that the work may take, whatever the interpreter has taken before


class CompileJob(msgspec.Struct, frozen=True, array_like=True):
    spec: ConstraintSpec
    engine: ConstraintEngine


def frame(content: bytes) -> bytes:
    return len(content).to_bytes(HEADER, "little") + content


def compile_within(job: CompileJob, seconds: float) -> Compiled | Refused:
    """`compile_constraint`, refused when it takes more CPU time. The main thread's, because of the signal."""

    def expire(number: int, where: FrameType | None) -> None:
        raise LimitExceeded(f"compiling took more than {seconds:g} s; write a smaller one")

    before = signal.signal(signal.SIGPROF, expire)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        return compile_constraint(job.spec, job.engine)
    except LimitExceeded as error:  # it expired outside of what refuses
        return Refused(str(error))
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        signal.signal(signal.SIGPROF, before)


def _limit_memory(limits: CompilerLimits) -> None:
    with contextlib.suppress(OSError):  # a system without /proc
        with open("/proc/self/statm", encoding="ascii") as file:
            taken = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        most = max(limits.memory, taken + _GROWTH)
        resource.setrlimit(resource.RLIMIT_AS, (most, most))


def serve(source: BinaryIO, sink: BinaryIO, limits: CompilerLimits) -> None:
    """Until the parent closes its end."""
    decoder = msgspec.msgpack.Decoder(CompileJob)
    while len(header := source.read(HEADER)) == HEADER:
        job = decoder.decode(source.read(int.from_bytes(header, "little")))
        sink.write(frame(msgspec.msgpack.encode(compile_within(job, limits.cpu_seconds))))
        sink.flush()


def main() -> None:
    limits = CompilerLimits()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the program; we go when it goes
    lifeline.die_with_parent_thread(int(sys.argv[1]))
    os.nice(limits.niceness)
    sink = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints is no answer
    # What the work needs is imported before memory is limited: libraries reserve more than they use.
    compile_constraint(ConstraintSpec("regex", "a"), "fsm")
    compile_constraint(ConstraintSpec("json_schema", '{"type": "null"}'), "fsm")
    _limit_memory(limits)
    try:
        serve(sys.stdin.buffer, sink, limits)
    except MemoryError:
        os._exit(1)  # the parent tells who asked, and starts another


if __name__ == "__main__":
    main()
