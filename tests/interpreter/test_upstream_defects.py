"""The seventeen defects of an earlier system that this one must not have, each as a fact.

Numbers are those of the list they were collected in. 12 (constraints dropped in silence) and 13 (speculation)
belong to hosted backends; the part of 12 that exists here is that constraints are refused loudly.
"""

import threading

import pytest
import umbel as ul
from umbel.interpreter.backends.echo import Echo, FailCall, Gate
from umbel.interpreter.selecting import decide
from umbel.lang.chat_template import ChatTemplate, TemplateWarning
from umbel.lang.prompt import Media
from umbel.lang.protocol import Capabilities, Hint, ScoredChoice

from .conftest import PATIENCE


class Broken(Exception):
    """What the backend raises in these tests; not an error of umbel, so it must come through as it is."""


def failing_program():
    @ul.function
    def program(s):
        s += "a" + ul.gen("x")
        s += "b" + ul.gen("y")
        return s

    return program


def broken_echo(k: int = 1) -> tuple[Echo, Broken]:
    error = Broken("the wire is cut")
    return Echo(lambda prompt: "ok", faults=FailCall(k, error)), error


# 1 ---------------------------------------------------------------------------------------------


def test_01_after_a_failed_step_every_later_read_raises_and_none_hangs() -> None:
    echo, error = broken_echo()
    state = failing_program().run(backend=echo, timeout=PATIENCE)
    state += "c" + ul.gen("z")
    fork = state.fork(2)
    fork += ul.gen("w")
    fork.join()
    reads = [
        lambda: state["x"],
        lambda: state["y"],
        lambda: state["z"],
        lambda: state["w"],
        lambda: state["never said"],
        lambda: fork[1]["w"],
        state.text,
        state.messages,
        state.sync,
        lambda: state.get_meta_info("y"),
        lambda: list(state.text_iter("y")),
        lambda: list(state.text_iter()),
        lambda: state.copy().text(),
    ]
    for read in reads:
        with pytest.raises(Broken) as caught:
            read()
        assert caught.value is error
    assert echo.calls == 1


# 2 ---------------------------------------------------------------------------------------------


def test_02_the_error_is_recorded_before_a_waiter_wakes() -> None:
    gate = Gate()
    error = Broken("late")
    echo = Echo(gate=gate, faults=FailCall(1, error))
    state = failing_program().run(backend=echo, timeout=PATIENCE)
    seen: list[object] = []

    def read() -> None:
        try:
            seen.append(state["x"])
        except Broken as caught:
            seen.extend([caught, state.error()])

    threads = [threading.Thread(target=read) for _ in range(4)]
    for thread in threads:
        thread.start()
    gate.wait_for(1)
    gate.open()
    for thread in threads:
        thread.join(PATIENCE)
    assert seen == [error] * 8


# 3 ---------------------------------------------------------------------------------------------


def test_03_a_failed_variable_shows_the_error_and_where_it_happened() -> None:
    echo, _ = broken_echo()
    state = failing_program().run(backend=echo, timeout=PATIENCE)
    for _ in range(2):  # the second read shows no longer a traceback than the first
        with pytest.raises(Broken) as caught:
            state["y"]
        places = [entry.name for entry in caught.traceback]
        assert places.count("generate") == 3  # the executor's, the run's and the backend's
        assert places[-1] == "__call__"  # the line that raised


# 4 ---------------------------------------------------------------------------------------------


def test_04_a_batch_keeps_finished_results_when_a_program_fails() -> None:
    @ul.function
    def program(s, x):
        s += f"{x}" + ul.gen("y")
        if x == 3:
            raise Broken("three")

    items = [(x,) for x in range(6)]
    results = program.run_batch(items, backend=Echo(), on_error="return", timeout=PATIENCE)
    assert [r["y"] for i, r in enumerate(results) if i != 3] == ["0", "1", "2", "4", "5"]
    assert isinstance(results[3], ul.Failure)
    assert isinstance(results[3].error, Broken)
    with pytest.raises(Broken) as caught:
        program.run_batch(items, backend=Echo(), num_threads=1, timeout=PATIENCE)
    assert {i: s["y"] for i, s in caught.value.batch_results.items()} == {0: "0", 1: "1", 2: "2"}
    assert "program 3 of 6" in caught.value.__notes__[0]


