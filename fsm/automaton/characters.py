"""Characters byte by byte: sets of code points and automata over them, through UTF-8 and the spelling of JSON strings.

    U+0041..U+00E9    41..7F -> end    C2 -> (80..BF -> end)    C3 -> (80..A9 -> end)

What follows a first byte depends on the bits that are left only, so equal remainders are one place: all of U+1000 to
U+CFFF share two. The places of a character automaton are made when a text comes to its states.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, lru_cache
from heapq import heapify, heappop, heappush

from ..language import Dfa, Ranges
from .places import END, ENDLESS, Edges, Place

Labelled = tuple[tuple[int, int, Place], ...]  # (first, last, the place after); code points or parts of them

SHORT_ESCAPES = {0x08: b"\\b", 0x09: b"\\t", 0x0A: b"\\n", 0x0C: b"\\f", 0x0D: b"\\r", 0x22: b'\\"', 0x5C: b"\\\\"}
ESCAPES = {code: b"\\u%04x" % code for code in range(0x20)} | SHORT_ESCAPES

# Characters that any JSON string holds as themselves. No control character, quote or end of a line is among them, so
# that what a pattern calls `.` takes them all.
PLAIN: Ranges = (
    *((0x20, 0x21), (0x23, 0x5B), (0x5D, 0x7E)),
    *((0x80, 0x2027), (0x202A, 0xD7FF), (0xE000, 0x10FFFF)),
)


Tails = dict[tuple[int, Labelled], Place]  # by (bytes left, values): equal remainders are one place


class Character(Place):
    """The place before one character of a set, with which the leaf is over."""

    __slots__ = ("ranges", "spelled")

    def __init__(self, ranges: Ranges, spelled: bool) -> None:
        super().__init__(shortest_character(ranges, spelled), plain=1 if covers_plain(ranges) else 0)
        self.ranges = ranges
        self.spelled = spelled

    @property
    def terminal(self) -> bool:
        return not self.ranges

    def _make_edges(self) -> Edges:
        return character_edges([(first, last, END) for first, last in self.ranges], self.spelled, None)


class Tail(Place):
    """The place inside a character: `remaining` continuation bytes ahead, 6 bits each, whose value decides."""

    __slots__ = ("_remaining", "_tails", "_values")

    def __init__(self, remaining: int, values: Labelled, tails: Tails | None) -> None:
        super().__init__(remaining + min(place.shortest for _, _, place in values))
        self._tails = tails
        self._remaining = remaining
        self._values = values

    @property
    def terminal(self) -> bool:
        return False

    def _make_edges(self) -> Edges:
        return tuple(_leading_edges(self._values, self._remaining - 1, 0x80, self._tails))


def character_edges(characters: Sequence[tuple[int, int, Place]], spelled: bool, tails: Tails | None) -> Edges:
    """Returns the first bytes of characters.

    Args:
        characters: code points with the place after them, ascending.
        spelled: as JSON strings write them.
        tails: keeps the remainders of one character automaton, and must not outlive it; None for sets of characters,
            which share the remainders of all sets.
    """
    raw: Labelled = (*_clip(characters, 0, 0xD7FF), *_clip(characters, 0xE000, 0x10FFFF))  # without surrogates
    edges: list[tuple[int, int, Place]] = []
    if spelled:
        raw, escaped = _split_escaped(raw)
        if escaped:
            edges += _spelling_edges(escaped, 0)
    edges += _clip(raw, 0, 0x7F)
    for marker, first, last, tail_bytes in (
        (0xC0, 0x80, 0x7FF, 1),
        (0xE0, 0x800, 0xFFFF, 2),
        (0xF0, 0x10000, 0x10FFFF, 3),
    ):
        edges += _leading_edges(_clip(raw, first, last), tail_bytes, marker, tails)
    return tuple(sorted(edges, key=_first_byte))


def _first_byte(edge: tuple[int, int, Place]) -> int:
    return edge[0]


def _tail(remaining: int, values: Labelled, tails: Tails | None) -> Place:
    if remaining == 0:
        return values[0][2]
    if tails is None:
        return _tail_of_sets(remaining, values)
    return tails.setdefault((remaining, values), Tail(remaining, values, tails))


@lru_cache(maxsize=8192)
def _tail_of_sets(remaining: int, values: Labelled) -> Place:
    """Returns the cache is only a saving: a remainder that was evicted is made again."""
    return Tail(remaining, values, None)


def _leading_edges(values: Labelled, remaining: int, marker: int, tails: Tails | None) -> list[tuple[int, int, Place]]:
    """Returns edges of the byte above `remaining` continuation bytes, its bits added to `marker`."""
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
        place = _tail(remaining, tuple(parts), tails)
        if edges and edges[-1][2] is place and edges[-1][1] == marker + head - 1:
            edges[-1] = (edges[-1][0], marker + end, place)
        else:
            edges.append((marker + head, marker + end, place))
    return edges


def _clip(values: Sequence[tuple[int, int, Place]], first: int, last: int) -> Labelled:
    return tuple(
        (max(start, first), min(end, last), place) for start, end, place in values if start <= last and end >= first
    )


def _split_escaped(characters: Labelled) -> tuple[Labelled, list[tuple[bytes, Place]]]:
    """Returns characters that a JSON string holds as themselves, and the spelling of the others."""
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
    """Returns the edges of a trie of spellings, none of which begins another."""
    groups: dict[int, list[tuple[bytes, Place]]] = {}
    for spelling in spellings:
        groups.setdefault(spelling[0][depth], []).append(spelling)
    edges = []
    for byte, group in sorted(groups.items()):
        if len(group[0][0]) == depth + 1:
            edges.append((byte, byte, group[0][1]))
        else:
            longer = tuple(_spelling_edges(group, depth + 1))
            edges.append((byte, byte, Place(1 + min(place.shortest for _, _, place in longer), edges=longer)))
    return edges


def covers_plain(ranges: Sequence[tuple[int, int]]) -> bool:
    """Tells whether every plain character is among `ranges`, which ascend and may touch."""
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
    """Returns bytes of the shortest character of `ranges`, which ascend; ENDLESS when there is none."""
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
    return Character(ranges, spelled)


def spell(data: bytes) -> bytes:
    """Writes text as a JSON string holds it, without the quotes."""
    return b"".join(ESCAPES.get(byte, bytes((byte,))) for byte in data)


def character_automaton(dfa: Dfa, spelled: bool) -> Place:
    """Returns the place before a text of the automaton."""
    return CharacterStates(dfa, spelled).place(0)


class CharacterStates:
    """Makes the places of one character automaton.

    shortest: bytes from each state to an end; ENDLESS where none is reached, and no edge leads there."""

    def __init__(self, dfa: Dfa, spelled: bool) -> None:
        self.dfa = dfa
        self.spelled = spelled
        self.tails: Tails = {}
        self.shortest = _shortest(dfa, spelled)
        self._places: dict[int, Place] = {}

    @cached_property
    def plain_runs(self) -> list[int]:
        return _plain_runs(self.dfa)

    def place(self, state: int) -> Place:
        place = self._places.get(state)
        if place is None:
            over = self.dfa.accepting[state] and not self.dfa.edges[state]
            place = self._places[state] = END if over else StatePlace(self, state)
        return place


class StatePlace(Place):
    """The place before the characters that lead on from a state."""

    __slots__ = ("state", "states")

    def __init__(self, states: CharacterStates, state: int) -> None:
        super().__init__(states.shortest[state], accepting=states.dfa.accepting[state])
        self.states = states
        self.state = state

    @property
    def terminal(self) -> bool:
        return not self.states.dfa.edges[self.state]

    @property
    def plain(self) -> int:
        return self.states.plain_runs[self.state]

    def without_empty_text(self) -> Place:
        begun = StatePlace(self.states, self.state)
        begun.accepting = False
        begun.shortest = super().without_empty_text().shortest
        return begun

    def _make_edges(self) -> Edges:
        states = self.states
        labelled = [
            (first, last, states.place(target))
            for ranges, target in states.dfa.edges[self.state]
            if states.shortest[target] < ENDLESS
            for first, last in ranges
        ]
        labelled.sort(key=_first)
        return character_edges(labelled, states.spelled, states.tails)


def _first(item: tuple[int, int, Place]) -> int:
    return item[0]


def _shortest(dfa: Dfa, spelled: bool) -> list[int]:
    """Finds shortest lengths by Dijkstra's algorithm from the accepting states, against the edges."""
    into: list[list[tuple[int, int]]] = [[] for _ in dfa.edges]  # [states]: (state before, bytes of a character)
    for state, edges in enumerate(dfa.edges):
        for ranges, target in edges:
            into[target].append((state, shortest_character(ranges, spelled)))
    shortest = [0 if accepting else ENDLESS for accepting in dfa.accepting]
    queue = [(0, state) for state, accepting in enumerate(dfa.accepting) if accepting]
    heapify(queue)
    while queue:
        length, state = heappop(queue)
        if length > shortest[state]:
            continue
        for before, step in into[state]:
            if length + step < shortest[before]:
                shortest[before] = length + step
                heappush(queue, (length + step, before))
    return shortest


def _plain_runs(dfa: Dfa) -> list[int]:
    """Counts, for each state, the plain characters that are certain to be taken, whichever they are.

    Breadth first against the edges: a run ends where the nearest state does not take every plain character.
    """
    covered = [covers_plain(sorted(item for ranges, _ in edges for item in ranges)) for edges in dfa.edges]
    runs = [ENDLESS if full else 0 for full in covered]
    into: list[list[int]] = [[] for _ in dfa.edges]
    for state, edges in enumerate(dfa.edges):
        for ranges, target in edges:
            if covered[state] and _meets_plain(ranges):
                into[target].append(state)
    layer = [state for state, full in enumerate(covered) if not full]
    length = 0
    while layer:
        length += 1
        reached = {before for state in layer for before in into[state] if runs[before] == ENDLESS}
        layer = sorted(reached)
        for state in layer:
            runs[state] = length
    return runs


def _meets_plain(ranges: Ranges) -> bool:
    return any(first <= end and last >= start for first, last in ranges for start, end in PLAIN)
