"""Places: where one stands inside a literal, a set of characters or a character automaton, byte by byte.

A place is a state of a small deterministic byte automaton. Its edges are made when they are first asked for, so that
thousands of options, or the 770 ranges of `\\w`, cost nothing until a text gets there.

    Place
    ├── Text           inside a byte string
    ├── LiteralTrie    inside one of several byte strings; equal beginnings are one place
    ├── Character      before a character: of a set, or of a state of a character automaton (see characters)
    └── Tail           inside a character, one to three bytes of UTF-8 before its end

A text may stand in several places at once. A split says which bytes they tell apart, and where each leads:

    places    [a-m] -> P    [k-z] -> Q
    ranges    a..j: 0       k..m: 1              n..z: 2
    moves     0: (P of 0)   1: (P of 0, Q of 1)  2: (Q of 1)

It depends on the places alone, not on the frames above them: the states inside a repeat share one split. How the bytes
part depends on even less, on the shapes of the places, which constraints share: a string of JSON and its quote part the
same bytes in each of them, so that is worked out once for all (`_pattern`). Moves are made when they are asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, Protocol
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from .nodes import Node

ENDLESS = 1 << 60  # a length or count without end; sums of it stay far above every real one

Edges = tuple[tuple[int, int, "Place"], ...]  # (first byte, last byte, next place); ascending, disjoint


class Shape:
    """Partitions the bytes of a place, whatever follows them; the same object for places of which that is the same.

    edges: (first byte, last byte, number of the place after it), numbers in the order in which places first come.
    """

    __slots__ = ("__weakref__", "edges")

    def __init__(self, edges: tuple[tuple[int, int, int], ...]) -> None:
        self.edges = edges


_SHAPES: WeakValueDictionary[tuple[tuple[int, int, int], ...], Shape] = WeakValueDictionary()
_SINGLE = [Shape(((byte, byte, 0),)) for byte in range(256)]  # of literals; kept
_SHAPES.update((shape.edges, shape) for shape in _SINGLE)


class Place:
    """One state of a leaf's byte automaton; the same object wherever it is the same state.

    accepting: the leaf may end here.
    rests: nodes, one of which may follow from here.
    shortest: bytes to the nearest end, those of `rests` included; ENDLESS where no end can be reached.
    """

    __slots__ = ("_edges", "_plain", "_shape", "_targets", "accepting", "rests", "shortest")

    def __init__(
        self,
        shortest: int,
        *,
        accepting: bool = False,
        rests: tuple[Node, ...] = (),
        edges: Edges | None = None,
        plain: int = 0,
    ) -> None:
        self.shortest = shortest
        self.accepting = accepting
        self.rests = rests
        self._plain = plain
        self._edges = edges
        self._shape: Shape | None = None
        self._targets: tuple[Place, ...] = ()

    @property
    def plain(self) -> int:
        """Counts the plain characters (see characters.PLAIN) that are certain to be taken from here."""
        return self._plain

    @property
    def edges(self) -> Edges:
        if self._edges is None:
            self._edges = self._make_edges()
        return self._edges

    @property
    def shape(self) -> Shape:
        if self._shape is None:
            numbers: dict[Place, int] = {}
            edges = tuple([(first, last, numbers.setdefault(place, len(numbers))) for first, last, place in self.edges])
            self._targets = tuple(numbers)
            self._shape = _SHAPES.get(edges) or _SHAPES.setdefault(edges, Shape(edges))
        return self._shape

    @property
    def targets(self) -> tuple[Place, ...]:
        """The places that the edges lead to, by the numbers of the shape. Known once the shape is."""
        return self._targets

    @property
    def terminal(self) -> bool:
        """Nothing leads on from here inside the leaf."""
        return not self.edges

    def _make_edges(self) -> Edges:
        return ()

    def without_empty_text(self) -> Place:
        """Returns the same place, where the leaf may not end at once."""
        after = [1 + place.shortest for _, _, place in self.edges]
        return Place(min(after, default=ENDLESS), edges=self.edges, plain=self.plain)


END = Place(0, accepting=True, edges=())  # after a character


class Text(Place):
    """The place inside a byte string, `offset` bytes after its beginning."""

    __slots__ = ("_offset", "data")

    def __init__(self, data: bytes, offset: int = 0) -> None:
        super().__init__(len(data) - offset, accepting=offset == len(data))
        self.data = data
        self._offset = offset

    @property
    def terminal(self) -> bool:
        return self.accepting

    def _make_edges(self) -> Edges:
        if self.accepting:
            return ()
        byte = self.data[self._offset]
        return ((byte, byte, Text(self.data, self._offset + 1)),)


Option = tuple[bytes, "Node | None", int]  # bytes, what follows them, the fewest bytes of what follows


class LiteralTrie(Place):
    """The place inside byte strings that agree in their first `depth` bytes."""

    __slots__ = ("_depth", "_options")

    def __init__(self, options: Sequence[Option], depth: int = 0) -> None:
        ended = [rest for data, rest, _ in options if len(data) == depth]
        super().__init__(
            min((len(data) - depth + after for data, _, after in options), default=ENDLESS),
            accepting=None in ended,
            rests=tuple(rest for rest in ended if rest is not None),
        )
        self._options = options
        self._depth = depth

    @property
    def terminal(self) -> bool:
        return all(len(data) == self._depth for data, _, _ in self._options)

    @property
    def options(self) -> Sequence[Option]:
        return self._options

    def _make_edges(self) -> Edges:
        depth = self._depth
        groups: dict[int, list[Option]] = {}
        for option in self._options:
            if len(option[0]) > depth:
                groups.setdefault(option[0][depth], []).append(option)
        return tuple((byte, byte, _choice(groups[byte], depth + 1)) for byte in sorted(groups))


def _choice(options: list[Option], depth: int) -> Place:
    data, rest, _ = options[0]
    return Text(data, depth) if len(options) == 1 and rest is None else LiteralTrie(options, depth)


DEAD = -1
UNKNOWN = -2

Steps = tuple[tuple[int, Place], ...]  # (index of the place that is left, place that is reached)
ByteRanges = tuple[tuple[int, int], ...]  # (first byte, last byte), ascending

_PATTERNS = 4_096  # kept for all constraints; a hundred are in use as a rule


class MoveKind(Enum):
    PASS = "one place, in the middle of its leaf"
    END = "one place, with which its leaf is over"
    MIXED = "anything else"


class Move:
    """Says where some bytes lead; `index` and `place` are the first step."""

    __slots__ = ("index", "kind", "place", "ranges", "steps")

    def __init__(self, steps: Steps, ranges: ByteRanges) -> None:
        self.steps = steps
        self.ranges = ranges
        self.index, self.place = steps[0]
        if len(steps) > 1 or self.place.rests:
            self.kind = MoveKind.MIXED
        elif self.place.accepting:
            self.kind = MoveKind.END if self.place.terminal else MoveKind.MIXED
        else:
            self.kind = MoveKind.PASS


class Split(Protocol):
    @property
    def moves(self) -> list[Move]: ...

    @property
    def only_byte(self) -> int:
        """The one byte that leads on, or -1."""

    def begin(self, row: NDArray[np.int32]) -> None:
        """Writes the row of a table that knows the dead bytes only. row: [256]"""

    def move(self, byte: int) -> Move | None:
        """Returns the move of a byte; None when it is dead."""


class ShapedSplit:
    """Splits by the pattern of its places' shapes."""

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
            steps = tuple([(index, places[index].targets[target]) for index, target in pattern.steps[number]])
            move = self._made[number] = Move(steps, pattern.ranges[number])
        return move


