"""The bytes that places tell apart: where several places stand at once, which byte leads where.

    places    [a-m] -> P    [k-z] -> Q
    ranges    a..j: 0       k..m: 1              n..z: 2
    moves     0: (P of 0)   1: (P of 0, Q of 1)  2: (Q of 1)

It depends on the places alone, not on the frames above them: the states inside a repeat share one split. How the bytes
part depends on even less, on the shapes of the places, which constraints share: a string of JSON and its quote part the
same bytes in each of them, so that is worked out once for all (`_pattern`). Moves are made when they are asked for.
"""

from __future__ import annotations

from enum import Enum
from functools import lru_cache
from itertools import pairwise
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from .places import Choice, Place, Shape, Text

DEAD = -1
UNKNOWN = -2

Steps = tuple[tuple[int, Place], ...]  # (index of the place that is left, place that is reached)
ByteRanges = tuple[tuple[int, int], ...]  # (first byte, last byte), ascending

_PATTERNS = 4_096  # kept for all constraints; a hundred are in use as a rule


class Kind(Enum):
    PASS = "one place, in the middle of its leaf"
    END = "one place, with which its leaf is over"
    MIXED = "anything else"


class Move:
    """Where some bytes lead; `index` and `place` are the first step."""

    __slots__ = ("index", "kind", "place", "ranges", "steps")

    def __init__(self, steps: Steps, ranges: ByteRanges) -> None:
        self.steps = steps
        self.ranges = ranges
        self.index, self.place = steps[0]
        if len(steps) > 1 or self.place.rests:
            self.kind = Kind.MIXED
        elif self.place.accepting:
            self.kind = Kind.END if self.place.terminal else Kind.MIXED
        else:
            self.kind = Kind.PASS


class Split(Protocol):
    @property
    def moves(self) -> list[Move]: ...

    @property
    def only_byte(self) -> int:
        """The one byte that leads on, or -1."""

    def begin(self, row: NDArray[np.int32]) -> None:
        """Writes the row of a table that knows the dead bytes only. row: [256]"""

    def move(self, byte: int) -> Move | None:
        """The move of a byte; None when it is dead."""


class ShapedSplit:
    """A split by the pattern of its places' shapes."""

    __slots__ = ("_made", "_pattern", "_places", "only_byte")

    def __init__(self, places: tuple[Place, ...]) -> None:
        self._places = places
        self._pattern = _pattern(tuple([place.shape for place in places]))
        self._made: list[Move | None] = [None] * len(self._pattern.steps)
        self.only_byte = self._pattern.only_byte

    @property
    def moves(self) -> list[Move]:
        return [self._move(number) for number in range(len(self._made))]

    def begin(self, row: NDArray[np.int32]) -> None:
        row[:] = self._pattern.first_row

    def move(self, byte: int) -> Move | None:
        number = self._pattern.numbers[byte]
        return None if number < 0 else self._move(number)

    def _move(self, number: int) -> Move:
        move = self._made[number]
        if move is None:
            places, pattern = self._places, self._pattern
            steps = tuple([(index, places[index].behind[target]) for index, target in pattern.steps[number]])
            move = self._made[number] = Move(steps, pattern.ranges[number])
        return move


class LiteralSplit:
    """The split of one place inside of literals: every edge is one byte and leads to a place of its own."""

    __slots__ = ("_edges", "only_byte")

    def __init__(self, place: Text | Choice) -> None:
        self._edges = {byte: behind for byte, _, behind in place.edges}
        self.only_byte = next(iter(self._edges)) if len(self._edges) == 1 else -1

    @property
    def moves(self) -> list[Move]:
        return [_move_of(byte, behind) for byte, behind in self._edges.items()]

    def begin(self, row: NDArray[np.int32]) -> None:
        row.fill(DEAD)
        for byte in self._edges:
            row[byte] = UNKNOWN

    def move(self, byte: int) -> Move | None:
        behind = self._edges.get(byte)
        return None if behind is None else _move_of(byte, behind)


class WholeLiteral:
    """Of a state inside of a literal whose row was written when it was made: one byte leads on."""

    __slots__ = ("only_byte",)

    def __init__(self, only_byte: int) -> None:
        self.only_byte = only_byte

    @property
    def moves(self) -> list[Move]:
        return []

    def begin(self, row: NDArray[np.int32]) -> None:
        """The row is whole."""

    def move(self, byte: int) -> Move | None:
        return None


WHOLE_LITERALS = [WholeLiteral(byte) for byte in range(256)]


def _move_of(byte: int, behind: Place) -> Move:
    return Move(((0, behind),), ((byte, byte),))


def split(places: tuple[Place, ...]) -> Split:
    """The split of places that a state stands in together."""
    if len(places) == 1 and isinstance(places[0], Text | Choice):
        return LiteralSplit(places[0])
    return ShapedSplit(places)


class _Pattern:
    """How bytes part that several places tell apart, whatever lies behind them.

    steps: of each move, (index of the place that is left, number of the place behind it, as its shape counts).
    ranges: of each move.
    numbers: [256] the move of a byte, -1: dead.
    """

    __slots__ = ("first_row", "numbers", "only_byte", "ranges", "steps")

    def __init__(self, parts: list[tuple[int, int, int]], steps: list[tuple[tuple[int, int], ...]]) -> None:
        """parts: (first byte, last byte, number of the move), ascending."""
        self.steps = steps
        self.numbers = [-1] * 256
        ranges: list[list[tuple[int, int]]] = [[] for _ in steps]
        for first, last, number in parts:
            ranges[number].append((first, last))
            self.numbers[first : last + 1] = [number] * (last + 1 - first)
        self.ranges: list[ByteRanges] = list(map(tuple, ranges))
        self.first_row: NDArray[np.int32] = np.where(np.array(self.numbers) < 0, DEAD, UNKNOWN).astype(np.int32)
        self.only_byte = parts[0][0] if len(parts) == 1 and parts[0][0] == parts[0][1] else -1


@lru_cache(maxsize=_PATTERNS)
def _pattern(shapes: tuple[Shape, ...]) -> _Pattern:
    """From byte to byte where an edge of some place begins or ends, with the places that have an edge there."""
    begins: dict[int, list[tuple[int, int]]] = {}
    ends: dict[int, list[int]] = {}
    for index, shape in enumerate(shapes):
        for first, last, target in shape.edges:
            begins.setdefault(first, []).append((index, target))
            ends.setdefault(last + 1, []).append(index)
    moves: dict[tuple[tuple[int, int], ...], int] = {}
    parts: list[tuple[int, int, int]] = []
    active: dict[int, int] = {}
    bounds = sorted(begins.keys() | ends.keys())
    for byte, following in pairwise(bounds):
        for index in ends.get(byte, ()):
            del active[index]
        active.update(begins.get(byte, ()))
        if active:
            steps = tuple(sorted(active.items()))
            parts.append((byte, following - 1, moves.setdefault(steps, len(moves))))
    return _Pattern(parts, list(moves))
