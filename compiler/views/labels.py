"""Labels nodes in the names of the paper's appendix D.1: ConstantText, Argument, Gen, Select, Variable, Fork,
GetForkItem, Join.

What is appended stands for its Append. A value is written as an expression; "<- 12" is the node that it comes from.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from ...lang.errors import GraphError
from ...lang.ops import RoleBegin, RoleEnd, Select, VarScopeBegin, VarScopeEnd
from ..checks.inputs import MAX_NESTING
from ..graph import Graph, Node, Parameter
from ..operations import (
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
    Join,
    Leaf,
    Look,
    Object,
    StreamText,
    Structure,
    Variable,
)

_DEPTH = 4  # of values inside of values that are written out; what is deeper is named by its number
_MEMBERS = 8  # of a list that are written out where texts are shortened
_USUAL_METHOD = Select(None, ()).method


@dataclass(frozen=True, slots=True)
class Label:
    """A node's label. `kind`: the paper's name of the node, `text`: all the rest."""

    kind: str
    text: str = ""

    def __str__(self) -> str:
        return f"{self.kind} {self.text}".rstrip()


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
        return text if self._longest is None or len(text) <= self._longest else f"{text[: self._longest - 1]}…"

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
            parts.append(f"{constraint.kind}={self._quoted(constraint.source)}")
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


def plain(text: str) -> str:
    """Writes a text on one line, of characters that can be seen."""
    return "".join(character if character.isprintable() else repr(character)[1:-1] for character in text)


def _reads(node: Node) -> bool:
    """Returns whether a value's input is a place of a stream, and no value inside of it."""
    return isinstance(node.op, Variable | Object | StreamText)
