"""Constraints compiled for the engine: kept, shared, bounded, and killed when they have to be."""

import asyncio
import contextlib
import os
import re
import signal
import subprocess
import sys
from importlib.util import find_spec
from typing import Any

import msgspec
import pytest
from umbel.lang.errors import BackendError, ConstraintError, OverloadedError
from umbel.lang.protocol import ConstraintEngine, ConstraintKind, ConstraintSpec
from umbel.srt.constraints.compiler import (
    MAX_COMPILED,
    Answer,
    Compiled,
    CompiledCache,
    InlineCompiler,
    Refused,
    compile_constraint,
)
from umbel.srt.constraints.compiler_process import CompilerProcess, explained
from umbel.srt.constraints.compiler_worker import CompileJob, compile_within
from umbel.srt.core.config import CompilerLimits, WorkerLimits
from umbel.srt.core.environment import worker_environment
from umbel.srt.processes import child
from umbel.srt.processes.child import HEADER, OUT_OF_MEMORY, cpu_limit
from umbel.srt.processes.worker import Cause, Trouble

from ..patient_compiler import PatientCompiler


def regex(source: str) -> ConstraintSpec:
    return ConstraintSpec("regex", source)


def library(
    compiler: PatientCompiler | InlineCompiler, *, entries: int = 4, most_bytes: int = 1 << 20
) -> CompiledCache:
    return CompiledCache(compiler, "fsm", entries=entries, most_bytes=most_bytes)


def test_a_regex_becomes_a_grammar_with_its_shortest_text() -> None:
    compiled = compile_constraint(regex("(yes|no)!{2}"), "fsm")
    assert isinstance(compiled, Compiled)
    assert compiled.close == "no!!"
    assert compiled.constraint.engine == "fsm"
    assert compiled.constraint == compile_constraint(regex("(yes|no)!{2}"), "auto").constraint  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        (regex("a)"), "position 1"),
        (regex("[^\\s\\S]"), "admits nothing"),
        (ConstraintSpec("json_schema", '{"type": "strin"}'), "type"),
        (ConstraintSpec("json_schema", '{"$ref": "#/nowhere"}'), "nowhere"),
        (ConstraintSpec("choices", "yes"), "no JSON array of texts"),
        (ConstraintSpec("choices", "[]"), "no JSON array of texts"),
        (ConstraintSpec("choices", "[1]"), "no JSON array of texts"),
        (ConstraintSpec("choices", "[" * 10_000), "no JSON array of texts"),
        (ConstraintSpec("lark", 'start: "a"', engine="fsm"), "Lark"),
        (ConstraintSpec("lark", 'start: "a"', engine="interegular"), "lark"),
    ],
)
def test_a_refusal_says_where_and_why(spec: ConstraintSpec, said: str) -> None:
    answer = compile_constraint(spec, "auto" if spec.engine is None else spec.engine)
    assert isinstance(answer, Refused)
    assert said in answer.message


