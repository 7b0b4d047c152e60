"""Where the values of a run lie: every variable, mark and list of a join has a place among its bindings."""

from collections.abc import Iterable

from ...interpreter.grammar import REASONING_SUFFIX
from ...lang.ops import VarScopeEnd
from ...lang.result import Result
from ..graph import Graph, Node
from ..operations import Choose, Generate, Join, Object, StreamText, Variable


class Slots:
    """Of one graph.

    Attributes:
        bindings: what a run makes of every slot: the name of the binding, and how its text becomes an object.
        marks: place of a stream → slot, where somebody waits for the stream to come there.
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
        """Of what a `gen` or `select` sets."""
        assert isinstance(setter.op, Generate | Choose), "only calls are asked for"
        said = setter.op.gen if isinstance(setter.op, Generate) else setter.op.select
        return self.variable(setter, said.name)

    def thinking(self, setter: Node, name: str | None) -> int:
        """Of what a model thought before it said `name`."""
        return self._variables[setter, _thoughts(name)]

    def _add_variables(self, node: Node) -> None:
        match node.op:
            case Generate(gen, _, tags):
                self._variables[node, gen.name or ""] = self.add(gen.name or "", gen.result)
                if tags is not None:
                    self._variables[node, _thoughts(gen.name)] = self.add(_thoughts(gen.name) if gen.name else "")
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
