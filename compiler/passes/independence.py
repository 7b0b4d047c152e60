"""Lets calls run side by side that a program declares independent, and forks as early as it can."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from ...lang.errors import ParameterError, remedy
from ..graph import STREAM_OPERATIONS, Graph, Node
from ..operations import Append, Choose, Fork, Generate, GetForkItem, Join, Look, Structure
from .rules import PassResult, Replacement, Rule, Site, apply_rules, call_label, gathers_variables, needed


def fork_independent(graph: Graph, independent: Iterable[str] = ()) -> PassResult:
    """Runs side by side what can: by the laws of `sink_joins` and `merge_forks`, and for calls named in `independent`
    by that of `fork_declared`. No other call sees other text than before.
    """
    declared = fork_declared(graph, tuple(independent))
    sunk = sink_joins(declared.graph)
    merged = merge_forks(sunk.graph)
    counts = {**declared.counts, **sunk.counts, **merged.counts}
    return PassResult(merged.graph, counts, notes=declared.notes)


def fork_declared(graph: Graph, names: Sequence[str]) -> PassResult:
    """Makes calls in branches that the program makes one after the other, and appends their text in order.

        s += "Summary: " + gen("summary") + "\\nKeywords: " + gen("keywords")

        with names ("summary", "keywords")
            summary    is generated after    ... Summary:
            keywords   is generated after    ... Summary: \\nKeywords:

    Law: a declared call sees the text before the first of its neighbours, and what the program says between its
    predecessor and itself, but not what its predecessors generate. The text after the last of them is put together in
    the order of the program. So the model is asked something else than before: only the program's author can say
    whether that is as good.

    Neighbours have nothing but text and pictures between them. What is generated or chosen under other names, turns,
    scopes, forks, and places whose text is read are borders.

    Raises:
        ParameterError: a declared call sees another one all the same.
    """
    if not names:
        return PassResult(graph, {})
    wanted = set(names)
    runs = [run for stream in graph.streams for run in _neighbours(graph, stream, wanted)]
    place_of = {call: (run, index) for run in runs for index, call in enumerate(run)}

    def separate(site: Site) -> Replacement | None:
        """Forks at the first of a run; each but the last hands on the next branch, and the last joins them all."""
        if site.node not in place_of:
            return None
        run, index = place_of[site.node]
        builder, line = site.builder, run[0].line
        if index == 0:
            fork = builder.node(Fork(len(run)), (site.inputs[0],), line)
            made = builder.node(site.node.op, (builder.node(GetForkItem(0), (fork,), line), *site.inputs[1:]), line)
        else:
            fork = site.nodes[run[0]].inputs[0].inputs[0]
            made = site.kept()
        if index + 1 < len(run):
            return Replacement(made, builder.node(GetForkItem(index + 1), (fork,), line))
        ends = (*(site.nodes[call] for call in run[:-1]), made)
        return Replacement(made, builder.node(Join("concate_and_append"), (fork, *ends), site.node.line))

    rewritten, counts = apply_rules(graph, (Rule("call forked", (Generate, Choose), separate),))
    _check_apart(rewritten, wanted)
    notes = tuple(f"side by side: {', '.join(map(call_label, run))}" for run in runs)
    return PassResult(rewritten, counts, notes=notes)


def check_declared(graph: Graph, names: Iterable[str]) -> None:
    """Raises ParameterError for a name that no call of the graph has."""
    known = dict.fromkeys(name for node in graph.nodes if (name := _name(node)) is not None)
    for name in names:
        if name not in known:
            raise ParameterError(f"independent: program {graph.name} generates no {name!r}; {remedy(name, known)}")


def _name(node: Node) -> str | None:
    match node.op:
        case Generate(gen):
            return gen.name
        case Choose(select):
            return select.name
    return None


def _neighbours(graph: Graph, stream: Sequence[Node], wanted: set[str]) -> list[list[Node]]:
    """Returns the runs of at least two declared calls of a stream."""
    runs: list[list[Node]] = []
    run: list[Node] = []
    inside: set[Node] = set()  # what comes after the beginning of the run
    for index, node in enumerate(stream):
        text = isinstance(node.op, Append | Look | Generate | Choose)
        if run and not (text and _stands_alone(graph, stream[index - 1], node) and inside.isdisjoint(_taken(node))):
            runs.append(run)
            run, inside = [], set()
        if _name(node) in wanted:
            run.append(node)
        elif isinstance(node.op, Generate | Choose) and run:
            runs.append(run)
            run, inside = [], set()
        if run:
            inside.add(node)
    runs.append(run)
    return [run for run in runs if len(run) > 1]


def _stands_alone(graph: Graph, before: Node, node: Node) -> bool:
    """Returns whether only `node` uses the text up to `before`."""
    return all(
        user is node or not (user.in_stream or user.op.__class__.__name__ == "StreamText")
        for user in graph.users[before]
    )


def _taken(node: Node) -> set[Node]:
    """Returns what the values of a stream node need."""
    return needed(node.inputs[1:])


def _check_apart(graph: Graph, wanted: set[str]) -> None:
    """Raises ParameterError for a declared call that sees another one."""
    calls = [node for node in graph.nodes if _name(node) in wanted]
    for call in calls:
        seen = needed(call.inputs)
        other = next((other for other in calls if other in seen), None)
        if other is not None:
            raise ParameterError(
                f"independent: {call_label(call)} sees the text of {call_label(other)}; write them one after the "
                "other with nothing but text between them, in one turn, or fork() where they part"
            )


def sink_joins(graph: Graph) -> PassResult:
    """Moves joins of variables to the end of their stream. Texts of branches are appended where they were.

    Law: the same calls with the same prompts, the same variables and texts, as long as no call fails. When a branch
    fails, calls have been made that the program would not have come to.
    """
    moved: set[Node] = set()
    arriving: dict[Node, list[Node]] = {}  # the last of a stream that is no such join → those that go after it
    for stream in graph.streams:
        last = next(index for index in reversed(range(len(stream))) if not _gathering(stream[index]))
        arriving[stream[last]] = [node for node in stream[:last] if _gathering(node)]
        moved.update(arriving[stream[last]])

    def lift(site: Site) -> Replacement | None:
        return Replacement(site.inputs[0], site.inputs[0]) if site.node in moved else None

    def sink(site: Site) -> Replacement | None:
        joins = arriving.get(site.node)
        if not joins:
            return None
        said = place = site.kept()
        for join in joins:
            ends = (site.places[end] for end in join.inputs[1:])
            place = site.builder.node(join.op, (place, *ends), join.line)
        return Replacement(said, place)

    sunk, counts = apply_rules(graph, (Rule("join sunk", (Join,), lift), Rule("sunk", STREAM_OPERATIONS, sink)))
    del counts["sunk"]  # the same thing seen from its other end
    return PassResult(_lists_last(sunk) if moved else graph, counts)


def _gathering(node: Node) -> bool:
    return isinstance(node.op, Join) and gathers_variables(node.op)


def _lists_last(graph: Graph) -> Graph:
    """Moves lists to the end: a list that a join makes comes after the join (see `running/slots.py`), so what only
    variables and the result take comes after all else."""
    late: set[Node] = set()
    for node in reversed(graph.nodes):
        if isinstance(node.op, Structure) and all(user in late for user in graph.users[node]):
            late.add(node)
    early = (node for node in graph.nodes if node not in late)
    return replace(graph, nodes=(*early, *(node for node in graph.nodes if node in late)))


def merge_forks(graph: Graph) -> PassResult:
    """Merges forks of one place into one fork.

    Law: the same calls with the same prompts, the same variables and texts. The backend hears of the branches as
    siblings.
    """
    head: dict[Node, Node] = {}  # fork → the first one of its place
    sizes: dict[Node, int] = {}
    offsets: dict[Node, int] = {}
    for node in graph.nodes:
        if isinstance(node.op, Fork):
            before = node.inputs[0]
            first = head[node] = head.get(before, node)
            offsets[node] = sizes.get(first, 0)
            sizes[first] = offsets[node] + node.op.size

    growing = {first for fork, first in head.items() if fork is not first}

    def grow(site: Site) -> Node | Replacement | None:
        node = site.node
        if head[node] is not node:
            return Replacement(site.inputs[0], site.inputs[0])
        return site.builder.node(Fork(sizes[node]), site.inputs, node.line) if node in growing else None

    def renumber(site: Site) -> Node | None:
        fork, op = site.node.inputs[0], site.node.op
        assert isinstance(op, GetForkItem), "the pattern says so"
        if not offsets[fork]:
            return None
        return site.builder.node(GetForkItem(offsets[fork] + op.index), site.inputs, site.node.line)

    merged, counts = apply_rules(graph, (Rule("grown", (Fork,), grow), Rule("renumbered", (GetForkItem,), renumber)))
    return PassResult(merged, {"fork merged": len(head) - len(set(head.values()))} if counts else {})
