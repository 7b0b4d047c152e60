"""A character automaton byte by byte: a place for each of its states, made when a text comes there."""

from __future__ import annotations

from functools import cached_property
from heapq import heapify, heappop, heappush

from ..language import Dfa, Ranges
from .characters import Tails, character_edges, covers_plain, shortest_character
from .places import END, ENDLESS, Edges, Place


def character_automaton(dfa: Dfa, spelled: bool) -> Place:
    """The place before a text of the automaton."""
    return _States(dfa, spelled).place(0)


class _States:
    """shortest: bytes from each state to an end; ENDLESS where none is reached, and no edge leads there."""

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
            place = self._places[state] = END if over else _StatePlace(self, state)
        return place


class _StatePlace(Place):
    """Before the characters that lead on from a state."""

    __slots__ = ("_state", "_states")

    def __init__(self, states: _States, state: int) -> None:
        super().__init__(states.shortest[state], accepting=states.dfa.accepting[state])
        self._states = states
        self._state = state

    @property
    def terminal(self) -> bool:
        return not self._states.dfa.edges[self._state]

    @property
    def plain(self) -> int:
        return self._states.plain_runs[self._state]

    def _make_edges(self) -> Edges:
        states = self._states
        labelled = [
            (first, last, states.place(target))
            for ranges, target in states.dfa.edges[self._state]
            if states.shortest[target] < ENDLESS
            for first, last in ranges
        ]
        labelled.sort(key=_first)
        return character_edges(labelled, states.spelled, states.tails)


def _first(item: tuple[int, int, Place]) -> int:
    return item[0]


def _shortest(dfa: Dfa, spelled: bool) -> list[int]:
    """Dijkstra's algorithm from the accepting states, against the edges."""
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
    """For each state, how many plain characters are certain to be taken, whichever they are.

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
    return any(last >= 0x20 and not (first == last and first in (0x22, 0x5C, 0x7F)) for first, last in ranges)
