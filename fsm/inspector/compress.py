"""Compressed automata: runs of characters that admit no choice become one edge (SGLang, section 4, appendix B.1).

    bytes        a state after each byte: what the runtime walks
    characters   a state after each character; what lies inside one is folded into an edge
    compressed   a state for each choice

        ( 0 ) -{-> ( 1 ) -"-> ( 2 ) -a-> ( 3 ) -0..9-> ( 4 )     becomes     ( 0 ) -{"a-> ( 3 ) -0..9-> ( 4 )

The runtime jumps over such a run with `Automaton.forced`, without a graph. This one is for people: how large a
constraint is, and how much of it needs no choice.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np

from ..automaton.automaton import Automaton
from ..errors import LimitExceeded
from ..language import Ranges

_SHORTEST_FOLD = 4  # states in a row; fewer are drawn as they are
_ROUND = 8  # edges from a state to the one that repeats it
_LEADS = ((0xC2, 0xDF, 1), (0xE0, 0xEF, 2), (0xF0, 0xF4, 3))  # first bytes, and how many bytes of the character follow


@dataclass(frozen=True, slots=True)
class Edge:
    """An edge: one character of `first`, then exactly the text `then`."""

    source: int
    target: int
    first: Ranges
    then: str = ""

    @property
    def text(self) -> str | None:
        """The text of this edge when it stands for one only."""
        if len(self.first) == 1 and self.first[0][0] == self.first[0][1]:
            return chr(self.first[0][0]) + self.then
        return None


@dataclass(frozen=True, slots=True)
class Graph:
    """States and edges of an automaton, as far as it was explored.

    open_states: seen and not explored; they have no edges here.
    """

    start: int
    states: tuple[int, ...]
    accepting: frozenset[int]
    edges: tuple[Edge, ...]
    open_states: frozenset[int] = frozenset()

    @property
    def complete(self) -> bool:
        return not self.open_states


@dataclass(frozen=True, slots=True)
class Exploration:
    """An automaton that was explored.

    characters: the graph; byte_states, byte_edges: how many it has with a state for each byte.
    """

    characters: Graph
    byte_states: int
    byte_edges: int


@dataclass(frozen=True, slots=True)
class CompressedGraph:
    """One automaton before and after compression, both with whole characters."""

    before: Graph
    after: Graph

    @property
    def removed_share(self) -> float:
        """The share of states that compression takes away."""
        return 1 - len(self.after.states) / len(self.before.states)


@dataclass(frozen=True, slots=True)
class ForcedShare:
    """Measures the shortest text of a constraint: its bytes, and how many of them admit no choice."""

    text: bytes
    forced: int

    @property
    def share(self) -> float:
        return self.forced / len(self.text) if self.text else 0.0


def explore(automaton: Automaton, most_states: int) -> Exploration:
    """Returns the states that are reached first, breadth first, and the edges between them.

    Characters that lead from one state to the same other one are one edge. Exploring ends when `most_states` states
    have been looked at, or where the limits of the automaton end it. States are numbered as they are found, whatever
    the automaton was used for before.
    """
    explorer = _Explorer(automaton)
    numbers = {automaton.start: 0}
    waiting = [automaton.start]
    edges: list[Edge] = []
    explored = 0
    for state in waiting:
        if explored == most_states:
            break
        try:
            targets = explorer.characters(state)
        except LimitExceeded:
            break
        explored += 1
        for target, ranges in targets.items():
            if target not in numbers:
                numbers[target] = len(numbers)
                waiting.append(target)
            edges.append(Edge(numbers[state], numbers[target], ranges))
    graph = Graph(
        0,
        tuple(numbers.values()),
        frozenset(number for state, number in numbers.items() if automaton.accepting(state)),
        tuple(edges),
        frozenset(numbers[state] for state in waiting[explored:]),
    )
    return Exploration(graph, len(numbers.keys() | explorer.bytes.keys()), sum(map(len, explorer.bytes.values())))


class _Explorer:
    """Explores breadth first. bytes: what was looked at so far: state -> (first byte, last byte, next state)."""

    def __init__(self, automaton: Automaton) -> None:
        self.bytes: dict[int, list[tuple[int, int, int]]] = {}
        self._automaton = automaton
        self._inside: dict[tuple[int, int], dict[int, Ranges]] = {}

    def characters(self, state: int) -> dict[int, Ranges]:
        """Finds next states by the characters that lead to them."""
        found: dict[int, list[tuple[int, int]]] = {}
        for first, last, target in self._row(state):
            if first < 0x80:
                found.setdefault(target, []).append((first, min(last, 0x7F)))
            for lead, end, following in _LEADS:
                for byte in range(max(first, lead), min(last, end) + 1):
                    base = (byte & (0x3F >> following)) << 6 * following
                    for after, ranges in self._after(target, following).items():
                        found.setdefault(after, []).extend((base + low, base + high) for low, high in ranges)
        return {target: _joined(ranges) for target, ranges in found.items()}

    def _after(self, state: int, following: int) -> dict[int, Ranges]:
        """Finds next states by the values of `following` continuation bytes."""
        known = self._inside.get((state, following))
        if known is not None:
            return known
        found: dict[int, list[tuple[int, int]]] = {}
        for first, last, target in self._row(state):
            if following == 1:
                found.setdefault(target, []).append((first & 0x3F, last & 0x3F))
                continue
            for byte in range(first, last + 1):
                base = (byte & 0x3F) << 6 * (following - 1)
                for after, ranges in self._after(target, following - 1).items():
                    found.setdefault(after, []).extend((base + low, base + high) for low, high in ranges)
        joined = {target: _joined(ranges) for target, ranges in found.items()}
        self._inside[state, following] = joined
        return joined

    def _row(self, state: int) -> list[tuple[int, int, int]]:
        known = self.bytes.get(state)
        if known is not None:
            return known
        self._automaton.expand(state)
        row = self._automaton.table[state]
        ends = np.flatnonzero(np.diff(row)).tolist()
        runs = zip([0, *(end + 1 for end in ends)], [*ends, 255], strict=True)
        self.bytes[state] = [(first, last, row.item(first)) for first, last in runs if row.item(first) >= 0]
        return self.bytes[state]


def _joined(ranges: list[tuple[int, int]]) -> Ranges:
    joined: list[tuple[int, int]] = []
    for first, last in sorted(ranges):
        if joined and joined[-1][1] + 1 == first:
            joined[-1] = (joined[-1][0], last)
        else:
            joined.append((first, last))
    return tuple(joined)


def compress(graph: Graph) -> CompressedGraph:
    """Merges singular transitions into the edge before them.

    A state goes when it is neither the start nor accepting, one edge of one character leaves it, and one edge leads to
    it: a text that comes there has no choice, and came by one way only.
    """
    leaving: dict[int, list[Edge]] = {state: [] for state in graph.states}
    for edge in graph.edges:
        leaving[edge.source].append(edge)
    arriving = Counter(edge.target for edge in graph.edges)
    inside = {
        state
        for state, edges in leaving.items()
        if len(edges) == 1
        and edges[0].text is not None
        and arriving[state] == 1
        and state not in graph.accepting
        and state != graph.start
    }
    edges = []
    for edge in graph.edges:
        if edge.source in inside:
            continue
        target, then = edge.target, ""
        while target in inside:  # ends: a circle of such states would have no way in, and the start stays
            following = leaving[target][0]
            then += following.text or ""
            target = following.target
        edges.append(Edge(edge.source, target, edge.first, then))
    states = tuple(state for state in graph.states if state not in inside)
    return CompressedGraph(graph, Graph(graph.start, states, graph.accepting, tuple(edges), graph.open_states))


def folded(graph: Graph) -> Graph:
    """Makes states that differ in a count only one, with a loop: for pictures.

    ( 1 ) -0..9-> ( 2 ) -0..9-> ( 3 ) -0..9-> ( 4 ), each with the same other edges     becomes     ( 1 ) -0..9-> ( 1 )
    """
    leaving: dict[int, list[Edge]] = {state: [] for state in graph.states}
    for edge in graph.edges:
        leaving[edge.source].append(edge)
    order = {state: place for place, state in enumerate(graph.states)}
    first: dict[int, int] = {state: state for state in graph.states}
    arriving = Counter(edge.target for edge in graph.edges)
    for state in graph.states:  # in the order in which they were found: a state comes before the one that repeats it
        for edge in leaving[state]:
            if arriving[edge.target] == 1 and _counts(graph, leaving, edge):
                first[edge.target] = first[state]
        for later in _after(leaving, state):
            if first[later] == later and order[later] > order[state] and _repeats(graph, leaving, later, state):
                first[later] = first[state]
    sizes = Counter(first.values())
    first = {state: root if sizes[root] >= _SHORTEST_FOLD else state for state, root in first.items()}
    edges = dict.fromkeys(Edge(first[edge.source], first[edge.target], edge.first, edge.then) for edge in graph.edges)
    states = tuple(dict.fromkeys(first.values()))
    accepting = graph.accepting.intersection(states)
    return Graph(graph.start, states, accepting, tuple(edges), graph.open_states.intersection(states))


def _after(leaving: dict[int, list[Edge]], state: int) -> list[int]:
    """Returns the states that a few edges lead to: as many as an escape of JSON has, and the character after it."""
    found = {state: None}
    level = [state]
    for _ in range(_ROUND):
        level = [edge.target for each in level for edge in leaving[each] if edge.target not in found]
        found.update(dict.fromkeys(level))
    return list(found)[1:]


def _repeats(graph: Graph, leaving: dict[int, list[Edge]], later: int, earlier: int, depth: int = 3) -> bool:
    """Tells whether `later` goes on as `earlier` does for `depth` edges; at the end of a count it may have fewer."""
    if any((later in states) != (earlier in states) for states in (graph.accepting, graph.open_states)):
        return False
    if depth == 0:
        return True
    targets = {(edge.first, edge.then): edge.target for edge in leaving[earlier]}
    return all(
        (edge.first, edge.then) in targets
        and _repeats(graph, leaving, edge.target, targets[edge.first, edge.then], depth - 1)
        for edge in leaving[later]
    ) and (bool(leaving[later]) or not leaving[earlier])


def _counts(graph: Graph, leaving: dict[int, list[Edge]], edge: Edge) -> bool:
    """Tells whether the edge's target goes on as its source does, but for where this edge and its like lead."""
    source, target = edge.source, edge.target
    alike = all((source in states) == (target in states) for states in (graph.accepting, graph.open_states))
    others = {(each.first, each.then, each.target) for each in leaving[source] if each != edge}
    expected = {
        (each.first, each.then, each.target)
        for each in leaving[target]
        if (each.first, each.then) != (edge.first, edge.then)
    }
    return (
        source != target and alike and others == expected and not any(each.target == source for each in leaving[target])
    )


def cut(graph: Graph, most: int) -> Graph:
    """Returns the states that were found first; those beyond them that they lead to are left open."""
    kept = set(graph.states[:most])
    edges = tuple(edge for edge in graph.edges if edge.source in kept)
    beyond = {edge.target for edge in edges} - kept
    return Graph(
        graph.start,
        tuple(state for state in graph.states if state in kept | beyond),
        graph.accepting,
        edges,
        graph.open_states & kept | beyond,
    )


def forced_share(automaton: Automaton) -> ForcedShare:
    """Measures how much of the shortest text a jump-forward writes without a choice. Raises LimitExceeded."""
    text = automaton.close(automaton.start)
    state, at, forced = automaton.start, 0, 0
    while at < len(text):
        run = len(automaton.forced(state))
        forced += run
        length = max(run, 1)
        state = automaton.run(state, text[at : at + length])
        at += length
    return ForcedShare(text, forced)
