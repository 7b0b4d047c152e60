"""Runs in child processes: ends them with their parent, and serves the jobs of a worker that may be killed (worker.py).

    standard output    [0, 4 bytes]                 ◀──      once: it is ready
    standard input     [length, 4 bytes][job]       ──▶
    standard output    [length, 4 bytes][answer]    ◀──      one after the other, both as msgpack

A timer in the child limits CPU time: it ends a job with an exception as soon as Python runs. The parent ends the
process when a library computes for longer. Memory is limited by the address space: without any left the process ends
with the status OUT_OF_MEMORY.

A child ends when its parent ends, in whatever way it ends: it reads the end of its standard input, of which only the
parent holds the other end (a process forked from the parent keeps it open, see `lang/transport/lifeline.py`), and Linux
sends a signal when the parent *thread* dies, so only children started from a main thread may ask for it.
"""

import contextlib
import ctypes
import os
import resource
import signal
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import BinaryIO, TypeVar

import msgspec

_PR_SET_PDEATHSIG = 1


def die_with_parent_thread(parent: int) -> None:
    """Asks Linux for SIGKILL at the death of the thread that started this process; does nothing elsewhere."""
    if not sys.platform.startswith("linux"):
        return
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it died before we asked
        os._exit(0)


HEADER = 4  # bytes
OUT_OF_MEMORY = 77  # exit status
AGAIN = 0.25  # seconds of CPU time; an error raised while an object is deleted is lost, and must be raised again

Job = TypeVar("Job")


@contextlib.contextmanager
def cpu_limit(seconds: float, error: Callable[[], Exception]) -> Iterator[None]:
    """Raises `error()` in the block when it takes more CPU time. For the main thread, because of the signal."""

    def expire(number: int, where: FrameType | None) -> None:
        raise error()

    before = signal.signal(signal.SIGPROF, expire)
    signal.setitimer(signal.ITIMER_PROF, seconds, AGAIN)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        signal.signal(signal.SIGPROF, before)


def limit_memory(growth: int) -> None:
    """Limits the address space to `growth` bytes beyond the present size.

    A library that is loaded later reserves its own: set the limit anew after it."""
    with contextlib.suppress(OSError):  # a system without /proc
        with open("/proc/self/statm", encoding="ascii") as file:
            taken = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        most = taken + growth
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


def lift_memory_limit() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (hard, hard))


def serve(source: BinaryIO, sink: BinaryIO, kind: type[Job], work: Callable[[Job], object]) -> None:
    """Reports that the child is ready, and answers jobs until the parent closes its end."""
    decoder = msgspec.msgpack.Decoder(kind)
    sink.write(bytes(HEADER))
    sink.flush()
    while len(header := source.read(HEADER)) == HEADER:
        content = msgspec.msgpack.encode(work(decoder.decode(source.read(int.from_bytes(header, "little")))))
        sink.write(len(content).to_bytes(HEADER, "little"))
        sink.write(content)  # as it is: a frame would be a copy
        sink.flush()


def run(niceness: int, prepare: Callable[[], None], kind: type[Job], work: Callable[[Job], object]) -> None:
    """Runs a child from start to exit. Its only command line argument is its parent's id.

    Args:
        prepare: loads what the work needs and limits memory, in this order: libraries reserve more than they use.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the program; this process ends when it ends
    die_with_parent_thread(int(sys.argv[1]))
    os.nice(niceness)
    sink = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # output of libraries must not mix with answers
    prepare()
    try:
        serve(sys.stdin.buffer, sink, kind, work)
    except MemoryError:
        os._exit(OUT_OF_MEMORY)  # the parent fails the job, and starts another process
