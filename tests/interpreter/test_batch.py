"""Many programs: order, bounds, failures, memory."""

import threading
from pathlib import Path

import pytest
import umbel as ul
from umbel.interpreter import loop
from umbel.interpreter.backends.echo import Echo, Gate

from .conftest import PATIENCE


@ul.function
def repeat(s, x):
    s += f"<{x}>" + ul.gen("y")
    if x == "raise":
        raise ValueError("asked to")
    return x


def test_results_come_in_order_from_dicts_and_tuples(echo: Echo) -> None:
    states = repeat.run_batch([{"x": 1}, (2,), [3], {"x": 4}], backend=echo, timeout=PATIENCE)
    assert [state["y"] for state in states] == ["<1>", "<2>", "<3>", "<4>"]
    assert repeat.run_batch([], backend=echo) == []


def test_sampling_defaults_reach_every_program(echo: Echo) -> None:
    repeat.run_batch([(1,), (2,)], backend=echo, temperature=0.5, sampling={"stop": "!"}, timeout=PATIENCE)
    assert {(r.sampling.temperature, r.sampling.stop) for r in echo.requests} == {(0.5, ("!",))}


@pytest.mark.parametrize(
    ("items", "options", "problem"),
    [
        ([(1,), (2, 3)], {}, "too many positional"),
        ([(1,), {"z": 3}], {}, "missing a required argument: 'x'"),
        ([(1,), 7], {}, "item 1 is 7"),
        ({"x": 1}, {}, "takes a list of dicts or tuples, got dict"),
        ([(1,)], {"num_threads": 0}, "num_threads=0"),
        ([(1,)], {"on_error": "ignore"}, "on_error='ignore'"),
        ([(1,)], {"stream": True}, "takes no stream"),
        ([(1,)], {"tempature": 1}, "run_batch.. has no option 'tempature'; did you mean 'temperature'"),
    ],
)
def test_wrong_arguments_raise_before_any_program_runs(
    echo: Echo, items: object, options: dict[str, object], problem: str
) -> None:
    with pytest.raises(ul.ParameterError, match=problem):
        repeat.run_batch(items, backend=echo, **options)
    assert echo.calls == 0


def test_the_generator_gives_results_as_they_are_ready() -> None:
    gate = Gate()
    results = repeat.run_batch(
        ((i,) for i in range(3)), backend=Echo(gate=gate), generator_style=True, timeout=PATIENCE, num_threads=1
    )
    for i in range(3):
        gate.step()
        assert next(results).ret_value == i
    assert list(results) == []


def test_the_generator_reads_its_items_only_as_it_needs_them(echo: Echo) -> None:
    taken = 0

    def items():
        nonlocal taken
        for i in range(1000):
            taken += 1
            yield (i,)

    results = repeat.run_batch(items(), backend=echo, generator_style=True, num_threads=4, timeout=PATIENCE)
    next(results)
    assert taken <= 12
    results.close()


def test_closing_the_generator_cancels_what_runs() -> None:
    gate = Gate()
    echo = Echo(gate=gate)
    results = repeat.run_batch([(i,) for i in range(10)], backend=echo, generator_style=True, num_threads=4)
    gate.step()
    next(results)
    gate.wait_for(4)
    results.close()
    loop.streams.run(_tick(), PATIENCE)
    assert echo.active == set()
    assert gate.waiting == 0


async def _tick() -> None:
    """The loop has gone round: what was asked of it before has begun."""
    import asyncio

    for _ in range(5):
        await asyncio.sleep(0)


def test_a_failure_says_all_about_its_program(echo: Echo) -> None:
    ok, failure = repeat.run_batch([("fine",), {"x": "raise"}], backend=echo, on_error="return", timeout=PATIENCE)
    assert ok.ret_value == "fine"
    assert isinstance(failure, ul.Failure)
    assert (failure.index, failure.arguments, str(failure.error)) == (1, {"x": "raise"}, "asked to")
    assert failure.state.variables() == ["y"]


def test_a_call_that_fails_after_the_body_returned_is_a_failure() -> None:
    error = RuntimeError("late")
    gate = Gate()

    def faults(verb: str, number: int) -> None:
        if verb == "generate" and number == 2:
            raise error

    results = repeat.run_batch(
        [(1,), (2,), (3,)], backend=Echo(gate=gate, faults=faults), on_error="return", generator_style=True
    )
    gate.open()
    outcomes = list(results)
    assert sum(isinstance(outcome, ul.Failure) for outcome in outcomes) == 1
    assert [outcome.error for outcome in outcomes if isinstance(outcome, ul.Failure)] == [error]