class LiteralSplit:
    """Splits one place inside of literals: every edge is one byte and leads to a place of its own."""

    __slots__ = ("_edges", "only_byte")

    def __init__(self, place: Text | LiteralTrie) -> None:
        self._edges = {byte: target for byte, _, target in place.edges}
        self.only_byte = next(iter(self._edges)) if len(self._edges) == 1 else -1

    @property
    def moves(self) -> list[Move]:
        return [_move_of(byte, target) for byte, target in self._edges.items()]

    def begin(self, row: NDArray[np.int32]) -> None:
        row.fill(DEAD)
        for byte in self._edges:
            row[byte] = UNKNOWN

    def move(self, byte: int) -> Move | None:
        target = self._edges.get(byte)
        return None if target is None else _move_of(byte, target)


class WholeLiteral:
    """Stands for a state inside of a literal whose row was written when it was made: one byte leads on."""

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


def _move_of(byte: int, target: Place) -> Move:
    return Move(((0, target),), ((byte, byte),))


def split(places: tuple[Place, ...]) -> Split:
    """Returns the split of places that a state stands in together."""
    if len(places) == 1 and isinstance(places[0], Text | LiteralTrie):
        return LiteralSplit(places[0])
    return ShapedSplit(places)


class _Pattern:
    """Partitions the bytes that several places tell apart, whatever follows them.

    steps: of each move, (index of the place that is left, number of the place that is reached, as its shape counts).
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
    """Sweeps from byte to byte where an edge begins or ends, with the places that have an edge there."""
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
