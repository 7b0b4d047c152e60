"""What one pass did."""

from collections.abc import Mapping
from dataclasses import dataclass

from ..graph import Graph, Node
from ..operations import Choose, Generate


@dataclass(frozen=True, slots=True)
class Outcome:
    """A rewritten graph.

    Attributes:
        graph: the same object where nothing was rewritten.
        counts: rule → how often it was applied.
        calls: by how many the calls of a run became fewer.
        notes: what a person wants to know, a line each.
    """

    graph: Graph
    counts: Mapping[str, int]
    calls: int = 0
    notes: tuple[str, ...] = ()


def called(node: Node) -> str:
    """A call, for people: "gen 'answer' (program.py:12)"."""
    match node.op:
        case Generate(gen):
            kind, name = "gen", gen.name
        case Choose(select):
            kind, name = "select", select.name
        case _:
            raise AssertionError(f"{type(node.op).__name__} is no call")
    words = [kind] if name is None else [kind, repr(name)]
    return " ".join(words if node.line is None else [*words, f"({node.line})"])
