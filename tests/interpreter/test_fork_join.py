"""Branches: they share what was said, cost nothing to make, and come back aligned."""

import statistics
import time

import pytest
import umbel as ul
from umbel.interpreter.backends.echo import Echo, FailCall, Gate
from umbel.lang.prompt import Generated, Text
from umbel.lang.protocol import GenRequest, Hint

from ..lang.templates.examples import FAMILIES, Family
from .conftest import PATIENCE


def gens(echo: Echo) -> list[GenRequest]:
    return [request for request in echo.requests if isinstance(request, GenRequest)]


def test_branches_begin_with_everything_said_before(echo: Echo) -> None:
    @ul.function
    def program(s):
        s += "root " + ul.gen("x")
        forks = s.fork(3)
        forks += lambda i: f" {i}" + ul.gen("y")
        return [fork.text() for fork in forks]

    assert program.run(backend=echo, timeout=PATIENCE).ret_value == [f"root root {i}{i}" for i in range(3)]


def test_branches_do_not_see_each_other_nor_what_the_parent_says_later(echo: Echo) -> None:
    @ul.function
    def program(s):
        s += "a"
        first, second = s.fork(2)
        s += "parent"
        first += "1"
        second += "2"
        return s.text(), first.text(), second.text()

    assert program.run(backend=echo, timeout=PATIENCE).ret_value == ("aparent", "a1", "a2")


def test_branches_read_variables_bound_before_the_fork(echo: Echo) -> None:
    @ul.function
    def program(s):
        s += "a" + ul.gen("x")
        fork = s.fork(2)
        s += "b" + ul.gen("x")
        fork[1] += "c" + ul.gen("x")
        return s["x"], fork[0]["x"], fork[1]["x"]

    assert program.run(backend=echo, timeout=PATIENCE).ret_value == ("b", "a", "c")


def test_the_prefix_is_one_object_for_all_branches(echo: Echo) -> None:
    @ul.function
    def program(s):
        s += "shared"
        forks = s.fork(8)
        forks += "x"
        for fork in forks:
            fork.sync()
        positions = [fork._sink._queue._executor.position for fork in forks]
        return len({id(position.prompt.parent) for position in positions})

    assert program.run(backend=echo, timeout=PATIENCE).ret_value == 1


def test_fork_of_eight_takes_less_than_a_millisecond(echo: Echo) -> None:
    @ul.function
    def program(s):
        s += "a long text " * 1000 + ul.gen("x")
        s.sync()
        times = []
        for _ in range(20):
            start = time.perf_counter()
            s.fork(8)
            times.append(time.perf_counter() - start)
        return times

    # The median of repeats: single ones may meet a busy machine. Typical: 0.05 ms.
    assert statistics.median(program.run(backend=echo, timeout=PATIENCE).ret_value) < 1e-3


def test_a_fork_gives_one_hint_with_the_shared_prefix(echo: Echo) -> None:
    @ul.function
    def program(s):
        s += "shared " + ul.gen("x")
        forks = s.fork(4)
        forks += " more" + ul.gen("y")
        forks.join()

    state = program.run(backend=echo, timeout=PATIENCE)
    state.sync()
    hints = [request for request in echo.requests if isinstance(request, Hint)]
    assert len(hints) == 1
    assert isinstance(hints[0].prompt[-1], Generated)
    first, *branches = gens(echo)
    assert first.origin.fork_group == ""
    assert {request.origin.fork_group for request in branches} == {hints[0].origin.fork_group} != {""}
    assert all(request.prompt[:2] == hints[0].prompt for request in branches)


@pytest.mark.parametrize("shape", ["copy", "one branch", "nothing said yet"])
def test_no_hint_where_nothing_is_shared(echo: Echo, shape: str) -> None:
    @ul.function
    def program(s):
        if shape != "nothing said yet":
            s += "text"
        states = [s.copy()] if shape == "copy" else s.fork(1 if shape == "one branch" else 3)
        for state in states:
            state += "x" + ul.gen("y")
            state.sync()

    program.run(backend=echo, timeout=PATIENCE)
    assert gens(echo)
    assert not any(isinstance(request, Hint) for request in echo.requests)


