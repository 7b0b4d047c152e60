"""The graph of a program (the paper's appendix D): its operations, their order and their dependencies.

There is one kind of node: an operation, its inputs, and the line that said it. Nodes are immutable, and equal nodes of
one graph are the same object, so a graph is rewritten by building another one.

    s += "Tip: " + topic             Begin ─► Append ─────► Append ────► Fork ─► Append ──► Join
    with s.fork(2) as tips:                   │             │            │       │           ▲ ▲
        tips += gen("tip")              Constant       Argument          │    Variable       │ │
    s += tips[0]["tip"]                                                  ├► GetForkItem 0 ─► Generate
                                                                         └► GetForkItem 1 ─► Generate

*Intra-stream* edges lead from a stream node to the one before it, its first input: what it says goes after all that
the stream said before. *Inter-stream* edges lead to another stream: from a branch to its fork, from a join to the ends
of branches, and from text to the stream that generates it.

Everything else of the compiler imports this module. Methods of `Graph` that show, measure or save it are functions of
those packages, which are imported by name when they are first called.
"""

import importlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any, get_args

import msgspec

from ..lang import checks
from ..lang.prompt import cell_name
from .operations import Begin, Fork, GetForkItem, Operation, StreamOperation, ValueOperation

if TYPE_CHECKING:
    from ..lang.protocol import Backend

STREAM_OPERATIONS: tuple[type, ...] = get_args(StreamOperation)
VALUE_OPERATIONS: tuple[type, ...] = get_args(ValueOperation)


@dataclass(frozen=True, slots=True)
class Line:
    """A line of the user's source.

    Attributes:
        file: as Python names it; printed as a cell of a notebook where it is one.
        number: counted from 1.
        function: whose line it is.
    """

    file: str
    number: int
    function: str = ""

    def __str__(self) -> str:
        return f"{cell_name(self.file) or self.file}:{self.number}"


