"""Programs shipped to a runtime of processes: one message there, and what happens when processes die."""

import os
import signal
from collections.abc import Iterator

import psutil
import pytest
import umbel as ul
from umbel.interpreter import loop
from umbel.lang.errors import CancelledError, ConnectionLostError, EngineError

pytestmark = pytest.mark.processes

PATIENCE = 60.0  # seconds, far above what any of this needs


@pytest.fixture(scope="module")
def runtime() -> Iterator[ul.Runtime]:
    with ul.Runtime(model="oracle", debug={"step_delay": 0.002}) as runtime:
        yield runtime


@ul.function(temperature=0)
def interview(s: ul.State, person: str) -> list[str]:
    s += f"An interview with {person}.\n"
    for question in ("name", "city", "work", "food", "wish"):
        s += f"{question}: " + ul.gen(question, max_tokens=5) + "\n"
    ways = s.fork(2)
    ways += ul.gen("way", max_tokens=3, temperature=1, seed=4)
    ways.join()
    return [*s["way"], s["wish"]]


@ul.function(temperature=0, ignore_eos=True)
def endless(s: ul.State) -> None:
    s += "on" + ul.gen("a", max_tokens=2000) + ul.gen("b", max_tokens=2000)


def test_five_gens_are_one_message(runtime: ul.Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    here = interview.compile(server=False).run("Ada", backend=runtime, timeout=PATIENCE)
    expected = (here["name"], here["wish"], here["way"], here.text(), here.ret_value)
    link = runtime._links[loop.streams.loop]
    said: list[object] = []
    send = link._send
    assert link.exchange is not None
    monkeypatch.setattr(link.exchange, "_send", lambda message: (said.append(message), send(message)))
    compiled = interview.compile(server=True)
    for _ in range(2):
        said.clear()
        state = compiled.run("Ada", backend=runtime, timeout=PATIENCE)
        assert (state["name"], state["wish"], state["way"], state.text(), state.ret_value) == expected
        assert [type(message).__name__ for message in said] == ["RunProgram"]
    assert said[0].graph == b""  # type: ignore[attr-defined]  # it is known by then
    assert state.usage.calls == here.usage.calls
    assert runtime.get_server_info()["gateway_programs"] == 2


def test_many_at_once_are_all_answered(runtime: ul.Runtime) -> None:
    people = [f"person {number}" for number in range(40)]
    given = [{"person": person} for person in people]
    shipped = interview.compile(server=True).run_batch(given, backend=runtime, timeout=PATIENCE)
    here = interview.run_batch(given, backend=runtime, timeout=PATIENCE)
    assert [state["wish"] for state in shipped] == [state["wish"] for state in here]


def test_cancelling_reaches_the_engine(runtime: ul.Runtime) -> None:
    state = endless.compile(server=True).run(backend=runtime, stream=True, timeout=PATIENCE)
    next(state.text_iter("a"))
    state.cancel()
    with pytest.raises(CancelledError):
        _ = state["b"]
    state = interview.compile(server=True).run("Bo", backend=runtime, timeout=PATIENCE)
    assert state["wish"]  # the engine has room again
    assert runtime.get_server_info()["in_flight"] == 1  # the question itself


def test_an_engine_that_dies_ends_the_program_and_the_next_one_runs(runtime: ul.Runtime) -> None:
    state = endless.compile(server=True).run(backend=runtime, stream=True, timeout=PATIENCE)
    next(state.text_iter("a"))
    assert runtime._process is not None
    for process in psutil.Process(runtime._process.process_id).children():
        if "umbel.srt.engine.process" in process.cmdline():
            process.kill()
    with pytest.raises(EngineError, match="the engine died"):
        _ = state["b"]
    assert interview.compile(server=True).run("Cy", backend=runtime, timeout=PATIENCE)["wish"]


def test_a_gateway_that_dies_ends_the_program_and_the_next_one_gets_a_new_one() -> None:
    with ul.Runtime(model="oracle", debug={"step_delay": 0.002}) as runtime:
        compiled = interview.compile(server=True)
        assert compiled.run("Di", backend=runtime, timeout=PATIENCE)["wish"]
        state = endless.compile(server=True).run(backend=runtime, stream=True, timeout=PATIENCE)
        next(state.text_iter("a"))
        assert runtime._process is not None
        os.kill(runtime._process.process_id, signal.SIGKILL)
        with pytest.raises(ConnectionLostError):
            _ = state["b"]
        assert compiled.run("Di", backend=runtime, timeout=PATIENCE)["wish"]  # the graph is sent anew


@pytest.mark.nightly
def test_a_program_of_which_nothing_is_known_yet_is_run_by_a_second_gateway() -> None:
    with ul.Runtime(model="oracle") as runtime:
        compiled = interview.compile(server=True)
        quiet = compiled.run("Di", backend=runtime, timeout=PATIENCE)["wish"]
        assert runtime._process is not None
        os.kill(runtime._process.process_id, signal.SIGSTOP)
        assert compiled.run("Di", backend=runtime, timeout=PATIENCE)["wish"] == quiet
        assert runtime.get_server_info()["client_retried_requests"] == 1


def test_an_own_chat_template_keeps_programs_here() -> None:
    runtime = ul.Runtime(model="oracle", chat_template="{{ messages }}")
    assert not runtime.capabilities.programs
    assert ul.Runtime(model="oracle").capabilities.programs
