"""Constraints compiled for the engine: kept, shared, bounded, and killed when they have to be."""

import asyncio
import os
import signal
import subprocess
import sys

import msgspec
import pytest
from umbel.lang.errors import ConstraintError, OverloadedError
from umbel.lang.protocol import ConstraintSpec
from umbel.srt.compiler_process import CompilerProcess
from umbel.srt.config import CompilerLimits, worker_environment
from umbel.srt.constraint_compiler import MAX_COMPILED, Answer, Compiled, InlineCompiler, Refused, compile_constraint
from umbel.srt.constraint_library import ConstraintLibrary
from umbel.srt.constraint_worker import CompileJob, compile_within
from umbel.srt.worker_child import HEADER

from .patient_compiler import PatientCompiler


def regex(source: str) -> ConstraintSpec:
    return ConstraintSpec("regex", source)


def library(
    compiler: PatientCompiler | InlineCompiler, *, entries: int = 4, most_bytes: int = 1 << 20
) -> ConstraintLibrary:
    return ConstraintLibrary(compiler, "fsm", entries=entries, most_bytes=most_bytes)


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
        (ConstraintSpec("lark", 'start: "a"', engine="fsm"), "Lark"),
        (ConstraintSpec("lark", 'start: "a"', engine="interegular"), "lark"),
    ],
)
def test_a_refusal_says_where_and_why(spec: ConstraintSpec, said: str) -> None:
    answer = compile_constraint(spec, "auto" if spec.engine is None else spec.engine)
    assert isinstance(answer, Refused)
    assert said in answer.message


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
    answer = compile_within(CompileJob(regex("(?=" + "[ab]*a[ab]{14}" * 3 + ")[ab]*b[ab]{15}a?"), "fsm"), 0.001)
    assert isinstance(answer, Refused)
    assert compile_within(CompileJob(regex("a"), "fsm"), 2.0) == compile_constraint(regex("a"), "fsm")


# ------------------------------------------------------------------------------------------ the process


def ask(compiler: CompilerProcess, *specs: ConstraintSpec) -> list["asyncio.Future[Answer | None]"]:
    futures = []
    for spec in specs:
        future: asyncio.Future[Answer | None] = asyncio.get_running_loop().create_future()
        compiler.compile(spec, "fsm", future.set_result, lambda: True)
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


@pytest.mark.processes
def test_a_process_that_is_killed_costs_one_answer() -> None:
    async def run() -> None:
        compiler = CompilerProcess(CompilerLimits(wall_seconds=0.0), lambda: None)
        (slow,) = await asyncio.gather(*ask(compiler, regex("a")))
        assert isinstance(slow, ConstraintError)
        assert compiler.counters["constraint_kills"] == 1
        compiler = CompilerProcess(CompilerLimits(), lambda: None)
        await asyncio.gather(*ask(compiler, regex("a")))
        assert compiler.process_id is not None
        os.kill(compiler.process_id, signal.SIGKILL)
        dead, alive = await asyncio.gather(*ask(compiler, regex("b"), regex("c")))
        assert isinstance(dead, ConstraintError | Compiled)  # the loop may have seen the end of the process already
        assert isinstance(alive, Compiled)
        await compiler.close()

    asyncio.run(run())


def framed(content: bytes) -> bytes:
    return len(content).to_bytes(HEADER, "little") + content


GREEDY_WORKER = """
from umbel.srt import constraint_worker as worker

compile_within = worker.compile_within
def greedy(job, seconds):
    wanted = len(bytearray(int(job.spec.source) << 20))
    assert wanted, "the memory was there"
    return compile_within(job, seconds)

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
            worker.stdin.write(framed(msgspec.msgpack.encode(CompileJob(regex(megabytes), "fsm"))))
        worker.stdin.flush()
        size = int.from_bytes(worker.stdout.read(HEADER), "little")
        answer = msgspec.msgpack.decode(worker.stdout.read(size), type=Compiled | Refused)
        assert isinstance(answer, Compiled)
        assert worker.stdout.read() == b""
        assert worker.wait(timeout=30) == 1


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
        wall_seconds=10.0,
        memory=512 << 20,
        niceness=10,
        most_waiting=256,
        kept_bytes=64 << 20,
    )
    assert MAX_COMPILED == 16 << 20
