"""Which joins the lists of a graph come from: `[of branch 0, of branch 1]` is what a join brings back."""

from collections.abc import Collection, Iterator
from typing import Any

from ..graph import Graph, Node
from ..operations import Join, Leaf, Structure, Variable
from .needs import gathers


def joins_of_lists(graph: Graph, alive: Collection[Node]) -> set[Node]:
    """Joins that a list among `alive` may come from: as many branches as entries, and an entry of its branch."""
    joins: dict[int, list[Node]] = {}  # by number of branches
    for node in graph.nodes:
        if isinstance(node.op, Join) and gathers(node.op):
            joins.setdefault(len(node.inputs) - 1, []).append(node)
    found: set[Node] = set()
    for node in graph.nodes:
        if node in alive and isinstance(node.op, Structure):
            for entries in _lists(node.op.template):
                streams = [_streams(graph, node, entry) for entry in entries]
                for join in joins.get(len(entries), ()):
                    ends = (graph.stream_of[end] for end in join.inputs[1:])
                    if any(end in of_entry for end, of_entry in zip(ends, streams, strict=True)):
                        found.add(join)
    return found


def _lists(template: Any) -> Iterator[list[Any]]:  # Any: see Structure.template
    """All lists in a template, the whole first."""
    match template:
        case list():
            yield template
            members: Any = template
        case tuple():
            members = template
        case dict():
            members = template.values()
        case _:
            return
    for member in members:
        yield from _lists(member)


def _streams(graph: Graph, node: Node, entry: Any) -> set[int]:
    """The streams that generate what is in an entry of a list, and those that they were forked off."""
    found: set[int] = set()
    waiting = [entry]
    while waiting:
        match waiting.pop():
            case Leaf(index):
                value = node.inputs[index]
                if isinstance(value.op, Variable):
                    stream: int | None = graph.stream_of[value.inputs[0]]
                    while stream is not None and stream not in found:
                        found.add(stream)
                        parents = graph.parents(stream)
                        stream = None if parents is None else parents[0]
            case list() | tuple() as members:
                waiting.extend(members)
            case dict() as members:
                waiting.extend(members.values())
    return found
