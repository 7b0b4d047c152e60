"""Runs the passes in their order, and checks the graph after each of them."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from ...lang import checks
from ...lang.errors import ParameterError, remedy, shown
from ..checks.verify import verify
from ..graph import Graph
from .equal_calls import merge_equal, merge_samples
from .folding import fold, merge_text
from .independence import check_declared, fork_independent
from .rules import PassResult
from .unused import drop_unused


@dataclass(frozen=True, slots=True)
class PassReport:
    """The result of one pass.
    Attributes:
        name: as in `compile(passes=[...])`.
        counts: rule → how often it was applied.
        calls: number of calls that a run saves.
        notes: a line each, such as which call was left out.
    """

    name: str
    counts: Mapping[str, int]
    calls: int
    notes: tuple[str, ...]

    @property
    def rewrites(self) -> int:
        return sum(self.counts.values())


@dataclass(frozen=True, slots=True)
class Report:
    """The results of the chosen passes, in the order in which they ran."""

    passes: tuple[PassReport, ...]

    @property
    def rewrites(self) -> Mapping[str, int]:
        """Pass → number of rewrites."""
        return {done.name: done.rewrites for done in self.passes}

    @property
    def calls(self) -> int:
        """Number of calls that a run saves."""
        return sum(done.calls for done in self.passes)

    def __str__(self) -> str:
        width = max((len(done.name) for done in self.passes), default=0)
        lines: list[str] = []
        for done in self.passes:
            counted = ", ".join(f"{count} {rule}" for rule, count in sorted(done.counts.items())) or "nothing to do"
            saved = f"; {done.calls} {'call' if done.calls == 1 else 'calls'} fewer" if done.calls else ""
            lines.append(f"{done.name:<{width}}  {counted}{saved}")
            lines += (f"{'':<{width}}  {note}" for note in done.notes)
        return "\n".join(lines) or "no passes"


@dataclass(frozen=True, slots=True)
class Rewritten:
    """A rewritten graph, with the report of its passes."""

    graph: Graph
    report: Report


DEFAULT = ("fold", "merge_text")  # those that change neither prompts nor calls, nor when they are made
NAMES = ("fold", "drop_unused", "merge_equal", "merge_samples", "fork_independent", "merge_text")  # in their order


@dataclass(frozen=True, slots=True)
class Choice:
    """The passes that run, and their options; checked.

    Attributes:
        names: of the passes, in the order in which they run.
        keep: variables that are asked for; None for all of them, and the text.
        independent: calls that need not see each other's text.
    """

    names: tuple[str, ...]
    keep: tuple[str, ...] | None = None
    independent: tuple[str, ...] = ()


def checked_choice(
    passes: str | Iterable[str], keep: Iterable[str] | None = None, independent: Iterable[str] | None = None
) -> Choice:
    """Checks what users write about passes.

    Args:
        passes: "default", "none", or names of passes, among which "default" stands for all of those.
        keep: names for drop_unused.
        independent: names for fork_independent.

    Raises:
        ParameterError: a pass that does not exist, or something for a pass that is not chosen.
    """
    wanted = _names("passes", passes) if not isinstance(passes, str) else (checks.plain(passes),)
    names: set[str] = set()
    for name in wanted:
        match name:
            case "default":
                names.update(DEFAULT)
            case "none" if len(wanted) == 1:
                pass
            case "none":
                raise ParameterError(f'passes={shown(list(wanted))}: "none" stands alone; leave it out, or the others')
            case _ if name in NAMES:
                names.add(name)
            case _:
                raise ParameterError(f"passes: there is no pass {name!r}; {remedy(name, (*NAMES, 'default', 'none'))}")
    options = {"keep": ("drop_unused", keep), "independent": ("fork_independent", independent)}
    for option, (name, given) in options.items():
        if given is not None and name not in names:
            raise ParameterError(
                f'{option}={shown(given)} is for the pass {name}; write passes=["default", "{name}"], or leave it out'
            )
    return Choice(
        tuple(name for name in NAMES if name in names),
        None if keep is None else _names("keep", keep),
        () if independent is None else _names("independent", independent),
    )


MAX_NAMES = 10_000  # of variables or calls


def _names(option: str, given: Iterable[str]) -> tuple[str, ...]:
    """Raises ParameterError for anything but names."""
    names = checks.members(option, given, MAX_NAMES, "a list of names")
    for name in names:
        if not isinstance(name, str):
            raise ParameterError(f"{option} has {shown(name)} in it; write names")
    return tuple(dict.fromkeys(map(checks.plain, names)))


_MOST_ROUNDS = 20  # each makes a graph smaller, or moves something to where it stays, so few are ever needed


def rewrite(
    graph: Graph,
    passes: str | Iterable[str] = "default",
    *,
    keep: Iterable[str] | None = None,
    independent: Iterable[str] | None = None,
) -> Rewritten:
    """Returns the graph that the passes make of `graph`, and what each of them did. Doing it again changes nothing.

    By default a program is rewritten only in ways that no run shows: `fold` and `merge_text`. The other passes change
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
    choice = checked_choice(passes, keep, independent)
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
    """Sums the results of one pass over all rounds."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._calls = 0
        self._notes: dict[str, None] = {}

    def add(self, graph: Graph, outcome: PassResult) -> Graph:
        """Adds what the pass made of `graph`, and returns the new graph."""
        self._counts.update(outcome.counts)
        self._calls += outcome.calls
        self._notes.update(dict.fromkeys(outcome.notes))
        if outcome.graph is not graph:
            verify(outcome.graph)
        return outcome.graph

    def report(self, name: str) -> PassReport:
        return PassReport(name, dict(self._counts), self._calls, tuple(self._notes))


_PASSES: Mapping[str, Callable[[Graph, Choice], PassResult]] = {
    "fold": lambda graph, _: fold(graph),
    "drop_unused": lambda graph, choice: drop_unused(graph, choice.keep),
    "merge_equal": lambda graph, _: merge_equal(graph),
    "merge_samples": lambda graph, _: merge_samples(graph),
    "fork_independent": lambda graph, choice: fork_independent(graph, choice.independent),
    "merge_text": lambda graph, _: merge_text(graph),
}
