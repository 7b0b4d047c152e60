"""A state is read as a dict: names, values, both; costs and usages add up."""

import asyncio
import json

import pytest
import umbel as ul
from umbel.lang.state import State


@ul.function
def program(s, question):
    s += question + ul.gen("first", max_tokens=4)
    s["note"] = question.upper()
    s += ul.gen("second", max_tokens=4)


@ul.function
async def async_program(s, question):
    s += question + ul.gen("first", max_tokens=4)


def state_of(question: str = "q") -> State:
    return program.run(question, backend=ul.Echo(["one", "two"]))


def test_dict_of_a_state_has_its_variables() -> None:
    expected = {"first": "one", "note": "Q", "second": "two"}
    state = state_of()
    assert dict(state) == state.to_dict() == expected
    assert {**state} == expected
    assert list(state) == state.keys() == list(expected)
    assert state.values() == list(expected.values())
    assert dict(state.items()) == expected
    assert json.loads(json.dumps(state.to_dict())) == expected


def test_membership_asks_for_a_name() -> None:
    state = state_of()
    assert "first" in state
    assert "third" not in state


def test_variables_are_an_attribute_and_may_be_called() -> None:
    state = state_of()
    assert state.variables == ["first", "note", "second"]
    assert state.variables() == ["first", "note", "second"]


def test_a_state_without_variables_is_true_and_empty() -> None:
    @ul.function
    def plain(s):
        s += "text"

    state = plain.run(backend=ul.Echo())
    assert dict(state) == {}
    assert state


def test_to_dict_raises_what_the_first_failed_variable_raises() -> None:
    failing = ul.Echo(["one", "two"], faults=ul.FailCall(2, ul.RequestError("refused")))
    state = program.run("q", backend=failing)
    with pytest.raises(ul.RequestError, match="refused"):
        state.to_dict()


def test_to_dict_ends_at_its_timeout() -> None:
    gate = ul.Gate()
    state = program.run("q", backend=ul.Echo(["one", "two"], gate=gate))
    with pytest.raises(ul.DeadlineError):
        state.to_dict(timeout=0.01)
    gate.open()
    assert state.to_dict()["second"] == "two"


def test_the_variables_of_an_async_program_are_awaited() -> None:
    async def main() -> None:
        state = await async_program.run_async("q", backend=ul.Echo(["one"]))
        assert await state.to_dict() == {"first": "one"}
        assert list(state) == state.variables == ["first"]
        with pytest.raises(ul.ProgramError, match=r"write await s.to_dict\(\)"):
            dict(state)

    asyncio.run(main())


def test_a_compiled_program_gives_the_same_dict() -> None:
    compiled = program.compile()
    assert dict(compiled.run(question="q", backend=ul.Echo(["one", "two"]))) == dict(state_of())


def test_costs_and_usages_add_up_without_a_beginning() -> None:
    states = [state_of(), state_of()]
    assert sum(state.cost for state in states).usage.calls == 4
    assert sum(state.usage for state in states).calls == 4
    assert sum((state.cost for state in states), ul.Cost()) == sum(state.cost for state in states)


@pytest.mark.parametrize("one", [ul.Cost(), ul.Usage(), ul.Speculation()])
def test_a_cost_adds_to_nothing_else(one: ul.Cost | ul.Usage | ul.Speculation) -> None:
    assert sum([one, one]) == one
    for other in (1, 0.5, "1", None):
        with pytest.raises(TypeError):
            one + other
        with pytest.raises(TypeError):
            other + one