def test_the_generator_raises_an_error_in_its_place(echo: Echo) -> None:
    results = repeat.run_batch([(1,), (2,), ("raise",), (4,)], backend=echo, generator_style=True, timeout=PATIENCE)
    assert [next(results).ret_value, next(results).ret_value] == [1, 2]
    with pytest.raises(ValueError, match="asked to"):
        next(results)
    assert list(results) == []


def test_no_program_starts_after_one_failed() -> None:
    echo = Echo()
    with pytest.raises(ValueError, match="asked to"):
        repeat.run_batch([("raise",), *((i,) for i in range(50))], backend=echo, num_threads=1, timeout=PATIENCE)
    assert echo.calls <= 1


def test_num_threads_bounds_how_many_run_at_once() -> None:
    running, most = 0, 0
    lock = threading.Lock()

    @ul.function
    def program(s, x):
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        s += f"{x}" + ul.gen("y")
        s["y"]
        with lock:
            running -= 1

    program.run_batch([(i,) for i in range(30)], backend=Echo(), num_threads=3, timeout=PATIENCE)
    assert most <= 3


def test_calls_that_no_body_waits_for_hold_no_thread() -> None:
    gate = Gate()
    results = repeat.run_batch([(i,) for i in range(100)], backend=Echo(gate=gate), generator_style=True)
    taker = threading.Thread(target=lambda: list(results))
    taker.start()
    gate.wait_for(100)  # all in flight, on at most 32 threads
    gate.open()
    taker.join(PATIENCE)
    assert not taker.is_alive()


def test_each_program_has_its_own_deadline() -> None:
    gate = Gate()
    gate.step(1)
    first, second = repeat.run_batch(
        [(1,), (2,)], backend=Echo(gate=gate), num_threads=1, timeout=0.05, on_error="return"
    )
    assert first["y"] == "<1>"
    assert isinstance(second, ul.Failure)
    assert isinstance(second.error, ul.DeadlineError)


def test_the_progress_bar_counts_programs(echo: Echo, capsys: pytest.CaptureFixture[str]) -> None:
    assert len(repeat.run_batch([(i,) for i in range(3)], backend=echo, progress_bar=True, timeout=PATIENCE)) == 3
    assert "3/3" in capsys.readouterr().err


def test_async_programs_run_in_batches_without_threads() -> None:
    threads: set[int] = set()

    @ul.function
    async def program(s, x):
        threads.add(threading.get_ident())
        s += f"<{x}>" + ul.gen("y")
        return await s["y"]

    states = program.run_batch([(i,) for i in range(500)], backend=Echo(), timeout=PATIENCE)
    assert [state.ret_value for state in states] == [f"<{i}>" for i in range(500)]
    assert states[7]["y"] == "<7>"
    assert len(threads) == 1


def test_an_async_program_that_raises_is_a_failure() -> None:
    @ul.function
    async def program(s, x):
        if x == 1:
            raise ValueError("one")
        return x

    zero, one, two = program.run_batch([(0,), (1,), (2,)], backend=Echo(), on_error="return")
    assert (zero.ret_value, two.ret_value) == (0, 2)
    assert isinstance(one, ul.Failure)


def test_an_interrupt_cancels_the_batch() -> None:
    gate = Gate()
    echo = Echo(gate=gate)
    results = repeat.run_batch([(i,) for i in range(8)], backend=echo, generator_style=True, num_threads=4)
    gate.step()
    first = next(results)
    gate.wait_for(4)
    with pytest.raises(KeyboardInterrupt):
        results.throw(KeyboardInterrupt)
    loop.streams.run(_tick(), PATIENCE)
    assert first.ret_value == 0
    assert echo.active == set()


@pytest.mark.parametrize("threads", [1, 4])
def test_a_batch_that_is_given_up_frees_its_journal(threads: int, tmp_path: Path) -> None:
    """Bodies that wait for a thread never run then, and hold the file no longer."""
    items, path = [(number,) for number in range(40)], tmp_path / "run.jsonl"
    for _ in repeat.run_batch(items, backend=Echo(), journal=path, generator_style=True, num_threads=threads):
        break
    again = Echo()
    assert len(repeat.run_batch(items, backend=again, journal=path, timeout=PATIENCE)) == 40
    assert again.calls < 40
