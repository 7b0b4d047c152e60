"""A graph for Graphviz: `dot -Tsvg`. Streams are boxes; what one stream needs of another is blue, values are dashed."""

from collections.abc import Iterator

from ..edges import Edge, edges
from ..graph import Graph
from ..operations import Begin, GetForkItem, Join
from .labels import Labels, plain, signature

_LONGEST = 40  # characters of one text


def dot(graph: Graph) -> str:
    return "\n".join([*_lines(graph), ""])


def _lines(graph: Graph) -> Iterator[str]:
    labels = Labels(graph, _LONGEST)
    yield f"digraph {_quoted(graph.name)} {{"
    yield f"  label={_quoted(signature(graph))}; labelloc=t; fontname=monospace;"
    yield "  node [shape=box, style=rounded, fontname=monospace, fontsize=11];"
    for number, stream in enumerate(graph.streams):
        op = stream[0].op
        named = f"stream {number}: {op.program}" if isinstance(op, Begin) else f"stream {number}"
        yield f"  subgraph cluster_{number} {{"
        yield f"    label={_quoted(named)}; color=gray;"
        for node in stream:
            yield f"    {graph.numbers[node]} [label={_quoted(f'{graph.numbers[node]}  {labels.of(node)}')}];"
        yield "  }"
    for edge in edges(graph):
        yield f"  {graph.numbers[edge.source]} -> {graph.numbers[edge.target]}{_style(edge)};"
    yield "}"


def _style(edge: Edge) -> str:
    if edge.kind == "intra":
        return ""
    if isinstance(edge.target.op, GetForkItem) or (
        isinstance(edge.target.op, Join) and edge.source in edge.target.inputs
    ):
        return " [color=blue]"
    return " [color=blue, style=dashed]"


def _quoted(text: str) -> str:
    """Labels escape what is not printable; what is left are the quote and the backslash."""
    escaped = plain(text).replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
