"""Places the nodes of a graph in a picture: streams are columns, time goes down.

    column 0     column 1          column 2
    Begin
    Append
    Fork ──────┬─────────────────┐
      │        GetForkItem 0     GetForkItem 1
      │        Generate          Generate
    Join ◄─────┴─────────────────┘
    Append     another fork's branch takes the column again

A node stands below all that it needs, so what can run at the same time stands side by side. A stream keeps its column
until it is joined, and stands right of the stream that it left.

Edges are of the two kinds of the paper's appendix D.1. *Intra-stream*: a stream says one thing after the other.
*Inter-stream*: one stream needs what another one has said. A branch needs its fork, a join needs the ends of its
branches, and text needs the streams that generate it, through however many values: `"".join(s["x"].upper() for s in
forks)` is one piece of text with an edge from every branch.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from ..graph import Graph, Node
from ..operations import Begin, Fork, GetForkItem, Join


@dataclass(frozen=True, slots=True)
class Edge:
    """`target` cannot run before `source` has. Both say something in a stream.

    Attributes:
        kind: "intra" inside of one stream, "inter" between two.
    """

    source: Node
    target: Node
    kind: Literal["intra", "inter"]


def edges(graph: Graph) -> tuple[Edge, ...]:
    """Returns all edges, in the order of their targets; of one target, the intra-stream one first."""
    said = _said(graph)
    found: list[Edge] = []
    for node in graph.nodes:
        if not node.in_stream:
            continue
        if node.before is not None:
            found.append(Edge(node.before, node, "intra"))
        found += [
            Edge(source, node, "inter")
            for source in dict.fromkeys(source for taken in node.inputs for source in said[taken])
            if graph.stream_of[source] != graph.stream_of[node]
        ]
    return tuple(found)


def intra_stream(graph: Graph) -> tuple[Edge, ...]:
    return tuple(edge for edge in edges(graph) if edge.kind == "intra")


def inter_stream(graph: Graph) -> tuple[Edge, ...]:
    return tuple(edge for edge in edges(graph) if edge.kind == "inter")


def _said(graph: Graph) -> dict[Node, tuple[Node, ...]]:
    """Returns what has to have been said for a node to be known: a stream node itself, and of values what they are made
    of."""
    said: dict[Node, tuple[Node, ...]] = {}
    for node in graph.nodes:
        if node.in_stream:
            said[node] = (node,)
        else:
            said[node] = tuple(dict.fromkeys(source for taken in node.inputs for source in said[taken]))
    return said


@dataclass(frozen=True, slots=True)
class Places:
    """Rows and columns, counted from 0.

    Attributes:
        rows: of every stream node.
        columns: of every stream, by its number.
        lanes: of forks and joins: in which lane of the strip below or above them their lines run sideways, counted
            from the top.
        strips: how many lanes there are below every row.
        edges: all of `edges.edges`.
    """

    rows: dict[Node, int]
    columns: tuple[int, ...]
    lanes: dict[Node, int]
    strips: tuple[int, ...]
    edges: tuple[Edge, ...]


def places(graph: Graph) -> Places:
    found = edges(graph)
    rows = _rows(graph, found)
    columns = _columns(graph, rows)
    lanes, strips = _lanes(graph, rows, columns)
    return Places(rows, columns, lanes, strips, found)


def _rows(graph: Graph, found: tuple[Edge, ...]) -> dict[Node, int]:
    needs: dict[Node, list[Node]] = {}
    for edge in found:
        needs.setdefault(edge.target, []).append(edge.source)
    rows: dict[Node, int] = {}
    for node in graph.nodes:
        if node.in_stream:
            rows[node] = max((rows[source] + 1 for source in needs.get(node, ())), default=0)
    _move_down(graph, found, rows)
    return rows


def _move_down(graph: Graph, found: tuple[Edge, ...], rows: dict[Node, int]) -> None:
    """Moves streams of runs inside of the program down to where they are needed: else they would all begin on top."""
    needed: dict[Node, list[Node]] = {}
    for edge in found:
        needed.setdefault(edge.source, []).append(edge.target)
    for node in reversed(graph.nodes):
        stream = graph.stream_of.get(node)
        if stream and isinstance(graph.streams[stream][0].op, Begin) and node in needed:
            rows[node] = min(rows[target] for target in needed[node]) - 1


def _columns(graph: Graph, rows: dict[Node, int]) -> tuple[int, ...]:
    """Returns, for every stream, the leftmost column right of the parent that is free for as long as the stream needs
    it."""
    taken: list[list[tuple[int, int]]] = []  # of every column: first and last row of its streams
    columns: list[int] = []
    for number, stream in enumerate(graph.streams):
        first, last = rows[stream[0]], _last_row(graph, stream, rows)
        parents = graph.parents(number)
        column = columns[parents[0]] + 1 if parents is not None else int(number > 0)
        while column < len(taken) and any(first <= other[1] and other[0] <= last for other in taken[column]):
            column += 1
        taken.extend([] for _ in range(column + 1 - len(taken)))
        taken[column].append((first, last))
        columns.append(column)
    return tuple(columns)


def _last_row(graph: Graph, stream: tuple[Node, ...], rows: dict[Node, int]) -> int:
    """Returns the row of its last node, or of the join that an arrow leads down to."""
    joins = (rows[user] for node in stream for user in graph.users[node] if isinstance(user.op, Join))
    return max((rows[stream[-1]], *joins))


def _lanes(graph: Graph, rows: dict[Node, int], columns: tuple[int, ...]) -> tuple[dict[Node, int], tuple[int, ...]]:
    """Assigns separate lanes to lines that would overlap. Lines from a fork on the left run below those from a fork on
    the right, and with joins it is the other way round: so no lines cross."""
    strips: list[list[tuple[int, int, Node]]] = [[] for _ in range(max(rows.values()) + 1)]
    for node, row in rows.items():
        column = columns[graph.stream_of[node]]
        if isinstance(node.op, Fork):
            others = [user for user in graph.users[node] if isinstance(user.op, GetForkItem)]
            strips[row].append((-column, _furthest(graph, others, columns, column), node))
        elif isinstance(node.op, Join):
            strips[row - 1].append((column, _furthest(graph, node.inputs[1:], columns, column), node))
    lanes: dict[Node, int] = {}
    for strip in strips:
        taken: list[list[tuple[int, int]]] = []  # of every lane: from column, to column
        for _, last, node in sorted(strip, key=lambda line: (isinstance(line[2].op, Join), line[0])):
            first = columns[graph.stream_of[node]]
            lane = 0
            while lane < len(taken) and any(first <= other[1] and other[0] <= last for other in taken[lane]):
                lane += 1
            taken.extend([] for _ in range(lane + 1 - len(taken)))
            taken[lane].append((first, last))
            lanes[node] = lane
    return lanes, tuple(_count(strip, lanes) for strip in strips)


def _furthest(graph: Graph, others: Iterable[Node], columns: tuple[int, ...], column: int) -> int:
    return max((columns[graph.stream_of[other]] for other in others), default=column)


def _count(strip: list[tuple[int, int, Node]], lanes: dict[Node, int]) -> int:
    return max((lanes[node] + 1 for _, _, node in strip), default=0)
