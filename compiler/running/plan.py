"""Plans a graph: makes it ready to run, once for all runs.

streams    one list of actions each; a stream runs its actions in order and waits only for what they need
slots      every variable, mark and list of a join has a place among the bindings that a run begins with
reads      what the body of the program waited for, in its order: where the interpreted body would have ended with
           an error, the compiled program ends too, with the same one
"""

from collections.abc import Iterable
from dataclasses import dataclass

from ...interpreter.stream import Grammar
from ...lang import ops, sampling
from ...lang.sampling import SamplingParams
from ..graph import Graph, Node, frozen
from ..operations import Append, Choose, Generate, Look, Options, Structure, Variable
from .actions import Action, RunGen, StartBranches
from .critical_path import CriticalPaths
from .slots import JoinedLists, Slots
from .streams import PlanContext, StreamActions


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
            if isinstance(node.op, Append | Choose | Look)
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
