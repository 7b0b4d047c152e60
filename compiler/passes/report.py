"""What the passes did to a graph, for people and for tests."""

from collections.abc import Mapping
from dataclasses import dataclass

from ..graph import Graph


@dataclass(frozen=True, slots=True)
class PassReport:
    """What one pass did.

    Attributes:
        name: as in `compile(passes=[...])`.
        counts: rule → how often it was applied.
        calls: by how many the calls of a run became fewer.
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
    """What the passes that were chosen did, in the order in which they ran."""

    passes: tuple[PassReport, ...]

    @property
    def rewrites(self) -> Mapping[str, int]:
        """Pass → number of rewrites."""
        return {done.name: done.rewrites for done in self.passes}

    @property
    def calls(self) -> int:
        """By how many the calls of a run became fewer."""
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
    """A graph, and what was done to it."""

    graph: Graph
    report: Report