@pytest.mark.parametrize(
    "spec",
    [
        regex("a{1000000}"),
        regex("(a|b){70000}"),
        regex("((ab){200}c?){200}"),
        ConstraintSpec("json_schema", '{"type": "string", "minLength": 1000000}'),
        ConstraintSpec("json_schema", '{"type": "array", "items": {"type": "integer"}, "minItems": 100000}'),
    ],
)
def test_a_constraint_without_a_short_text_is_refused_before_that_is_written(
    spec: ConstraintSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("umbel.fsm.automaton.automaton.shortest_text", None)
    answer = compile_constraint(spec, "fsm")
    assert isinstance(answer, Refused)
    assert re.search(r"the shortest text that satisfies it has \d+ bytes, at most 65536 are allowed", answer.message)


@pytest.mark.parametrize("kind", ["json_schema", "tools"])
def test_a_count_that_no_message_holds_is_refused(kind: ConstraintKind) -> None:
    schema = '{"type": "object", "properties": {"q": {"type": "string", "maxLength": 1e308}}}'
    tools = f'{{"format": "fenced", "tools": [{{"name": "search", "schema": {schema}}}]}}'
    answer = compile_constraint(ConstraintSpec(kind, tools if kind == "tools" else schema), "fsm")
    assert isinstance(answer, Refused)
    assert "a count in it" in answer.message


def test_equal_constraints_that_come_together_are_compiled_once() -> None:
    compiler, told = PatientCompiler(), []
    shelf = library(compiler)
    for _ in range(24):
        shelf.find(regex("a+"), "", told.append)
    compiler.work()
    shelf.find(regex("a+"), "", told.append)
    assert len(compiler.asked) == 1
    assert len(told) == 25
    assert all(answer is told[0] for answer in told)
    assert shelf.counters["constraint_compiles"] == 1
    assert shelf.counters["constraint_cache_hits"] == 24


def test_a_salt_shares_with_nobody() -> None:
    compiler = PatientCompiler()
    shelf = library(compiler)
    for salt in ("", "a", "b", "a"):
        shelf.find(regex("a+"), salt, lambda answer: None)
    compiler.work()
    assert len(compiler.asked) == 3


def test_without_a_cache_every_request_is_compiled() -> None:
    compiler = PatientCompiler()
    shelf = library(compiler, entries=0)
    for _ in range(3):
        shelf.find(regex("a+"), "", lambda answer: None)
    compiler.work()
    shelf.find(regex("a+"), "", lambda answer: None)
    compiler.work()
    assert len(compiler.asked) == 4


def test_what_was_not_used_for_the_longest_time_goes() -> None:
    shelf = library(InlineCompiler(), entries=2)
    for source in ("a", "b", "a", "c", "a", "b"):
        shelf.find(regex(source), "", lambda answer: None)
    assert shelf.counters["constraint_compiles"] == 4
    assert shelf.counters["constraint_cache_hits"] == 2


def test_what_is_kept_is_bounded_in_bytes() -> None:
    shelf = library(InlineCompiler(), entries=100, most_bytes=2000)
    for _ in range(2):
        for length in range(8):
            shelf.find(regex("a" * (200 + length)), "", lambda answer: None)
    assert shelf.counters["constraint_compiles"] > 8
    assert shelf._bytes <= 2000


def test_refusals_are_kept_too() -> None:
    shelf = library(InlineCompiler())
    told: list[Answer] = []
    for _ in range(2):
        shelf.find(regex("("), "", told.append)
    assert shelf.counters["constraint_compiles"] == 1
    assert shelf.counters["constraint_refusals"] == 1
    assert isinstance(told[1], Refused)


def test_nobody_waiting_means_no_work() -> None:
    compiler, told = PatientCompiler(), []
    shelf = library(compiler)
    shelf.find(regex("a"), "", told.append).forget()
    compiler.work()
    assert (compiler.asked, told) == ([], [])
    shelf.find(regex("a"), "", told.append)
    compiler.work()
    assert len(told) == 1


def test_time_ends_a_compilation() -> None:
    answer = compile_within(CompileJob(regex("(?=" + "[ab]*a[ab]{14}" * 3 + ")[ab]*b[ab]{15}a?"), "fsm", 0.001))
    assert isinstance(answer, Refused)
    assert compile_within(CompileJob(regex("a"), "fsm", 2.0)) == compile_constraint(regex("a"), "fsm")


def test_time_ends_work_that_loses_the_first_error() -> None:
    """An error that a signal's handler raises while an object is deleted is printed and forgotten."""

    class Swallowing:
        def __del__(self) -> None:
            with contextlib.suppress(TimeoutError):
                while True:
                    pass

    def work() -> None:
        Swallowing()
        while True:
            pass

    with pytest.raises(TimeoutError), cpu_limit(0.01, TimeoutError):
        work()


# ------------------------------------------------------------------------------------------ the process


def ask(
    compiler: CompilerProcess, *specs: ConstraintSpec, engine: ConstraintEngine = "fsm"
) -> list["asyncio.Future[Answer | None]"]:
    futures = []
    for spec in specs:
        future: asyncio.Future[Answer | None] = asyncio.get_running_loop().create_future()
        compiler.compile(spec, engine, future.set_result, lambda: True)
        futures.append(future)
    return futures


@pytest.mark.processes
def test_the_process_answers_and_stays() -> None:
    async def run() -> None:
        flushed: list[None] = []
        compiler = CompilerProcess(CompilerLimits(), lambda: flushed.append(None))
        first, refused = await asyncio.gather(*ask(compiler, regex("[ab]{3}"), regex("(")))
        assert first == compile_constraint(regex("[ab]{3}"), "fsm")
        assert isinstance(refused, Refused)
        (again,) = await asyncio.gather(*ask(compiler, regex("c")))
        assert isinstance(again, Compiled)
        assert compiler.counters == {"constraint_processes": 1, "constraint_kills": 0}
        await compiler.close()
        assert len(flushed) == 3

    asyncio.run(run())


# Seconds and hundreds of megabytes of llguidance, which no limit of its own bounds, on every way to it.
MULTIPLE = '{"type": "integer", "multipleOf": 1000003}'
SLOW_FOR_LLGUIDANCE = [
    ConstraintSpec("json_schema", MULTIPLE),  # our automata do not honour it
    ConstraintSpec("json_schema", MULTIPLE, engine="llguidance"),
    ConstraintSpec("lark", f"start: %json {MULTIPLE}"),
    ConstraintSpec("lark", f"start: %json {MULTIPLE}", engine="llguidance"),
]
needs_llguidance = pytest.mark.skipif(find_spec("llguidance") is None, reason="llguidance is not installed")


@needs_llguidance
@pytest.mark.processes
@pytest.mark.parametrize(
    "spec",
    [
        pytest.param(spec, marks=[] if name in ("schema", "asked grammar") else [pytest.mark.nightly], id=name)
        for name, spec in zip(("schema", "asked", "grammar", "asked grammar"), SLOW_FOR_LLGUIDANCE, strict=True)
    ],
)
def test_what_llguidance_reads_too_long_is_refused_before_the_engine_hears_of_it(spec: ConstraintSpec) -> None:
    async def run() -> None:
        compiler = CompilerProcess(CompilerLimits(cpu_seconds=0.3), lambda: None, WorkerLimits(look=0.05, overtime=0.1))
        slow, after = await asyncio.gather(*ask(compiler, spec, regex("a"), engine="auto"))
        assert isinstance(slow, ConstraintError | Refused)
        message = slow.message if isinstance(slow, Refused) else str(slow)
        assert re.search("the constraint is too large: .*of CPU time", message), message
        assert isinstance(after, Compiled)
        await compiler.close()

    asyncio.run(run())


SLOW_WORKER = """
import time
from umbel.srt.constraints import compiler_worker as worker

compile_within = worker.compile_within
def slow(job):
    if job.spec.source == "slow":
        if job.seconds < 1: return worker.Refused("it takes long", lasting=False)
        time.sleep(3600)
    return compile_within(job)

worker.compile_within = slow
worker.main()
"""


@pytest.mark.processes
def test_a_slow_constraint_holds_up_no_quick_one(monkeypatch: pytest.MonkeyPatch) -> None:
    as_worker(monkeypatch, SLOW_WORKER)

    async def run() -> None:
        compiler = CompilerProcess(CompilerLimits(), lambda: None, WorkerLimits(idle_seconds=3600.0))
        slow, *quick = ask(compiler, regex("slow"), regex("a"), regex("b"))
        assert all(isinstance(answer, Compiled) for answer in await asyncio.gather(*quick))
        while len(compiler.process_ids) < 2:
            await asyncio.sleep(0)
        (later,) = await asyncio.gather(*ask(compiler, regex("c")))
        assert isinstance(later, Compiled)
        assert not slow.done()
        await compiler.close()

    asyncio.run(run())


@pytest.mark.processes
def test_a_constraint_that_takes_longer_than_quick_ones_is_compiled_all_the_same() -> None:
    """Ten times what it is given first."""

    async def run() -> None:
        compiler = CompilerProcess(CompilerLimits(quick_seconds=0.01), lambda: None)
        (answer,) = await asyncio.gather(*ask(compiler, regex("(?=[ab]*a[ab]{11})[ab]*b[ab]{10}a?")))
        assert isinstance(answer, Compiled)
        assert len(compiler.process_ids) == 2
        await compiler.close()

    asyncio.run(run())


@pytest.mark.nightly
@needs_llguidance
@pytest.mark.processes
def test_what_llguidance_takes_too_much_memory_for_is_refused_before_the_engine_hears_of_it() -> None:
    async def run() -> None:
        compiler = CompilerProcess(CompilerLimits(cpu_seconds=60.0), lambda: None)
        (large,) = await asyncio.gather(*ask(compiler, ConstraintSpec("json_schema", MULTIPLE), engine="auto"))
        assert isinstance(large, ConstraintError)
        assert "MiB" in str(large)
        await compiler.close()

    asyncio.run(run())


@needs_llguidance
@pytest.mark.parametrize(
    ("spec", "said"),
    [
        (ConstraintSpec("lark", "start: nothing"), "grammar: .*nothing"),
        (ConstraintSpec("lark", "start: " + "(" * 3000 + '"a"' + ")" * 3000), "grammar: .*nested"),
        (ConstraintSpec("regex", "a(", engine="llguidance"), "regex: "),
        (ConstraintSpec("json_schema", '{"type": "strin"}', engine="llguidance"), "json_schema: "),
        (ConstraintSpec("json_schema", '{"multipleOf": 100003, "format": "nowhere"}'), "json_schema: #/"),
    ],
)
def test_what_llguidance_refuses_is_refused_where_it_is_compiled(spec: ConstraintSpec, said: str) -> None:
    answer = compile_constraint(spec, "auto")
    assert isinstance(answer, Refused)
    assert re.search(said, answer.message), answer.message
    assert len(answer.message) < 2000


NBYTES = f"""
from umbel.lang.protocol import ConstraintSpec
from umbel.srt.constraints.compiler import compile_constraint
small = compile_constraint(ConstraintSpec("lark", 'start: "a"'), "auto")
large = compile_constraint(ConstraintSpec("json_schema", {MULTIPLE.replace("1000003", "60013")!r}), "llguidance")
print(small.constraint.nbytes, large.constraint.nbytes)
"""


@needs_llguidance
@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="the system has no /proc")
def test_the_memory_that_llguidance_took_travels_with_the_constraint() -> None:
    """In a process of its own, as in the runtime: one that has freed memory before shows no growth."""
    printed = subprocess.run([sys.executable, "-c", NBYTES], capture_output=True, text=True, check=True).stdout
    small, large = map(int, printed.split())
    assert small < large


