"""Proposals: the blocks of a segment in an order that more runs share, constants first (the paper's D.2).

Which orders are lawful is decided here, from the text alone; whether the text still means the same is for a checker or
the user to say (`consent.py`). A proposal that nobody confirmed changes nothing.
"""

import hashlib
import itertools
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from ..graph import Builder, Graph, Line, Node, rebuilt
from ..operations import Append, Constant
from . import phrases
from .blocks import Block, Blocks, cut, joined
from .marked import Marked
from .pieces import (
    PRIVATE,
    Call,
    Kind,
    Piece,
    Refine,
    Segment,
    begins_prompt,
    calls_of,
    is_asked,
    segments_of,
    unrefined,
)
from .tokens import Counter, Shareable, shareable

LEAST_GAIN = 8  # tokens of the first call; less is not worth another order of words


@dataclass(frozen=True, slots=True)
class Proposal:
    """Another order of a segment.

    Attributes:
        id: says which text becomes which; the same as long as these are the same.
        line: where the segment begins.
        segment: of the graph it was made for.
        marked: its pieces as a string.
        new_text: in the marks of `marked`.
        before, after: both as people write templates.
        old, new: tokens that two runs share, by the order as it is and as it would be.
    """

    id: str
    line: Line | None
    segment: Segment
    marked: Marked
    new_text: str
    before: str
    after: str
    old: Shareable
    new: Shareable

    @property
    def gain(self) -> Shareable:
        """The paper's measure is `gain.first`."""
        return self.new - self.old


def propose(
    graph: Graph,
    counter: Counter,
    *,
    shared: Collection[str] = (),
    refine: Refine = unrefined,
    least_gain: int = LEAST_GAIN,
) -> tuple[Proposal, ...]:
    """The best lawful order of every segment for which it gains `least_gain` tokens, or the text of a shared argument,
    whose length nobody knows; one by one.

    Args:
        shared: arguments that many runs have in common; they go between the constants and the others.
        refine: tells volatile parts of constants apart.
    """
    segments = segments_of(graph, shared)
    old_calls = calls_of(graph, shared, segments, refine)
    old = shareable(old_calls, counter)
    found = []
    for segment in segments:
        marked = Marked.of(refine(segment))
        new_text = best_order(segment, marked)
        if new_text == marked.text:
            continue
        pieces = tuple(marked.pieces(new_text))

        def reordered(other: Segment, this: Segment = segment, pieces: tuple[Piece, ...] = pieces) -> tuple[Piece, ...]:
            return pieces if other is this else refine(other)

        new_calls = calls_of(graph, shared, segments, reordered)
        new = shareable(new_calls, counter)
        if new.first - old.first >= least_gain or _shared_arguments(new_calls) > _shared_arguments(old_calls):
            before, after = marked.shown(marked.text), marked.shown(new_text)
            name = hashlib.sha256(f"{before}\0{after}".encode("utf-8", "surrogatepass")).hexdigest()[:8]
            found.append(Proposal(name, segment.line, segment, marked, new_text, before, after, old, new))
    return tuple(found)


def _shared_arguments(calls: Sequence[Call]) -> int:
    """How many stand in front of the first difference of the first call's prompt."""
    pieces = calls[0].pieces if calls else ()
    alike = itertools.takewhile(lambda piece: piece.kind not in PRIVATE, pieces)
    return sum(piece.kind is Kind.SHARED for piece in alike)


def best_order(segment: Segment, marked: Marked) -> str:
    """The segment's text with constants first, then what is shared, then the rest, as far as that is lawful."""
    blocks = cut(marked)
    if blocks.fixed or any(Kind.MEDIA in block.kinds or Kind.ROLE in block.kinds for block in blocks.blocks):
        return marked.text
    first = 1 if _first_stays(segment, blocks) else 0
    last = len(blocks.blocks) - (1 if _last_stays(segment, blocks) else 0)
    order = _sorted(blocks.blocks, first, last)
    if last == len(blocks.blocks) and order and not _may_end(segment, blocks, order[-1]):
        order = _sorted(blocks.blocks, first, last - 1)
    return joined(blocks, order) if order else marked.text


def _sorted(blocks: Sequence[Block], first: int, last: int) -> list[int]:
    """Stable: what is in one class keeps its order."""
    movable = range(first, max(first, last))
    ordered = sorted(movable, key=lambda number: _class(blocks[number]))
    return [*range(first), *ordered, *range(max(first, last), len(blocks))]


def _class(block: Block) -> int:
    if block.kinds & PRIVATE:
        return 2
    return 1 if Kind.SHARED in block.kinds else 0


def _first_stays(segment: Segment, blocks: Blocks) -> bool:
    """What goes on with text in front of the segment stays there."""
    return blocks.first_stays or not (begins_prompt(segment.before) or "\n" in blocks.lead)


def _last_stays(segment: Segment, blocks: Blocks) -> bool:
    """What a model goes on with stays in front of it: a cue ("Answer:"), or half a sentence."""
    if blocks.last_stays:
        return True
    if not blocks.blocks or not any(is_asked(follower) for follower in segment.followers):
        return False
    last = blocks.blocks[-1]
    return "\n" not in last.gap and phrases.TERMINAL.search(last.text) is None


def _may_end(segment: Segment, blocks: Blocks, number: int) -> bool:
    """Whether a model that goes on behind this block begins something new."""
    if not any(is_asked(follower) for follower in segment.followers):
        return True
    return "\n" in blocks.blocks[-1].gap or phrases.TERMINAL.search(blocks.blocks[number].text) is not None


def apply(graph: Graph, proposals: Collection[Proposal]) -> Graph:
    """The graph with these proposals, which were made for it. Nothing else changes."""
    assert all(proposal.segment.before in graph.numbers for proposal in proposals), "made for another graph"
    last_of = {proposal.segment.appends[-1]: proposal for proposal in proposals}
    skipped = {append for proposal in proposals for append in proposal.segment.appends[:-1]}
    new: dict[Node, Node] = {}

    def rewrite(builder: Builder, node: Node, inputs: tuple[Node, ...]) -> Node:
        if node in skipped:
            new[node] = inputs[0]
        elif node in last_of:
            new[node] = _appended(builder, last_of[node], inputs[0], new)
        else:
            new[node] = builder.node(node.op, inputs, node.line)
        return new[node]

    return rebuilt(graph, rewrite)


def _appended(builder: Builder, proposal: Proposal, before: Node, new: dict[Node, Node]) -> Node:
    for piece in proposal.marked.pieces(proposal.new_text):
        line = piece.line or proposal.line
        if piece.node is not None and piece.kind is not Kind.VOLATILE:
            value = new[piece.node]
        else:
            value = builder.node(Constant(piece.text), (), line)
        before = builder.node(Append(), (before, value), line)
    return before
