"""Assigns slots to the values of a run, and finds the lists that joins make.

Every variable, mark and list of a join has an index among the run's bindings. A graph only says that a variable is a
list of branches' values. The join that makes it is found here, so that the list is known when the parent reaches the
join, has the facts of every branch, and fails as they do.

    branch 0:  gen("x") ─► Join        Structure [Leaf 0, Leaf 1]     a list of the join, with a slot of its own
    branch 1:  gen("x") ─►                     Variable x  Variable x

Likewise the texts of a `gen` with n above 1, which a graph names one by one, are the one variable that they come from.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from ...interpreter.stream import REASONING_SUFFIX
from ...lang.ops import VarScopeEnd
from ...lang.result import Result
from ..graph import Graph, Node
from ..operations import Choose, Constant, Generate, Join, Leaf, Object, StreamText, Structure, Variable


class Slots:
    """The slots of one graph.

    Attributes:
        bindings: what a run makes of every slot: the name of the binding, and how its text becomes an object.
        marks: place of a stream → slot, where another stream waits for this one.
        values: value node → the slot that it is read from.
    """

    def __init__(self, graph: Graph) -> None:
        self.bindings: list[tuple[str, Result | None]] = []
        self._variables: dict[tuple[Node, str], int] = {}
        for node in graph.nodes:
            self._add_variables(node)
        self.marks = {place: self.add("") for place in dict.fromkeys(_places(graph))}
        self.values: dict[Node, int] = {}
        for node in graph.nodes:
            match node.op:
                case Variable(name) | Object(name):
                    self.values[node] = self.variable(node.inputs[0], name)
                case StreamText():
                    self.values[node] = self.marks[node.inputs[0]]

    def add(self, name: str, result: Result | None = None) -> int:
        self.bindings.append((name, result))
        return len(self.bindings) - 1

    def variable(self, setter: Node, name: str | None) -> int:
        return self._variables[setter, name or ""]

    def call(self, setter: Node) -> int:
        """Returns the slot of what a `gen` or `select` sets."""
        assert isinstance(setter.op, Generate | Choose), "only calls are asked for"
        said = setter.op.gen if isinstance(setter.op, Generate) else setter.op.select
        return self.variable(setter, said.name)

    def thinking(self, setter: Node, name: str | None) -> int:
        """Returns the slot of what a model thought before it said `name`."""
        return self._variables[setter, _thoughts(name)]

    def _add_variables(self, node: Node) -> None:
        match node.op:
            case Generate(gen, _, tags):
                self._variables[node, gen.name or ""] = self.add(gen.name or "", gen.result)
                if tags is not None:
                    self._variables[node, _thoughts(gen.name)] = self.add(_thoughts(gen.name) if gen.name else "")
                for name, result in ({} if gen.captures is None else gen.captures.results).items():
                    self._variables[node, name] = self.add(name, result)
            case Choose(select):
                self._variables[node, select.name or ""] = self.add(select.name or "")
            case VarScopeEnd(name):
                self._variables[node, name] = self.add(name)


def _thoughts(name: str | None) -> str:
    return (name or "") + REASONING_SUFFIX


def _places(graph: Graph) -> Iterable[Node]:
    for node in graph.nodes:
        match node.op:
            case Join():
                yield from node.inputs[1:]
            case StreamText():
                yield node.inputs[0]


Slotted = tuple[int, tuple[int | None, ...]]  # the slot of a list, and those of what each branch found


@dataclass(frozen=True, slots=True)
class Column:
    """`join` makes the list `value`, or a list inside of it."""

    join: Node
    value: Node


def columns(graph: Graph) -> list[Column]:
    """Returns the lists of all joins of a graph."""
    return JoinedLists(graph, Slots(graph)).columns


@dataclass(slots=True)
class JoinResult:
    """The result of a join.

    Attributes:
        lists: those of branches come before the lists that have them inside.
        given: slots of what the branches themselves assigned.
    """

    lists: list[Slotted] = field(default_factory=list)
    given: list[int] = field(default_factory=list)


class JoinedLists:
    """Assigns slots to the lists of a graph's joins.

    Attributes:
        joins: join → what it brings back.
        columns: which list is of which join.
        assigned: values that branches assigned, with their slots. Those that are parts of lists are in no graph.
    """

    def __init__(self, graph: Graph, slots: Slots) -> None:
        self.joins: dict[Node, JoinResult] = {}
        self.columns: list[Column] = []
        self.assigned: list[tuple[Node, int]] = []
        self._graph = graph
        self._slots = slots
        for node in graph.nodes:
            match node.op:
                case Join("gather_variable"):
                    self.joins[node] = JoinResult()
                case Structure(list() as template):
                    # One list may have several names: that of what is in it, and those that it was assigned to.
                    for name in dict.fromkeys(taken.op.name for taken in node.inputs if isinstance(taken.op, Variable)):
                        slot = self._find(node, template, name, None)
                        if slot is not None:
                            slots.values[node] = slot
                            break

    def _find(self, node: Node, template: list[Any], name: str, stream: int | None) -> int | None:
        """Returns the slot of the list `name`, if a `gen` or a join makes it; `stream`: of the branch that has to."""
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
        """Returns the slot of the list that `join` makes, if it makes this one: at least one entry is what a `gen`, or
        another join, has bound to the name in its branch. Entries that are not are what branches assigned."""
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
        """Returns the slot of a value that the name had before the branch was forked off."""
        parents = self._graph.parents(stream)
        while parents is not None:
            found = self._found(node, entry, name, parents[0])
            if isinstance(found, int):
                return found
            parents = self._graph.parents(parents[0])
        return None

    def _found(self, node: Node, entry: Any, name: str, stream: int) -> int | Node | None:
        """Returns what a branch found: a slot, a value that it assigned, or nothing."""
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

    def _list(self, gathered: JoinResult, branches: list[int | Node | None], name: str) -> int:
        slots = tuple(self._given(gathered, each, name) if isinstance(each, Node) else each for each in branches)
        for slot, known in gathered.lists:
            if known == slots:
                return slot
        slot = self._slots.add(name)
        gathered.lists.append((slot, slots))
        return slot

    def _given(self, gathered: JoinResult, value: Node, name: str) -> int:
        slot = self._slots.add(name)
        self.assigned.append((value, slot))
        gathered.given.append(slot)
        return slot


def _part(node: Node, entry: Any) -> Node:
    """Makes a part of a structure a value of its own."""
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
