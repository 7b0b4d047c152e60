"""Branches of a fork that part too early: what they all say stands behind what each says for itself.

forks += lambda i: f"Tip {i} of 3. Name one concrete action in at most ten words."
"""

import re
from collections.abc import Iterator

from ..graph import Graph, Node
from ..operations import Fork
from .findings import Finding
from .marked import Marked
from .pieces import Kind, Piece, Segment, segments_of
from .tokens import Counter, Shareable
from .units import units_of

LEAST_COMMON = 16  # tokens that branches say alike; less is a label


def branch_findings(graph: Graph, counter: Counter) -> Iterator[Finding]:
    first_segments: dict[Node, list[Segment]] = {}
    starts = {segment.before: segment for segment in segments_of(graph)}
    for number, stream in enumerate(graph.streams):
        if graph.parents(number) is not None and stream[0] in starts:
            first_segments.setdefault(stream[0].inputs[0], []).append(starts[stream[0]])
    for fork, segments in first_segments.items():
        assert isinstance(fork.op, Fork), "branches begin at forks"
        common = _common_tokens(segments, counter)
        line = segments[0].line
        if len(segments) > 1 and common >= LEAST_COMMON and line is not None:
            what = (
                f"{len(segments)} branches part in front of {common} tokens that all of them say; "
                "say these in front of the fork, or first in every branch"
            )
            saved = common * (len(segments) - 1)
            yield Finding("counter-early", line.number, line.number, graph.name, what, Shareable(0, saved))


def _common_tokens(segments: list[Segment], counter: Counter) -> int:
    """Tokens of sentences that stand in every branch behind the first one in which they differ."""
    said = [[unit.text for unit in units_of(Marked.of(_named(segment)).text)] for segment in segments]
    parting = next((n for n, units in enumerate(zip(*said, strict=False)) if len(set(units)) > 1), None)
    if parting is None:
        return 0
    behind = [set(units[parting + 1 :]) for units in said]
    common = [unit for unit in said[0][parting + 1 :] if all(unit in others for others in behind)]
    return sum(counter.tokens(unit) for unit in common if len(re.findall(r"\w+", unit)) > 2)


def _named(segment: Segment) -> list[Piece]:
    """Values as their names: two of a name are the same in all branches."""
    return [
        piece if piece.kind is Kind.CONSTANT else Piece(Kind.CONSTANT, f"{{{piece.name}}}") for piece in segment.pieces
    ]
