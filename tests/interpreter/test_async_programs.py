"""`async def` programs: on the caller's loop, by the thousand, without threads."""

import asyncio
import gc
import threading
import warnings
from collections.abc import Callable

import pytest
import umbel as ul
from umbel.interpreter.backends.echo import Echo, Gate

from .conftest import PATIENCE


@ul.function
async def ask(s, x):
    s += ul.user(f"q{x}") + ul.assistant(ul.gen("a"))
    return await s["a"]


def test_an_async_program_runs_on_the_callers_loop(echo: Echo) -> None:
    seen: list[object] = []

    @ul.function
    async def program(s, x):
        seen.append(asyncio.get_running_loop())
        s += f"{x}" + ul.gen("a")
        return await s["a"]

    async def main() -> None:
        state = await program.run_async(5, backend=echo, timeout=PATIENCE)
        assert state.ret_value == "5"
        assert await state["a"] == "5"
        assert await state.text() == "55"
        assert (await state.get_meta_info("a"))["completion_tokens"] == 1
        assert await state.messages() == []
        await state.sync()
        assert seen == [asyncio.get_running_loop()]

    asyncio.run(main())


@pytest.mark.nightly
def test_two_thousand_at_once_need_a_constant_number_of_threads() -> None:
    gate = Gate()
    echo = Echo(gate=gate, record=10)

    async def main() -> tuple[list[str], int]:
        runs = [asyncio.ensure_future(ask.run_async(x, backend=echo, timeout=60.0)) for x in range(2000)]
        await asyncio.to_thread(gate.wait_for, 2000)  # the test's own thread, not a program's
        threads = threading.active_count()
        gate.open()
        return [state.ret_value for state in await asyncio.gather(*runs)], threads

    before = threading.active_count()
    results, threads = asyncio.run(main())
    assert results == [f"q{x}" for x in range(2000)]
    assert threads <= before + 2  # the test's, and the streams' loop if this test is the first to need it


def test_sync_code_can_run_an_async_program(echo: Echo) -> None:
    state = ask.run(1, backend=echo, timeout=PATIENCE)
    assert isinstance(state, ul.State)
    assert (state.ret_value, state["a"]) == ("q1", "q1")
    assert ask(2, backend=echo).ret_value == "q2"


def test_sync_code_can_stream_an_async_program(echo: Echo) -> None:
    state = ask.run("1 two", backend=echo, stream=True, timeout=PATIENCE)
    assert "".join(state.text_iter("a")) == "q1 two"


def test_an_async_program_streams_to_async_readers() -> None:
    @ul.function
    async def program(s):
        s += "a" + ul.gen("x")

    async def main() -> list[str]:
        state = await program.run_async(backend=Echo(["one two"]), stream=True, timeout=PATIENCE)
        return [piece async for piece in state.text_async_iter()]

    assert asyncio.run(main()) == ["a", "one", " two"]


def test_async_branches_are_joined(echo: Echo) -> None:
    @ul.function
    async def program(s):
        s += "r"
        forks = s.fork(3)
        forks += lambda i: f"{i}" + ul.gen("x")
        seen = await asyncio.gather(*(fork["x"] for fork in forks))
        forks.join()
        return list(seen), await s["x"]

    async def main() -> object:
        return (await program.run_async(backend=echo, timeout=PATIENCE)).ret_value

    assert asyncio.run(main()) == (["r0", "r1", "r2"],) * 2


def test_a_nested_async_program_is_awaited(echo: Echo) -> None:
    @ul.function
    async def program(s):
        first = await ask(s, 1)
        second = await ask(s, 2)
        return first, second

    @ul.function
    def sync_program(s):
        ask(s, 1)

    state = program.run(backend=echo, timeout=PATIENCE)
    assert state.ret_value == ("q1", "q2")
    with pytest.raises(ul.ParameterError, match="cannot run inside the sync program"):
        sync_program.run(backend=echo)


def test_a_sync_program_can_be_awaited(echo: Echo) -> None:
    @ul.function
    def program(s, x):
        s += x + ul.gen("a")
        return s["a"], threading.get_ident()

    async def main() -> None:
        state = await program.run_async("b", backend=echo, timeout=PATIENCE)
        value, thread = state.ret_value
        assert (value, await state["a"]) == ("b", "b")
        assert thread != threading.get_ident()

    asyncio.run(main())


