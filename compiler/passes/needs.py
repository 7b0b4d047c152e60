"""What a value or a place needs to be what it is, as opposed to what it waits for."""

from collections.abc import Iterable

from ..graph import Node
from ..operations import Join


def needed(roots: Iterable[Node]) -> set[Node]:
    """The roots and all that they need. A join that brings variables back waits for branches, but says nothing of
    theirs: who takes a variable of a branch needs it itself."""
    seen: set[Node] = set()
    waiting = list(roots)
    while waiting:
        node = waiting.pop()
        if node not in seen:
            seen.add(node)
            waiting.extend(node.inputs[:1] if isinstance(node.op, Join) and gathers(node.op) else node.inputs)
    return seen


def gathers(join: Join) -> bool:
    return join.mode == "gather_variable"