@pytest.mark.processes
def test_a_killed_process_costs_no_answer() -> None:
    async def run() -> None:
        compiler = CompilerProcess(CompilerLimits(), lambda: None)
        await asyncio.gather(*ask(compiler, regex("a")))
        for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV):
            (process,) = compiler.process_ids
            os.kill(process, signal.SIGSTOP)  # so that it has the job when it dies
            waiting = ask(compiler, regex("b"), regex("c"))
            await asyncio.sleep(0)
            os.kill(process, number)
            os.kill(process, signal.SIGCONT)
            assert all(isinstance(answer, Compiled) for answer in await asyncio.gather(*waiting)), number
        await compiler.close()

    asyncio.run(run())


@pytest.mark.processes
@pytest.mark.nightly
def test_a_stopped_process_costs_no_answer() -> None:
    async def run() -> None:
        compiler = CompilerProcess(CompilerLimits(), lambda: None, WorkerLimits(look=0.01, idle_seconds=0.1))
        await asyncio.gather(*ask(compiler, regex("a")))
        assert compiler.process_ids
        os.kill(compiler.process_ids[0], signal.SIGSTOP)
        answers = await asyncio.gather(*ask(compiler, regex("b"), regex("c")))
        assert all(isinstance(answer, Compiled) for answer in answers)
        assert compiler.counters == {"constraint_processes": 2, "constraint_kills": 1}
        await compiler.close()

    asyncio.run(run())


