"""State says what; the sink decides when. Here the sink only writes down what it is told."""

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from umbel.lang.errors import ParameterError
from umbel.lang.generation import gen
from umbel.lang.ops import ConstantText, Gen, Op, RoleBegin, RoleEnd, Sequence, VarScopeBegin, VarScopeEnd
from umbel.lang.protocol import Cost, Usage
from umbel.lang.state import AsyncState, State, StateGroup


class Notebook:
    """A sink that records."""

    def __init__(self) -> None:
        self.ops: list[Op] = []
        self.values: dict[str, Any] = {}
        self.joined: list[tuple[int, str]] = []

    def submit(self, op: Op) -> None:
        self.ops.append(op)

    def fork(self, size: int) -> list["Notebook"]:
        return [Notebook() for _ in range(size)]

    def join(self, children: list["Notebook"], mode: str, quorum: int | None = None) -> None:
        self.joined.append((len(children), mode))

    def assign(self, name: str, value: Any) -> None:
        self.values[name] = value

    def has(self, name: str) -> bool:
        return name in self.values

    def names(self) -> list[str]:
        return list(self.values)

    def read(self, name: str, timeout: float | None) -> Any:
        return (self.values[name], timeout)

    async def read_async(self, name: str, timeout: float | None) -> Any:
        return self.read(name, timeout)

    def value(self, name: str, timeout: float | None) -> Any:
        return ("value of", self.values[name], timeout)

    async def value_async(self, name: str, timeout: float | None) -> Any:
        return self.value(name, timeout)

    async def messages_async(self, timeout: float | None) -> list[dict[str, str]]:
        return [{"role": "user", "content": str(timeout)}]

    def error(self) -> BaseException | None:
        return None

    def cost(self) -> Cost:
        return Cost(Usage(1, 2, 3, 4))

    def iterate(self, name: str | None) -> Iterator[tuple[str, dict[str, Any]]]:
        yield from [("a", {"place": 0}), (str(name), {"place": 1})]

    async def iterate_async(self, name: str | None) -> Any:
        for piece in self.iterate(name):
            yield piece


def test_what_is_appended_is_submitted_as_one_operation() -> None:
    sink = Notebook()
    state = State(sink)
    state += "a"
    state += "b" + gen("x")
    state += ["c", gen("y")]
    assert sink.ops == [
        ConstantText("a"),
        Sequence((ConstantText("b"), Gen("x"))),
        Sequence((ConstantText("c"), Gen("y"))),
    ]
    with pytest.raises(ParameterError, match="cannot append int"):
        state += 3
    assert len(sink.ops) == 3


def test_blocks_are_closed_when_their_body_raises() -> None:
    sink = Notebook()
    state = State(sink)
    with pytest.raises(ValueError, match="stop"), state.user(), state.var_scope("v"):
        raise ValueError("stop")
    assert sink.ops == [RoleBegin("user"), VarScopeBegin("v"), VarScopeEnd("v"), RoleEnd("user")]


def test_a_role_with_content_is_one_operation() -> None:
    sink = Notebook()
    State(sink).assistant("hi")
    assert sink.ops == [Sequence((RoleBegin("assistant"), ConstantText("hi"), RoleEnd("assistant")))]


def test_variables_go_through_the_sink() -> None:
    state = State(Notebook())
    state["a"] = 1
    state.set_var("b", 2)
    assert (state["a"], state.get_var("b", timeout=3.0)) == ((1, None), (2, 3.0))
    assert (state.value("a"), state.value("b", timeout=3.0)) == (("value of", 1, None), ("value of", 2, 3.0))
    assert "a" in state
    assert "c" not in state
    assert 5 not in state
    assert state.variables() == ["a", "b"]
    assert state.usage == Usage(1, 2, 3, 4)


def test_an_async_state_is_awaited() -> None:
    async def main() -> None:
        state = AsyncState(Notebook())
        state["a"] = 1
        assert await state["a"] == (1, None)
        assert await state.get_var("a", timeout=2.0) == (1, 2.0)
        assert await state.value("a", timeout=2.0) == ("value of", 1, 2.0)
        assert (await state.messages(timeout=1.0))[0]["content"] == "1.0"
        assert [piece async for piece in state.text_async_iter("n")] == ["a", "n"]
        assert [meta async for _, meta in state.text_async_iter("n", return_meta_data=True)] == [
            {"place": 0},
            {"place": 1},
        ]

    asyncio.run(main())


def test_pieces_come_with_or_without_their_facts() -> None:
    state = State(Notebook())
    assert list(state.text_iter("n")) == ["a", "n"]
    assert list(state.text_iter("n", return_meta_data=True)) == [("a", {"place": 0}), ("n", {"place": 1})]


@pytest.mark.parametrize("size", [0, -1, 1.5, True, "2"])
def test_a_fork_needs_a_number_of_branches(size: object) -> None:
    with pytest.raises(ParameterError, match="write a number of branches"):
        State(Notebook()).fork(size)  # type: ignore[arg-type]


def fork(size: int) -> tuple[StateGroup[State], list[Notebook], Notebook]:
    parent = Notebook()
    group = State(parent).fork(size)
    return group, [state._sink for state in group], parent  # type: ignore[misc]


def test_an_expression_goes_to_every_branch() -> None:
    group, sinks, _ = fork(2)
    group += "a"
    assert [sink.ops for sink in sinks] == [[ConstantText("a")], [ConstantText("a")]]


def test_a_list_gives_one_item_per_branch() -> None:
    group, sinks, _ = fork(2)
    group += ["a", gen("x")]
    assert [sink.ops for sink in sinks] == [[ConstantText("a")], [Gen("x")]]
    with pytest.raises(ParameterError, match="a list of 3 for 2 branches"):
        group += ["a", "b", "c"]


def test_a_function_is_called_with_the_branch_number() -> None:
    group, sinks, _ = fork(3)
    group += lambda index: f"branch {index}"
    assert [sink.ops for sink in sinks] == [[ConstantText(f"branch {i}")] for i in range(3)]


def test_all_branches_get_it_or_none() -> None:
    group, sinks, _ = fork(3)
    with pytest.raises(ParameterError):
        group += ["a", "b", None]
    assert [sink.ops for sink in sinks] == [[], [], []]


@pytest.mark.parametrize("name", [5, "", None])
def test_the_names_of_variables_are_checked(name: object) -> None:
    state = State(Notebook())
    for say in (state.var_scope, lambda name: state.set_var(name, 1), lambda name: state.__setitem__(name, 1)):
        with pytest.raises(ParameterError, match="variable name"):
            say(name)


def test_branches_are_indexed_iterated_and_appended_to() -> None:
    group, sinks, _ = fork(2)
    group[1] += "only here"
    assert [sink.ops for sink in sinks] == [[], [ConstantText("only here")]]
    assert len(group) == len(list(group)) == 2
    with pytest.raises(ParameterError, match="cannot be replaced"):
        group[0] = State(Notebook())


def test_leaving_the_block_of_a_fork_joins_it() -> None:
    group, _, parent = fork(3)
    with group:
        group += "a"
    group.join("concate_and_append")
    assert parent.joined == [(3, "gather_variable"), (3, "concate_and_append")]


def test_a_copy_is_one_branch_of_the_same_kind() -> None:
    sink = Notebook()
    copy = AsyncState(sink).copy()
    assert isinstance(copy, AsyncState)
    assert copy._sink is not sink
