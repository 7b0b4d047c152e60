"""Lays a prompt out as text with the sources of its pieces, and finds the earlier prompts nearest to it.

"Q: "  "What is"  "\\nA:"          pieces, with their sources
0      3          10              where they begin
"""

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass

from ...lang.prompt import Generated, Media, Part, Prompt, Source, SourceKind, Text, told_apart
from .history import Asked


@dataclass(frozen=True, slots=True)
class PromptPiece:
    """A piece of a prompt. `text` begins at character `start`. `source` None: umbel wrote it."""

    start: int
    text: str
    source: Source | None


@dataclass(frozen=True, slots=True)
class Layout:
    """A prompt: its text and its non-empty pieces."""

    text: str
    pieces: tuple[PromptPiece, ...]

    def at(self, character: int) -> PromptPiece | None:
        """Returns the piece that holds this character; None after the end."""
        if not 0 <= character < len(self.text):
            return None
        return self.pieces[bisect_right(self.pieces, character, key=lambda piece: piece.start) - 1]


def of_call(asked: Asked) -> Layout:
    """Lays out the prompt that was sent."""
    written = _written(asked.intent.prompt)
    if asked.parts is None:
        return _laid(written)
    return _aligned(_laid(written), "".join(map(text_of, asked.parts)))


def with_answer(asked: Asked) -> Layout:
    """Lays out the prompt and its answer: both are in the cache afterwards."""
    layout = of_call(asked)
    if not asked.answer:
        return layout
    said = asked.intent.source
    source = None if said is None else said.of(SourceKind.GENERATED, asked.intent.name)
    piece = PromptPiece(len(layout.text), asked.answer, source)
    return Layout(layout.text + asked.answer, (*layout.pieces, piece))


def common_length(left: str, right: str) -> int:
    """Returns the length of the common prefix of two texts. Bisects by comparing slices."""
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
    """Returns the program's pieces of a prompt, with their sources."""
    found: list[tuple[str, Source | None]] = []
    step: Prompt | None = prompt
    while step is not None and step.part is not None:
        found.append((text_of(step.part), step.source))
        step = step.parent
    found.reverse()
    return found


def _laid(written: list[tuple[str, Source | None]]) -> Layout:
    pieces: list[PromptPiece] = []
    place = 0
    for text, source in written:
        if text:
            pieces.append(PromptPiece(place, text, source))
            place += len(text)
    return Layout("".join(piece.text for piece in pieces), tuple(pieces))


def _aligned(own: Layout, sent: str) -> Layout:
    """Lays out a sent prompt that differs from the program's: instructions about a constraint stand somewhere in the
    middle."""
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


COMPARED = 8  # earlier prompts whose tokens are compared


@dataclass(frozen=True, slots=True)
class Neighbour:
    """An earlier call. `common`: characters of its prompt and answer in common with the explained prompt."""

    asked: Asked
    layout: Layout
    common: int

    @property
    def goes_on(self) -> bool:
        """True if its text continues after the common prefix."""
        return self.common < len(self.layout.text)

    def had_ended(self, asked: Asked) -> bool:
        """Returns whether it had ended before `asked` began."""
        return self.asked.ended is not None and self.asked.ended < asked.began


@dataclass(frozen=True, slots=True)
class Neighbours:
    """The nearest calls first; of equally near ones those that go on, and of these the latest."""

    same_salt: tuple[Neighbour, ...]
    other_salts: tuple[Neighbour, ...]


class EarlierCalls:
    """Earlier prompts as the calls of one report see them: each is laid out once.

    Args:
        calls: in any order, some of them perhaps twice.
    """

    def __init__(self, calls: Iterable[Asked]) -> None:
        self._calls = sorted(dict.fromkeys(calls), key=lambda call: call.began, reverse=True)
        self._layouts: dict[Asked, Layout] = {}

    def of(self, asked: Asked, text: str) -> Neighbours:
        """Finds the nearest calls that began before this one and share a prefix with its text."""
        same, others = _Nearest(text), _Nearest(text)
        for call in self._calls[bisect_right(self._calls, -asked.began, key=lambda call: -call.began) :]:
            layout = self._layouts.get(call)
            if layout is None:
                layout = self._layouts[call] = with_answer(call)
            (same if call.salt == asked.salt else others).look_at(call, layout)
        return Neighbours(same.found(), others.found())


class _Nearest:
    """Keeps the nearest of many prompts. Most are rejected by comparing as many characters as the last one shares."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._found: list[Neighbour] = []
        self._least = text[:1]  # what a prompt has to begin with to be among them

    def look_at(self, asked: Asked, layout: Layout) -> None:
        if not self._least or not layout.text.startswith(self._least):
            return
        self._found.append(Neighbour(asked, layout, common_length(self._text, layout.text)))
        if len(self._found) >= 2 * COMPARED:
            del self._sorted()[COMPARED:]
            self._least = self._text[: self._found[-1].common]

    def found(self) -> tuple[Neighbour, ...]:
        return tuple(self._sorted()[:COMPARED])

    def _sorted(self) -> list[Neighbour]:
        self._found.sort(key=lambda neighbour: (neighbour.common, neighbour.goes_on), reverse=True)  # the latest first
        return self._found
