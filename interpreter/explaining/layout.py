"""The text of a prompt with who put what into it.

"Q: "  "What is"  "\nA:"          pieces, with their sources
0      3          10              where they begin
"""

from bisect import bisect_right
from dataclasses import dataclass

from ...lang.prompt import Generated, Media, Part, Prompt, Text, told_apart
from ...lang.source import Source, SourceKind
from .history import Asked


@dataclass(frozen=True, slots=True)
class Piece:
    """`text` begins at character `start`. `source` None: umbel wrote it."""

    start: int
    text: str
    source: Source | None


@dataclass(frozen=True, slots=True)
class Layout:
    """A prompt: its text and the pieces it is made of, none of them empty."""

    text: str
    pieces: tuple[Piece, ...]

    def at(self, character: int) -> Piece | None:
        """The piece that holds this character; None behind the end."""
        if not 0 <= character < len(self.text):
            return None
        return self.pieces[bisect_right(self.pieces, character, key=lambda piece: piece.start) - 1]


def of_call(asked: Asked) -> Layout:
    """What was sent."""
    written = _written(asked.intent.prompt)
    if asked.parts is None:
        return _laid(written)
    return _aligned(_laid(written), "".join(map(text_of, asked.parts)))


def with_answer(asked: Asked) -> Layout:
    """What was sent, and what came: both are in the cache afterwards."""
    layout = of_call(asked)
    if not asked.answer:
        return layout
    said = asked.intent.source
    source = None if said is None else said.of(SourceKind.GENERATED, asked.intent.name)
    piece = Piece(len(layout.text), asked.answer, source)
    return Layout(layout.text + asked.answer, (*layout.pieces, piece))


def common_length(left: str, right: str) -> int:
    """How many characters two texts begin with alike. Compares slices, so long texts cost a few steps."""
    low, high = 0, min(len(left), len(right))
    if left[:high] == right[:high]:
        return high
    while high - low > 1:  # alike up to low, not up to high
        middle = (low + high) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle
    return low


def text_of(part: Part) -> str:
    match part:
        case Text(text=text) | Generated(text=text):
            return text
        case Media():
            return told_apart(part)


def _written(prompt: Prompt) -> list[tuple[str, Source | None]]:
    """What the program appended, piece by piece."""
    found: list[tuple[str, Source | None]] = []
    step: Prompt | None = prompt
    while step is not None and step.part is not None:
        found.append((text_of(step.part), step.source))
        step = step.parent
    found.reverse()
    return found


def _laid(written: list[tuple[str, Source | None]]) -> Layout:
    pieces: list[Piece] = []
    place = 0
    for text, source in written:
        if text:
            pieces.append(Piece(place, text, source))
            place += len(text)
    return Layout("".join(piece.text for piece in pieces), tuple(pieces))


def _aligned(own: Layout, sent: str) -> Layout:
    """The prompt of a call that says more than the program did: what the model is told about a constraint stands
    somewhere in the middle."""
    head = common_length(own.text, sent)
    tail = common_length(own.text[head:][::-1], sent[head:][::-1])
    inserted = sent[head : len(sent) - tail]
    before = [(piece.text[: head - piece.start], piece.source) for piece in own.pieces if piece.start < head]
    start = len(own.text) - tail
    after = [
        (piece.text[max(0, start - piece.start) :], piece.source)
        for piece in own.pieces
        if piece.start + len(piece.text) > start
    ]
    return _laid([*before, (inserted, None), *after])
