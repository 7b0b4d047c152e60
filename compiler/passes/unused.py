"""Drops dead calls: those that no variable, text or result needs.

s += "Plan: " + gen("plan")                      keep=["plan"]: the critique is not asked for, and
with s.fork(2) as f:                             neither is the stream that writes it
    f += "Critique: " + gen("critique")
"""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from typing import Any

from ...lang.errors import ParameterError, remedy
from ..graph import STREAM_OPERATIONS, Graph, Node
from ..operations import Begin, Choose, Generate, Join, Leaf, Structure, Variable
from .rules import PassResult, Replacement, Rule, Site, apply_rules, call_label, gathers_variables, needed, shrink_rules


def drop_unused(graph: Graph, keep: Iterable[str] | None = None) -> PassResult:
    """Law: the variables in `keep` and what the program returns have the same values, as long as no call fails; the
    calls that are made are made with the same prompts.

    A call goes where nothing that is asked for takes its variable, its text, or a text that was generated after it.
    So do whole branches, and nested runs. A stream ends after the last thing of it that is needed: then it has no text
    beyond that, and with `keep` no variables but those.

    Args:
        keep: names of variables that are asked for. None: all of the program's own, and its text.

    Raises:
        ParameterError: a name that the program does not set.
    """
    kept = _kept(graph, keep)
    alive = _alive(graph, kept, with_text=keep is None)
    dropped = [node for node in graph.nodes if isinstance(node.op, Generate | Choose) and node not in alive]
    firsts = [stream[0] for stream in graph.streams]
    gone = {first for first in firsts if first not in alive}
    if all(node in alive for stream in graph.streams for node in stream) and len(kept) == len(graph.variables):
        return PassResult(graph, {})
    first_of = {node: stream[0] for stream in graph.streams for node in stream}

    def drop(site: Site) -> Replacement | None:
        """Drops a node: what waited for the end of a stream waits for what is left of it."""
        if site.node in alive or isinstance(site.node.op, Begin):
            return None
        return Replacement(site.inputs[0], site.inputs[0])

    def wait_for_less(site: Site) -> Node | Replacement | None:
        node = site.node
        pairs = zip(node.inputs[1:], site.inputs[1:], strict=True)
        ends = [new for old, new in pairs if first_of[old] not in gone]
        if len(ends) + 1 == len(site.inputs):
            return None
        if not ends:
            return Replacement(site.inputs[0], site.inputs[0])
        return site.builder.node(node.op, (site.inputs[0], *ends), node.line)

    rewritten, counts = apply_rules(
        graph,
        (
            Rule("dropped", STREAM_OPERATIONS, drop),
            Rule("join", (Join,), wait_for_less),
            *shrink_rules(graph, gone),
        ),
        ends=[stream[-1] for stream in graph.streams if stream[0] not in gone],
        variables=kept,
    )
    counts += Counter(variable=len(graph.variables) - len(kept))
    notes = tuple(f"left out: {call_label(node)}" for node in dropped)
    return PassResult(rewritten, counts, len(dropped), notes)


def _kept(graph: Graph, keep: Iterable[str] | None) -> list[tuple[str, Node]]:
    if keep is None:
        return list(graph.variables)
    known = dict(graph.variables)
    for name in keep:
        if name not in known:
            raise ParameterError(f"keep: program {graph.name} sets no variable {name!r}; {remedy(name, known)}")
    wanted = set(keep)
    return [(name, value) for name, value in graph.variables if name in wanted]


def _alive(graph: Graph, kept: list[tuple[str, Node]], *, with_text: bool) -> set[Node]:
    """Returns what is asked for and all that it needs. A list that a join makes has an entry for each branch: the join
    stays, and so do its branches, with as much of each as is needed."""
    own = graph.streams[graph.stream_of[graph.ends[0]]]
    roots = [own[0], graph.result, *(value for _, value in kept)]
    if with_text:
        roots.append(own[-1])
    alive = needed(roots)
    while True:
        joins = joins_of_lists(graph, alive)
        firsts = {graph.streams[graph.stream_of[end]][0] for join in joins for end in join.inputs[1:]}
        more = (joins | firsts) - alive
        if not more:
            return alive
        alive = needed((*alive, *more))


def joins_of_lists(graph: Graph, alive: Collection[Node]) -> set[Node]:
    """Returns the joins that may make a list among `alive`: as many branches as entries, one entry of its branch."""
    joins: dict[int, list[Node]] = {}  # by number of branches
    for node in graph.nodes:
        if isinstance(node.op, Join) and gathers_variables(node.op):
            joins.setdefault(len(node.inputs) - 1, []).append(node)
    found: set[Node] = set()
    for node in graph.nodes:
        if node in alive and isinstance(node.op, Structure):
            for entries in _lists(node.op.template):
                streams = [_streams(graph, node, entry) for entry in entries]
                for join in joins.get(len(entries), ()):
                    ends = (graph.stream_of[end] for end in join.inputs[1:])
                    if any(end in of_entry for end, of_entry in zip(ends, streams, strict=True)):
                        found.add(join)
    return found


def _lists(template: Any) -> Iterator[list[Any]]:  # Any: see Structure.template
    """Yields all lists in a template, the whole first."""
    match template:
        case list():
            yield template
            members: Any = template
        case tuple():
            members = template
        case dict():
            members = template.values()
        case _:
            return
    for member in members:
        yield from _lists(member)


def _streams(graph: Graph, node: Node, entry: Any) -> set[int]:
    """Returns the streams that generate what is in an entry of a list, and those that they were forked off."""
    found: set[int] = set()
    waiting = [entry]
    while waiting:
        match waiting.pop():
            case Leaf(index):
                value = node.inputs[index]
                if isinstance(value.op, Variable):
                    stream: int | None = graph.stream_of[value.inputs[0]]
                    while stream is not None and stream not in found:
                        found.add(stream)
                        parents = graph.parents(stream)
                        stream = None if parents is None else parents[0]
            case list() | tuple() as members:
                waiting.extend(members)
            case dict() as members:
                waiting.extend(members.values())
    return found