# A worker that is ready only after more CPU time than a constraint may take.
SLOW_START = """
import time
from umbel.srt.constraints import compiler_worker as worker
from umbel.srt.processes import child

def prepare():
    while time.process_time() < 0.6: pass

child.run(0, prepare, worker.CompileJob, worker.compile_within)
"""

# Workers that end before they are ready, or with every job.
NEVER_READY = "raise SystemExit(3)"
SELF_KILLING = """
import os, signal
from umbel.srt.constraints import compiler_worker as worker
from umbel.srt.processes import child

child.run(0, lambda: None, worker.CompileJob, lambda job: os.kill(os.getpid(), signal.{name}))
"""
SLEEPING = SELF_KILLING.replace("os.kill(os.getpid(), signal.{name})", "signal.pause()")

# A library that computes for ever and never lets Python run: no timer's handler is heard.
DEAF = """
from umbel.srt.constraints import compiler_worker as worker
from umbel.srt.processes import child

def compute(job):
    sum(range(10**12))

child.run(0, lambda: None, worker.CompileJob, compute)
"""


def as_worker(monkeypatch: pytest.MonkeyPatch, source: str) -> None:
    """Workers run this instead of their module."""
    start = asyncio.create_subprocess_exec

    async def started(*command: str, **options: Any) -> asyncio.subprocess.Process:
        *_, parent = command
        return await start(sys.executable, "-P", "-c", source, parent, **options)

    monkeypatch.setattr(asyncio, "create_subprocess_exec", started)


