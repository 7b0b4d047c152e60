"""Text with holes → blocks that may change places: sentences and lines, tied together where one speaks of another.

    "Title: ⟨title⟩\\nSummarise the article in two sentences.\\nArticle: ⟨article⟩\\n"
     └──── 0 ────┘  └────────────── 1 ────────────────────┘  └────── 2 ──────┘

Rules only ever tie: what no rule takes for a block of its own stays with its neighbours. A label stays with what it
labels, a list in one piece, an opening tag with its closing one, examples with each other.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from . import phrases
from .marked import Marked
from .pieces import Kind
from .ties import bare_text, continues, points, ties_of
from .units import Unit, unadorned, units_of


@dataclass(frozen=True, slots=True)
class Block:
    """Attributes:
    text: marked, without white space around it.
    gap: the white space behind it.
    kinds: of the holes in it; empty for constant text.
    """

    text: str
    gap: str
    kinds: frozenset[Kind]


@dataclass(frozen=True, slots=True)
class Blocks:
    """A segment, cut. `lead` + each block's text and gap is the segment.

    Attributes:
        first_stays, last_stays: what the first block says, or is, belongs to the beginning; the last to the end.
        fixed: what one says is about the order of all.
    """

    lead: str
    blocks: tuple[Block, ...]
    first_stays: bool
    last_stays: bool
    fixed: bool


def cut(marked: Marked) -> Blocks:
    text = marked.text
    lead = text[: len(text) - len(text.lstrip())]
    units = list(units_of(text[len(lead) :]))
    tied = ties_of(units, marked)
    blocks = []
    group: list[Unit] = []
    for number, unit in enumerate(units):
        group.append(unit)
        if not tied[number]:
            blocks.append(_block(group, marked))
            group = []
    ends = unadorned(units[-1].text) if units else ""
    return Blocks(
        lead,
        tuple(blocks),
        first_stays=bool(units) and (points(phrases.BACKWARD, units[0], marked) or continues(units[0])),
        last_stays=ends.endswith((":", "：")) or (bool(units) and points(phrases.FORWARD, units[-1], marked)),
        fixed=any(phrases.ORDER.search(bare_text(unit.text, marked)) for unit in units),
    )


def joined(blocks: Blocks, order: Sequence[int]) -> str:
    """The blocks in another order. Two that were neighbours keep what stands between them; new neighbours get the
    wider of the gaps they had there; what ends the segment stays its end."""
    result = blocks.lead
    last = len(blocks.blocks) - 1
    for place, number in enumerate(order):
        block = blocks.blocks[number]
        if place == last:
            return result + block.text + blocks.blocks[last].gap
        following = order[place + 1]
        candidates = [] if number == last else [block.gap]
        if following != number + 1:
            candidates.append(blocks.blocks[max(following - 1, 0)].gap)  # the first had one behind it only
        result += block.text + max(candidates, key=_width)
    return result


def _width(gap: str) -> tuple[int, int]:
    return gap.count("\n"), len(gap)


def _block(units: list[Unit], marked: Marked) -> Block:
    text = "".join(unit.text + unit.gap for unit in units[:-1]) + units[-1].text
    kinds = frozenset(marked.holes[character].kind for character in text if character in marked.holes)
    return Block(text, units[-1].gap, kinds)
