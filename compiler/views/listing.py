"""Writes a graph as text: as a listing, with a block for each stream and a line for each thing that it says, or as DOT.

Numbers are places in `Graph.nodes`, as in files and messages. What takes something from elsewhere has "<- number".
"""

import os
from collections.abc import Iterator

from ..graph import Graph, Line, Node
from ..operations import Begin, Fork, GetForkItem, Join
from .labels import Labels, plain, signature
from .places import Edge, edges

_LONGEST = 60  # characters of one text
_LONGEST_IN_DOT = 40
_WIDTH = 100  # most columns before the line of the source; what is longer pushes it away


def text(graph: Graph) -> str:
    """Writes the listing, for the terminal. Texts are shortened; the file of the graph has all of them."""
    return _Listing(graph).text()


class _Listing:
    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._labels = Labels(graph, _LONGEST)
        self._files = list(dict.fromkeys(node.line.file for node in graph.nodes if node.line is not None))
        self._digits = len(str(len(graph.nodes)))
        widths = [len(self._said(node)) for stream in graph.streams for node in stream]
        self._width = max((width for width in widths if width <= _WIDTH), default=0)

    def text(self) -> str:
        graph = self._graph
        lines = [signature(graph), *(f"  {plain(file)}" for file in self._files)]
        for number, stream in enumerate(graph.streams):
            lines += ["", self._head(number)]
            lines += map(self._line, stream)
        if graph.variables:
            lines += ["", "variables"]
            lines += [f"  {plain(name)} = {self._labels.value(value)}" for name, value in graph.variables]
        lines += ["", "result", f"  {self._labels.value(graph.result)}", ""]
        return "\n".join(lines)

    def _head(self, number: int) -> str:
        first = self._graph.streams[number][0]
        match first.op:
            case Begin(program):
                return f"stream {number}: {plain(program)}"
            case GetForkItem(index):
                fork = first.inputs[0]
                assert isinstance(fork.op, Fork), "a branch begins at a fork"
                return (
                    f"stream {number}: branch {index} of {fork.op.size}, forked off stream "
                    f"{self._graph.stream_of[fork]} at {self._graph.numbers[fork]}"
                )
            case _:
                raise AssertionError("a stream begins with a Begin or a GetForkItem")

    def _line(self, node: Node) -> str:
        said = self._said(node)
        return said if node.line is None else f"{said.ljust(self._width)}  {self._where(node.line)}"

    def _said(self, node: Node) -> str:
        return f"  {self._graph.numbers[node]:>{self._digits}}  {self._labels.of(node)}{self._leading_to(node)}"

    def _leading_to(self, node: Node) -> str:
        """Names the streams that begin here."""
        if not isinstance(node.op, Fork):
            return ""
        users = self._graph.users[node]
        branches = [str(self._graph.stream_of[user]) for user in users if isinstance(user.op, GetForkItem)]
        shown = f"{branches[0]} to {branches[-1]}" if len(branches) > 8 else ", ".join(branches)
        return f" -> stream{'s' if len(branches) > 1 else ''} {shown}" if branches else ""

    def _where(self, line: Line) -> str:
        """Names the line. The file is named once, above, where there is one only."""
        return f"line {line.number}" if len(self._files) == 1 else f"{os.path.basename(line.file)}:{line.number}"


# ------------------------------------------------------------------------------------ for Graphviz


def dot(graph: Graph) -> str:
    """Writes a graph for `dot -Tsvg`: streams are boxes; what one stream needs of another is blue, values dashed."""
    return "\n".join([*_lines(graph), ""])


def _lines(graph: Graph) -> Iterator[str]:
    labels = Labels(graph, _LONGEST_IN_DOT)
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
    """Quotes a label. Unprintable characters are escaped already; this escapes the quote and the backslash."""
    escaped = plain(text).replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
