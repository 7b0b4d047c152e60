"""Applies rules: what a pass looks for, and what it writes instead. A pass is a table of them.

    Rule("join constants", (Append,), joined)      nodes of these operations are shown to `joined`,
                                                   which gives what stands there instead, or None

A graph is walked once, inputs first. A stream node may be replaced by two: the one that says or sets something, which
values read, and the one after which the stream goes on.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace

from ..graph import Builder, Graph, Node
from ..operations import Choose, Fork, Generate, GetForkItem, Join, StreamText


@dataclass(frozen=True, slots=True)
class Replacement:
    """The replacement of a stream node.

    Attributes:
        node: what sets variables, for values that read them.
        place: after which the stream goes on; where joins, ends and reads of the text find it.
    """

    node: Node
    place: Node


@dataclass(frozen=True, slots=True)
class Site:
    """A node of the old graph, about to be made anew.

    Attributes:
        builder: of the new graph.
        node: the old one.
        inputs: what its inputs became.
        nodes, places: what the nodes before it became, old → new; see `Replacement`.
    """

    builder: Builder
    node: Node
    inputs: tuple[Node, ...]
    nodes: Mapping[Node, Node]
    places: Mapping[Node, Node]

    def kept(self) -> Node:
        """Returns the node with its new inputs."""
        return self.builder.node(self.node.op, self.inputs, self.node.line)


@dataclass(frozen=True, slots=True)
class Rule:
    """Shows nodes whose operation is one of `pattern` to `rewrite`. `name` is what reports call it."""

    name: str
    pattern: tuple[type, ...]
    rewrite: Callable[[Site], Node | Replacement | None]


def apply_rules(
    graph: Graph,
    rules: Iterable[Rule],
    *,
    ends: Iterable[Node] | None = None,
    variables: Iterable[tuple[str, Node]] | None = None,
) -> tuple[Graph, Counter[str]]:
    """Rewrites `graph` by the first rule that does so at each node, and how often each rule did.

    Args:
        ends: streams that are kept for their own sake; the graph's own without it.
        variables: those that are kept; the graph's own without it.

    A graph that no rule changes is given back as it is, unless ends or variables were given.
    """
    table: dict[type, list[Rule]] = {}
    for rule in rules:
        for operation in rule.pattern:
            table.setdefault(operation, []).append(rule)
    builder = Builder()
    nodes: dict[Node, Node] = {}
    places: dict[Node, Node] = {}
    counts: Counter[str] = Counter()
    for node in graph.nodes:
        site = Site(builder, node, _new_inputs(node, nodes, places), nodes, places)
        for rule in table.get(type(node.op), ()):
            found = rule.rewrite(site)
            if found is not None:
                counts[rule.name] += 1
                break
        else:
            found = site.kept()
        instead = found if isinstance(found, Replacement) else Replacement(found, found)
        nodes[node], places[node] = instead.node, instead.place
    if not counts and ends is None and variables is None:
        return graph, counts
    rewritten = builder.graph(
        graph.name,
        graph.parameters,
        (places[end] for end in (graph.ends if ends is None else ends)),
        ((name, nodes[value]) for name, value in (graph.variables if variables is None else variables)),
        nodes[graph.result],
        graph.fixed,
    )
    return _ended(rewritten), counts


def _new_inputs(node: Node, nodes: Mapping[Node, Node], places: Mapping[Node, Node]) -> tuple[Node, ...]:
    if isinstance(node.op, Join | StreamText):
        return tuple(places[taken] for taken in node.inputs)
    if node.before is None:
        return tuple(nodes[taken] for taken in node.inputs)
    return places[node.inputs[0]], *(nodes[taken] for taken in node.inputs[1:])


def _ended(graph: Graph) -> Graph:
    """Returns the graph with the ends of all its streams, the program's own first: a rewrite makes streams, and removes
    some."""
    own = graph.stream_of[graph.ends[0]]
    others = (number for number in range(len(graph.streams)) if number != own)
    return replace(graph, ends=tuple(graph.streams[number][-1] for number in (own, *others)))


@dataclass(frozen=True, slots=True)
class PassResult:
    """The result of a pass: a rewritten graph.

    Attributes:
        graph: the same object where nothing was rewritten.
        counts: rule → how often it was applied.
        calls: number of calls that a run saves.
        notes: for the user, a line each.
    """

    graph: Graph
    counts: Mapping[str, int]
    calls: int = 0
    notes: tuple[str, ...] = ()


def call_label(node: Node) -> str:
    """Names a call for people: "gen 'answer' (program.py:12)"."""
    match node.op:
        case Generate(gen):
            kind, name = "gen", gen.name
        case Choose(select):
            kind, name = "select", select.name
        case _:
            raise AssertionError(f"{type(node.op).__name__} is no call")
    words = [kind] if name is None else [kind, repr(name)]
    return " ".join(words if node.line is None else [*words, f"({node.line})"])


def needed(roots: Iterable[Node]) -> set[Node]:
    """Returns the roots and all that they need. A join that brings variables back waits for branches, but says nothing
    of theirs: what takes a variable of a branch needs it itself."""
    seen: set[Node] = set()
    waiting = list(roots)
    while waiting:
        node = waiting.pop()
        if node not in seen:
            seen.add(node)
            waiting.extend(node.inputs[:1] if isinstance(node.op, Join) and gathers_variables(node.op) else node.inputs)
    return seen


def gathers_variables(join: Join) -> bool:
    return join.mode == "gather_variable"


def shrink_rules(graph: Graph, gone: Collection[Node]) -> tuple[Rule, Rule]:
    """Returns rules that shrink forks, and renumber the branches that stay.

    Args:
        gone: `GetForkItem`s of branches that are no more. The pass itself says what becomes of them.
    """
    staying: dict[Node, list[Node]] = {node: [] for node in graph.nodes if isinstance(node.op, Fork)}
    shrunk: set[Node] = set()
    for node in graph.nodes:
        if isinstance(node.op, GetForkItem):
            if node in gone:
                shrunk.add(node.inputs[0])
            else:
                staying[node.inputs[0]].append(node)

    def shrink(site: Site) -> Node | Replacement | None:
        if site.node not in shrunk:
            return None
        size = len(staying[site.node])
        if not size:
            return Replacement(site.inputs[0], site.inputs[0])
        return site.builder.node(Fork(size), site.inputs, site.node.line)

    def move_up(site: Site) -> Node | None:
        fork = site.node.inputs[0]
        if fork not in shrunk or site.node in gone:
            return None
        return site.builder.node(GetForkItem(staying[fork].index(site.node)), site.inputs, site.node.line)

    return Rule("fork", (Fork,), shrink), Rule("branch", (GetForkItem,), move_up)
