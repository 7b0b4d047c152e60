"""The streams of a graph: chains that begin once, branch at forks, and come back where they left."""

from ...interpreter.grammar import Grammar
from ...lang import sampling
from ...lang.errors import GraphError, ProgramError
from ...lang.ops import RoleBegin, RoleEnd, VarScopeBegin, VarScopeEnd
from ..graph import Graph, Node
from ..operations import Begin, GetForkItem, Join


def check_streams(graph: Graph) -> None:
    """Looks at a graph whose nodes are in order and have the inputs that they need.

    Raises:
        GraphError: two nodes behind one, a stream that begins twice, an end that is none, a branch of another stream,
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
                key, what = ("behind", node.before), f"the stream goes on from node {graph.numbers[node.before]}"
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
    """What is open goes on into branches: one that leaves inside of a turn begins inside of it."""
    behind: dict[Node, Grammar] = {}
    for node in graph.nodes:
        if not node.in_stream:
            continue
        grammar = behind[node.inputs[0]] if node.inputs else Grammar()
        try:
            match node.op:
                case RoleBegin() | RoleEnd() | VarScopeBegin() | VarScopeEnd():
                    grammar, _ = grammar.read(node.op, sampling.merge)
                case Join(mode) if mode == "concate_and_append":
                    for index, end in enumerate(node.inputs[1:]):
                        behind[end].check_same_turn(grammar, index)
        except ProgramError as error:
            raise _error(graph, node, str(error)) from None
        behind[node] = grammar


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
    """Who was forked off whom. A walk down the tree comes to a stream as number `entered`; what was forked off it, and
    off its branches, follows up to `left`."""

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
