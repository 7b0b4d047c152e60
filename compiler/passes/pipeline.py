"""The passes in their order, with a check of the graph behind each of them."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping

from ..checks.verify import verify
from ..graph import Graph
from .choice import Choice, chosen
from .equal_calls import merge_equal
from .folding import fold
from .independence import check_declared, fork_independent
from .outcome import Outcome
from .report import PassReport, Report, Rewritten
from .samples import merge_samples
from .text import merge_text
from .unused import drop_unused

_MOST_ROUNDS = 20  # each makes a graph smaller, or moves something to where it stays, so few are ever needed


def optimise(
    graph: Graph,
    passes: str | Iterable[str] = "default",
    *,
    keep: Iterable[str] | None = None,
    independent: Iterable[str] | None = None,
) -> Graph:
    """`rewrite`, for who does not want to know what was done."""
    return rewrite(graph, passes, keep=keep, independent=independent).graph


def rewrite(
    graph: Graph,
    passes: str | Iterable[str] = "default",
    *,
    keep: Iterable[str] | None = None,
    independent: Iterable[str] | None = None,
) -> Rewritten:
    """The graph that the passes make of `graph`, and what each of them did. Doing it again changes nothing.

    By default a program is rewritten in ways only that nobody can see: `fold` and `merge_text`. The other passes change
    which calls are made or when, each by the law in its docstring:

        drop_unused        calls that nothing depends on are not made
        merge_equal        equal calls of a deterministic kind are made once
        merge_samples      samples of one prompt are asked for with one call
        fork_independent   branches begin as early as they can, and nothing waits that does not have to

    Args:
        passes: "default", "none", or names of passes, among which "default" stands for all of those.
        keep: for drop_unused: the variables that are asked for. None: all of them, and the text of the program.
        independent: for fork_independent: names of calls that need not see each other's text.

    Raises:
        ParameterError: a pass or a name that does not exist, or a call that cannot be what is said of it.
    """
    choice = chosen(passes, keep, independent)
    done = {name: _Done() for name in choice.names}
    verify(graph)
    check_declared(graph, choice.independent)
    for _ in range(_MOST_ROUNDS):
        before = graph
        for name in choice.names:
            graph = done[name].add(graph, _PASSES[name](graph, choice))
        if graph is before:
            break
    else:
        raise AssertionError("passes undo each other's work")
    return Rewritten(graph, Report(tuple(done[name].report(name) for name in choice.names)))


class _Done:
    """What one pass did, over all rounds."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._calls = 0
        self._notes: dict[str, None] = {}

    def add(self, graph: Graph, outcome: Outcome) -> Graph:
        """The pass made `outcome` of `graph`."""
        self._counts.update(outcome.counts)
        self._calls += outcome.calls
        self._notes.update(dict.fromkeys(outcome.notes))
        if outcome.graph is not graph:
            verify(outcome.graph)
        return outcome.graph

    def report(self, name: str) -> PassReport:
        return PassReport(name, dict(self._counts), self._calls, tuple(self._notes))


_PASSES: Mapping[str, Callable[[Graph, Choice], Outcome]] = {
    "fold": lambda graph, _: fold(graph),
    "drop_unused": lambda graph, choice: drop_unused(graph, choice.keep),
    "merge_equal": lambda graph, _: merge_equal(graph),
    "merge_samples": lambda graph, _: merge_samples(graph),
    "fork_independent": lambda graph, choice: fork_independent(graph, choice.independent),
    "merge_text": lambda graph, _: merge_text(graph),
}
