"""Where a value comes from: the arguments and variables that it is made of, in words too."""

import inspect
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass

import msgspec

from ..graph import Node
from ..operations import Apply, Argument, Concat, Constant, Object, StreamText, Structure, Variable


def sources(node: Node) -> list[Node]:
    """The arguments and variables that a value is made of, each once."""
    found: dict[Node, None] = {}
    waiting = [node]
    while waiting:
        node = waiting.pop()
        if isinstance(node.op, Apply | Concat | Structure):
            waiting.extend(reversed(node.inputs))
        elif not isinstance(node.op, Constant):
            found[node] = None
    return list(found)


def describe(node: Node) -> str:
    """What a value comes from, for messages."""
    found = [_called(source) for source in sources(node)]
    return " and ".join(dict.fromkeys(found)) or "a value that was changed"


def _called(node: Node) -> str:
    match node.op:
        case Argument(name):
            return f"argument {name!r}"
        case Variable(name) | Object(name):
            return f"variable {name!r}"
        case StreamText():
            return "the text of the state"
        case _:
            return type(node.op).__name__


def is_text(node: Node) -> bool:
    """Whether the value is a text whatever the arguments are: an argument may be of any type, and so may its parts."""
    while isinstance(node.op, Apply) and node.op.function in ("item", "multiply", "slice"):
        node = node.inputs[0]
    return not isinstance(node.op, Argument | Object)


def is_of_object(node: Node) -> bool:
    while isinstance(node.op, Apply) and node.op.function == "item":
        node = node.inputs[0]
    return isinstance(node.op, Object)


def members(value: object) -> Iterable[object]:
    """What a value holds, as far as it can be looked into."""
    match value:
        case Mapping():
            return [member for pair in value.items() for member in pair]
        case list() | tuple() | set() | frozenset():
            return value
        case msgspec.Struct():
            return [getattr(value, name) for name in value.__struct_fields__]
        case _ if is_dataclass(value) and not isinstance(value, type):
            return [getattr(value, member.name) for member in fields(value)]
        case _ if isinstance(value, type):
            return ()
        case _:
            return list(getattr(value, "__dict__", {}).values())


def is_lazy(value: object) -> bool:
    """Whether a value has to be run to be read, and can be once only: a generator, a map, a coroutine."""
    return isinstance(value, Iterator | AsyncIterator) or inspect.isawaitable(value)
