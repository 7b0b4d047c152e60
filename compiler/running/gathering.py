"""Which lists joins make. A graph says that a variable is a list of what branches found; here it is found which join
brings it back, so that it is known when the parent comes there, has the facts of every branch, and fails as they do.

    branch 0:  gen("x") ─► Join        Structure [Leaf 0, Leaf 1]     a list of the join, with a slot of its own
    branch 1:  gen("x") ─►                     Variable x  Variable x

Likewise the texts of a `gen` with n above 1, which a graph names one by one, are the one variable that they come from.
"""

from dataclasses import dataclass, field
from typing import Any

from ..graph import Graph, Node
from ..operations import Constant, Join, Leaf, Structure, Variable
from .slots import Slots

Slotted = tuple[int, tuple[int | None, ...]]  # the slot of a list, and those of what each branch found


@dataclass(frozen=True, slots=True)
class Column:
    """`join` makes the list `value`, or a list inside of it."""

    join: Node
    value: Node


def columns(graph: Graph) -> list[Column]:
    """The lists of all joins of a graph."""
    return Gathering(graph, Slots(graph)).columns


@dataclass(slots=True)
class Gathered:
    """What a join brings back.

    Attributes:
        lists: those of branches come before the lists that have them inside.
        given: slots of what the branches themselves assigned.
    """

    lists: list[Slotted] = field(default_factory=list)
    given: list[int] = field(default_factory=list)


class Gathering:
    """Of one graph: gives slots to the lists of its joins.

    Attributes:
        joins: join → what it brings back.
        columns: which list is of which join.
        assigned: values that branches assigned, with their slots. Those that are parts of lists are in no graph.
    """

    def __init__(self, graph: Graph, slots: Slots) -> None:
        self.joins: dict[Node, Gathered] = {}
        self.columns: list[Column] = []
        self.assigned: list[tuple[Node, int]] = []
        self._graph = graph
        self._slots = slots
        for node in graph.nodes:
            match node.op:
                case Join("gather_variable"):
                    self.joins[node] = Gathered()
                case Structure(list() as template):
                    # One list may have several names: that of what is in it, and those that it was assigned to.
                    for name in dict.fromkeys(taken.op.name for taken in node.inputs if isinstance(taken.op, Variable)):
                        slot = self._find(node, template, name, None)
                        if slot is not None:
                            slots.values[node] = slot
                            break

    def _find(self, node: Node, template: list[Any], name: str, stream: int | None) -> int | None:
        """The slot of the list `name`, if a `gen` or a join makes it; `stream`: of the branch that has to."""
        slot = self._texts(node, template, name, stream)
        for join in reversed(self.joins):
            if slot is None and stream in (None, self._graph.stream_of[join]):
                slot = self._gathered(node, template, name, join)
        return slot

    def _texts(self, node: Node, template: list[Any], name: str, stream: int | None) -> int | None:
        values = [node.inputs[entry.index] for entry in template if isinstance(entry, Leaf)]
        setters = {value.inputs[0] for value in values if isinstance(value.op, Variable) and value.op.name == name}
        indices = [value.op.index for value in values if isinstance(value.op, Variable)]
        if len(setters) != 1 or indices != list(range(len(template))):
            return None
        (setter,) = setters
        return self._slots.variable(setter, name) if stream in (None, self._graph.stream_of[setter]) else None

    def _gathered(self, node: Node, template: list[Any], name: str, join: Node) -> int | None:
        """The slot of the list that `join` makes, if it makes this one: at least one entry is what a `gen`, or another
        join, has bound to the name in its branch. Entries that are not are what branches assigned."""
        ends = join.inputs[1:]
        if len(ends) != len(template):
            return None
        streams = [self._graph.stream_of[end] for end in ends]
        branches = [self._found(node, entry, name, stream) for stream, entry in zip(streams, template, strict=True)]
        if not any(isinstance(branch, int) for branch in branches):
            return None
        self.columns.append(Column(join, node))
        for index, (stream, entry) in enumerate(zip(streams, template, strict=True)):
            if isinstance(branches[index], Node):
                inherited = self._inherited(node, entry, name, stream)
                branches[index] = branches[index] if inherited is None else inherited
        return self._list(self.joins[join], branches, name)

    def _inherited(self, node: Node, entry: Any, name: str, stream: int) -> int | None:
        """The slot of a value that the name had before the branch was forked off."""
        parents = self._graph.parents(stream)
        while parents is not None:
            found = self._found(node, entry, name, parents[0])
            if isinstance(found, int):
                return found
            parents = self._graph.parents(parents[0])
        return None

    def _found(self, node: Node, entry: Any, name: str, stream: int) -> int | Node | None:
        """What a branch found: a slot, a value that it assigned, or nothing."""
        if isinstance(entry, list):
            slot = self._find(node, entry, name, stream)
            if slot is not None:
                return slot
        if isinstance(entry, Leaf):
            value = node.inputs[entry.index]
            if value.op == Variable(name) and self._graph.stream_of[value.inputs[0]] == stream:
                return self._slots.values[value]
            return value
        return None if entry is None else _part(node, entry)

    def _list(self, gathered: Gathered, branches: list[int | Node | None], name: str) -> int:
        slots = tuple(self._given(gathered, each, name) if isinstance(each, Node) else each for each in branches)
        for slot, known in gathered.lists:
            if known == slots:
                return slot
        slot = self._slots.add(name)
        gathered.lists.append((slot, slots))
        return slot

    def _given(self, gathered: Gathered, value: Node, name: str) -> int:
        slot = self._slots.add(name)
        self.assigned.append((value, slot))
        gathered.given.append(slot)
        return slot


def _part(node: Node, entry: Any) -> Node:
    """A part of a structure, as a value of its own."""
    inputs: list[Node] = []
    template = _renumbered(entry, node, inputs)
    return Node(Structure(template), tuple(inputs)) if inputs else Node(Constant(template))


def _renumbered(entry: Any, node: Node, inputs: list[Node]) -> Any:
    match entry:
        case Leaf(index):
            inputs.append(node.inputs[index])
            return Leaf(len(inputs) - 1)
        case list():
            return [_renumbered(member, node, inputs) for member in entry]
        case tuple():
            return tuple(_renumbered(member, node, inputs) for member in entry)
        case dict():
            return {key: _renumbered(member, node, inputs) for key, member in entry.items()}
    return entry
