"""The child's side of chat templates that come from elsewhere: it renders one after the other, within limits.

    standard input     [length, 4 bytes][Job]       ──▶
    standard output    [length, 4 bytes][Answer]    ◀──      one after the other, both as msgpack

A template's program is bounded in CPU time, in memory and in what it writes, and so is its compilation, which folds
constants. CPU time ends Python code with an exception, and the process by the system's own limit where one operation
in C takes all of it. Windows has neither timer nor limits: a thread ends the process, once Python code runs. The
process imports jinja2 and msgspec, gets none of its parent's secrets by its environment, and ends with
the parent's end of the pipe.
"""

import contextlib
import os
import signal
import sys
import threading
import time
from functools import lru_cache
from types import FrameType
from typing import Any, BinaryIO, NoReturn

import msgspec

try:
    import resource
except ModuleNotFoundError:  # Windows
    resource = None  # type: ignore[assignment]

from .jinja import compile_template, reason_of, render_template

HEADER = 4  # bytes
CPU_SECONDS = 1.0  # of one job, unless its parent says another number
MOST_MEMORY = 256 << 20  # bytes beyond what the process has when it is ready
KEPT_TEMPLATES = 16
OUT_OF_CPU = 77  # exit status where a thread ends the process
LOOK_SECONDS = 0.02  # between that thread's looks at the CPU time


class Job(msgspec.Struct, frozen=True):
    """Compile a template, and render it unless `variables` is None."""

    source: str
    variables: dict[str, Any] | None  # Any: what the template is given, plain data
    most: int  # characters of the text


class Answer(msgspec.Struct, frozen=True):
    """The text, or why there is none. `last`: the process ends after it."""

    text: str = ""
    reason: str | None = None
    last: bool = False


class _Exhausted(BaseException):
    """A limit was reached. Not an Exception, which Jinja would annotate."""


_compiled = lru_cache(KEPT_TEMPLATES)(compile_template)


def work(job: Job, seconds: float) -> Answer:
    """Never raises, whatever the template does. `seconds`: of CPU time."""
    try:
        with _cpu_limit(seconds):
            template = _compiled(job.source)
            return Answer("" if job.variables is None else render_template(template, job.variables, job.most))
    except _Exhausted:
        return Answer(reason=f"it takes more than {seconds:g} s of CPU time", last=True)
    except MemoryError:
        return Answer(reason=f"it takes more than {MOST_MEMORY >> 20} MiB of memory", last=True)
    except Exception as error:
        return Answer(reason=reason_of(error))


@contextlib.contextmanager
def _cpu_limit(seconds: float) -> Any:  # Any: an iterator, for the decorator
    if resource is None:
        with _ended_by_a_thread(seconds):
            yield
        return
    used = resource.getrusage(resource.RUSAGE_SELF)
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    # In whole seconds of the process's life, so it comes later than the timer, which ends all but C.
    most = int(used.ru_utime + used.ru_stime + seconds) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0.0)


@contextlib.contextmanager
def _ended_by_a_thread(seconds: float) -> Any:  # Any: as above
    done, end = threading.Event(), time.process_time() + seconds

    def look() -> None:
        while not done.wait(LOOK_SECONDS):
            if time.process_time() > end:
                os._exit(OUT_OF_CPU)

    threading.Thread(target=look, daemon=True).start()
    try:
        yield
    finally:
        done.set()


def _expire(number: int, where: FrameType | None) -> NoReturn:
    raise _Exhausted


def _limit_memory() -> None:
    """Linux enforces it. Elsewhere the CPU time bounds what can be written to."""
    if resource is None:
        return
    with contextlib.suppress(OSError, ValueError):
        with open("/proc/self/statm", encoding="ascii") as file:
            taken = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        most = taken + MOST_MEMORY
        resource.setrlimit(resource.RLIMIT_AS, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


def _serve(source: BinaryIO, sink: BinaryIO, seconds: float) -> None:
    decoder = msgspec.msgpack.Decoder(Job)
    while len(header := source.read(HEADER)) == HEADER:
        answer = work(decoder.decode(source.read(int.from_bytes(header, "little"))), seconds)
        try:
            content = msgspec.msgpack.encode(answer)
        except UnicodeEncodeError:
            content = msgspec.msgpack.encode(Answer(reason="it writes half of a surrogate pair, which is no character"))
        sink.write(len(content).to_bytes(HEADER, "little") + content)
        sink.flush()
        if answer.last:
            return


def main() -> None:
    """The whole life of the child, started with the CPU seconds of a job as its only argument."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the program; we go when it goes
    if resource is not None:
        signal.signal(signal.SIGPROF, _expire)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    sink = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints is no answer
    _limit_memory()
    with contextlib.suppress(MemoryError, BrokenPipeError):  # of a job that is larger than the memory
        _serve(sys.stdin.buffer, sink, float(sys.argv[1]))
    os._exit(0)  # what a template left is not torn down


if __name__ == "__main__":
    main()