# 5 ---------------------------------------------------------------------------------------------


def test_05_a_batch_runs_the_users_function_once_per_item() -> None:
    calls: list[int] = []

    @ul.function
    def program(s, x):
        calls.append(x)
        s += "a long constant head " * 20 + str(x) + ul.gen("y")

    program.run_batch([{"x": x} for x in range(5)], backend=Echo(), timeout=PATIENCE)
    assert sorted(calls) == [0, 1, 2, 3, 4]


# 6 ---------------------------------------------------------------------------------------------


def test_06_waiting_for_a_variable_that_comes_later_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    looked = 0
    said, read = threading.Event(), threading.Event()

    @ul.function
    def program(s):
        assert said.wait(PATIENCE)
        s += "a" + ul.gen("late")

    state = program.run(backend=Echo(["one two"]), stream=True, timeout=PATIENCE)
    get = state._sink.table.get

    def counting(name: str):
        nonlocal looked
        looked += 1
        return get(name)

    monkeypatch.setattr(type(state._sink.table), "get", lambda table, name: counting(name))
    pieces: list[str] = []

    def follow() -> None:
        read.set()
        pieces.extend(state.text_iter("late"))

    thread = threading.Thread(target=follow)
    thread.start()
    assert read.wait(PATIENCE)
    said.set()
    thread.join(PATIENCE)
    assert pieces == ["one", " two"]
    assert looked < 20  # a busy loop looks thousands of times


# 7 ---------------------------------------------------------------------------------------------


def test_07_two_readers_of_one_stream_both_see_every_piece() -> None:
    gate = Gate()
    state = failing_program().run(
        backend=Echo(["one two three", "four five"], gate=gate), stream=True, timeout=PATIENCE
    )
    seen: dict[int, list[str]] = {0: [], 1: [], 2: []}

    def follow(reader: int, name: str | None) -> None:
        seen[reader].extend(state.text_iter(name))

    threads = [threading.Thread(target=follow, args=args) for args in ((0, "x"), (1, "x"), (2, None))]
    for thread in threads:
        thread.start()
    for arrived in range(1, 8):
        gate.wait_for(arrived)
        gate.step()
    for thread in threads:
        thread.join(PATIENCE)
    assert seen[0] == seen[1] == ["one", " two", " three"]
    assert seen[2] == ["a", "one", " two", " three", "b", "four", " five"]


# 8 ---------------------------------------------------------------------------------------------


def test_08_join_stays_aligned_and_gathers_names_from_before_the_fork(echo: Echo) -> None:
    @ul.function
    def program(s):
        s += "0" + ul.gen("old")
        forks = s.fork(3)
        forks[0] += "a" + ul.gen("new")
        forks[2] += "c" + ul.gen("new")
        forks[1] += "b" + ul.gen("old")
        forks.join()

    state = program.run(backend=echo, timeout=PATIENCE)
    assert state["new"] == ["a", None, "c"]
    assert state["old"] == ["0", "b", "0"]


# 9 ---------------------------------------------------------------------------------------------


def test_09_bind_keeps_every_option_of_the_decorator() -> None:
    echo = Echo(["x"])

    @ul.function(name="named", temperature=0.25, stop="\n")
    def program(s, a, b):
        s += a + b + ul.gen("x")

    bound = program.bind(a="1")
    assert (bound.name, bound.options) == (program.name, program.options)
    bound.run(b="2", backend=echo, timeout=PATIENCE).sync()
    sampling = echo.requests[-1].sampling
    assert (sampling.temperature, sampling.stop) == (0.25, ("\n",))


# 10 --------------------------------------------------------------------------------------------


def test_10_roles_and_scopes_are_closed_when_their_body_raises(echo: Echo) -> None:
    @ul.function
    def program(s):
        try:
            with s.user(), s.var_scope("said"):
                s += "half"
                raise ValueError("stop here")
        except ValueError:
            pass
        s += ul.assistant(ul.gen("x"))

    state = program.run(backend=echo, timeout=PATIENCE)
    assert state["said"] == "half"
    assert [m["role"] for m in state.messages()] == ["user", "assistant"]


# 11 --------------------------------------------------------------------------------------------


