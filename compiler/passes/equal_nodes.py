"""Finds equal nodes in branches of one fork: the same operations after the same prompt.

Fork ─┬► Append "A" ─► select x ─► Append "B" ...        the first three nodes of both branches are equal
      └► Append "A" ─► select x ─► Append "C" ...
"""

from dataclasses import replace

from ...interpreter.stream import REASONING_SUFFIX
from ...lang.ops import VarScopeEnd
from ..graph import Graph, Node, frozen
from ..operations import Begin, Choose, Fork, Generate, GetForkItem, Join, Object, Operation, Options, Variable
from .rules import gathers_variables


class EqualNodes:
    """The equal nodes of one graph.

    Attributes:
        first: node → the first one of the graph that is the same. Calls are, where their kind is deterministic and
            their prompts are the same.
        place: stream node → what is the same object where prompts are the same.
    """

    def __init__(self, graph: Graph) -> None:
        self.first: dict[Node, Node] = {}
        self.place: dict[Node, object] = {}
        self._graph = graph
        self._branches: dict[object, object] = {}  # stream and place that branches leave → their beginning
        known: dict[object, Node] = {}
        for node in graph.nodes:
            self.first[node] = known.setdefault(self._key(node), node)
            if node.in_stream:
                self.place[node] = self._place(node)

    def _key(self, node: Node) -> object:
        op = node.op
        if not node.in_stream:
            taken = tuple(self.first[value] for value in node.inputs)
            return frozen(op) if not isinstance(op, Variable | Object) else _read(op, node.inputs[0]), taken
        before = node.before
        if before is None or isinstance(op, Fork | Join):
            return node  # streams and what ties them together are what they are
        if isinstance(op, Generate | Choose):
            if not is_deterministic(self._graph, node):
                return node
            said: object = frozen(named(op, None))
        else:
            said = frozen(op)
        return said, self.place[before], tuple(self.first[value] for value in node.inputs[1:])

    def _place(self, node: Node) -> object:
        match node.op:
            case GetForkItem():
                # The same for all that leave here, and another than for the stream that goes on.
                fork = node.inputs[0]
                key = self._graph.stream_of[fork], self.place[_leaving(fork)]
                return self._branches.setdefault(key, object())
            case _:
                return self.first[node]


def _leaving(fork: Node) -> Node:
    """Returns the last thing before a fork that its branches see: neither forks nor joins of variables say anything."""
    node = fork
    while isinstance(node.op, Fork) or (isinstance(node.op, Join) and gathers_variables(node.op)):
        node = node.inputs[0]
    return node


def _read(op: Variable | Object, setter: Node) -> object:
    """Returns what is read, whatever it is called. A scope says its name, and a call has one name or two."""
    called = "thinking" if isinstance(setter.op, Generate) and op.name != setter.op.gen.name else "text"
    return type(op), called, getattr(op, "index", None)


def named(op: Operation, name: str | None) -> Generate | Choose:
    """Returns the call under another name; without one it is what a model sees of it."""
    if isinstance(op, Generate):
        return replace(op, gen=replace(op.gen, name=name))
    assert isinstance(op, Choose), "these are the calls"
    return replace(op, select=replace(op.select, name=name))


def is_deterministic(graph: Graph, call: Node) -> bool:
    """Returns whether the same prompt gives the same answer, in every run and on a backend that is deterministic at
    all: the best of choices, greedy text, and text with a seed. What a run may set itself does not count."""
    match call.op:
        case Choose(select):
            return select.temperature == 0
        case Generate():
            options = _certain(graph, call)
            return options.get("temperature") == 0 or options.get("seed") is not None
    raise AssertionError(f"{type(call.op).__name__} is no call")


def _certain(graph: Graph, call: Node) -> Options:
    """Returns sampling fields that no options of a run override: those of the call, and in a nested run all."""
    op = call.op
    assert isinstance(op, Generate), "only these have sampling fields"
    return {**op.defaults, **op.gen.options} if _is_nested(graph, call) else op.gen.options


def _is_nested(graph: Graph, node: Node) -> bool:
    """Returns whether a node stands in a run inside of the program, or a branch of one."""
    stream: int = graph.stream_of[node]
    while (parents := graph.parents(stream)) is not None:
        stream = parents[0]
    begin = graph.streams[stream][0].op
    return isinstance(begin, Begin) and begin.number > 0


def read_of(setter: Node, op: Variable | Object, old: Node) -> Variable | Object:
    """Returns a read of call `old`, of `setter` in its place, which may have another name."""
    name = name_of(setter)
    assert name is not None, "a call that is read has a name"
    thinking = isinstance(old.op, Generate) and op.name != old.op.gen.name
    return replace(op, name=name + REASONING_SUFFIX if thinking else name)


def name_of(call: Node) -> str | None:
    match call.op:
        case Generate(gen):
            return gen.name
        case Choose(select):
            return select.name
        case VarScopeEnd(name):
            return name
    raise AssertionError(f"{type(call.op).__name__} sets nothing")


def appended_streams(graph: Graph) -> set[int]:
    """Returns streams whose text a join appends to another one."""
    joins = (node for node in graph.nodes if isinstance(node.op, Join) and not gathers_variables(node.op))
    return {graph.stream_of[end] for join in joins for end in join.inputs[1:]}
