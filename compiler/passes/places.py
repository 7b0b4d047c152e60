"""What is known of the places of streams before anything runs: which text may be said in other pieces there.

A template may refuse text behind a turn that it shows only together with the next one, and it may put white space
between the opening of an answer and its first text, unless the text brings it (see `interpreter/position.py`).
"""

from collections.abc import Callable

from ...lang.ops import RoleBegin, RoleEnd
from ..graph import Graph, Node
from ..operations import Append, Begin, Choose, Constant, Generate, Look


def may_begin_answer(graph: Graph) -> frozenset[Node]:
    """Places behind which the first text of an assistant turn may come."""

    def begins(node: Node) -> bool | None:
        match node.op:
            case RoleBegin(role):
                return role == "assistant"
            case Begin() | RoleEnd() | Generate() | Choose() | Look():
                return False
            case Append() if _shows(node.inputs[1]):
                return False
        return None

    return _places(graph, begins)


def takes_text(graph: Graph) -> frozenset[Node]:
    """Places behind which text is never refused: no turn is owed there."""

    def takes(node: Node) -> bool | None:
        match node.op:
            case RoleEnd():
                return False
            case Begin() | RoleBegin() | Append() | Generate() | Choose() | Look():
                return True
        return None

    return _places(graph, takes)


def _places(graph: Graph, decide: Callable[[Node], bool | None]) -> frozenset[Node]:
    """Stream nodes for which `decide` says True, or says None and said True of what stands before."""
    found: set[Node] = set()
    for node in graph.nodes:
        if node.in_stream:
            here = decide(node)
            if here or (here is None and node.inputs[0] in found):
                found.add(node)
    return frozenset(found)


def _shows(text: Node) -> bool:
    """Whether a text has a character that is no white space, for certain."""
    return isinstance(text.op, Constant) and isinstance(text.op.value, str) and bool(text.op.value.strip())