def test_11_a_missing_chat_template_is_said_loudly() -> None:
    @ul.function
    def program(s):
        s += ul.user("hello") + ul.assistant(ul.gen("x"))

    backend = Echo([" hi"], chat_template=ChatTemplate(None, name="a base model"))
    with pytest.warns(TemplateWarning, match="a base model has no chat template") as told:
        text = program.run(backend=backend, timeout=PATIENCE).text()
    assert text == "USER: hello\nASSISTANT: hi\n"
    assert (told[0].filename, told[0].lineno) == (__file__, program.body.function.__code__.co_firstlineno + 2)


# 12 --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("constraint", [{"regex": "a+"}, {"json_schema": "{}"}, {"dtype": int}, {"stop_regex": "a"}])
def test_12_a_constraint_is_refused_not_dropped(constraint: dict[str, object]) -> None:
    @ul.function
    def program(s):
        s += ul.gen("x", **constraint)

    echo = Echo(capabilities=Capabilities("a model that only talks"))
    with pytest.raises(ul.CapabilityError, match=r"a model that only talks (does not enforce|has no stop_regex)"):
        program.run(backend=echo, timeout=PATIENCE)["x"]
    assert echo.calls == 0


# 13 --------------------------------------------------------------------------------------------


def test_13_programs_that_run_at_once_do_not_share_state_on_the_backend() -> None:
    @ul.function
    def program(s, x):
        for turn in range(3):
            s += f"[{x}.{turn}]" + ul.gen("y")
        return s["y"]

    echo = Echo(lambda prompt: prompt[prompt.rindex("[") :])
    states = program.run_batch([(x,) for x in range(64)], backend=echo, timeout=PATIENCE)
    assert [state.ret_value for state in states] == [f"[{x}.2]" for x in range(64)]
    assert all(f"[{x}.0][{x}.0]" in state.text() for x, state in enumerate(states))


# 14 --------------------------------------------------------------------------------------------


def test_14_a_log_probability_of_zero_counts_in_the_mean() -> None:
    certain = ScoredChoice((1, 2), (0.0, -3.0))  # mean -1.5; without its zero it would be -3
    other = ScoredChoice((3,), (-2.0,))
    assert decide("token_length_normalized", [other, certain]).scores == (-2.0, -1.5)
    assert decide("token_length_normalized", [other, ScoredChoice((1,), (0.0,))]).index == 1  # all zeros: no division


# 15 --------------------------------------------------------------------------------------------


def test_15_fork_does_not_wait_for_the_backend() -> None:
    gate = Gate()
    echo = Echo(gate=gate)

    @ul.function
    def program(s):
        s += "a" + ul.gen("x")
        s.fork(8)  # never used

    state = program.run(backend=echo, timeout=PATIENCE)  # comes back although the first call waits at the gate
    assert not any(isinstance(request, Hint) for request in echo.requests)  # its place has not come yet
    gate.open()
    state.sync()
    hints = [request for request in echo.requests if isinstance(request, Hint)]
    assert len(hints) == 1
    assert echo.calls == 1


# 16 --------------------------------------------------------------------------------------------


def test_16_a_prompt_may_hold_several_images() -> None:
    echo = Echo(["seen"])

    @ul.function
    def program(s):
        s += ul.image(b"one") + " and " + ul.image(b"two") + ul.gen("x")

    program.run(backend=echo, timeout=PATIENCE).sync()
    assert [part.data for part in echo.requests[-1].prompt if isinstance(part, Media)] == [b"one", b"two"]


# 17 --------------------------------------------------------------------------------------------


def test_17_a_batch_has_a_bounded_number_of_threads() -> None:
    most = 0
    lock = threading.Lock()
    before = threading.active_count()

    @ul.function
    def program(s, x):
        nonlocal most
        s += f"{x}" + ul.gen("y")
        s["y"]
        with lock:
            most = max(most, threading.active_count())

    program.run_batch([(x,) for x in range(200)], backend=Echo(), timeout=PATIENCE)
    assert most <= before + 32 + 1  # and the loop


def test_a_backend_that_cannot_hint_is_not_asked_to() -> None:
    @ul.function
    def program(s):
        s += "a"
        forks = s.fork(3)
        forks += ul.gen("x")
        forks.join()

    echo = Echo(["1", "2", "3"], capabilities=Capabilities("plain"))
    assert program.run(backend=echo, timeout=PATIENCE)["x"] == ["1", "2", "3"]
    assert not any(isinstance(request, Hint) for request in echo.requests)
