"""Small graphs that are written and read again, and how two are compared."""

from typing import Any, TypedDict

from umbel.compiler.files import serialise
from umbel.compiler.graph import Builder, Graph, Line, Node, Parameter, frozen
from umbel.compiler.operations import Begin, Constant, Generate, Variable
from umbel.lang.prompt import public_name


class Named(TypedDict):
    name: str
    more: "list[Named]"


def _line(node: Node) -> object:
    line = node.line
    return None if line is None else (public_name(line.file), line.number, line.function)


def alike(first: Graph, second: Graph) -> bool:
    """Equal in everything but identity; of lines, files as graphs name them."""

    def told(graph: Graph) -> object:
        numbers = graph.numbers
        return (
            frozen((graph.name, graph.parameters, graph.fixed)),
            [(frozen(node.op), [numbers[taken] for taken in node.inputs], _line(node)) for node in graph.nodes],
            [numbers[end] for end in graph.ends],
            [(name, numbers[value]) for name, value in graph.variables],
            numbers[graph.result],
        )

    return told(first) == told(second)


def gen_graph(said: Any, default: Any = "") -> Graph:
    """A program of one gen."""
    builder = Builder()
    end = builder.node(Generate(said), [builder.node(Begin("one"))], Line("one.py", 3))
    value = builder.node(Variable(said.name), [end])
    return builder.graph("one", [Parameter("a", False, default)], [end], [(said.name, value)], value)


def constant_graph(value: Any) -> Graph:
    builder = Builder()
    end = builder.node(Begin("one"))
    return builder.graph(
        "one", [], [end], [("kept", builder.node(Constant(value), (), Line("one.py", 4)))], end_value(builder)
    )


def end_value(builder: Builder):
    return builder.node(Constant("the result"))


def copied(graph: Graph) -> Graph:
    return serialise.decode(serialise.encode(graph), source="copy")
