"""Places: where one stands inside a literal, a set of characters or a character automaton, byte by byte.

A place is a state of a small deterministic byte automaton. Its edges are made when somebody first asks for them, so
that thousands of options, or the 770 ranges of `\\w`, cost nothing until a text gets there.

    Place
    ├── Text         inside a byte string
    ├── Choice       inside one of several byte strings; equal beginnings are one place (a trie)
    ├── Character    before a character: of a set, or of a state of a character automaton
    └── Tail         inside a character, one to three bytes of UTF-8 before its end
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

from .language import Ranges

if TYPE_CHECKING:
    from .nodes import Node

ENDLESS = 1 << 60  # a length or count without end; sums of it stay far above every real one

Edges = tuple[tuple[int, int, "Place"], ...]  # (first byte, last byte, next place); ascending, disjoint
Labelled = tuple[tuple[int, int, "Place"], ...]  # (first, last, the place behind); code points or parts of them

SHORT_ESCAPES = {0x08: b"\\b", 0x09: b"\\t", 0x0A: b"\\n", 0x0C: b"\\f", 0x0D: b"\\r", 0x22: b'\\"', 0x5C: b"\\\\"}
ESCAPES = {code: b"\\u%04x" % code for code in range(0x20)} | SHORT_ESCAPES

# Characters that any JSON string holds as themselves and that no control character or quote is among.
PLAIN: Ranges = ((0x20, 0x21), (0x23, 0x5B), (0x5D, 0x7E), (0x80, 0xD7FF), (0xE000, 0x10FFFF))


class Place:
    """One state of a leaf's byte automaton; the same object wherever it is the same state.

    accepting: the leaf may end here.
    rests: nodes, one of which may follow from here.
    shortest: bytes to the nearest end, those of `rests` included; ENDLESS where no end can be reached.
    plain: how many plain characters (see PLAIN) are certain to be taken from here, whichever they are.
    """

    __slots__ = ("_edges", "accepting", "plain", "rests", "shortest")

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
        self.plain = plain
        self._edges = edges

    @property
    def edges(self) -> Edges:
        if self._edges is None:
            self._edges = self._make_edges()
        return self._edges

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


class Character(Place):
    """Before one character of `characters`, each range with the place behind it."""

    __slots__ = ("_characters", "_spelled")

    def __init__(
        self,
        characters: Sequence[tuple[int, int, Place]],  # read when the edges are asked for: may be filled until then
        shortest: int,
        *,
        spelled: bool,
        accepting: bool = False,
        plain: int = 0,
    ) -> None:
        super().__init__(shortest, accepting=accepting, plain=plain)
        self._characters = characters
        self._spelled = spelled

    @property
    def terminal(self) -> bool:
        return not self._characters

    @property
    def single(self) -> bool:
        """The leaf is over behind each of the characters."""
        return all(place is END for _, _, place in self._characters)

    def _make_edges(self) -> Edges:
        raw = tuple(_without_surrogates(self._characters))
        edges: list[tuple[int, int, Place]] = []
        if self._spelled:
            raw, escaped = _split_escaped(raw)
            if escaped:
                edges += _spelling_edges(escaped, 0)
        edges += _clip(raw, 0, 0x7F)
        for marker, first, last, tail_bytes in (
            (0xC0, 0x80, 0x7FF, 1),
            (0xE0, 0x800, 0xFFFF, 2),
            (0xF0, 0x10000, 0x10FFFF, 3),
        ):
            edges += _leading_edges(_clip(raw, first, last), tail_bytes, marker)
        return tuple(sorted(edges, key=lambda edge: edge[0]))


class Tail(Place):
    """Inside a character: `remaining` continuation bytes ahead, 6 bits each, whose value decides."""

    __slots__ = ("_remaining", "_values")

    def __init__(self, remaining: int, values: Labelled) -> None:
        super().__init__(remaining + min(place.shortest for _, _, place in values))
        self._remaining = remaining
        self._values = values

    @property
    def terminal(self) -> bool:
        return False

    def _make_edges(self) -> Edges:
        return tuple(_leading_edges(self._values, self._remaining - 1, 0x80))


@lru_cache(maxsize=8192)
def _tail(remaining: int, values: Labelled) -> Place:
    """Equal suffixes of characters are one place; the cache is only a saving, an evicted one is made again."""
    return values[0][2] if remaining == 0 else Tail(remaining, values)


def _leading_edges(values: Labelled, remaining: int, marker: int) -> list[tuple[int, int, Place]]:
    """Edges of the byte above `remaining` continuation bytes, its bits added to `marker`."""
    shift = 6 * remaining
    low = (1 << shift) - 1
    groups: list[tuple[int, int, list[tuple[int, int, Place]]]] = []
    for first, last, place in values:
        head, end = first >> shift, last >> shift
        if first & low or (head == end and last & low != low):
            part = (first & low, last & low if head == end else low, place)
            if groups and groups[-1][0] == head:
                groups[-1][2].append(part)
            else:
                groups.append((head, head, [part]))
            head += 1
        if head <= end and last & low != low:
            if head < end:
                groups.append((head, end - 1, [(0, low, place)]))
            groups.append((end, end, [(0, last & low, place)]))
        elif head <= end:
            groups.append((head, end, [(0, low, place)]))
    edges: list[tuple[int, int, Place]] = []
    for head, end, parts in groups:
        place = _tail(remaining, tuple(parts))
        if edges and edges[-1][2] is place and edges[-1][1] == marker + head - 1:
            edges[-1] = (edges[-1][0], marker + end, place)
        else:
            edges.append((marker + head, marker + end, place))
    return edges


def _clip(values: Sequence[tuple[int, int, Place]], first: int, last: int) -> Labelled:
    return tuple(
        (max(start, first), min(end, last), place) for start, end, place in values if start <= last and end >= first
    )


def _without_surrogates(characters: Sequence[tuple[int, int, Place]]) -> list[tuple[int, int, Place]]:
    return [*_clip(characters, 0, 0xD7FF), *_clip(characters, 0xE000, 0x10FFFF)]


def _split_escaped(characters: Labelled) -> tuple[Labelled, list[tuple[bytes, Place]]]:
    """Characters that a JSON string holds as themselves, and the spelling of the others."""
    raw: list[tuple[int, int, Place]] = []
    for first, last in ((0x20, 0x21), (0x23, 0x5B), (0x5D, 0x10FFFF)):
        raw += _clip(characters, first, last)
    escaped = [
        (ESCAPES[code], place)
        for start, end, place in characters
        if start <= 0x5C
        for code in range(start, min(end, 0x5C) + 1)
        if code in ESCAPES
    ]
    return tuple(raw), escaped


def _spelling_edges(spellings: Sequence[tuple[bytes, Place]], depth: int) -> list[tuple[int, int, Place]]:
    """The edges of a trie of spellings, none of which begins another."""
    groups: dict[int, list[tuple[bytes, Place]]] = {}
    for spelling in spellings:
        groups.setdefault(spelling[0][depth], []).append(spelling)
    edges = []
    for byte, group in sorted(groups.items()):
        if len(group[0][0]) == depth + 1:
            edges.append((byte, byte, group[0][1]))
        else:
            behind = tuple(_spelling_edges(group, depth + 1))
            edges.append((byte, byte, Place(1 + min(place.shortest for _, _, place in behind), edges=behind)))
    return edges


def covers_plain(ranges: Sequence[tuple[int, int]]) -> bool:
    """Whether every plain character is among `ranges`, which ascend and may touch."""
    rest = iter(ranges)
    first, last = 0, -1
    for start, end in PLAIN:
        while start <= end:
            while last < start:
                first, last = next(rest, (ENDLESS, ENDLESS))
            if first > start:
                return False
            start = last + 1
    return True


def _utf8_length(code: int) -> int:
    return 1 if code < 0x80 else 2 if code < 0x800 else 3 if code < 0x10000 else 4


def shortest_character(ranges: Sequence[tuple[int, int]], spelled: bool) -> int:
    """Bytes of the shortest character of `ranges`, which ascend; ENDLESS when there is none."""
    best = ENDLESS
    for first, last in ranges:
        if not spelled or first > 0x5C:
            return min(best, _utf8_length(first))
        if (first <= 0x21 and last >= 0x20) or (first <= 0x5B and last >= 0x23) or last > 0x5C:
            return 1
        best = min(best, *(len(ESCAPES[code]) for code in range(first, last + 1)))  # nothing but escapes
    return best


@lru_cache(maxsize=4096)
def characters(ranges: Ranges, spelled: bool) -> Place:
    """The place before one character of `ranges`; one object for equal sets, so that what follows from it is shared."""
    plain = 1 if covers_plain(ranges) else 0
    labelled = tuple((first, last, END) for first, last in ranges)
    return Character(labelled, shortest_character(ranges, spelled), spelled=spelled, plain=plain)


def spell(data: bytes) -> bytes:
    """Text as a JSON string holds it, without the quotes."""
    return b"".join(ESCAPES.get(byte, bytes((byte,))) for byte in data)
