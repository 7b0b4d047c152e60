"""Which lists joins make. A graph says that a variable is a list of what branches found; here it is found which join
brings it back, so that it is known when the parent comes there, has the facts of every branch, and fails as they do.

    branch 0:  gen("x") ─► Join        Structure [Leaf 0, Leaf 1]     a list of the join, with a slot of its own
    branch 1:  gen("x") ─►                     Variable x  Variable x

Likewise the texts of a `gen` with n above 1, which a graph names one by one, are the one variable that they come from.
"""

from dataclasses import dataclass, field
from typing import Any

from .graph import Graph, Node
from .operations import Constant, Join, Leaf, Object, Structure, Variable
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
        assigned: value → its slot, of what branches assigned. Constants among them are in no graph.
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
                    slot = self._find(node, template, None)
                    if slot is not None:
                        slots.values[node] = slot

    def _find(self, node: Node, template: list[Any], stream: int | None) -> int | None:
        """The slot of a list, if it is one of a `gen` or a join; `stream`: of the branch that has to have made it."""
        slot = self._texts(node, template, stream)
        for join in reversed(self.joins):
            if slot is None and stream in (None, self._graph.stream_of[join]):
                slot = self._gathered(node, template, join)
        return slot

    def _texts(self, node: Node, template: list[Any], stream: int | None) -> int | None:
        values = [node.inputs[entry.index] for entry in template if isinstance(entry, Leaf)]
        setters = {(value.inputs[0], value.op.name) for value in values if isinstance(value.op, Variable)}
        indices = [value.op.index for value in values if isinstance(value.op, Variable)]
        if len(setters) != 1 or indices != list(range(len(template))):
            return None
        ((setter, name),) = setters
        return self._slots.variable(setter, name) if stream in (None, self._graph.stream_of[setter]) else None

    def _gathered(self, node: Node, template: list[Any], join: Node) -> int | None:
        """The slot of the list that `join` makes, if it makes this one: at least one entry comes from its branch for
        certain, and none from elsewhere. Others are what branches assigned."""
        ends = join.inputs[1:]
        if len(ends) != len(template):
            return None
        branches: list[int | Node | None] = []
        for end, entry in zip(ends, template, strict=True):
            stream = self._graph.stream_of[end]
            match entry:
                case None:
                    branches.append(None)
                case list():
                    slot = self._find(node, entry, stream)
                    if slot is None:
                        return None
                    branches.append(slot)
                case Leaf(index):
                    value = node.inputs[index]
                    if isinstance(value.op, Variable) and value.op.index is None:
                        if self._graph.stream_of[value.inputs[0]] != stream:
                            return None
                        branches.append(self._slots.values[value])
                    elif isinstance(value.op, Variable | Object):
                        return None
                    else:
                        branches.append(value)
                case _:
                    branches.append(Node(Constant(entry)))
        certain = [branch for branch in branches if isinstance(branch, int)]
        if not certain:
            return None
        self.columns.append(Column(join, node))
        return self._list(join, branches, self._slots.bindings[certain[0]][0])

    def _list(self, join: Node, branches: list[int | Node | None], name: str) -> int:
        gathered = self.joins[join]
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
