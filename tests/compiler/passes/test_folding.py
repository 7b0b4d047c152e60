"""Folding: what is constant is computed, and every run is what it was."""

from typing import Any

import pytest
from umbel.compiler.graph import Builder, Parameter
from umbel.compiler.operations import Apply, Argument, Concat, Constant, Leaf, Structure
from umbel.compiler.passes.folding import fold
from umbel.compiler.running.compiled import CompiledProgram
from umbel.interpreter.backends.echo import Echo

from .building import returning, said, straight


@pytest.mark.parametrize(
    ("value", "function", "arguments", "expected"),
    [
        ("Why", "upper", (), "WHY"),
        (" why ", "strip", (), "why"),
        ("why", "slice", (1, None, None), "hy"),
        (7, "format", (">3",), "  7"),
        (7, "str", (), "7"),
        ("ab", "multiply", (3,), "ababab"),
    ],
)
def test_a_function_of_a_constant_is_a_constant(value: Any, function: str, arguments: Any, expected: str) -> None:
    builder = Builder()
    graph = returning(builder.node(Apply(function, arguments), (builder.node(Constant(value)),)), builder=builder)
    outcome = fold(graph)
    assert outcome.graph.result.op == Constant(expected)
    assert outcome.counts == {"computed": 1}


@pytest.mark.parametrize(
    ("value", "function", "arguments"),
    [
        ("a", "multiply", (1 << 40,)),
        ("a", "center", (1 << 40, "*")),
        ("a", "format", (">999999999",)),
        ("a" * 2000, "replace", ("", "b" * 2000)),
        ("a", "item", (5,)),  # raises where the program does: when it runs
        ("a", "format", ("%d",)),
        ({"a": [1]}, "item", ("a",)),
    ],
)
def test_what_is_large_and_what_fails_is_left_to_the_run(value: Any, function: str, arguments: Any) -> None:
    builder = Builder()
    graph = returning(builder.node(Apply(function, arguments), (builder.node(Constant(value)),)), builder=builder)
    assert fold(graph).graph is graph


def test_texts_in_texts_are_one_text() -> None:
    builder = Builder()
    question = builder.node(Argument("question"))
    first, second = builder.node(Constant("a")), builder.node(Constant("b"))
    inner = builder.node(Concat(), (second, builder.node(Constant("")), question))
    graph = returning(builder.node(Concat(), (first, inner)), builder=builder, parameters=(Parameter("question"),))
    result = fold(graph).graph.result
    assert [taken.op for taken in result.inputs] == [Constant("ab"), Argument("question")]


def test_a_text_of_an_argument_still_asks_for_text() -> None:
    builder = Builder()
    text = builder.node(Concat(), (builder.node(Constant("")), builder.node(Argument("question"))))
    graph = returning(text, builder=builder, parameters=(Parameter("question"),))
    assert isinstance(fold(graph).graph.result.op, Concat)


def test_a_text_is_said_piece_by_piece() -> None:
    builder = Builder()
    pieces = [builder.node(Constant("Q: ")), builder.node(Constant("why"))]
    assert said(fold(straight(builder.node(Concat(), pieces), builder=builder)).graph) == ["Q: why"]


def test_constants_are_written_in_lists_and_members_taken_out() -> None:
    builder = Builder()
    question = builder.node(Argument("question"))
    listed = builder.node(Structure([Leaf(0), {"of": Leaf(1)}, Leaf(0)]), (builder.node(Constant(1)), question))
    graph = fold(returning(listed, builder=builder, parameters=(Parameter("question"),))).graph
    assert graph.result.op == Structure([1, {"of": Leaf(0)}, 1])
    picked = builder.node(Apply("item", (1,)), (builder.node(Structure((Leaf(0), Leaf(1))), listed.inputs),))
    graph = fold(returning(picked, builder=builder, parameters=(Parameter("question"),))).graph
    assert graph.result.op == Argument("question")


def test_a_tuple_of_constants_is_one_and_a_list_is_built_anew() -> None:
    for template, wanted in (((Leaf(0),), Constant(("a",))), ([Leaf(0)], Structure(["a"]))):
        builder = Builder()
        made = builder.node(Structure(template), (builder.node(Constant("a")),))
        graph = fold(returning(made, builder=builder)).graph
        assert graph.result.op == wanted
        compiled = CompiledProgram(graph)
        first, second = (compiled.run(backend=Echo()).ret_value for _ in range(2))
        assert first == second
        assert isinstance(first, tuple) or first is not second
