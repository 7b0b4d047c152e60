"""Text with holes: pieces as one string, in which a value is one character."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from .pieces import Kind, Piece

_FIRST_MARK = 0xF0000  # of a private plane


def is_mark(character: str) -> bool:
    """Whether a character is from the planes that marks are taken from."""
    return ord(character) >= _FIRST_MARK


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
        taken = {character for piece in pieces for character in piece.text if is_mark(character)}
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


def _hole_text(piece: Piece) -> str:
    return f"{{{piece.name or piece.kind.name.lower()}}}"