def test_a_refused_hint_does_not_stop_the_branches() -> None:
    echo = Echo(lambda prompt: "ok", faults=FailCall(1, ul.OverloadedError("full"), verbs=["hint"]))

    @ul.function
    def program(s):
        s += "a"
        forks = s.fork(2)
        forks += ul.gen("x")
        forks.join()

    assert program.run(backend=echo, timeout=PATIENCE)["x"] == ["ok", "ok"]


def test_branches_run_at_the_same_time() -> None:
    gate = Gate()
    echo = Echo(lambda prompt: "ok", gate=gate)

    @ul.function
    def program(s):
        s += "a"
        forks = s.fork(5)
        forks += ul.gen("x")
        forks.join()

    state = program.run(backend=echo, timeout=PATIENCE)
    gate.wait_for(5)
    assert gate.waiting == 5
    gate.open()
    assert state["x"] == ["ok"] * 5


def test_join_appends_the_text_of_the_branches_as_the_parts_it_was() -> None:
    echo = Echo(["zero", "one", "two", "end"])

    @ul.function
    def program(s):
        s += "Facts:"
        forks = s.fork(3)
        for i, fork in enumerate(forks):
            fork += f" {i}=" + ul.gen("fact")
            fork.sync()
        forks.join("concate_and_append")
        s += "." + ul.gen("x")

    state = program.run(backend=echo, timeout=PATIENCE)
    assert state.text() == "Facts: 0=zero 1=one 2=two.end"
    parts = gens(echo)[-1].prompt
    assert [part.text for part in parts if isinstance(part, Generated)] == ["zero", "one", "two"]
    assert parts[-1] == Text(".")


def test_joined_turns_are_turns_of_the_conversation(echo: Echo) -> None:
    @ul.function
    def program(s):
        s += ul.system("S")
        forks = s.fork(2)
        forks += lambda i: ul.user(f"q{i}") + ul.assistant(ul.gen("x"))
        forks.join("concate_and_append")
        s += ul.user("end")

    messages = program.run(backend=echo, timeout=PATIENCE).messages()
    assert [m["content"] for m in messages] == ["S", "q0", "q0", "q1", "q1", "end"]


def test_branches_inside_an_open_turn_give_their_text_to_it(echo: Echo) -> None:
    @ul.function
    def program(s):
        with s.user():
            s += "list:"
            forks = s.fork(2)
            forks += lambda i: f" item {i}"
            forks.join("concate_and_append")

    assert program.run(backend=echo, timeout=PATIENCE).messages() == [
        {"role": "user", "content": "list: item 0 item 1"}
    ]


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_blanks_around_an_appending_join_are_those_of_the_program(family: Family) -> None:
    """Also where the template strips white space, which is held back until it is known what follows."""

    def whole(s):
        s += "Hello: there " + "1" + " and you" + ul.gen("x") + " \n" + "end"

    def branched(s):
        s += "Hello: "
        forks = s.fork(3)
        forks[0] += "there "
        forks[1] += "1"
        forks[2] += " "
        forks.join("concate_and_append")
        s += "and you"
        forks = s.fork(1)
        forks += ul.gen("x")
        forks += " \n"
        forks.join("concate_and_append")
        s += "end"

    def said(body) -> str:
        @ul.function
        def program(s):
            with s.user():
                body(s)
            s += ul.assistant(ul.gen("y"))

        template = ul.ChatTemplate(family.source, tokens=family.tokens, options=family.options)
        return program.run(backend=Echo(["x", "y"], chat_template=template), timeout=PATIENCE).text()

    assert said(branched) == said(whole)


def test_a_branch_that_left_a_turn_open_cannot_be_appended(echo: Echo) -> None:
    @ul.function
    def program(s):
        forks = s.fork(2)
        forks[1] += ul.user_begin() + "half"
        forks.join("concate_and_append")

    with pytest.raises(ul.ProgramError, match="branch 1 is inside user turn"):
        program.run(backend=echo)


def test_an_unknown_join_mode_is_an_error(echo: Echo) -> None:
    @ul.function
    def program(s):
        s.fork(2).join("gather")  # type: ignore[arg-type]

    with pytest.raises(ul.ParameterError, match="join mode='gather' is not known"):
        program.run(backend=echo)


def test_join_does_not_wait() -> None:
    gate = Gate()

    @ul.function
    def program(s):
        s += "a"
        with s.fork(2) as forks:
            forks += ul.gen("x")
        s += " then " + ul.gen("y")

    state = program.run(backend=Echo(lambda prompt: "ok", gate=gate), timeout=PATIENCE)
    assert state.variables() == ["x", "y"]
    gate.open()
    assert (state["x"], state["y"]) == (["ok", "ok"], "ok")
    assert len(state.get_meta_info("x")) == 2


