"""Text with holes → blocks that may change places: sentences and lines, tied together where one speaks of another.

    "Title: ⟨title⟩\\nSummarise the article in two sentences.\\nArticle: ⟨article⟩\\n"
     └──── 0 ────┘  └────────────── 1 ────────────────────┘  └────── 2 ──────┘

Rules only ever tie: what no rule takes for a block of its own stays with its neighbours. A label stays with what it
labels, a list in one piece, an opening tag with its closing one, examples with each other.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from . import phrases
from .pieces import Kind, Piece
from .tokens import Counter

_FIRST_MARK = 0xF0000  # of a private plane; a hole is one character


@dataclass(frozen=True, slots=True)
class Marked:
    """Pieces as one string: a hole is one character that no constant has.

    Attributes:
        holes: mark → piece.
    """

    text: str
    holes: dict[str, Piece]

    @classmethod
    def of(cls, pieces: Iterable[Piece]) -> "Marked":
        pieces = list(pieces)
        taken = {character for piece in pieces for character in piece.text if ord(character) >= _FIRST_MARK}
        marks = (chr(number) for number in range(_FIRST_MARK, 0x110000) if chr(number) not in taken)
        holes: dict[str, Piece] = {}
        text = []
        for piece in pieces:
            if piece.kind is Kind.CONSTANT:
                text.append(piece.text)
            else:
                mark = next(marks)
                holes[mark] = piece
                text.append(mark)
        return cls("".join(text), holes)

    def pieces(self, text: str) -> Iterator[Piece]:
        """A string with these marks → pieces; constants have no node and no line."""
        constant = ""
        for character in text:
            hole = self.holes.get(character)
            if hole is None:
                constant += character
                continue
            if constant:
                yield Piece(Kind.CONSTANT, constant)
            constant = ""
            yield hole
        if constant:
            yield Piece(Kind.CONSTANT, constant)

    def shown(self, text: str) -> str:
        """As people write templates: `{question}` for the argument."""
        return "".join(_hole_text(self.holes[c]) if c in self.holes else c for c in text)


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


@dataclass(slots=True)
class _Unit:
    """A sentence or a line. `starts_line`: it does not stand behind another one in its line."""

    text: str
    gap: str
    starts_line: bool


def cut(marked: Marked) -> Blocks:
    text = marked.text
    lead = text[: len(text) - len(text.lstrip())]
    units = list(_units(text[len(lead) :]))
    tied = _ties(units, marked)
    blocks = []
    group: list[_Unit] = []
    for number, unit in enumerate(units):
        group.append(unit)
        if not tied[number]:
            blocks.append(_block(group, marked))
            group = []
    ends = _unadorned(units[-1].text) if units else ""
    return Blocks(
        lead,
        tuple(blocks),
        first_stays=bool(units) and (_points(phrases.BACKWARD, units[0], marked) or _continues(units[0])),
        last_stays=ends.endswith(":") or (bool(units) and _points(phrases.FORWARD, units[-1], marked)),
        fixed=any(phrases.ORDER.search(_bare(unit.text, marked)) for unit in units),
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


def free_tokens(marked: Marked, counter: Counter) -> int:
    """Tokens of sentences and lines without a hole. Labels and tags do not count: they go where their values go."""
    units = _units(marked.text.lstrip())
    return sum(counter.tokens(unit.text) for unit in units if not _has_hole(unit, marked) and _is_saying(unit))


def units_of(marked: Marked) -> list[str]:
    """Sentences and lines, in marks."""
    return [unit.text for unit in _units(marked.text.lstrip())]


def _has_hole(unit: _Unit, marked: Marked) -> bool:
    return any(character in marked.holes for character in unit.text)


def _is_saying(unit: _Unit) -> bool:
    """Whether a unit is more than a label, a separator or a tag."""
    bare = phrases.TAG.sub("", _unadorned(unit.text))
    return not bare.endswith((":", "：")) and (len(bare.split()) > 2 or len(bare) > 12)


def _width(gap: str) -> tuple[int, int]:
    return gap.count("\n"), len(gap)


def _units(text: str) -> Iterator[_Unit]:
    """Lines; those that are no list items, headings or labels' beginnings are cut at the ends of sentences."""
    position = 0
    while position < len(text):
        end = text.find("\n", position)
        line = text[position:] if end < 0 else text[position:end]
        position += len(line)
        start = position
        while position < len(text) and text[position].isspace():
            position += 1
        gap = text[start:position]  # blank lines and what indents the next one
        sentences = [line] if phrases.LIST_ITEM.match(line) or phrases.HEADING.match(line) else _sentences(line)
        for number, sentence in enumerate(sentences):
            bare = sentence.rstrip()
            behind = sentence[len(bare) :]
            yield _Unit(bare, behind if number < len(sentences) - 1 else behind + gap, starts_line=number == 0)


def _sentences(line: str) -> list[str]:
    sentences, start = [], 0
    for end in phrases.SENTENCE_END.finditer(line):
        behind = line[end.end() : end.end() + 1]
        if behind and (not behind.islower() or ord(behind) >= _FIRST_MARK):
            sentences.append(line[start : end.end()])
            start = end.end()
    return [*sentences, line[start:]] if line[start:] else sentences


