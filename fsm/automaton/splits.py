"""The bytes that places tell apart: where several places stand at once, which byte leads where.

    places    [a-m] -> P    [k-z] -> Q
    ranges    a..j: 0       k..m: 1              n..z: 2
    moves     0: (P of 0)   1: (P of 0, Q of 1)  2: (Q of 1)

It depends on the places alone, not on the frames above them: the states inside a repeat share one split. Inside of
literals, where most states have one place and are left for one byte, moves are made when they are asked for.
"""

from __future__ import annotations

from enum import Enum
from itertools import pairwise
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from .places import Choice, Place, Text

DEAD = -1
UNKNOWN = -2

Steps = tuple[tuple[int, Place], ...]  # (index of the place that is left, place that is reached)


class Kind(Enum):
    PASS = "one place, in the middle of its leaf"
    END = "one place, with which its leaf is over"
    MIXED = "anything else"


class Move:
    """Where some bytes lead; `index` and `place` are the first step.

    ranges: (first byte, last byte), ascending.
    """

    __slots__ = ("index", "kind", "place", "ranges", "steps")

    def __init__(self, steps: Steps) -> None:
        self.steps = steps
        self.ranges: list[tuple[int, int]] = []
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


class RangeSplit:
    """A split whose moves are all known."""

    __slots__ = ("_first_row", "moves", "only_byte")

    def __init__(self, ranges: list[tuple[int, int, int]], moves: list[Move]) -> None:
        """ranges: (first byte, last byte, index of the move), ascending."""
        self.moves = moves
        for first, last, index in ranges:
            moves[index].ranges.append((first, last))
        self._first_row: NDArray[np.int32] = np.full(256, DEAD, np.int32)
        for first, last, _ in ranges:
            self._first_row[first : last + 1] = UNKNOWN
        self.only_byte = ranges[0][0] if len(ranges) == 1 and ranges[0][0] == ranges[0][1] else -1

    def begin(self, row: NDArray[np.int32]) -> None:
        row[:] = self._first_row

    def move(self, byte: int) -> Move | None:
        for move in self.moves:
            for first, last in move.ranges:
                if first <= byte <= last:
                    return move
        return None


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


def _move_of(byte: int, behind: Place) -> Move:
    move = Move(((0, behind),))
    move.ranges.append((byte, byte))
    return move


def split(places: tuple[Place, ...]) -> Split:
    """The split of places that a state stands in together."""
    if len(places) != 1:
        return _split_several(places)
    place = places[0]
    return LiteralSplit(place) if isinstance(place, Text | Choice) else _split_one(place)


def _split_one(place: Place) -> Split:
    moves: dict[Place, int] = {}
    ranges = [(first, last, moves.setdefault(behind, len(moves))) for first, last, behind in place.edges]
    return RangeSplit(ranges, [Move(((0, behind),)) for behind in moves])


def _split_several(places: tuple[Place, ...]) -> Split:
    """From byte to byte where an edge of some place begins or ends, with the places that have an edge there."""
    begins: dict[int, list[tuple[int, Place]]] = {}
    ends: dict[int, list[int]] = {}
    for index, place in enumerate(places):
        for first, last, behind in place.edges:
            begins.setdefault(first, []).append((index, behind))
            ends.setdefault(last + 1, []).append(index)
    moves: dict[Steps, int] = {}
    ranges: list[tuple[int, int, int]] = []
    active: dict[int, Place] = {}
    bounds = sorted(begins.keys() | ends.keys())
    for byte, following in pairwise(bounds):
        for index in ends.get(byte, ()):
            del active[index]
        active.update(begins.get(byte, ()))
        if active:
            steps = tuple(sorted(active.items(), key=_index)) if len(active) > 1 else tuple(active.items())
            ranges.append((byte, following - 1, moves.setdefault(steps, len(moves))))
    return RangeSplit(ranges, [Move(steps) for steps in moves])


def _index(item: tuple[int, Place]) -> int:
    return item[0]
