"""Writes a graph as text: as a listing, with a block for each stream and a line for each thing that it says, or as DOT.

Nodes have the names of the paper's appendix D.1: ConstantText, Argument, Gen, Select, Variable, Fork, GetForkItem,
Join. What is appended stands for its Append, and a value is written as an expression. Numbers are places in
`Graph.nodes`, as in files and messages. What takes something from elsewhere has "<- number".

Edges are of the two kinds of that appendix. *Intra-stream*: a stream says one thing after the other. *Inter-stream*:
one stream needs what another one has said. A branch needs its fork, a join needs the ends of its branches, and text
needs the streams that generate it, through however many values: `"".join(s["x"].upper() for s in forks)` is one piece
of text with an edge from every branch.
"""

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any, Literal

from ...fsm.composed import nodes
from ...lang.errors import GraphError
from ...lang.ops import CachePoint, RoleBegin, RoleEnd, Select, VarScopeBegin, VarScopeEnd
from ...lang.prompt import cell_name
from ..graph import Graph, Line, Node, Parameter
from ..operations import (
    MAX_NESTING,
    Append,
    Apply,
    Argument,
    Begin,
    Choose,
    Concat,
    Constant,
    Fork,
    Generate,
    GetForkItem,
    Isolate,
    Join,
    Leaf,
    Look,
    Object,
    StreamText,
    Structure,
    Variable,
)

_DEPTH = 4  # of values inside of values that are written out; what is deeper is named by its number


@dataclass(frozen=True, slots=True)
class Edge:
    """`target` cannot run before `source` has. Both say something in a stream.

    Attributes:
        kind: "intra" inside of one stream, "inter" between two.
    """

    source: Node
    target: Node
    kind: Literal["intra", "inter"]


def edges(graph: Graph) -> tuple[Edge, ...]:
    """Returns all edges, in the order of their targets; of one target, the intra-stream one first."""
    said = _said(graph)
    found: list[Edge] = []
    for node in graph.nodes:
        if not node.in_stream:
            continue
        if node.before is not None:
            found.append(Edge(node.before, node, "intra"))
        found += [
            Edge(source, node, "inter")
            for source in dict.fromkeys(source for taken in node.inputs for source in said[taken])
            if graph.stream_of[source] != graph.stream_of[node]
        ]
    return tuple(found)


def _said(graph: Graph) -> dict[Node, tuple[Node, ...]]:
    """Returns what has to have been said for a node to be known: a stream node itself, and of values what they are made
    of."""
    said: dict[Node, tuple[Node, ...]] = {}
    for node in graph.nodes:
        if node.in_stream:
            said[node] = (node,)
        else:
            said[node] = tuple(dict.fromkeys(source for taken in node.inputs for source in said[taken]))
    return said


@dataclass(frozen=True, slots=True)
class Label:
    """A node's label. `kind`: the paper's name of the node, `text`: all the rest."""

    kind: str
    text: str = ""

    def __str__(self) -> str:
        return f"{self.kind} {self.text}".rstrip()


_MEMBERS = 8  # of a list that are written out where texts are shortened
_USUAL_METHOD = Select(None, ()).method
_LONGEST = 60  # characters of one text
_LONGEST_IN_DOT = 40
_WIDTH = 100  # most columns before the line of the source; what is longer pushes it away