@dataclass(frozen=True, slots=True, eq=False)
class Node:
    """An operation of a stream, or a value that it takes. Made by a `Builder`.

    Attributes:
        op: the operation and its attributes.
        inputs: see `operations.py` for the inputs of each operation.
        line: in the program; None without one (a stream's begin, a node made by a pass).
    """

    op: Operation
    inputs: tuple["Node", ...] = field(default=(), repr=False)  # all that a node needs is much to print
    line: Line | None = field(default=None, repr=False)

    @property
    def in_stream(self) -> bool:
        return isinstance(self.op, STREAM_OPERATIONS)

    @property
    def before(self) -> "Node | None":
        """The previous node of the stream; None for values and at the beginning of a stream."""
        return self.inputs[0] if self.in_stream and not isinstance(self.op, Begin | GetForkItem) else None


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter of the program. Unless `required`, a run without an argument for it uses `default`."""

    name: str
    required: bool = True
    default: Any = None  # the user's


@dataclass(frozen=True, eq=False)
class Graph:
    """Holds the operations of a traced program, with their order and dependencies; made by `program.trace()`.

    A *stream* is the program's own text, or that of one branch. Notebooks show the picture of a graph.

    Attributes:
        name: of the program.
        parameters: in the order of the function's signature, without static and bound ones.
        nodes: inputs before what takes them; otherwise in the order of the program.
        ends: the last node of every stream; the first is the program's own.
        variables: of the program's own stream at its end: pairs of a name and its value node, in order of first use.
        result: value node of what the function returned.
        fixed: names of the static and bound parameters, which a run cannot give.

    Examples:
        >>> @ul.function
        ... def tips(s, topic):
        ...     s += topic
        ...     with s.fork(2) as forks:
        ...         forks += ul.gen("tip", max_tokens=8)
        >>> graph = tips.trace()
        >>> graph.parents(2)  # stream 2 is branch 1 of stream 0
        (0, 1)
        >>> print(graph.text())
        tips(topic)
          ...
        stream 0: tips
           1  Begin tips
           2  Argument topic                line 3
           3  Fork 2 -> streams 1, 2        line 4
           8  Join gather_variable <- 6, 7  line 4
        ...
        stream 2: branch 1 of 2, forked off stream 0 at 3
           5  GetForkItem 1 <- 3            line 4
           7  Gen tip max_tokens=8          line 5
        ...
    """

    name: str
    parameters: tuple[Parameter, ...]
    nodes: tuple[Node, ...]
    ends: tuple[Node, ...]
    variables: tuple[tuple[str, Node], ...]
    result: Node
    fixed: tuple[str, ...] = ()

    @cached_property
    def streams(self) -> tuple[tuple[Node, ...], ...]:
        """The stream nodes of every stream, in order; streams in the order in which they begin."""
        streams: dict[Node, list[Node]] = {}
        first_of: dict[Node, Node] = {}
        for node in self.nodes:
            if node.in_stream:
                before = node.before
                first = first_of[node] = node if before is None else first_of[before]
                streams.setdefault(first, []).append(node)
        return tuple(map(tuple, streams.values()))

    @cached_property
    def stream_of(self) -> dict[Node, int]:
        """The number of a stream node's stream in `streams`."""
        return {node: number for number, stream in enumerate(self.streams) for node in stream}

    @cached_property
    def numbers(self) -> dict[Node, int]:
        """Every node's index in `nodes`."""
        return {node: number for number, node in enumerate(self.nodes)}

    @cached_property
    def users(self) -> dict[Node, tuple[Node, ...]]:
        """For each node those that have it among their inputs."""
        users: dict[Node, list[Node]] = {node: [] for node in self.nodes}
        for node in self.nodes:
            for taken in dict.fromkeys(node.inputs):
                users[taken].append(node)
        return {node: tuple(found) for node, found in users.items()}

    def peak_tokens(
        self, backend: "Backend", arguments: Mapping[str, Any] | None = None, options: Mapping[str, Any] | None = None
    ) -> int:
        """Returns a bound on the tokens whose keys one run holds at the same time, computed by `memory.py`.

        Args:
            backend: started; it measures text, and has the chat template.
            arguments: of the run, by name.
            options: sampling fields of the run, such as `{"max_tokens": 64}`.

        Raises:
            ParameterError: an argument is missing.
        """
        from ..interpreter.batch import MAX_ARGUMENTS
        from ..interpreter.body import sampling_defaults
        from ..interpreter.run import checked

        given = {} if arguments is None else checks.entries("arguments", arguments, MAX_ARGUMENTS, "a dict by name")
        asked = None if options is None else sampling_defaults(options)
        return int(_function("memory", "peak_tokens")(self, checked(backend), given, asked))

    def parents(self, number: int) -> tuple[int, int] | None:
        """Returns the stream that a branch was forked off, and the branch's index; None for a stream of its own.

        Args:
            number: of the branch's stream, in `streams`.
        """
        first = self.streams[checks.integer("number", number, 0, len(self.streams) - 1)][0]
        if not isinstance(first.op, GetForkItem):
            return None
        fork = first.inputs[0]
        assert isinstance(fork.op, Fork), "a branch begins at a fork"
        return self.stream_of[fork], first.op.index

    # -------------------------------------------------------------------------------- looking and keeping

    def __repr__(self) -> str:
        return f"<graph {self.name}: {len(self.nodes)} nodes in {len(self.streams)} streams>"

    def text(self) -> str:
        """Returns a listing: a block for each stream, a line for each of its operations."""
        return str(_function("views.listing", "text")(self))

    def dot(self) -> str:
        """Returns the graph in the language of Graphviz."""
        return str(_function("views.listing", "dot")(self))

    def svg(self) -> str:
        """Returns a picture as SVG: streams side by side, time downwards."""
        return str(_function("views.drawing", "svg")(self))

    def _repr_svg_(self) -> str:
        return self.svg()

    def _repr_html_(self) -> str:
        return str(_function("views.drawing", "html")(self))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes a file of the graph, all of it or nothing; `umbel.load(path)` gives a program that runs it.

        Args:
            path: of the file, such as "tips.umbel.json".

        Raises:
            GraphError: the graph holds what no file can: objects and result types of classes of yours.
            OSError: the file cannot be written.
        """
        _function("files.serialise", "save")(self, path)


def _function(module: str, name: str) -> Callable[..., Any]:  # as the function is declared
    """Imports a function of a package that imports this module, by name, when a method of `Graph` needs it."""
    found: Callable[..., Any] = getattr(importlib.import_module(f".{module}", __package__), name)
    return found


class Builder:
    """Makes nodes, each once. `line` is not compared: equal nodes keep the first line."""

    def __init__(self) -> None:
        self._nodes: dict[object, Node] = {}

    def node(self, op: Operation, inputs: Iterable[Node] = (), line: Line | None = None) -> Node:
        taken = tuple(inputs)
        key = (type(op), frozen(op), tuple(map(id, taken)))
        found = self._nodes.get(key)
        if found is None:
            found = self._nodes[key] = Node(op, taken, line)
        return found

    def graph(
        self,
        name: str,
        parameters: Iterable[Parameter],
        ends: Iterable[Node],
        variables: Iterable[tuple[str, Node]],
        result: Node,
        fixed: Iterable[str] = (),
    ) -> Graph:
        """Returns the graph of the nodes these need, in the order in which they were made, without unused nodes."""
        ends, variables = tuple(ends), tuple(variables)
        needed = set(reachable((*ends, *(value for _, value in variables), result)))
        nodes = tuple(node for node in self._nodes.values() if node in needed)
        return Graph(name, tuple(parameters), nodes, ends, variables, result, tuple(fixed))


Rewrite = Callable[[Builder, Node, tuple[Node, ...]], Node]


def rebuilt(graph: Graph, rewrite: Rewrite) -> Graph:
    """Rebuilds `graph` with every node put through `rewrite(builder, node, new inputs)`, inputs first.

    A stream node that is left out is rewritten to the new node before it.
    """
    builder = Builder()
    new: dict[Node, Node] = {}
    for node in graph.nodes:
        new[node] = rewrite(builder, node, tuple(new[taken] for taken in node.inputs))
    return builder.graph(
        graph.name,
        graph.parameters,
        (new[end] for end in graph.ends),
        ((name, new[value]) for name, value in graph.variables),
        new[graph.result],
        graph.fixed,
    )


def kept(builder: Builder, node: Node, inputs: tuple[Node, ...]) -> Node:
    """Keeps a node: the rewrite that changes nothing."""
    return builder.node(node.op, inputs, node.line)


def reachable(roots: Iterable[Node]) -> Iterator[Node]:
    """Yields the roots and everything that they need, each once. No recursion: programs are long chains."""
    seen: set[Node] = set()
    waiting = list(roots)
    while waiting:
        node = waiting.pop()
        if node not in seen:
            seen.add(node)
            yield node
            waiting.extend(node.inputs)


def frozen(value: object) -> object:
    """Returns a hashable stand-in that is equal exactly where values are equal and of the same type."""
    match value:
        case dict():
            return dict, tuple((key, frozen(member)) for key, member in value.items())
        case list() | tuple():
            return type(value), tuple(map(frozen, value))
        case set() | frozenset():
            return type(value), frozenset(map(frozen, value))
        case msgspec.Struct():
            return type(value), tuple(frozen(getattr(value, name)) for name in value.__struct_fields__)
    if is_dataclass(value) and not isinstance(value, type):
        return type(value), tuple([frozen(getattr(value, name)) for name in _compared_fields(type(value))])
    try:
        hash(value)
    except TypeError:
        return type(value), id(value)
    return type(value), value


@cache
def _compared_fields(kind: type) -> tuple[str, ...]:
    """Returns the names of a dataclass's fields that are compared. `fields` itself takes longer than all else here."""
    return tuple(member.name for member in fields(kind) if member.compare)
