"""Turns the nodes of a stream into its actions. Text that stands together is appended at once, where that changes no
prompt."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import cast

from ...interpreter.reasoning import ReasoningTags
from ...interpreter.steps import Step
from ...lang import ops
from ...lang.source import Source, SourceKind
from ..graph import Graph, Node
from ..operations import Append, Choose, Constant, Fork, Generate, GetForkItem, Join, Look, Options
from . import actions
from .actions import Action
from .slots import JoinResult, Slots


@dataclass(frozen=True, slots=True)
class Layer:
    """The sampling fields of a `gen`, or of a `select` that draws: those around it and its own. `nested`: in a run
    inside of the program, which the options of the run around it do not reach."""

    defaults: Options
    given: Options
    nested: bool


@dataclass(frozen=True, slots=True)
class PlanContext:
    """State shared by the actions of all streams of a graph.

    Attributes:
        sources: value node → slots of the bindings that it needs, in the order of the program.
        joins: what joins bring back.
        layers: of every call; walks add theirs.
    """

    graph: Graph
    slots: Slots
    sources: Mapping[Node, tuple[int, ...]]
    joins: Mapping[Node, JoinResult]
    layers: list[Layer] = field(default_factory=list)


class StreamActions:
    """Makes the actions of one stream; the streams of a graph are walked in the order in which they begin."""

    def __init__(self, layout: PlanContext, number: int) -> None:
        self._layout = layout
        self._nested = _root(layout.graph, number) > 0
        self._texts: list[Node] = []  # to be said at once
        self._source: Source | None = None  # of these texts: the same line
        self._actions: list[Action] = []
        for node in layout.graph.streams[number]:
            self._add(node)
        self._flush()

    @property
    def actions(self) -> tuple[Action, ...]:
        return tuple(self._actions)

    def _add(self, node: Node) -> None:
        if isinstance(node.op, Append):
            self._append(node, node.inputs[1])
        else:
            action = self._action(node)
            if action is not None:
                self._flush()
                self._actions.append(action)
        place = self._layout.slots.marks.get(node)
        if place is not None:
            self._flush()
            self._actions.append(actions.ReachMark(place))

    # -------------------------------------------------------------------------------- text

    def _append(self, node: Node, text: Node) -> None:
        if self._is_late(text):
            self._flush()
            self._actions.append(actions.AppendLateText(text, _source(node)))
            return
        if _source(node) != self._source:
            self._flush()
            self._source = _source(node)
        self._texts.append(text)

    def _flush(self) -> None:
        if not self._texts:
            return
        constants = [text.op.value for text in self._texts if isinstance(text.op, Constant)]
        if len(constants) == len(self._texts) and all(isinstance(constant, str) for constant in constants):
            self._actions.append(actions.Fixed(Step(ops.ConstantText("".join(constants)), source=self._source)))
        else:
            self._actions.append(actions.AppendText(tuple(self._texts), self._source))
        self._texts = []

    def _is_late(self, *values: Node) -> bool:
        return any(self._layout.sources[value] for value in values)

    # -------------------------------------------------------------------------------- anything else

    def _action(self, node: Node) -> Action | None:
        """Makes the action of a node; None for what begins a stream."""
        slots = self._layout.slots
        match node.op:
            case Generate():
                return self._ask(node, node.op)
            case Choose():
                return self._choose(node, node.op)
            case Look(num_frames):
                source = node.inputs[1]
                return actions.ShowMedia(source, num_frames, self._is_late(source), _source(node))
            case ops.RoleBegin() | ops.RoleEnd():
                return actions.Fixed(Step(node.op, source=_source(node)))
            case ops.VarScopeBegin():
                return actions.Fixed(Step(node.op))
            case ops.VarScopeEnd(name):
                return actions.EndScope(node.op, slots.variable(node, name))
            case Fork(size):
                return actions.StartBranches(size, self._branches(node))
            case Join(mode):
                ends = tuple(slots.marks[end] for end in node.inputs[1:])
                if mode == "concate_and_append":
                    return actions.AppendBranches(ends)
                gathered = self._layout.joins[node]
                return actions.GatherVariables((*ends, *gathered.given), tuple(gathered.lists))
        return None

    def _ask(self, node: Node, op: Generate) -> Action:
        slots, name = self._layout.slots, op.gen.name
        tags = None if op.tags is None else ReasoningTags(*op.tags)
        thinking = None if tags is None else slots.thinking(node, name)
        return actions.RunGen(
            op.gen, self._layer(op.defaults, op.gen.options), slots.variable(node, name), thinking, tags, _source(node)
        )

    def _choose(self, node: Node, op: Choose) -> Action:
        choices = node.inputs[1:]
        values = tuple(choice.op.value for choice in choices if isinstance(choice.op, Constant))
        layer = self._layer(op.defaults, {}) if op.select.temperature else None
        chosen = actions.RunSelect(op.select, layer, self._layout.slots.variable(node, op.select.name), _source(node))
        if len(values) == len(choices):
            return replace(chosen, select=replace(op.select, choices=cast(tuple[str, ...], values)))
        return actions.RunLateSelect(chosen, choices, self._is_late(*choices))

    def _layer(self, defaults: Options, given: Options) -> int:
        self._layout.layers.append(Layer(defaults, given, self._nested))
        return len(self._layout.layers) - 1

    def _branches(self, fork: Node) -> tuple[int, ...]:
        graph = self._layout.graph
        return tuple(graph.stream_of[user] for user in graph.users[fork] if isinstance(user.op, GetForkItem))


def _root(graph: Graph, number: int) -> int:
    """Returns the number of the run inside the program that a stream belongs to; 0 for the program's own."""
    parents = graph.parents(number)
    while parents is not None:
        number = parents[0]
        parents = graph.parents(number)
    begin = graph.streams[number][0].op
    return getattr(begin, "number", 0)


def _source(node: Node) -> Source | None:
    return None if node.line is None else Source(SourceKind.TEXT, node.line)
