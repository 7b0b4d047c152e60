"""Dead calls: what nobody asks for is not generated.

s += "Plan: " + gen("plan")                      keep=["plan"]: the critique is not asked for, and
with s.fork(2) as f:                             neither is the stream that writes it
    f += "Critique: " + gen("critique")
"""

from collections import Counter
from collections.abc import Iterable

from ...lang.errors import ParameterError, remedy
from ..graph import STREAM_OPERATIONS, Graph, Node
from ..operations import Begin, Choose, Generate, Join
from .branches import shrinking
from .lists import joins_of_lists
from .needs import needed
from .outcome import Outcome, called
from .rules import Instead, Rule, Site, applied


def drop_unused(graph: Graph, keep: Iterable[str] | None = None) -> Outcome:
    """Law: the variables in `keep` and what the program returns have the same values, as long as no call fails; the
    calls that are made are made with the same prompts.

    A call goes where nothing that is asked for takes its variable, its text, or a text that was generated behind it.
    So do whole branches, and nested runs. A stream ends behind the last thing of it that is needed: then it has no text
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
        return Outcome(graph, {})
    first_of = {node: stream[0] for stream in graph.streams for node in stream}

    def drop(site: Site) -> Instead | None:
        """Who waited for the end of a stream waits for what is left of it."""
        if site.node in alive or isinstance(site.node.op, Begin):
            return None
        return Instead(site.inputs[0], site.inputs[0])

    def wait_for_less(site: Site) -> Node | Instead | None:
        node = site.node
        pairs = zip(node.inputs[1:], site.inputs[1:], strict=True)
        ends = [new for old, new in pairs if first_of[old] not in gone]
        if len(ends) + 1 == len(site.inputs):
            return None
        if not ends:
            return Instead(site.inputs[0], site.inputs[0])
        return site.builder.node(node.op, (site.inputs[0], *ends), node.line)

    rewritten, counts = applied(
        graph,
        (
            Rule("dropped", STREAM_OPERATIONS, drop),
            Rule("join", (Join,), wait_for_less),
            *shrinking(graph, gone),
        ),
        ends=[stream[-1] for stream in graph.streams if stream[0] not in gone],
        variables=kept,
    )
    counts += Counter(variable=len(graph.variables) - len(kept))
    notes = tuple(f"left out: {called(node)}" for node in dropped)
    return Outcome(rewritten, counts, len(dropped), notes)


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
    """What is asked for and all that it needs. A list that a join makes has an entry for each branch: the join stays,
    and so do its branches, with as much of each as is needed."""
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