def test_a_failed_branch_fails_what_joins_it_and_not_its_sisters() -> None:
    error = RuntimeError("second branch")
    echo = Echo({"go 0": "fine", "go 1": "bad", "go 2": "fine"}, faults=FailCall(2, error))

    @ul.function
    def program(s):
        s += "go"
        forks = s.fork(3)
        for i, fork in enumerate(forks):
            fork += f" {i}" + ul.gen("x")
            if i != 1:
                continue
            with pytest.raises(RuntimeError):
                fork["x"]
        return forks

    forks = program.run(backend=echo, timeout=PATIENCE).ret_value
    assert [forks[0]["x"], forks[2]["x"]] == ["fine", "fine"]
    forks.join()
    parent = forks._parent
    with pytest.raises(RuntimeError) as caught:
        parent["x"]
    assert caught.value is error
    with pytest.raises(RuntimeError):
        parent.text()


def test_branches_of_branches_gather_lists_of_lists() -> None:
    echo = Echo(lambda prompt: prompt[-2:])

    @ul.function
    def program(s):
        s += "r"
        forks = s.fork(2)
        for i, fork in enumerate(forks):
            inner = fork.fork(2)
            inner += lambda j, i=i: f"{i}{j}" + ul.gen("x")
            inner.join()
        forks.join()

    assert program.run(backend=echo, timeout=PATIENCE)["x"] == [["00", "01"], ["10", "11"]]


def test_a_copy_goes_its_own_way(echo: Echo) -> None:
    @ul.function
    def program(s):
        s += "a" + ul.gen("x")
        other = s.copy()
        other += "b"
        return other.text(), s.text(), other["x"]

    assert program.run(backend=echo, timeout=PATIENCE).ret_value == ("aab", "aa", "a")


def test_the_block_of_a_copy_is_a_fork_of_one(echo: Echo) -> None:
    @ul.function
    def program(s):
        s += "a"
        with s.copy() as branch:
            branch += "b" + ul.gen("x")
        return s["x"], s.text()

    assert program.run(backend=echo, timeout=PATIENCE).ret_value == (["ab"], "a")


def test_only_a_copy_is_a_block(echo: Echo) -> None:
    @ul.function
    def program(s):
        with s:
            pass

    with pytest.raises(ul.ProgramError, match=r"with s\.copy\(\) as branch"):
        program.run(backend=echo)


def test_a_thousand_nested_copies_stay_cheap(echo: Echo) -> None:
    @ul.function
    def program(s):
        for turn in range(1000):
            s = s.copy()
            s += "x"
            s["turn"] = turn
        return s.text(), s["turn"]

    assert program.run(backend=echo, timeout=PATIENCE).ret_value == ("x" * 1000, 999)


def test_a_branch_that_leaves_a_variable_alone_keeps_its_value_from_before_the_fork(echo: Echo) -> None:
    @ul.function
    def program(s: ul.State) -> None:
        s += "a" + ul.gen("x") + ul.gen("y")
        s["z"] = 7
        forks = s.fork(3)
        forks[1] += "b" + ul.gen("x") + ul.gen("new")
        forks[2]["z"] = 8
        forks.join()

    state = program.run(backend=Echo(["1", "2", "3", "4"]))
    assert state["x"] == ["1", "3", "1"]
    assert state["y"] == "2"
    assert state["z"] == [7, 7, 8]
    assert state["new"] == [None, "4", None]
    assert [bool(facts) for facts in state.get_meta_info("x")] == [True, True, True]


def test_values_from_before_a_fork_go_through_branches_of_branches() -> None:
    @ul.function
    def program(s: ul.State) -> object:
        s += ul.gen("x", n=2)
        outer = s.fork(2)
        inner = outer[0].fork(2)
        inner[1] += ul.gen("x")
        inner.join()
        outer.join()
        joined = s["x"]
        with s.copy() as copy:
            copy["y"] = "last"
        return joined, s["x"], s["y"]

    joined, still, copied = program.run(backend=Echo([["1", "2"], "3"])).ret_value
    assert joined == still == [[["1", "2"], "3"], ["1", "2"]]
    assert copied == ["last"]
