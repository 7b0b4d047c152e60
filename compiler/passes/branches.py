"""Forks that lose branches: the others move up, and a fork without branches is none."""

from collections.abc import Collection

from ..graph import Graph, Node
from ..operations import Fork, GetForkItem
from .rules import Instead, Rule, Site


def shrinking(graph: Graph, gone: Collection[Node]) -> tuple[Rule, Rule]:
    """Rules for forks and the branches that stay.

    Args:
        gone: `GetForkItem`s of branches that are no more. The pass itself says what becomes of them.
    """
    staying: dict[Node, list[Node]] = {node: [] for node in graph.nodes if isinstance(node.op, Fork)}
    shrunk: set[Node] = set()
    for node in graph.nodes:
        if isinstance(node.op, GetForkItem):
            if node in gone:
                shrunk.add(node.inputs[0])
            else:
                staying[node.inputs[0]].append(node)

    def shrink(site: Site) -> Node | Instead | None:
        if site.node not in shrunk:
            return None
        size = len(staying[site.node])
        if not size:
            return Instead(site.inputs[0], site.inputs[0])
        return site.builder.node(Fork(size), site.inputs, site.node.line)

    def move_up(site: Site) -> Node | None:
        fork = site.node.inputs[0]
        if fork not in shrunk or site.node in gone:
            return None
        return site.builder.node(GetForkItem(staying[fork].index(site.node)), site.inputs, site.node.line)

    return Rule("fork", (Fork,), shrink), Rule("branch", (GetForkItem,), move_up)
