"""Bounds how long the texts of a run can become, before it runs: a client's graph must not fill the memory of a server.

A few nodes are enough for a text of any length: `Apply` repeats and pads, and what is taken twice by each of fifty
nodes has doubled fifty times. What a model generates is counted as it is usual, since it costs its sender tokens.
"""

import re
from collections.abc import Mapping
from typing import Any

from ...lang.errors import GraphError
from ...lang.ops import RoleBegin, RoleEnd
from ..graph import Graph, Node
from ..operations import (
    Append,
    Apply,
    Argument,
    Begin,
    Choose,
    Concat,
    Constant,
    Generate,
    GetForkItem,
    Join,
    StreamText,
    Structure,
)

MOST = 1 << 27  # characters of all texts that functions, joins and copies of streams make, together

_GENERATED = 1 << 15  # characters of what one `gen` or `select` usually gives, at most
_SCALAR = 32  # characters of a number
_SCAFFOLDING = 64  # characters around a turn
_LONGER_LETTERS = 3  # of case functions: "ΐ".upper() has three
_ESCAPED = 10  # of repr and ascii: "\U0001f600"

_MADE = ("repr", "ascii", "str", "format", "multiply", "replace", "center", "ljust", "rjust", "zfill", "expandtabs")


class TextLimit:
    """The limit of one graph. Most graphs copy nothing, and are not checked again."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._grows = any(_grows(node) for node in graph.nodes)

    def check(self, arguments: Mapping[str, Any]) -> None:
        """Raises GraphError where a run with these arguments may make more than `MOST` characters."""
        if not self._grows:
            return
        length: dict[Node, int] = {}  # of values; of what a stream's prompt has up to a stream node
        said: dict[Node, int] = {}  # of what a stream has said itself up to a node
        made = 0
        for node in self._graph.nodes:
            if node.in_stream:
                said[node], added = self._said(node, length, said)
                before = node.inputs[0] if node.inputs else None
                length[node] = (0 if before is None else length[before]) + added
                made += added if isinstance(node.op, Join) else 0
            else:
                length[node] = self._value(node, length, arguments)
                made += length[node] if _grows(node) else 0
            if made > MOST:
                at = f" at {node.line}" if node.line is not None else ""
                raise GraphError(
                    f"the program{at} may make texts of {made} characters, and {MOST} are the most that a server "
                    "makes; run it with server=False"
                )

    def _said(self, node: Node, length: Mapping[Node, int], said: Mapping[Node, int]) -> tuple[int, int]:
        """Counts what the stream has said itself, and what of it the node adds."""
        match node.op:
            case Begin() | GetForkItem():
                return 0, 0
            case Append():
                added = length[node.inputs[1]]
            case Generate() | Choose():
                added = _GENERATED
            case RoleBegin() | RoleEnd():
                added = _SCAFFOLDING
            case Join("concate_and_append"):
                added = sum(said[end] for end in node.inputs[1:])
            case _:
                added = 0
        return said[node.inputs[0]] + added, added

    def _value(self, node: Node, length: Mapping[Node, int], arguments: Mapping[str, Any]) -> int:
        taken = [length[value] for value in node.inputs]
        match node.op:
            case Constant(value):
                return _size(value)
            case Argument(name):
                return _size(arguments.get(name))
            case Concat():
                return sum(taken)
            case StreamText():
                return taken[0]
            case Structure(template):
                return sum(taken) + _size(template)
            case Apply(function, constants):
                return _applied(function, constants, taken[0])
            case _:  # a variable, or the object that it stands for
                return _GENERATED


def _grows(node: Node) -> bool:
    match node.op:
        case Apply(function):
            return function in _MADE
        case Join(mode):
            return mode == "concate_and_append"
        case _:
            return isinstance(node.op, Concat | StreamText)


def _applied(function: str, constants: tuple[Any, ...], length: int) -> int:
    first: Any = constants[0] if constants else 8  # an integer or a text, as `attributes.py` has looked
    match function:
        case "multiply":
            return length * max(0, int(first))
        case "center" | "ljust" | "rjust" | "zfill":
            return max(length, int(first))
        case "expandtabs":
            return length * max(1, int(first))
        case "replace":
            return (length + 1) * (len(constants[1]) + 1)
        case "format":
            return length + _SCALAR + sum(int(number[:18]) for number in re.findall(r"\d+", first))
        case "repr" | "ascii" | "str":
            return _ESCAPED * length + 2
        case _:
            return _LONGER_LETTERS * length


def _size(value: Any) -> int:
    """Counts the characters of all that is in a value. No recursion."""
    total, waiting = 0, [value]
    while waiting:
        member = waiting.pop()
        match member:
            case str() | bytes():
                total += len(member)
            case dict():
                waiting.extend(member)
                waiting.extend(member.values())
            case list() | tuple() | set() | frozenset():
                waiting.extend(member)
                total += 2
            case int():
                total += member.bit_length() // 3 + 2
            case _:
                total += _SCALAR
    return total
