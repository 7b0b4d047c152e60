"""Server-sent events, and an answer told in them."""

from collections.abc import Iterable
from dataclasses import dataclass

import msgspec

DONE = b"data: [DONE]\n\n"


def event(data: object, name: str = "") -> bytes:
    """One event. `data` becomes JSON, in one line; `name` is its type, where the dialect names types."""
    head = f"event: {name}\n" if name else ""
    return f"{head}data: ".encode() + msgspec.json.encode(data) + b"\n\n"


@dataclass(frozen=True, slots=True)
class Told:
    """An answer as the events of a stream, in order.

    opening   before any text
    pieces    of the text, at least one event if there is any text
    closing   why it ended, and what it cost
    last      what says that nothing follows
    """

    opening: tuple[bytes, ...]
    pieces: tuple[bytes, ...]
    closing: tuple[bytes, ...]
    last: tuple[bytes, ...]

    def all(self) -> tuple[bytes, ...]:
        return (*self.opening, *self.pieces, *self.closing, *self.last)

    def begun(self) -> tuple[bytes, ...]:
        """The first half of the text, and what comes before it."""
        return (*self.opening, *self.pieces[: (len(self.pieces) + 1) // 2])


def inside_characters(data: bytes) -> Iterable[bytes]:
    """Cut everywhere inside characters of more than one byte, as a network may."""
    start = 0
    for place in range(1, len(data)):
        if data[place] & 0xC0 == 0x80:  # a byte that continues a character
            yield data[start:place]
            start = place
    yield data[start:]


def in_lengths(data: bytes, length: int) -> Iterable[bytes]:
    """Cut into pieces of `length` bytes, wherever that is."""
    for start in range(0, len(data), length):
        yield data[start : start + length]
