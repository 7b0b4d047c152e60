"""Ending early: cancelled by hand, by a deadline, by an error. Nothing keeps running."""

import asyncio
import contextlib
import threading
from collections.abc import Callable

import pytest
import umbel as ul
from umbel.interpreter import loop
from umbel.interpreter.backends.echo import Echo, Gate
from umbel.interpreter.executor import StepQueue
from umbel.interpreter.run import Run

from .conftest import PATIENCE
from .test_batch import _tick


@ul.function
def program(s):
    s += "a" + ul.gen("x")
    forks = s.fork(3)
    forks += "b" + ul.gen("y")
    forks.join()
    s += "c" + ul.gen("z")


def test_cancel_aborts_the_request_in_flight_and_fails_the_rest() -> None:
    gate = Gate()
    echo = Echo(gate=gate)
    state = program.run(backend=echo, timeout=PATIENCE)
    gate.wait_for(1)
    state.cancel()
    for name in ("x", "y", "z"):
        with pytest.raises(ul.CancelledError, match="the run was cancelled"):
            state[name]
    with pytest.raises(ul.CancelledError):
        state.text()
    assert isinstance(state.error(), ul.CancelledError)
    assert (len(echo.aborted), echo.active, echo.calls) == (1, set(), 1)


def test_cancel_reaches_every_branch() -> None:
    gate = Gate()
    echo = Echo(gate=gate)
    state = program.run(backend=echo, timeout=PATIENCE)
    gate.step()
    gate.wait_for(4)
    state.cancel()
    with pytest.raises(ul.CancelledError):
        state.sync()
    loop.streams.run(_tick(), PATIENCE)
    assert (len(echo.aborted), echo.active) == (3, set())
    assert state["x"] == "a"  # what was known stays known


def test_cancelling_a_finished_run_changes_nothing(echo: Echo) -> None:
    state = program.run(backend=echo, timeout=PATIENCE)
    state.sync()
    state.cancel()
    assert state.error() is None
    assert state["z"] == "c"


def test_the_deadline_ends_every_wait() -> None:
    gate = Gate()
    echo = Echo(gate=gate)
    state = program.run(backend=echo, timeout=0.05)
    for read in (lambda: state["x"], lambda: state["z"], state.text, state.sync, lambda: list(state.text_iter())):
        with pytest.raises(ul.DeadlineError):
            read()
    loop.streams.run(_tick(), PATIENCE)
    assert echo.active == set()
    assert len(echo.aborted) == 1


def test_a_deadline_that_passes_after_the_end_does_not_matter(echo: Echo) -> None:
    state = program.run(backend=echo, timeout=PATIENCE)
    state.sync()
    assert state._sink.run.deadline is None
    state += "more" + ul.gen("w")
    assert state["w"] == "more"


def test_the_requests_say_how_much_time_is_left(echo: Echo) -> None:
    program.run(backend=echo, timeout=PATIENCE).sync()
    assert all(0 < request.origin.timeout <= PATIENCE for request in echo.requests)


def test_a_read_with_its_own_timeout_does_not_end_the_run() -> None:
    gate = Gate()
    state = program.run(backend=Echo(gate=gate), timeout=PATIENCE)
    with pytest.raises(ul.DeadlineError, match="variable 'x' was not known in time"):
        state.get_var("x", timeout=0.01)
    with pytest.raises(ul.DeadlineError):
        state.text(timeout=0.01)
    gate.open()
    assert state["x"] == "a"


def test_a_timeout_of_a_read_is_a_number(echo: Echo) -> None:
    state = program.run(backend=echo, timeout=PATIENCE)
    for read in (lambda: state.get_var("x", timeout="soon"), lambda: state.text(timeout="soon")):
        with pytest.raises(ul.ParameterError, match="timeout='soon' is not a number; write seconds"):
            read()


def test_asking_for_the_error_waits_until_it_is_known() -> None:
    error = ul.EngineError("gone")

    def run() -> ul.State:
        return program.run(backend=Echo(gate=gate, faults=ul.FailCall(2, error)), timeout=PATIENCE)

    gate = Gate()
    state = run()
    with pytest.raises(ul.DeadlineError):
        state.error(timeout=0.01)
    opener = threading.Thread(target=gate.open)
    opener.start()
    assert state.error() is error
    opener.join(PATIENCE)

    async def ask() -> BaseException | None:
        return await ul.AsyncState(run()._sink).error()

    assert asyncio.run(ask()) is error


def test_an_error_of_the_body_aborts_what_is_in_flight() -> None:
    gate = Gate()
    echo = Echo(gate=gate)

    @ul.function
    def failing(s):
        s += "a" + ul.gen("x")
        gate.wait_for(1)
        raise ValueError("body")

    with pytest.raises(ValueError, match="body"):
        failing.run(backend=echo, timeout=PATIENCE)
    loop.streams.run(_tick(), PATIENCE)
    assert echo.active == set()
    assert len(echo.aborted) == 1


def test_cancel_from_another_thread_wakes_the_program() -> None:
    gate = Gate()
    started: list[ul.State] = []
    outcome: list[BaseException] = []

    @ul.function
    def waiting(s):
        started.append(s)
        s += "a" + ul.gen("x")
        s["x"]

    def run() -> None:
        try:
            waiting.run(backend=Echo(gate=gate), timeout=PATIENCE)
        except ul.CancelledError as error:
            outcome.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    gate.wait_for(1)
    started[0].cancel()
    thread.join(PATIENCE)
    assert len(outcome) == 1


def test_a_run_that_is_cancelled_while_the_backend_starts_ends() -> None:
    class Slow(Echo):
        starting = threading.Event()

        async def start(self) -> None:
            import asyncio

            self.starting.set()
            await asyncio.Event().wait()

    echo = Slow()
    state = program.run(backend=echo, timeout=PATIENCE)
    assert echo.starting.wait(PATIENCE)
    state.cancel()
    with pytest.raises(ul.CancelledError):
        state["x"]


def test_cancel_before_the_stream_began_still_fails_its_steps() -> None:
    """Many at once, so that some are cancelled between the creation of their task and its first step."""
    for _ in range(200):
        state = program.run(backend=Echo(), timeout=PATIENCE)
        state.cancel()
        with contextlib.suppress(ul.CancelledError):
            assert state["z"] == "c"


class LastWorkEnds:
    """A home on whose clock nobody can look before the last work of `run` has ended, which frees it of its deadline."""

    def __init__(self) -> None:
        self.run: Run | None = None

    def call(self, function: Callable[..., object], *arguments: object) -> None: ...

    def call_later(self, seconds: float, function: Callable[..., object], *arguments: object) -> None: ...

    def time(self) -> float:
        if self.run is not None:
            self.run.end()
        return 100.0


def test_a_run_that_ends_while_it_is_asked_whether_it_is_late_gives_an_answer(echo: Echo) -> None:
    home = LastWorkEnds()
    run = Run(echo, timeout=1.0, home=home)
    home.run = run
    assert run.is_late in (True, False)
    assert run.deadline is None
    assert run.is_late is False


def test_an_error_that_another_thread_finds_has_its_traceback(echo: Echo) -> None:
    queue = StepQueue(Run(echo))
    known: list[bool] = []

    class Watched(Exception):
        @property
        def __traceback__(self) -> None:
            known.append(queue.error is not None)

    queue._fail(Watched())
    assert known == [False]  # a reader would have found the error without its traceback
