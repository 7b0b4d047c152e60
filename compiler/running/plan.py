"""Plans a graph: makes it ready to run, once for all runs.

streams    one list of actions each; a stream runs its actions in order and waits only for what they need. Text that
           stands together is appended at once, where that changes no prompt
slots      every variable, mark and list of a join has a place among the bindings that a run begins with
reads      what the body of the program waited for, in its order: where the interpreted body would have ended with
           an error, the compiled program ends too, with the same one
critical   after every call the tokens of the longest path from it to the end (`CriticalPaths`)

    gen 20 ─┬─ gen 100 ── gen 30 ─┐                  ahead:  170 ─┬─ 150 ── 50 ─┐
            ├─ gen 10 ────────────┼─ gen 20                      ├─  30 ────────┼─ 20
            └─ gen 10 ────────────┘                              └─  30 ────────┘

With fewer places than branches, the runtime begins the branch first that the program would wait longest for. Texts are
expected to be as long as they were in earlier runs, and before there are any, as `max_tokens` allows. Only the order of
one program's own calls depends on it, so a wrong guess costs time and nothing else.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import cast

from ...interpreter.reasoning import ReasoningTags
from ...interpreter.steps import Step
from ...interpreter.stream import Grammar
from ...lang import ops, sampling
from ...lang.prompt import Source, SourceKind
from ...lang.sampling import SamplingParams
from ..graph import Graph, Node, frozen
from ..operations import (
    Append,
    Choose,
    Constant,
    Fork,
    Generate,
    GetForkItem,
    Isolate,
    Join,
    Look,
    Options,
    Structure,
    Variable,
    captured_names,
)
from . import actions
from .actions import Action, RunGen, StartBranches
from .slots import JoinedLists, JoinResult, Slots

_CHOICE = 1  # tokens that a `select` takes as long as: its choices are scored at once


@dataclass(frozen=True, slots=True)
class StreamPlan:
    """One stream. `fork`: the number of that where it begins; None when it begins by itself."""

    actions: tuple[Action, ...]
    fork: int | None


@dataclass(frozen=True, slots=True)
class Read:
    """A value that the body waits for. `slot`: of the variable that it is assigned to, if it is to one."""

    value: Node
    slot: int | None = None


@dataclass(frozen=True, slots=True)
class Assigned:
    """A variable that the program gives a value itself."""

    value: Node
    slot: int


class Plan:
    """The plan of one graph; changed by no run.

    Attributes:
        streams: in the order of `graph.streams`; `root` is the number of the program's own.
        forks: all of them.
        slots: where the values of a run lie.
        gens: slot of every `gen` → its place among the calls that have sampling parameters.
        sources: value node → slots of the bindings that it needs, in the order of the program.
        variables: name → slot, of the program's own stream at its end.
        known: variables that the program assigned, and whose values are known when a run begins.
        reads: see above. `waits`: the program ends only when they, and what it returns, are known.
        grammar: what is open at the end of the program's own stream.
        paths: what follows every call, learned over all runs.

    Raises:
        ParameterError: sampling fields that do not fit together.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.slots = Slots(graph)
        gathering = JoinedLists(graph, self.slots)
        assigned = [Assigned(value, slot) for value, slot in gathering.assigned]
        self.variables = tuple((name, self._place(value, name, assigned)) for name, value in graph.variables)
        parts = [each.value for each in assigned if each.value not in graph.numbers]
        self.sources = _sources((*graph.nodes, *parts), self.slots)
        self.known = tuple(each for each in assigned if not self.sources[each.value])
        self.reads = self._reads(assigned)
        self.waits = bool(self.reads or self.sources[graph.result])
        layout = PlanContext(graph, self.slots, self.sources, gathering.joins)
        walks = [StreamActions(layout, number) for number in range(len(graph.streams))]
        self.forks = tuple(action for walk in walks for action in walk.actions if isinstance(action, StartBranches))
        begins = {branch: number for number, fork in enumerate(self.forks) for branch in fork.branches}
        self.streams = tuple(StreamPlan(walk.actions, begins.get(number)) for number, walk in enumerate(walks))
        self.root = graph.stream_of[graph.ends[0]]
        self.grammar = _open_at_end(graph.streams[self.root])
        calls = [node for node in graph.nodes if isinstance(node.op, Generate | Choose)]
        self.paths = CriticalPaths(graph, {node: self.slots.call(node) for node in calls})
        actions = (action for stream in self.streams for action in stream.actions)
        self.gens = {action.slot: action.call for action in actions if isinstance(action, RunGen)}
        self._layers = tuple(layout.layers)
        self._merged: tuple[object, tuple[SamplingParams, ...]] = (None, ())
        self.sampling({})

    def sampling(self, options: Options) -> tuple[SamplingParams, ...]:
        """Returns the sampling parameters of every call: the options of a run override what the program set around the
        call, and the call's own override both.

        Raises:
            ParameterError: fields that do not fit together.
        """
        given = frozen(options)
        known, merged = self._merged
        if known != given:
            merged = tuple(
                sampling.merge(layer.defaults, {} if layer.nested else options, layer.given) for layer in self._layers
            )
            self._merged = given, merged  # the last one: a batch, or a loop, gives the same again and again
        return merged

    # -------------------------------------------------------------------------------- where values lie

    def _place(self, value: Node, name: str, assigned: list[Assigned]) -> int:
        """Returns the slot of a variable: that of its setter, of a join's list, or one of its own for what the program
        assigned."""
        slot = self.slots.values.get(value)
        whole = isinstance(value.op, Structure) or (isinstance(value.op, Variable) and value.op.index is None)
        if slot is None or not whole or self.slots.bindings[slot][0] != name:
            slot = self.slots.add(name)
            assigned.append(Assigned(value, slot))
        return slot

    # -------------------------------------------------------------------------------- what the body waits for

    def _reads(self, assigned: list[Assigned]) -> tuple[Read, ...]:
        """Returns values that text, choices and pictures are made of, and those that are assigned; in the order in
        which the program had them first. What is known when a run begins is left out."""
        numbers = self.graph.numbers

        def place(read: Read) -> int:
            """Returns the place of a read. A part of a list is in no graph; what it is made of is."""
            return max(numbers.get(node, 0) for node in (read.value, *read.value.inputs))

        used = {
            value: Read(value)
            for node in self.graph.nodes
            if isinstance(node.op, Append | Choose | Isolate | Look)
            for value in node.inputs[1:]
        }
        given = (Read(each.value, each.slot) for each in assigned)
        reads = [read for read in (*used.values(), *given) if self.sources[read.value]]
        return tuple(sorted(reads, key=place))


