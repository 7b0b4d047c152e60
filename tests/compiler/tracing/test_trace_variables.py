"""Variables of a program that is traced: symbols, lists of them, and what the program assigned."""

from collections import Counter, namedtuple
from enum import Enum

import pytest
import umbel as ul
from umbel.compiler.operations import (
    Append,
    Apply,
    Generate,
    Join,
    Object,
    StreamText,
)

from .traces import said, traced, value_of


def test_variables_after_a_join_are_lists() -> None:
    def program(s):
        forks = s.fork(2)
        forks[0] += ul.gen("a")
        forks[1] += ul.gen("b")
        forks[1]["mine"] = [1, 2]
        forks.join()
        assert s["a"][1] is None
        assert s["mine"] == [None, [1, 2]]
        s += s["a"][0] + s["b"][1]

    graph = traced(program)
    known = {"a": "A", "b": "B"}
    assert said(graph, **known) == "AB"
    assert {name: value_of(node, known) for name, node in graph.variables} == {
        "a": ["A", None], "b": [None, "B"], "mine": [None, [1, 2]],
    }  # fmt: skip


def test_branches_have_what_their_parent_had() -> None:
    def program(s, q):
        s += ul.gen("x")
        with s.fork(2) as forks:
            for branch in forks:
                branch += branch["x"] + ul.gen("y")
                assert branch.variables() == ["x", "y"]
        assert s.variables() == ["x", "y"]

    traced(program)


def test_a_copy_and_what_is_not_joined_run_too() -> None:
    def program(s):
        other = s.copy()
        other += "aside" + ul.gen("y")
        with s.copy() as branch:
            branch += ul.gen("x")
        s += s["x"][0]

    graph = traced(program)
    assert len(graph.ends) == 3
    assert [name for name, _ in graph.variables] == ["x"]


def test_texts_of_branches_are_appended() -> None:
    def program(s):
        forks = s.fork(2)
        forks += lambda index: f"{index}"
        forks.join("concate_and_append")

    graph = traced(program)
    assert graph.streams[0][-1].op == Join("concate_and_append")
    assert graph.variables == ()


def test_several_texts_are_a_list() -> None:
    def program(s):
        s += ul.gen("x", n=3)
        assert len(s["x"]) == 3
        s += s["x"][2]

    graph = traced(program)
    assert said(graph, x=["a", "b", "c"]) == "c"


def test_a_name_means_its_latest_value() -> None:
    def program(s):
        s += ul.gen("x")
        first = s["x"]
        s += ul.gen("x")
        s += first + s["x"]

    appends = [node for node in traced(program).streams[0] if isinstance(node.op, Append)]
    setters = [node.inputs[1].inputs[0] for node in appends]
    assert len(set(setters)) == 2


def test_assigned_values_are_what_they_were() -> None:
    def program(s, q):
        held = {"a": 1}
        s["held"] = held
        assert s["held"] is held
        s["text"] = "Q: " + q
        s["mixed"] = [q, 1, (q.strip(), None)]

    graph = traced(program)
    assert {name: value_of(node, {"q": " x "}) for name, node in graph.variables} == {
        "held": {"a": 1}, "text": "Q:  x ", "mixed": [" x ", 1, ("x", None)],
    }  # fmt: skip


class Color(str, Enum):  # noqa: UP042  # whose str() is another text
    RED = "red"


def test_values_keep_their_types() -> None:
    counts = Counter("aab")
    point = namedtuple("point", "x y")(1, 2)

    def program(s):
        s["counts"], s["point"], s["color"] = counts, point, Color.RED
        s += Color.RED

    graph = traced(program)
    assert {name: value_of(node, {}) for name, node in graph.variables} == {
        "counts": counts, "point": point, "color": Color.RED,
    }  # fmt: skip
    assert [type(value_of(node, {})) for _, node in graph.variables] == [Counter, type(point), Color]
    assert said(graph) == "red"


def test_what_a_program_knows_of_its_names() -> None:
    def program(s):
        assert "x" not in s
        s += ul.separate_reasoning(ul.gen("x"))
        assert "x" in s
        assert s.variables() == ["x", "x_reasoning_content"]
        s += s["x_reasoning_content"]
        s.sync()

    graph = traced(program)
    generate = next(node for node in graph.nodes if isinstance(node.op, Generate))
    assert generate.op.tags == ("<think>", "</think>")


def test_a_name_that_is_never_set() -> None:
    def program(s):
        s += ul.gen("answer")
        s += s["anwser"]

    with pytest.raises(ul.VariableError, match="did you mean 'answer'"):
        ul.function(program).trace()


def test_objects_go_into_text() -> None:
    def program(s):
        s += ul.gen("n", dtype=int) + ul.gen("plain") + ul.gen("many", dtype=int, n=2)
        number = s.value("n")
        assert not isinstance(number, str)
        s += f"{number} {number:03d} {number!r}" + str(number) + s.value("plain") + str(s.value("many")[1])

    graph = traced(program)
    objects = [node for node in graph.nodes if isinstance(node.op, Object)]
    assert [node.op.name for node in objects] == ["n", "many"]
    functions = [node.op.function for node in graph.nodes if isinstance(node.op, Apply)]
    assert sorted(functions) == ["format", "format", "item", "repr", "str", "str"]


def test_the_text_of_a_state_is_that_of_its_place() -> None:
    def program(s, q):
        s += q
        before = s.text()
        s += "!"
        return [before, s.text()]

    graph = traced(program)
    places = [node.inputs[0] for node in graph.result.inputs]
    assert [type(node.op) for node in graph.result.inputs] == [StreamText, StreamText]
    assert places == [graph.streams[0][1], graph.streams[0][2]]
