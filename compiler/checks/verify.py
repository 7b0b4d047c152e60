"""Verifies that a graph is whole: between passes, and before a graph that came from outside does anything.

    order        inputs before what takes them, every node once, and none that nothing needs
    inputs       as many and of such kinds as `operations.py` says
    streams      a chain each; branches begin at forks and come back to the stream that they left, or one above it
    roles        as the interpreter asks for: turns do not nest, scopes end where they began
    names        what is read has been set, by the node that is asked for it

No recursion: programs are long chains.
"""

from collections.abc import Sequence

from ...interpreter.stream import Grammar
from ...lang import sampling
from ...lang.errors import GraphError, ProgramError
from ...lang.ops import RoleBegin, RoleEnd, VarScopeBegin, VarScopeEnd
from ..graph import Graph, Node, Parameter, frozen, reachable
from ..operations import Argument, Begin, GetForkItem, Join
from .nodes import check_attributes, check_inputs


def verify(graph: Graph) -> None:
    """Returns for a graph that can run.

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
            check_attributes(node.op)
            check_inputs(node)
            _check_argument(node, known)
        except GraphError as error:
            raise GraphError(f"{place(number, node)}: {error}") from None
    check_streams(graph)


def place(number: int, node: Node) -> str:
    """Names a node for messages: "node 3 (Append) at program.py:12"."""
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
        known = first.setdefault((frozen(node.op), tuple(graph.numbers[taken] for taken in node.inputs)), number)
        if known != number:
            raise GraphError(f"{place(number, node)} says the same as node {known}; equal nodes are one")


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


# ------------------------------------------------------------------------------------ streams


def check_streams(graph: Graph) -> None:
    """Checks the streams of a graph whose nodes are in order and have the inputs that they need.

    A stream is a chain that begins once, branches at forks, and comes back where it left.

    Raises:
        GraphError: two nodes after one, a stream that begins twice, an end that is none, a branch of another stream,
            or a turn or scope that does not fit; with the node and the line.
    """
    _check_chains(graph)
    _check_ends(graph)
    _check_grammar(graph)
    _check_joins(graph)


def _check_chains(graph: Graph) -> None:
    first: dict[object, Node] = {}
    for node in graph.nodes:
        key: object
        match node.op:
            case Begin(_, number):
                key, what = ("begin", number), f"stream {number} has begun"
            case GetForkItem(index):
                key, what = (node.inputs[0], index), f"branch {index} of the fork has begun"
            case _ if node.before is not None:
                key, what = ("after", node.before), f"the stream goes on from node {graph.numbers[node.before]}"
            case _:
                continue
        other = first.setdefault(key, node)
        if other is not node:
            raise _error(graph, node, f"{what} already, with node {graph.numbers[other]}")


def _check_ends(graph: Graph) -> None:
    last = {stream[-1] for stream in graph.streams}
    seen: set[Node] = set()
    for end in graph.ends:
        if end not in last or end in seen:
            raise _error(
                graph, end, "it is among the graph's ends" + (" twice" if end in seen else " and ends nothing")
            )
        seen.add(end)
    for stream in graph.streams:
        if stream[-1] not in seen:
            raise _error(graph, stream[-1], "it ends a stream and is not among the graph's ends")
    begin = graph.streams[graph.stream_of[graph.ends[0]]][0].op if graph.ends else None
    if not isinstance(begin, Begin) or begin.number != 0:
        raise GraphError("the first end of a graph is that of the program's own stream, which begins with Begin 0")


def _check_grammar(graph: Graph) -> None:
    """Checks turns and scopes. What is open goes on into branches: one that leaves inside of a turn begins inside of
    it."""
    after: dict[Node, Grammar] = {}
    for node in graph.nodes:
        if not node.in_stream:
            continue
        grammar = after[node.inputs[0]] if node.inputs else Grammar()
        try:
            match node.op:
                case RoleBegin() | RoleEnd() | VarScopeBegin() | VarScopeEnd():
                    grammar, _ = grammar.read(node.op, sampling.merge)
                case Join(mode) if mode == "concate_and_append":
                    for index, end in enumerate(node.inputs[1:]):
                        after[end].check_same_turn(grammar, index)
        except ProgramError as error:
            raise _error(graph, node, str(error)) from None
        after[node] = grammar


def _check_joins(graph: Graph) -> None:
    family = _Family(graph)
    for node in graph.nodes:
        if isinstance(node.op, Join):
            for index, end in enumerate(node.inputs[1:]):
                if not family.descends(graph.stream_of[end], graph.stream_of[node]):
                    raise _error(
                        graph, node, f"what it joins as branch {index}, node {graph.numbers[end]}, left another stream"
                    )


class _Family:
    """The tree of forked streams. A depth-first walk reaches a stream as number `entered`; its descendants follow up to
    `left`."""

    def __init__(self, graph: Graph) -> None:
        count = len(graph.streams)
        children: list[list[int]] = [[] for _ in range(count)]
        waiting: list[int] = []
        for number in range(count):
            parents = graph.parents(number)
            (waiting if parents is None else children[parents[0]]).append(number)
        order: list[int] = []
        while waiting:
            order.append(waiting.pop())
            waiting.extend(children[order[-1]])
        self._entered = [0] * count
        for when, number in enumerate(order):
            self._entered[number] = when
        self._left = [when + 1 for when in self._entered]
        for number in reversed(order):
            self._left[number] = max((self._left[number], *(self._left[child] for child in children[number])))

    def descends(self, stream: int, ancestor: int) -> bool:
        return self._entered[ancestor] < self._entered[stream] < self._left[ancestor]


def _error(graph: Graph, node: Node, what: str) -> GraphError:
    at = f" at {node.line}" if node.line is not None else ""
    return GraphError(f"node {graph.numbers[node]} ({type(node.op).__name__}){at}: {what}")
