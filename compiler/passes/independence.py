"""Calls that a program declares independent are made side by side."""

from collections.abc import Iterable, Sequence

from ...lang.errors import ParameterError, remedy
from ..graph import Graph, Node
from ..operations import Append, Choose, Fork, Generate, GetForkItem, Join, Look
from .forks import merge_forks, sink_joins
from .needs import needed
from .outcome import Outcome, called
from .rules import Instead, Rule, Site, applied


def fork_independent(graph: Graph, independent: Iterable[str] = ()) -> Outcome:
    """What can go on side by side does: by the laws of `sink_joins` and `merge_forks`, and for calls named in
    `independent` by that of `fork_declared`. No other call sees other text than before.
    """
    declared = fork_declared(graph, tuple(independent))
    sunk = sink_joins(declared.graph)
    merged = merge_forks(sunk.graph)
    counts = {**declared.counts, **sunk.counts, **merged.counts}
    return Outcome(merged.graph, counts, notes=declared.notes)


def fork_declared(graph: Graph, names: Sequence[str]) -> Outcome:
    """Calls that the program says one behind the other are made in branches, and their text is appended in order.

        s += "Summary: " + gen("summary") + "\\nKeywords: " + gen("keywords")

        with names ("summary", "keywords")
            summary    is generated behind   ... Summary:
            keywords   is generated behind   ... Summary: \\nKeywords:

    Law: a declared call sees the text before the first of its neighbours, and what the program says between its
    predecessor and itself, but not what its predecessors generate. The text behind the last of them is put together in
    the order of the program. So the model is asked something else than before: only who wrote the program can say
    whether that is as good.

    Neighbours have nothing but text and pictures between them. What is generated or chosen under other names, turns,
    scopes, forks, and places whose text is read are borders.

    Raises:
        ParameterError: a declared call sees another one all the same.
    """
    if not names:
        return Outcome(graph, {})
    wanted = set(names)
    runs = [run for stream in graph.streams for run in _neighbours(graph, stream, wanted)]
    place_of = {call: (run, index) for run in runs for index, call in enumerate(run)}

    def separate(site: Site) -> Instead | None:
        """The first of a run forks; each but the last hands on the next branch, and the last joins them all."""
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
            return Instead(made, builder.node(GetForkItem(index + 1), (fork,), line))
        ends = (*(site.nodes[call] for call in run[:-1]), made)
        return Instead(made, builder.node(Join("concate_and_append"), (fork, *ends), site.node.line))

    rewritten, counts = applied(graph, (Rule("call forked", (Generate, Choose), separate),))
    _check_apart(rewritten, wanted)
    notes = tuple(f"side by side: {', '.join(map(called, run))}" for run in runs)
    return Outcome(rewritten, counts, notes=notes)


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
    """Runs of at least two declared calls of a stream."""
    runs: list[list[Node]] = []
    run: list[Node] = []
    inside: set[Node] = set()  # what stands behind the beginning of the run
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
    """Whether nothing but `node` asks what the text up to `before` is."""
    return all(
        user is node or not (user.in_stream or user.op.__class__.__name__ == "StreamText")
        for user in graph.users[before]
    )


def _taken(node: Node) -> set[Node]:
    """What the values of a stream node need."""
    return needed(node.inputs[1:])


def _check_apart(graph: Graph, wanted: set[str]) -> None:
    """Raises ParameterError for a declared call that sees another one."""
    calls = [node for node in graph.nodes if _name(node) in wanted]
    for call in calls:
        seen = needed(call.inputs)
        other = next((other for other in calls if other in seen), None)
        if other is not None:
            raise ParameterError(
                f"independent: {called(call)} sees the text of {called(other)}; write them one behind the other with "
                "nothing but text between them, in one turn, or fork() where they part"
            )
