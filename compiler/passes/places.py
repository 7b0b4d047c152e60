"""What is known of the places of streams before anything runs: where text is never refused.

A template may refuse text behind a turn that it shows only together with the next one (see `interpreter/position.py`).
"""

from ...lang.ops import RoleBegin, RoleEnd
from ..graph import Graph, Node
from ..operations import Append, Begin, Choose, Generate, Look


def takes_text(graph: Graph) -> frozenset[Node]:
    """Places behind which text is never refused: no turn is owed there."""
    found: set[Node] = set()
    for node in graph.nodes:
        if node.in_stream:
            here = _takes(node)
            if here or (here is None and node.inputs[0] in found):
                found.add(node)
    return frozenset(found)


def _takes(node: Node) -> bool | None:
    """None: as what stands before."""
    match node.op:
        case RoleEnd():
            return False
        case Begin() | RoleBegin() | Append() | Generate() | Choose() | Look():
            return True
    return None