class Labels:
    """Labels the nodes of one graph.

    Args:
        longest: characters of a text of the program that are written; None for all of them.
    """

    def __init__(self, graph: Graph, longest: int | None = None) -> None:
        self._numbers = graph.numbers
        self._longest = longest

    def of(self, node: Node) -> Label:
        """Labels a stream node by its text, a value by its kind."""
        match node.op:
            case Append():
                return self.of(node.inputs[1])
            case Begin(program):
                return Label("Begin", plain(program))
            case Generate():
                return Label("Gen", self._generation(node.op))
            case Choose():
                return Label("Select", self._choosing(node))
            case Look(num_frames):
                frames = "" if num_frames is None else f"{num_frames} frames of "
                return Label("Image" if num_frames is None else "Video", f"{frames}{self.value(node.inputs[1])}")
            case RoleBegin(role) | RoleEnd(role):
                return Label(type(node.op).__name__, plain(role))
            case VarScopeBegin(name) | VarScopeEnd(name):
                return Label(type(node.op).__name__, plain(name))
            case CachePoint(ttl):
                return Label("CachePoint", f"{ttl:g} s")
            case Isolate():
                return Label("Private", self.value(node.inputs[1]))
            case Fork(size):
                return Label("Fork", str(size))
            case GetForkItem(index):
                return Label("GetForkItem", f"{index} <- {self._numbers[node.inputs[0]]}")
            case Join(mode):
                ends = [str(self._numbers[end]) for end in node.inputs[1:]]
                return Label("Join", f"{mode} <- {self._listed(ends)}")
            case Constant(value) if isinstance(value, str):
                return Label("ConstantText", self._constant(value))
        kind, _, text = self.value(node).partition(" ")
        return Label(kind, text)

    def value(self, node: Node, depth: int = 0) -> str:
        """Writes a value as an expression."""
        if depth > _DEPTH:
            return f"node {self._numbers[node]}"
        taken = [self.value(value, depth + 1) for value in node.inputs] if not _reads(node) else []
        match node.op:
            case Constant(value):
                return self._constant(value)
            case Argument(name):
                return f"Argument {plain(name)}"
            case Variable(name, index):
                item = "" if index is None else f"[{index}]"
                return f"Variable {plain(name)}{item} <- {self._numbers[node.inputs[0]]}"
            case Object(name):
                return f"Object {plain(name)} <- {self._numbers[node.inputs[0]]}"
            case StreamText():
                return f"StreamText <- {self._numbers[node.inputs[0]]}"
            case Concat():
                return f"Concat ({self._listed(taken)})"
            case Apply(function, arguments):
                return f"Apply {function}({', '.join((*taken, *map(self._constant, arguments)))})"
            case Structure(template):
                return self._template(template, taken)
            case _:
                raise GraphError(f"node {self._numbers[node]} is no value")

    def _constant(self, value: object) -> str:
        match value:
            case str():
                return self._quoted(value)
            case bytes():
                return f"{len(value)} bytes"
            case PurePath():
                return self._quoted(str(value))
            case _:
                return self._shortened(repr(value))

    def _quoted(self, text: str) -> str:
        """Quotes a text in double quotes, on one line. Cut before it is written out: a picture's data may be in it."""
        shown = self._shortened(text)
        return '"' + plain(re.sub(r'["\\]', r"\\\g<0>", shown)) + '"'

    def _shortened(self, text: str) -> str:
        return text if self._longest is None else folded(text, self._longest)

    def _listed(self, parts: list[str]) -> str:
        if self._longest is None or len(parts) <= _MEMBERS:
            return ", ".join(parts)
        return ", ".join([*parts[:_MEMBERS], f"… {len(parts) - _MEMBERS} more"])

    def _template(self, template: Any, taken: list[str], depth: int = 0) -> str:
        if depth > MAX_NESTING:
            return "…"
        match template:
            case Leaf(index):
                return taken[index]
            case list():
                return f"[{self._listed([self._template(member, taken, depth + 1) for member in template])}]"
            case tuple():
                members = [self._template(member, taken, depth + 1) for member in template]
                return f"({self._listed(members)}{',' if len(template) == 1 else ''})"
            case dict():
                pairs = [
                    f"{self._constant(key)}: {self._template(member, taken, depth + 1)}"
                    for key, member in template.items()
                ]
                return f"{{{self._listed(pairs)}}}"
            case _:
                return self._constant(template)

    def _generation(self, op: Generate) -> str:
        parts = [plain(op.gen.name or "(no name)")]
        if op.gen.result is not None and op.gen.result.wanted != "text":
            parts.append(f"-> {plain(op.gen.result.wanted)}")
        parts += self._options(op.gen.options)
        constraint = op.gen.constraint
        if constraint is not None:
            source = constraint.source
            shown = nodes.spelled(nodes.read(source)) if constraint.kind == "expression" else source
            parts.append(f"{constraint.kind}={self._quoted(shown)}")
        if op.gen.captures is not None:
            parts.append(f"(captures: {', '.join(map(plain, op.gen.captures.results))})")
        if op.defaults:
            parts.append(f"(defaults: {' '.join(self._options(op.defaults))})")
        if op.tags is not None:
            parts.append(f"(thinking: {plain(op.tags[0])} {plain(op.tags[1])})")
        return " ".join(parts)

    def _choosing(self, node: Node) -> str:
        assert isinstance(node.op, Choose), "asked for a Choose"
        select = node.op.select
        choices = self._listed([self.value(choice) for choice in node.inputs[1:]])
        method = [] if select.method == _USUAL_METHOD else [f"method={select.method}"]
        temperature = [] if select.temperature == 0 else [f"temperature={select.temperature}"]
        return " ".join([plain(select.name or "(no name)"), f"of {choices}", *method, *temperature])

    def _options(self, options: Mapping[str, Any]) -> list[str]:
        return [f"{name}={self._option(value)}" for name, value in options.items()]

    def _option(self, value: object) -> str:
        if isinstance(value, tuple) and len(value) == 1:
            return self._constant(value[0])
        return self._constant(value)


def signature(graph: Graph) -> str:
    """Writes the program as `tip(topic, count=2)`."""
    return plain(f"{graph.name}({', '.join(map(_parameter, graph.parameters))})")


def _parameter(parameter: Parameter) -> str:
    if parameter.required:
        return parameter.name
    default = repr(parameter.default)
    return f"{parameter.name}={default if len(default) <= 40 else default[:39] + '…'}"


def place(line: Line) -> str:
    """Names a line by its file without folders, or by its cell."""
    return f"{cell_name(line.file) or os.path.basename(line.file)}:{line.number}"


def folded(text: str, longest: int) -> str:
    """Shortens a text to its first and last characters, two of the first to one of the last."""
    if len(text) <= longest:
        return text
    end = max(longest // 3, 1)
    return f"{text[: max(longest - 1 - end, 1)]}…{text[-end:]}"


def plain(text: str) -> str:
    """Writes a text on one line, of characters that can be seen."""
    return "".join(character if character.isprintable() else repr(character)[1:-1] for character in text)


def _reads(node: Node) -> bool:
    """Returns whether a value's input is a place of a stream, and no value inside of it."""
    return isinstance(node.op, Variable | Object | StreamText)


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
        lines = [signature(graph), *(f"  {plain(cell_name(file) or file)}" for file in self._files)]
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
        return f"line {line.number}" if len(self._files) == 1 else place(line)


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
