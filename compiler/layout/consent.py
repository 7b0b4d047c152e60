"""Which proposals are applied: those that a checker confirms, and those that the user accepts. No others, ever.

compiled = ask.compile(reorder=True)                          # nothing is applied; compiled.reordered lists proposals
compiled = ask.compile(reorder=True, accept=["4c58a7f9"])     # this one is
compiled = ask.compile(reorder=True, checker=model)           # those that the model says mean the same
"""

from collections.abc import Collection
from dataclasses import dataclass

from ...interpreter.batch import MAX_ARGUMENTS
from ...lang import checks
from ...lang.errors import ParameterError, remedy, shown
from ...lang.protocol import Backend
from ..graph import Graph, Line
from .checker import Verdict, verdicts
from .reorder import Proposal, apply, propose
from .tokens import Counter, Shareable, default_counter

THRESHOLD = 0.9  # probability of "same" from which a checker's word counts


@dataclass(frozen=True, slots=True)
class Reordering:
    """A proposal and what became of it.

    Attributes:
        id: for `accept`.
        line: where the text begins.
        before, after: the text in both orders, with `{name}` for arguments.
        gain: tokens more that two runs share: of the first call's prompt, and of all.
        verdict: of the checker; None where none was asked.
        applied: whether the program says it in the new order.
    """

    id: str
    line: Line | None
    before: str
    after: str
    gain: Shareable
    verdict: Verdict | None
    applied: bool

    def __str__(self) -> str:
        became = "applied" if self.applied else "not applied"
        said = ""
        if self.verdict is not None:
            word = "the same" if self.verdict.same else "another meaning"
            chance = "" if self.verdict.probability is None else f", {self.verdict.probability:.0%} the same"
            said = f"; the checker says {word}{chance}"
        return f"{self.id} at {self.line}: {self.gain.first} tokens more are shared; {became}{said}"


def reordered(
    graph: Graph,
    *,
    checker: Backend | None = None,
    accept: Collection[str] | None = None,
    shared: Collection[str] = (),
    threshold: float = THRESHOLD,
    counter: Counter | None = None,
) -> tuple[Graph, tuple[Reordering, ...]]:
    """The graph with what was agreed to, and what became of every proposal.

    Args:
        graph: as it was traced.
        checker: a backend whose model is asked about proposals that are not in `accept`.
        accept: ids of proposals that are applied unasked.
        shared: arguments that many runs have in common.
        threshold: the probability of "same" from which the checker's word counts.
        counter: of tokens; by default that of the default model.

    Raises:
        ParameterError: an id in `accept` that no proposal has, a name in `shared` that no parameter has, or a
            threshold that is no probability.
        Whatever the checker raises.
    """
    checks.number("threshold", threshold, 0, 1, "a probability, 0 to 1, such as 0.9")
    known = [parameter.name for parameter in graph.parameters]
    for name in checks.members("shared", shared, MAX_ARGUMENTS, "a list of names of parameters"):
        if not isinstance(name, str) or name not in known:
            raise ParameterError(
                f"shared={shown(name)}: {graph.name} has no such parameter; {remedy(shown(name), known)}"
            )
    counter = counter or default_counter()
    proposals = propose(graph, counter, shared=shared)
    ids = {proposal.id for proposal in proposals}
    accepted = set()
    for name in () if accept is None else checks.members("accept", accept, MAX_ARGUMENTS, "a list of ids of proposals"):
        if isinstance(name, str) and name in ids:
            accepted.add(name)
            continue
        listed = ", ".join(proposal.id for proposal in proposals) or "none"
        raise ParameterError(f"accept={shown(name)}: {graph.name} has no such proposal; its proposals are {listed}")
    asked = [proposal for proposal in proposals if proposal.id not in accepted] if checker is not None else []
    said = dict(zip((proposal.id for proposal in asked), verdicts(asked, checker), strict=True)) if checker else {}
    agreed = [
        proposal
        for proposal in proposals
        if proposal.id in accepted or (proposal.id in said and said[proposal.id].confirms(threshold))
    ]
    records = tuple(_record(proposal, said.get(proposal.id), proposal in agreed) for proposal in proposals)
    return (apply(graph, agreed) if agreed else graph), records


def _record(proposal: Proposal, verdict: Verdict | None, applied: bool) -> Reordering:
    return Reordering(proposal.id, proposal.line, proposal.before, proposal.after, proposal.gain, verdict, applied)
