"""Graphs made by hand, and by taking others to pieces."""

from typing import Any

from umbel.compiler.checks.verify import verify
from umbel.compiler.graph import Builder, Graph, Node, rebuilt
from umbel.compiler.operations import Append, Begin, Concat, Constant


def straight(*said: Node, builder: Builder) -> Graph:
    """A program of one stream that appends these values."""
    last = builder.node(Begin("p"))
    for value in said:
        last = builder.node(Append(), (last, value))
    return whole(builder.graph("p", (), (last,), (), builder.node(Constant(None))))


def returning(value: Node, *, builder: Builder, parameters: Any = ()) -> Graph:
    """A program that returns a value."""
    return whole(builder.graph("p", parameters, (builder.node(Begin("p")),), (), value))


def whole(graph: Graph) -> Graph:
    verify(graph)
    return graph


def said(graph: Graph) -> list[Any]:
    """What the own stream of a program appends: constants, and of other values the operation."""
    values = [node.inputs[1].op for node in graph.streams[0] if isinstance(node.op, Append)]
    return [value.value if isinstance(value, Constant) else value for value in values]


def shredded(graph: Graph) -> Graph:
    """The same program, saying every constant letter by letter, with nothing said in between."""

    def shred(builder: Builder, node: Node, inputs: tuple[Node, ...]) -> Node:
        if not isinstance(node.op, Append) or not isinstance(inputs[1].op, Constant):
            return builder.node(node.op, inputs, node.line)
        place = inputs[0]
        for letter in inputs[1].op.value:
            place = builder.node(Append(), (place, builder.node(Constant(letter))))
            place = builder.node(Append(), (place, builder.node(Constant(""))))
        return place

    return whole(rebuilt(graph, shred))


def put_together(graph: Graph) -> Graph:
    """The same program, with neighbouring texts of its streams joined before they are said."""
    inside: set[Node] = set()
    runs: dict[Node, list[Node]] = {}
    for stream in graph.streams:
        run: list[Node] = []
        for node in stream:
            if isinstance(node.op, Append) and (not run or graph.users[run[-1]] == (node,)):
                run.append(node)
            else:
                run = [node] if isinstance(node.op, Append) else []
            if len(run) > 1:
                inside.add(run[-2])
                runs.pop(run[-2], None)
                runs[node] = list(run)

    def put(builder: Builder, node: Node, inputs: tuple[Node, ...]) -> Node:
        if node in inside:
            return inputs[0]
        if node in runs:
            values = [builder.node(Concat(), [made[each.inputs[1]] for each in runs[node]])]
            return builder.node(Append(), (inputs[0], *values), node.line)
        return builder.node(node.op, inputs, node.line)

    made: dict[Node, Node] = {}

    def noted(builder: Builder, node: Node, inputs: tuple[Node, ...]) -> Node:
        made[node] = put(builder, node, inputs)
        return made[node]

    return whole(rebuilt(graph, noted))
