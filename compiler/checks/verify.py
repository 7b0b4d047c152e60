"""Whether a graph is whole. Looked at between passes, and before a graph that came from outside does anything.

    order        inputs before what takes them, every node once, and none that nothing needs
    inputs       as many and of such kinds as `operations.py` says
    streams      a chain each; branches begin at forks and come back to the stream that they left, or one above it
    roles        as the interpreter asks for: turns do not nest, scopes end where they began
    names        what is read has been set, by the node that is asked for it

No recursion: programs are long chains.
"""

from collections.abc import Sequence

from ...lang.errors import GraphError
from ..graph import Graph, Node, Parameter, frozen, reachable
from ..operations import Argument
from . import attributes, inputs
from .chains import check_streams


def verify(graph: Graph) -> None:
    """Nothing, for a graph that can run.

    Raises:
        GraphError: the first thing that is wrong, with its node and the line of the program.
    """
    _check_names(graph)
    _check_order(graph)
    _check_equals(graph)
    _check_roots(graph)
    known = {parameter.name for parameter in graph.parameters}
    for number, node in enumerate(graph.nodes):
        try:
            attributes.check(node.op)
            inputs.check(node)
            _check_argument(node, known)
        except GraphError as error:
            raise GraphError(f"{place(number, node)}: {error}") from None
    check_streams(graph)


def place(number: int, node: Node) -> str:
    """A node for messages: "node 3 (Append) at program.py:12"."""
    at = f" at {node.line}" if node.line is not None else ""
    return f"node {number} ({type(node.op).__name__}){at}"


def _check_names(graph: Graph) -> None:
    if not isinstance(graph.name, str):
        raise GraphError(f"the graph's name is {graph.name!r}; write a string")
    for parameter in graph.parameters:
        if not isinstance(parameter, Parameter) or not isinstance(parameter.required, bool):
            raise GraphError(f"{parameter!r} is no parameter; write Parameter('question')")
    _check_unique("parameter", [parameter.name for parameter in graph.parameters])
    _check_unique("variable", [name for name, _ in graph.variables])


def _check_unique(kind: str, names: Sequence[object]) -> None:
    seen: set[str] = set()
    for name in names:
        if not isinstance(name, str) or not name:
            raise GraphError(f"a {kind} of the graph is called {name!r}; write a non-empty string")
        if name in seen:
            raise GraphError(f"two {kind}s of the graph are called {name!r}; give each a name of its own")
        seen.add(name)


def _check_order(graph: Graph) -> None:
    seen: dict[Node, int] = {}
    for number, node in enumerate(graph.nodes):
        if node in seen:
            raise GraphError(f"{place(number, node)} is in the graph twice, first as node {seen[node]}")
        for taken in node.inputs:
            if taken not in seen:
                where = "comes after it" if taken in graph.numbers else "is not in the graph"
                raise GraphError(
                    f"{place(number, node)} takes a {type(taken.op).__name__} that {where}; inputs stand before what "
                    "takes them"
                )
        seen[node] = number


def _check_equals(graph: Graph) -> None:
    first: dict[object, int] = {}
    for number, node in enumerate(graph.nodes):
        twin = first.setdefault((frozen(node.op), tuple(graph.numbers[taken] for taken in node.inputs)), number)
        if twin != number:
            raise GraphError(f"{place(number, node)} says the same as node {twin}; equal nodes are one")


def _check_roots(graph: Graph) -> None:
    values = (*((f"variable {name!r}", value) for name, value in graph.variables), ("result", graph.result))
    for what, value in values:
        if value not in graph.numbers or value.in_stream:
            raise GraphError(f"the graph's {what} is a {type(value.op).__name__}; it has to be a value of the graph")
    for end in graph.ends:
        if end not in graph.numbers or not end.in_stream:
            raise GraphError(f"a {type(end.op).__name__} is among the graph's ends; ends are places of its streams")
    needed = set(reachable((*graph.ends, *(value for _, value in values))))
    for number, node in enumerate(graph.nodes):
        if node not in needed:
            raise GraphError(f"{place(number, node)} is needed by nothing; leave it out, as Builder.graph does")


def _check_argument(node: Node, known: set[str]) -> None:
    if isinstance(node.op, Argument) and node.op.name not in known:
        there = f"its parameters are {', '.join(sorted(known))}" if known else "it has none"
        raise GraphError(f"the graph has no parameter {node.op.name!r}; {there}")