@pytest.mark.processes
def test_the_start_of_the_process_counts_against_no_constraint(monkeypatch: pytest.MonkeyPatch) -> None:
    as_worker(monkeypatch, SLOW_START)

    async def run() -> None:
        limits = WorkerLimits(look=0.01, overtime=0.0, wall_seconds=0.5)
        # The process for quick jobs is allowed as much, so one that is slow on a busy machine begins no second one.
        allowed = CompilerLimits(cpu_seconds=0.5, quick_seconds=0.5)
        compiler = CompilerProcess(allowed, lambda: None, limits)
        (answer,) = await asyncio.gather(*ask(compiler, regex("a")))
        assert isinstance(answer, Compiled)
        assert compiler.counters == {"constraint_processes": 1, "constraint_kills": 0}
        await compiler.close()

    asyncio.run(run())


@pytest.mark.processes
@pytest.mark.parametrize(
    ("source", "kind", "said", "tries"),
    [
        (NEVER_READY, BackendError, "no process could be started .*exit status 3", 2),
        (SELF_KILLING.format(name="SIGKILL"), BackendError, "killed from outside, in every try .*SIGKILL", 2),
        (SELF_KILLING.format(name="SIGTERM"), BackendError, "killed from outside, in every try .*SIGTERM", 2),
        (SELF_KILLING.format(name="SIGSTOP"), BackendError, "no sign of work, in every try .*stopped", 2),
        (SLEEPING, BackendError, "no sign of work, in every try .*slept", 2),
        (SELF_KILLING.format(name="SIGABRT"), ConstraintError, "in every try .*SIGABRT", 2),
        (DEAF, ConstraintError, r"too large: .*[0-9.]+ s of CPU time .*0\.2 s are allowed", 1),
    ],
    ids=["never ready", "killed", "terminated", "stopped", "sleeping", "aborted", "deaf"],
)
@pytest.mark.sampled(4)
def test_an_error_says_what_became_of_the_process(
    monkeypatch: pytest.MonkeyPatch, source: str, kind: type[Exception], said: str, tries: int
) -> None:
    as_worker(monkeypatch, source)

    async def run() -> None:
        limits = WorkerLimits(look=0.01, idle_seconds=0.1, overtime=0.1)
        compiler = CompilerProcess(CompilerLimits(cpu_seconds=0.2), lambda: None, limits)
        (answer,) = await asyncio.gather(*ask(compiler, regex("a")))
        assert type(answer) is kind
        assert re.search(said, str(answer)), answer
        assert isinstance(answer, ConstraintError) or "the constraint is not the cause" in str(answer)
        assert compiler.counters["constraint_processes"] == tries
        await compiler.close()

    asyncio.run(run())