def _sources(nodes: Iterable[Node], slots: Slots) -> dict[Node, tuple[int, ...]]:
    sources: dict[Node, tuple[int, ...]] = {}
    for node in nodes:
        if not node.in_stream:
            slot = slots.values.get(node)
            needed = (found for taken in node.inputs for found in sources[taken]) if slot is None else (slot,)
            sources[node] = tuple(dict.fromkeys(needed))
    return sources


def _open_at_end(stream: tuple[Node, ...]) -> Grammar:
    role: str | None = None
    scopes: list[str] = []
    for node in stream:
        match node.op:
            case ops.RoleBegin(name):
                role = name
            case ops.RoleEnd():
                role = None
            case ops.VarScopeBegin(name):
                scopes.append(name)
            case ops.VarScopeEnd():
                scopes.pop()
    return Grammar(role, tuple(scopes))


@dataclass(frozen=True, slots=True)
class Layer:
    """The sampling fields of a `gen` or a `select`: those around it and its own. `nested`: in a run
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
            case Isolate():
                tenant = node.inputs[1]
                return actions.OpenPrivate(tenant, self._is_late(tenant), _source(node))
            case ops.RoleBegin() | ops.RoleEnd():
                return actions.Fixed(Step(node.op, source=_source(node)))
            case ops.VarScopeBegin() | ops.CachePoint():
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
            op.gen,
            self._layer(op.defaults, op.gen.options),
            slots.variable(node, name),
            thinking,
            tags,
            _source(node),
            tuple(slots.variable(node, captured) for captured in captured_names(op.gen)),
        )

    def _choose(self, node: Node, op: Choose) -> Action:
        choices = node.inputs[1:]
        values = tuple(choice.op.value for choice in choices if isinstance(choice.op, Constant))
        layer = self._layer(op.defaults, op.select.options)
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


@dataclass(slots=True)
class _Mean:
    total: int = 0
    count: int = 0


class CriticalPaths:
    """The critical paths of one graph; learns over its runs, from any thread.

    Args:
        calls: slots of the `Generate` and `Choose` nodes' variables.
    """

    def __init__(self, graph: Graph, calls: Mapping[Node, int]) -> None:
        self._graph = graph
        self._calls = calls
        self._means: dict[int, _Mean] = {}  # by slot
        self._noted = 0
        self._learn_at = 1  # texts noted, when paths are computed anew: 1, 2, 4, 8, ...
        self._last: tuple[Mapping[int, int], Mapping[int, int]] | None = None  # longest → ahead

    @property
    def matter(self) -> bool:
        """True if two calls may ever wait at the same time."""
        return len(self._graph.streams) > 1

    def note(self, slot: int, tokens: int) -> None:
        """Notes how many tokens a run's text had."""
        mean = self._means.setdefault(slot, _Mean())
        mean.total += tokens
        mean.count += 1
        self._noted += 1

    def ahead(self, longest: Mapping[int, int]) -> Mapping[int, int]:
        """Returns the tokens ahead of every call, by slot. `longest`: those that the gens of a run may have, by
        slot."""
        last = self._last
        if last is None or last[0] != longest or self._noted >= self._learn_at:
            while self._learn_at <= self._noted:
                self._learn_at *= 2
            last = self._last = (longest, self._computed(longest))
        return last[1]

    def expected(self, slot: int, longest: int) -> int:
        """Returns the tokens that a text is expected to have."""
        mean = self._means.get(slot)
        return longest if mean is None else min(longest, math.ceil(mean.total / mean.count))

    def _computed(self, longest: Mapping[int, int]) -> dict[int, int]:
        graph, ways = self._graph, dict[Node, int]()
        for node in reversed(graph.nodes):  # users first
            way = max((ways[user] for user in graph.users[node]), default=0)
            slot = self._calls.get(node)
            if slot is not None:
                way += _CHOICE if isinstance(node.op, Choose) else self.expected(slot, longest[slot])
            ways[node] = way
        return {slot: ways[node] for node, slot in self._calls.items()}
