"""The dependencies between what a program says: the two kinds of the paper's appendix D.1.

*Intra-stream*: a stream says one thing after the other. *Inter-stream*: one stream needs what another one has said. A
branch needs its fork, a join needs the ends of its branches, and text needs the streams that generate it, through
however many values: `"".join(s["x"].upper() for s in forks)` is one piece of text with an edge from every branch.
"""

from dataclasses import dataclass
from typing import Literal

from .graph import Graph, Node


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
    """All of them, in the order of their targets; of one target, the intra-stream one first."""
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
    """What has to have been said for a node to be known: a stream node itself, and of values what they are made of."""
    said: dict[Node, tuple[Node, ...]] = {}
    for node in graph.nodes:
        if node.in_stream:
            said[node] = (node,)
        else:
            said[node] = tuple(dict.fromkeys(source for taken in node.inputs for source in said[taken]))
    return said