def test_what_befell_the_machine_is_not_remembered_of_a_constraint() -> None:
    for cause in Cause:
        compiler = PatientCompiler()
        shelf = library(compiler)
        told: list[Answer] = []
        for _ in range(2):
            shelf.find(regex("a"), "", told.append)
            compiler.work(explained(Trouble(cause, "it was seen", 1.5, 90.0), CompilerLimits()))
        assert len(compiler.asked) == 2, cause
        assert "write a smaller" in str(told[0]) or isinstance(told[0], BackendError), cause


def test_a_compilation_that_took_too_long_is_tried_again_when_it_is_asked_for_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """CPU time is measured: on a busy machine the same work takes more of it."""
    monkeypatch.setattr(child, "AGAIN", 0.001)  # the first error may fall into the deletion of an object, and be lost
    late = compile_within(CompileJob(regex("(?=" + "[ab]*a[ab]{14}" * 3 + ")[ab]*b[ab]{15}a?"), "fsm", 0.001))
    compiler = PatientCompiler()
    shelf = library(compiler)
    for _ in range(2):
        shelf.find(regex("a"), "", lambda answer: None)
        compiler.work(late)
    assert len(compiler.asked) == 2


def framed(content: bytes) -> bytes:
    return len(content).to_bytes(HEADER, "little") + content


GREEDY_WORKER = """
from umbel.srt.constraints import compiler_worker as worker

compile_within = worker.compile_within
def greedy(job):
    wanted = len(bytearray(int(job.spec.source) << 20))
    assert wanted, "the memory was there"
    return compile_within(job)

worker.compile_within = greedy
worker.main()
"""


@pytest.mark.processes
def test_a_constraint_that_wants_more_memory_than_there_is_ends_the_process() -> None:
    arguments = [sys.executable, "-c", GREEDY_WORKER, str(os.getpid())]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=worker_environment()) as worker:
        assert worker.stdin is not None
        assert worker.stdout is not None
        for megabytes in ("100", "2000"):  # the second is above the limit, whatever the interpreter has taken
            worker.stdin.write(framed(msgspec.msgpack.encode(CompileJob(regex(megabytes), "fsm", 2.0))))
        worker.stdin.flush()
        assert worker.stdout.read(HEADER) == bytes(HEADER), "it is ready"
        size = int.from_bytes(worker.stdout.read(HEADER), "little")
        answer = msgspec.msgpack.decode(worker.stdout.read(size), type=Compiled | Refused)
        assert isinstance(answer, Compiled)
        assert worker.stdout.read() == b""
        assert worker.wait(timeout=30) == OUT_OF_MEMORY


@pytest.mark.processes
def test_the_queue_is_bounded() -> None:
    async def run() -> None:
        compiler = CompilerProcess(CompilerLimits(most_waiting=2), lambda: None)
        futures = ask(compiler, regex("a"), regex("b"))
        with pytest.raises(OverloadedError):
            ask(compiler, regex("c"))
        await asyncio.gather(*futures)
        await compiler.close()

    asyncio.run(run())


def test_the_limits_are_these() -> None:
    assert CompilerLimits() == CompilerLimits(
        cpu_seconds=2.0,
        quick_seconds=0.3,
        memory=256 << 20,
        niceness=10,
        most_waiting=256,
        kept_bytes=64 << 20,
    )
    assert MAX_COMPILED == 16 << 20
    assert WorkerLimits() == WorkerLimits(
        look=0.25,
        idle_seconds=4.0,
        overtime=0.5,
        wall_seconds=120.0,
        starved_seconds=600.0,
        start_seconds=300.0,
        more_tries=1,
    )