def test_an_unknown_name_raises_in_the_body_and_in_its_tasks(echo: Echo) -> None:
    @ul.function
    async def program(s):
        with pytest.raises(ul.VariableError):
            await s["z"]

        async def inner() -> None:
            await s["z"]

        with pytest.raises(ul.VariableError):
            await asyncio.create_task(inner())
        return "done"

    async def main() -> str:
        state = await program.run_async(backend=echo, stream=True, timeout=PATIENCE)
        await state.sync()
        with pytest.raises(ul.VariableError):
            await state["z"]
        return state.ret_value

    assert asyncio.run(main()) == "done"


def test_cancelling_the_task_aborts_its_requests() -> None:
    gate = Gate()
    echo = Echo(gate=gate)

    async def main() -> None:
        task = asyncio.create_task(ask.run_async(1, backend=echo, timeout=PATIENCE))
        while gate.arrived < 1:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        while echo.active:
            await asyncio.sleep(0)

    asyncio.run(asyncio.wait_for(main(), PATIENCE))
    assert len(echo.aborted) == 1


def test_the_deadline_ends_a_body_that_waits_for_something_else(echo: Echo) -> None:
    @ul.function
    async def program(s):
        await asyncio.Event().wait()

    async def main() -> None:
        with pytest.raises(ul.DeadlineError, match=r"timeout=0.05"):
            await program.run_async(backend=echo, timeout=0.05)

    asyncio.run(main())
    with pytest.raises(ul.DeadlineError):
        program.run(backend=echo, timeout=0.05)


def test_a_timeout_of_the_body_itself_stays_its_own(echo: Echo) -> None:
    @ul.function
    async def program(s):
        async with asyncio.timeout(0):
            await asyncio.Event().wait()

    async def main() -> None:
        with pytest.raises(TimeoutError) as caught:
            await program.run_async(backend=echo, timeout=PATIENCE)
        assert not isinstance(caught.value, ul.DeadlineError)

    asyncio.run(main())


def test_a_read_takes_its_own_timeout() -> None:
    async def main() -> None:
        state = await reading.run_async(backend=Echo(gate=Gate()), timeout=PATIENCE)
        with pytest.raises(ul.DeadlineError, match="variable 'x' was not known in time"):
            await state.get_var("x", timeout=0.01)
        state.cancel()

    @ul.function
    async def reading(s):
        s += "a" + ul.gen("x")

    asyncio.run(main())


def test_an_async_program_does_not_block_its_own_loop() -> None:
    @ul.function
    async def inner(s):
        return 1

    @ul.function
    async def program(s):
        with pytest.raises(ul.ProgramError, match=r"await inner\.run_async"):
            inner.run(backend=Echo())

    program.run(backend=Echo(), timeout=PATIENCE)


@pytest.mark.parametrize("compiled", [False, True])
def test_a_variable_is_given_no_value_that_has_to_be_waited_for(compiled: bool) -> None:
    async def helper() -> str:
        return "b"

    assigned: list[Callable[[ul.AsyncState], None]] = [
        lambda s: s.__setitem__("y", s["x"]),
        lambda s: s.set_var("y", s.text()),
        lambda s: s.__setitem__("y", ["a", s["x"]]),
        lambda s: s.__setitem__("y", helper()),
        lambda s: s.__iadd__(helper()),
        lambda s: s.__iadd__(s["x"]),
        lambda s: s.user(["a", helper()]),
    ]

    for assign in assigned:

        @ul.function
        async def program(s):
            s += "a" + ul.gen("x", max_tokens=2)
            assign(s)  # noqa: B023
            s += "b"

        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            work = program.compile if compiled else lambda: program.run(backend=Echo(), timeout=PATIENCE).sync()
            with pytest.raises(ul.ProgramError, match="write await"):
                work()
            gc.collect()
        assert not [each for each in warned if "never awaited" in str(each.message)]


def test_methods_can_be_async(echo: Echo) -> None:
    class Agent:
        @ul.function
        async def act(self, s, x):
            s += x + ul.gen("a")
            return await s["a"]

    assert Agent().act.run("go", backend=echo, timeout=PATIENCE).ret_value == "go"
