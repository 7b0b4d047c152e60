"""Merges text: constants that are appended one after the other become one constant, and empty ones go.

    Append "Q: " ─► Append "why" ─► Append "" ─► Generate        Append "Q: why" ─► Generate

Only between operations that append: whatever else stands in a stream (a scope, a fork, a turn) is a border, and so is
a place that a value looks at.
"""

from itertools import zip_longest

from ...lang.ops import RoleBegin, RoleEnd
from ..graph import Graph, Node
from ..operations import Append, Begin, Choose, Constant, Generate, Look
from .rules import PassResult, Replacement, Rule, Site, apply_rules


def merge_text(graph: Graph) -> PassResult:
    """Law: every prompt has the same parts (neighbouring text is one part anyway), every variable the same value.

    White space at the beginning and the end of a turn is the template's affair. The interpreter gives it the text of a
    turn in whatever pieces that comes (see `interpreter/position.py`).
    """
    runs = _runs(graph)
    swallowed = {node for run in runs.values() for node in run[:-1]}
    takes = takes_text(graph)

    def swallow(site: Site) -> Replacement | None:
        return Replacement(site.inputs[0], site.inputs[0]) if site.node in swallowed else None

    def join(site: Site) -> Node | None:
        run = runs.get(site.node)
        if run is None:
            return None
        text = "".join(_text(node) or "" for node in run)
        constant = site.builder.node(Constant(text), (), run[0].inputs[1].line)
        return site.builder.node(Append(), (site.inputs[0], constant), run[0].line)

    def leave_out(site: Site) -> Replacement | None:
        """Leaves out empty text where nothing would be refused: after a turn that is owed it is an error, and stays
        one."""
        if _text(site.node) != "" or site.node.before not in takes:
            return None
        return Replacement(site.inputs[0], site.inputs[0])

    graph, counts = apply_rules(
        graph,
        (
            Rule("merged into the next", (Append,), swallow),
            Rule("merged", (Append,), join),
            Rule("left out", (Append,), leave_out),
        ),
    )
    del counts["merged"]  # the same thing seen from its other end
    return PassResult(graph, counts)


def _runs(graph: Graph) -> dict[Node, list[Node]]:
    """Returns constants that can be appended at once, at least two, under the last of them."""
    runs: dict[Node, list[Node]] = {}
    for stream in graph.streams:
        run: list[Node] = []
        for node, following in zip_longest(stream, stream[1:]):
            text = _text(node)
            if text is None:
                continue
            run.append(node)
            if graph.users[node] == (following,) and _text(following) is not None:
                continue
            if len(run) > 1:
                runs[node] = run
            run = []
    return runs


def _text(node: Node | None) -> str | None:
    """Returns the constant that a node appends."""
    if node is None or not isinstance(node.op, Append):
        return None
    said = node.inputs[1].op
    return said.value if isinstance(said, Constant) and isinstance(said.value, str) else None


def takes_text(graph: Graph) -> frozenset[Node]:
    """Returns places after which text is never refused: no turn is owed there. A template may refuse text after a turn
    that it shows only together with the next one (see `interpreter/position.py`)."""
    found: set[Node] = set()
    for node in graph.nodes:
        if node.in_stream:
            here = _takes(node)
            if here or (here is None and node.inputs[0] in found):
                found.add(node)
    return frozenset(found)


def _takes(node: Node) -> bool | None:
    """Returns whether the node takes text after it; None: as the node before."""
    match node.op:
        case RoleEnd():
            return False
        case Begin() | RoleBegin() | Append() | Generate() | Choose() | Look():
            return True
    return None
