"""The process that compiles constraints: what becomes of requests when it hangs or dies, and that it goes with its
parent. The oracle model; waits for conditions, not for time.
"""

import asyncio
import re
import signal
from collections.abc import Iterator

import psutil
import pytest
from umbel.interpreter.backends.runtime import Runtime
from umbel.interpreter.cli import main
from umbel.lang.prompt import Text
from umbel.lang.protocol import ConstraintSpec, Final, GenRequest
from umbel.lang.sampling import SamplingParams

from ..own_processes import own_processes
from .test_processes import PATIENCE, wait_until

pytestmark = pytest.mark.processes

SAMPLING = SamplingParams(max_tokens=12, seed=1)


@pytest.fixture
def runtime() -> Iterator[Runtime]:
    backend = Runtime("oracle", progress=False, constraint_cache=8)
    yield backend
    backend.shutdown()


def compilers() -> list[psutil.Process]:
    return own_processes("umbel.srt.constraints.compiler_worker")


async def text_of(runtime: Runtime, label: str, regex: str | None = None) -> str:
    constraint = ConstraintSpec("regex", regex) if regex is not None else None
    asked = GenRequest(label, (Text("Answer: "),), SAMPLING, constraint=constraint)
    async for event in runtime.generate(asked):
        if isinstance(event, Final):
            return event.completions[0].text
    raise AssertionError("no ending")


def test_a_compiler_that_hangs_and_dies_costs_no_request(runtime: Runtime) -> None:
    async def scenario() -> None:
        assert re.fullmatch("[ab]{3}", await text_of(runtime, "first", "[ab]{3}"))
        (compiler,) = compilers()
        compiler.send_signal(signal.SIGSTOP)
        stuck = asyncio.create_task(text_of(runtime, "stuck", "[cd]{3}"))
        free = await asyncio.wait_for(text_of(runtime, "free"), PATIENCE)
        known = await asyncio.wait_for(text_of(runtime, "known", "[ab]{3}"), PATIENCE)
        assert free
        assert re.fullmatch("[ab]{3}", known)
        assert not stuck.done()
        compiler.kill()
        assert re.fullmatch("[cd]{3}", await asyncio.wait_for(stuck, PATIENCE))
        assert re.fullmatch("[ef]{3}", await asyncio.wait_for(text_of(runtime, "after", "[ef]{3}"), PATIENCE))
        facts = (await runtime.control("info")).result
        assert facts["gateway_constraint_kills"] == 1
        assert facts["gateway_constraint_processes"] == 2

    asyncio.run(scenario())


def test_the_compiler_is_there_before_the_first_constraint(runtime: Runtime) -> None:
    runtime.wait_ready()
    wait_until(lambda: len(compilers()) == 1, "no compiler was started")
    (compiler,) = compilers()
    asyncio.run(text_of(runtime, "first", "[ab]{3}"))
    assert compilers() == [compiler]


def test_an_abort_while_compiling_leaves_nothing_behind(runtime: Runtime) -> None:
    async def scenario() -> None:
        await text_of(runtime, "first", "a")
        (compiler,) = compilers()
        compiler.send_signal(signal.SIGSTOP)
        stuck = asyncio.create_task(text_of(runtime, "stuck", "[cd]{3}"))
        await text_of(runtime, "free")
        stuck.cancel()
        await asyncio.gather(stuck, return_exceptions=True)
        while (await runtime.control("info")).result["in_flight"] != 1:  # the question itself
            await asyncio.sleep(0)
        compiler.send_signal(signal.SIGCONT)
        assert await asyncio.wait_for(text_of(runtime, "after", "b"), PATIENCE) == "b"

    asyncio.run(scenario())


def test_the_compiler_goes_with_its_runtime(runtime: Runtime) -> None:
    asyncio.run(text_of(runtime, "first", "a"))
    assert compilers()
    runtime.shutdown()
    wait_until(lambda: not compilers(), "the compiler outlived its runtime")


def test_umbel_warm_starts_a_model_twice_and_lets_it_answer(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["warm", "oracle"]) == 0
    answer, starts = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"it says: A number: [1-9][0-9]", answer)
    assert re.fullmatch(r"first start \d+\.\d s, the next one \d+\.\d s \(oracle kernels\)", starts)
