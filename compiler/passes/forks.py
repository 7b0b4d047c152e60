"""Branches begin as early as they can, and nothing waits that does not have to.

    before   Fork ─► Join ─► Append ─► Generate          Generate waits for the branches, though it reads none of them
    after    Fork ─► Append ─► Generate ─► Join

    before   Fork 1 ─► Fork 1 ─► Fork 1                  three copies, said one behind the other
    after    Fork 3                                      siblings: one hint, and one group for the scheduler

What text needs of a branch it takes as a variable, so it waits for that and for nothing else.
"""

from dataclasses import replace

from ..graph import STREAM_OPERATIONS, Graph, Node
from ..operations import Fork, GetForkItem, Join, Structure
from .needs import gathers
from .outcome import Outcome
from .rules import Instead, Rule, Site, applied


def sink_joins(graph: Graph) -> Outcome:
    """Joins of variables go to the end of their stream. Texts of branches are appended where they were.

    Law: the same calls with the same prompts, the same variables and texts, as long as no call fails. When a branch
    fails, calls have been made that the program would not have come to.
    """
    moved: set[Node] = set()
    arriving: dict[Node, list[Node]] = {}  # the last of a stream that is no such join → those that go behind it
    for stream in graph.streams:
        last = next(index for index in reversed(range(len(stream))) if not _gathering(stream[index]))
        arriving[stream[last]] = [node for node in stream[:last] if _gathering(node)]
        moved.update(arriving[stream[last]])

    def lift(site: Site) -> Instead | None:
        return Instead(site.inputs[0], site.inputs[0]) if site.node in moved else None

    def sink(site: Site) -> Instead | None:
        joins = arriving.get(site.node)
        if not joins:
            return None
        said = place = site.kept()
        for join in joins:
            ends = (site.places[end] for end in join.inputs[1:])
            place = site.builder.node(join.op, (place, *ends), join.line)
        return Instead(said, place)

    sunk, counts = applied(graph, (Rule("join sunk", (Join,), lift), Rule("sunk", STREAM_OPERATIONS, sink)))
    del counts["sunk"]  # the same thing seen from its other end
    return Outcome(_lists_last(sunk) if moved else graph, counts)


def _gathering(node: Node) -> bool:
    return isinstance(node.op, Join) and gathers(node.op)


def _lists_last(graph: Graph) -> Graph:
    """A list that a join makes stands behind it (see `gathering.py`): what only variables and the result take goes
    behind all else."""
    late: set[Node] = set()
    for node in reversed(graph.nodes):
        if isinstance(node.op, Structure) and all(user in late for user in graph.users[node]):
            late.add(node)
    early = (node for node in graph.nodes if node not in late)
    return replace(graph, nodes=(*early, *(node for node in graph.nodes if node in late)))


def merge_forks(graph: Graph) -> Outcome:
    """Forks of one place are one fork.

    Law: the same calls with the same prompts, the same variables and texts. The backend hears of the branches as
    siblings.
    """
    head: dict[Node, Node] = {}  # fork → the first one of its place
    sizes: dict[Node, int] = {}
    offsets: dict[Node, int] = {}
    for node in graph.nodes:
        if isinstance(node.op, Fork):
            before = node.inputs[0]
            first = head[node] = head.get(before, node)
            offsets[node] = sizes.get(first, 0)
            sizes[first] = offsets[node] + node.op.size

    growing = {first for fork, first in head.items() if fork is not first}

    def grow(site: Site) -> Node | Instead | None:
        node = site.node
        if head[node] is not node:
            return Instead(site.inputs[0], site.inputs[0])
        return site.builder.node(Fork(sizes[node]), site.inputs, node.line) if node in growing else None

    def renumber(site: Site) -> Node | None:
        fork, op = site.node.inputs[0], site.node.op
        assert isinstance(op, GetForkItem), "the pattern says so"
        if not offsets[fork]:
            return None
        return site.builder.node(GetForkItem(offsets[fork] + op.index), site.inputs, site.node.line)

    merged, counts = applied(graph, (Rule("grown", (Fork,), grow), Rule("renumbered", (GetForkItem,), renumber)))
    return Outcome(merged, {"fork merged": len(head) - len(set(head.values()))} if counts else {})
