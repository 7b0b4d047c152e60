"""The common head: what the prompts of many runs of one program begin with, known before any of them runs.

    system("You are ...") + user("Rules: ... " + question) + assistant(gen("answer"))
    |------------------ head -----------------|  argument: here runs part

It is built by the interpreter's own `Position`, so its parts are those that a run will send: template scaffolding,
trimmed white space and turns included. Arguments that are the same in all runs belong to it.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from ...interpreter.position import Position
from ...lang.chat_template import ChatTemplate
from ...lang.errors import TemplateError
from ...lang.ops import RoleBegin, RoleEnd, VarScopeBegin, VarScopeEnd
from ...lang.prompt import Part
from ..graph import Graph, Node, frozen
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
    Join,
    Look,
    Structure,
)
from ..running.values import Values

_ASKS = (Generate, Choose, Fork)  # here the prompt so far goes to the backend


def common_head(graph: Graph, template: ChatTemplate, arguments: Mapping[str, Any] | None = None) -> tuple[Part, ...]:
    """What every prompt of the program's own stream begins with, up to the last place where it is asked with.

    Args:
        template: of the backend that the runs use.
        arguments: by name, those that all runs are given alike.
    """
    return _Walk(graph, template, arguments or {}).head()


def shared_arguments(items: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The arguments that are in all items, and the same: equal, and of the same type."""
    if not items:
        return {}
    first, *others = items
    shared: dict[str, Any] = {}
    for name, value in first.items():
        same = frozen(value)
        if all(name in other and frozen(other[name]) == same for other in others):
            shared[name] = value
    return shared


class _Walk:
    """Along the program's own stream, as far as it is known."""

    def __init__(self, graph: Graph, template: ChatTemplate, arguments: Mapping[str, Any]) -> None:
        self._stream = graph.streams[graph.stream_of[graph.ends[0]]]
        self._template = template
        self._arguments = arguments
        self._values = Values({}, {}, (), arguments)
        self._position = Position()

    def head(self) -> tuple[Part, ...]:
        asked: tuple[Part, ...] = ()  # with these at the last place of the walk
        for number, node in enumerate(self._stream):
            goes_on = self._follow(node)
            if isinstance(node.op, _ASKS) or not goes_on:
                later = any(isinstance(after.op, _ASKS) for after in self._stream[number:])
                asked = self._position.prompt.parts if later else asked
            if not goes_on:
                break
        return asked

    def _follow(self, node: Node) -> bool:
        """Says what the node says; False where runs part behind it, or would end with an error."""
        position = self._position
        try:
            match node.op:
                case Append():
                    return self._say(node.inputs[1])
                case RoleBegin(role):
                    position.open_turn(self._template, role)
                case RoleEnd():
                    position.close_turn(self._template)
                case Generate() | Choose() | Look():
                    position.settle("gen()")
                    return False
                case Join(mode):
                    return mode == "gather_variable"
                case Begin() | Fork() | VarScopeBegin() | VarScopeEnd():
                    pass
                case _:
                    return False
        except TemplateError:
            return False
        return True

    def _say(self, text: Node) -> bool:
        pieces: Iterable[Node] = text.inputs if isinstance(text.op, Concat) else (text,)
        for piece in pieces:
            if not self._is_known(piece):
                return False
            value = self._values.value(piece)
            if not isinstance(value, str):  # the run says what is wrong with it
                return False
            self._position.say(value)
        return True

    def _is_known(self, node: Node) -> bool:
        return all(_known_here(value, self._arguments) for value in _with_inputs(node))


def _known_here(node: Node, arguments: Mapping[str, Any]) -> bool:
    match node.op:
        case Constant() | Concat() | Apply() | Structure():
            return True
        case Argument(name):
            return name in arguments
    return False


def _with_inputs(node: Node) -> Iterator[Node]:
    """The node and what it is computed from. No recursion: a text may be joined out of thousands."""
    waiting = [node]
    while waiting:
        top = waiting.pop()
        yield top
        waiting.extend(top.inputs)
