"""`state.usage` and `state.cost` wait for the calls that were asked for; `..._so_far` does not."""

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest
import umbel as ul
from umbel.interpreter.backends.echo import Echo, Gate

from .conftest import PATIENCE


@ul.function
def branching(s: ul.State) -> None:
    s += "a" + ul.gen("x")
    forks = s.fork(3)
    forks += "b" + ul.gen("y")  # joined by nothing


@ul.function
async def branching_async(s: ul.AsyncState) -> None:
    s += "a" + ul.gen("x")
    s.fork(3)[1].__iadd__("b" + ul.gen("y"))


def opened_meanwhile(gate: Gate, read: Callable[[], Any]) -> Any:
    """What `read` gives when the gate opens only after it has begun to wait."""
    gate.wait_for(1)
    opener = threading.Thread(target=gate.open)
    opener.start()
    found = read()
    opener.join()
    return found


def test_usage_is_that_of_all_calls_before_any_variable_was_read() -> None:
    gate = Gate()
    state = branching.run(backend=Echo(gate=gate), timeout=PATIENCE)
    assert state.usage_so_far == state.cost_so_far.usage == ul.Usage()
    assert opened_meanwhile(gate, lambda: state.usage).calls == 4
    assert state.cost.usage == state.usage == state.usage_so_far
    assert state.usage.completion_tokens == 4


def test_inside_the_body_usage_counts_what_was_said_so_far() -> None:
    @ul.function
    def program(s: ul.State) -> tuple[int, int]:
        s += "a" + ul.gen("x")
        first = s.usage.calls
        s += ul.gen("y")
        return first, s.cost.usage.calls

    for options in ({}, {"stream": True}):
        state = program.run(backend=Echo(), timeout=PATIENCE, **options)
        assert "".join(state.text_iter()) == "aaa"
        assert state.ret_value == (1, 2)


def test_an_observer_of_a_streaming_run_waits_for_its_end() -> None:
    said = threading.Event()

    @ul.function
    def program(s: ul.State) -> None:
        assert said.wait(PATIENCE)
        s += "a" + ul.gen("x")

    state = program.run(backend=Echo(), timeout=PATIENCE, stream=True)
    assert state.usage_so_far.calls == 0
    said.set()
    assert state.usage.calls == 1


def test_a_run_that_failed_or_was_cancelled_counts_the_calls_that_were_made() -> None:
    gate = Gate()
    cancelled = branching.run(backend=Echo(gate=gate), timeout=PATIENCE)
    gate.step()
    gate.wait_for(4)
    cancelled.cancel()
    assert cancelled.usage.calls == cancelled.cost.usage.calls == 1
    late = branching.run(backend=Echo(gate=Gate()), timeout=0.05)
    assert late.usage.calls == 0
    assert isinstance(late.error(), ul.DeadlineError)
    failed = branching.run(backend=Echo(["one"]), timeout=PATIENCE)
    assert failed.usage.calls == 1


def test_the_usage_of_an_async_state_is_awaited() -> None:
    async def main() -> None:
        state = await branching_async.run_async(backend=Echo(), timeout=PATIENCE)
        assert (await state.usage).calls == (await state.cost).usage.calls == 2
        assert state.usage_so_far.calls == 2
        with pytest.raises(AttributeError, match=r"write \(await state\.usage\)\.calls"):
            _ = state.usage.calls  # type: ignore[attr-defined]

    asyncio.run(main())


def test_a_compiled_run_waits_too() -> None:
    gate = Gate()
    state = branching.compile().run(backend=Echo(gate=gate), timeout=PATIENCE)
    assert opened_meanwhile(gate, lambda: state.usage).calls >= 1
    assert state.usage == state.usage_so_far


@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_what_an_async_program_forgot_to_await_is_refused_where_it_is_used() -> None:
    uses: list[tuple[Callable[[Any], object], type[Exception]]] = [
        (lambda value: f"{value}", ul.ProgramError),
        (str, ul.ProgramError),
        (lambda value: "Q: " + value, ul.ProgramError),
        (lambda value: value + "!", ul.ProgramError),
        (lambda value: value == "yes", ul.ProgramError),
        (bool, ul.ProgramError),
        (lambda value: value.strip(), AttributeError),
    ]

    @ul.function
    async def program(s: ul.AsyncState) -> None:
        s += "a" + ul.gen("x")
        for use, error in uses:
            with pytest.raises(error, match="await s\\['x'\\]"):
                use(s["x"])
        with pytest.raises(ul.ParameterError, match="write await in front of it"):
            s += s["x"]
        assert await asyncio.gather(s["x"], asyncio.create_task(s["x"])) == ["a", "a"]

    program.run(backend=Echo(), timeout=PATIENCE)
