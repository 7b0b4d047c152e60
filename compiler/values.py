"""Computes the value nodes of a graph in one run: each once, when the bindings that they read are settled.

A node that reads nothing of the run (constants, arguments, functions of them) is known at once.
"""

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from ..interpreter.variables import Binding
from ..lang.errors import ParameterError, shown
from ..lang.ops import Op
from ..lang.state import BaseState
from .graph import Node
from .operations import FUNCTIONS, Apply, Argument, Concat, Constant, Leaf, Object, StreamText, Structure, Variable


class Values:
    """The values of one run.

    Args:
        slots: value node → place of the binding that it reads.
        sources: value node → the places of all bindings that it needs, in the order in which they are read.
        bindings: by place.
        arguments: of the run, by name.
    """

    __slots__ = ("_arguments", "_bindings", "_known", "_slots", "_sources")

    def __init__(
        self,
        slots: Mapping[Node, int],
        sources: Mapping[Node, tuple[int, ...]],
        bindings: Sequence[Binding],
        arguments: Mapping[str, Any],
    ) -> None:
        self._slots = slots
        self._sources = sources
        self._bindings = bindings
        self._arguments = arguments
        self._known: dict[Node, Any] = {}

    async def known(self, node: Node) -> Any:
        """Waits for what the node needs, on the loop that settles it. Raises the error of a binding that failed."""
        for slot in self._sources[node]:
            binding = self._bindings[slot]
            if not binding.done:
                await binding.settled_here()
            binding.value()  # the first that failed, in the order of the program
        return self.value(node)

    def value(self, node: Node) -> Any:
        """Returns the value of a node whose bindings are settled. No recursion: a text may be joined out of thousands.

        Raises:
            ParameterError: as `text`.
            The error of a binding, and what Python says of a wrong key or index.
        """
        known = self._known
        if node not in known:
            waiting = [node]
            while waiting:
                top = waiting[-1]
                missing = () if top in self._slots else [taken for taken in top.inputs if taken not in known]
                if missing:
                    waiting.extend(missing)
                else:
                    known[waiting.pop()] = self._computed(top)
        return known[node]

    def text(self, node: Node) -> str:
        """Returns what the node puts into text. A graph says `f"{x}"` and `s += x` alike: what is no text can only have
        been meant in the first way, since the second raises, unless it is a list, which is said item by item.

        Raises:
            ParameterError: a value that is probably no text, and would be said nevertheless.
        """
        value = self.value(node)
        return value if isinstance(value, str) else _spelled(node, value)

    def _computed(self, node: Node) -> Any:
        match node.op:
            case Constant(value):
                # A program that is interpreted makes lists and dicts anew in every run.
                return copy.deepcopy(value) if isinstance(value, list | dict | set) else value
            case Argument(name):
                return self._arguments[name]
            case Variable(_, index):
                value = self._read(node)
                return value if index is None else value[index]
            case Object():
                return self._bindings[self._slots[node]].object()
            case StreamText():
                return self._read(node).position.prompt.text
            case Structure(template):
                if node in self._slots:
                    return self._read(node)
                return _filled(template, [self._known[taken] for taken in node.inputs])
            case Concat():
                return "".join([self.text(taken) for taken in node.inputs])
            case Apply(function, arguments):
                return FUNCTIONS[function](self._known[node.inputs[0]], *arguments)
        raise AssertionError(f"{type(node.op).__name__} is no value: the verifier lets none through")

    def _read(self, node: Node) -> Any:
        return self._bindings[self._slots[node]].value()


def described(node: Node, value: object) -> str:
    """Makes the error for a value that does not fit."""
    kind = f"{type(value).__name__} {shown(value)}"
    return f"argument {node.op.name!r}, which is {kind}," if isinstance(node.op, Argument) else kind


def _spelled(node: Node, value: object) -> str:
    if value is None or isinstance(value, list | tuple | bytes | Op | BaseState):
        raise ParameterError(
            f"cannot put {described(node, value)} into text; give text, or write str(...) around it in the program"
        )
    try:
        return str(value)
    except Exception as error:  # of the object's own code; an integer of thousands of digits
        raise ParameterError(f"cannot put {described(node, value)} into text: {error}") from error


def _filled(template: Any, values: list[Any]) -> Any:
    """Fills a template of lists, tuples and dicts, made anew with the values at its leaves."""
    match template:
        case Leaf(index):
            return values[index]
        case list():
            return [_filled(member, values) for member in template]
        case tuple():
            return tuple(_filled(member, values) for member in template)
        case dict():
            return {key: _filled(member, values) for key, member in template.items()}
    return template