def _ties(units: list[_Unit], marked: Marked) -> list[bool]:
    """For every unit whether it is tied to the next one."""
    tied = [False] * len(units)

    def tie(first: int, last: int) -> None:
        for number in range(max(first, 0), min(last, len(units) - 1)):
            tied[number] = True

    for number, unit in enumerate(units):
        if _unadorned(unit.text).endswith((":", ",", ";", "—", "-")) or _points(phrases.FORWARD, unit, marked):
            tie(number, number + 1)
        if _points(phrases.BACKWARD, unit, marked) or _continues(unit):
            tie(number - 1, number)
        if phrases.SEPARATOR.match(unit.text):
            tie(number - 1, number + 1)
        if phrases.LIST_ITEM.match(unit.text) and number and phrases.LIST_ITEM.match(units[number - 1].text):
            tie(number - 1, number)
        if phrases.HEADING.match(unit.text):
            tie(number, _section_end(units, number))
    for first, last in (*_enclosed(units), *_fenced(units), *_bracketed(units), *_examples(units)):
        tie(first, last)
    return tied


def _continues(unit: _Unit) -> bool:
    """Whether a unit goes on with the one in front. A hole may hold anything, so a line that begins with one does
    not, and what follows it in the same line does."""
    first = unit.text[:1]
    if ord(first or " ") >= _FIRST_MARK:
        return not unit.starts_line
    return phrases.CONTINUES.match(unit.text) is not None and phrases.LIST_ITEM.match(unit.text) is None


def _bare(text: str, marked: Marked) -> str:
    """Without holes: what they hold says nothing about its place."""
    return "".join(" " if character in marked.holes else character for character in text)


def _unadorned(text: str) -> str:
    """Without what makes the last letters bold."""
    return text.rstrip("*_ ")


def _points(words: re.Pattern[str], unit: _Unit, marked: Marked) -> bool:
    return words.search(_bare(unit.text, marked)) is not None


def _section_end(units: list[_Unit], start: int) -> int:
    """The last unit in front of the next heading."""
    for number in range(start + 1, len(units)):
        if phrases.HEADING.match(units[number].text):
            return number - 1
    return len(units) - 1


def _enclosed(units: list[_Unit]) -> Iterator[tuple[int, int]]:
    """From opening tags to closing ones. One without the other reaches to the end, or the beginning."""
    open_tags: list[tuple[str, int]] = []
    for number, unit in enumerate(units):
        for match in phrases.TAG.finditer(unit.text):
            closes, name = bool(match[1] or match[3]), match[2] or match[4]
            if not closes:
                open_tags.append((name, number))
                continue
            for index in range(len(open_tags) - 1, -1, -1):
                if open_tags[index][0] == name:
                    yield open_tags[index][1], number
                    del open_tags[index:]
                    break
            else:
                yield 0, number
    for _, number in open_tags:
        yield number, len(units) - 1


def _fenced(units: list[_Unit]) -> Iterator[tuple[int, int]]:
    """Between two fences of a kind; a quotation mark that is not closed in its unit is one too."""
    opened: dict[str, int] = {}
    for number, unit in enumerate(units):
        fences = phrases.FENCE.findall(unit.text)
        rest = phrases.FENCE.sub("", unit.text)
        for sign in (*fences, *(['"'] * (rest.count('"') % 2))):
            if sign in opened:
                yield opened.pop(sign), number
            else:
                opened[sign] = number
    for number in opened.values():
        yield number, len(units) - 1


def _bracketed(units: list[_Unit]) -> Iterator[tuple[int, int]]:
    """From an opening bracket to the one that closes it; smileys and the like close nothing."""
    waiting: list[tuple[str, int]] = []
    for number, unit in enumerate(units):
        for character in unit.text:
            if character in phrases.OPENING:
                waiting.append((phrases.CLOSING[phrases.OPENING.index(character)], number))
            elif waiting and character == waiting[-1][0]:
                yield waiting.pop()[1], number


def _examples(units: list[_Unit]) -> Iterator[tuple[int, int]]:
    """Shots: where a label comes again, everything from the first label that does to the last is one piece. What is
    asked about stands behind its examples, and nothing else between them."""
    places: dict[str, list[int]] = {}
    for number, unit in enumerate(units):
        label = phrases.LABEL.match(unit.text)
        if label is not None:
            places.setdefault(label[1].strip().lower(), []).append(number)
    repeated = [numbers for numbers in places.values() if len(numbers) > 1]
    if repeated:
        yield min(numbers[0] for numbers in repeated), max(numbers[-1] for numbers in repeated)


def _block(units: list[_Unit], marked: Marked) -> Block:
    text = "".join(unit.text + unit.gap for unit in units[:-1]) + units[-1].text
    kinds = frozenset(marked.holes[character].kind for character in text if character in marked.holes)
    return Block(text, units[-1].gap, kinds)


def _hole_text(piece: Piece) -> str:
    return f"{{{piece.name or piece.kind.name.lower()}}}"
