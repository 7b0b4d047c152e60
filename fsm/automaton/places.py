"""Places: where one stands inside a literal, a set of characters or a character automaton, byte by byte.

A place is a state of a small deterministic byte automaton. Its edges are made when somebody first asks for them, so
that thousands of options, or the 770 ranges of `\\w`, cost nothing until a text gets there.

    Place
    ├── Text         inside a byte string
    ├── Choice       inside one of several byte strings; equal beginnings are one place (a trie)
    ├── Character    before a character: of a set, or of a state of a character automaton (see characters)
    └── Tail         inside a character, one to three bytes of UTF-8 before its end
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

if TYPE_CHECKING:
    from .nodes import Node

ENDLESS = 1 << 60  # a length or count without end; sums of it stay far above every real one

Edges = tuple[tuple[int, int, "Place"], ...]  # (first byte, last byte, next place); ascending, disjoint


class Shape:
    """How the bytes of a place part, whatever lies behind them; the same object for places of which that is the same.

    edges: (first byte, last byte, number of the place behind it), numbers in the order in which places first come.
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

    __slots__ = ("_behind", "_edges", "_plain", "_shape", "accepting", "rests", "shortest")

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
        self._behind: tuple[Place, ...] = ()

    @property
    def plain(self) -> int:
        """How many plain characters (see characters.PLAIN) are certain to be taken from here, whichever they are."""
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
            self._behind = tuple(numbers)
            self._shape = _SHAPES.get(edges) or _SHAPES.setdefault(edges, Shape(edges))
        return self._shape

    @property
    def behind(self) -> tuple[Place, ...]:
        """The places behind the edges, by the numbers of the shape. Known once the shape is."""
        return self._behind

    @property
    def terminal(self) -> bool:
        """Nothing leads on from here inside the leaf."""
        return not self.edges

    def _make_edges(self) -> Edges:
        return ()

    def beyond_the_empty_text(self) -> Place:
        """The same place, where the leaf may not end at once."""
        after = [1 + place.shortest for _, _, place in self.edges]
        return Place(min(after, default=ENDLESS), edges=self.edges, plain=self.plain)


END = Place(0, accepting=True, edges=())  # behind a character


class Text(Place):
    """Inside a byte string, `offset` bytes after its beginning."""

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


class Choice(Place):
    """Inside byte strings that agree in their first `depth` bytes."""

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
    return Text(data, depth) if len(options) == 1 and rest is None else Choice(options, depth)
