"""Finds the tokens that an automaton lets through: a trie and a transition table walked together.

The table is filled as it is needed: a walk asks for what is UNKNOWN in it. When it is told to stop, or has gone as far
as it may, it hands back where it has not been, as work for the next walk:

    work    [n, 3]  (begin, end, state): the sibling nodes from `begin` on, with all below them, up to `end`;
                    the text before them has led to `state`

This walk is numpy, level by level. A native one (kernels/cpu) may be handed in; both do the same.
"""

from __future__ import annotations

import itertools
import weakref
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ..automaton.automaton import UNKNOWN, Automaton
from .trie import END, NO_TOKEN, STEP, TOKEN, Section, Trie


class Rows(Protocol):
    """The transitions, some of them not known yet."""

    @property
    def table(self) -> NDArray[np.int32]:
        """[states, 256] next state, DEAD or UNKNOWN; another array after `find`, if need be."""

    def find(self, state: int, byte: int) -> bool:
        """Makes an entry of the table known; False: not now, and the walk is to end. Raises what states raise."""


class Fuelled:
    """An automaton that is explored for as long as there is fuel: targets, each of which takes one.

    Attributes:
        fuel: what is left; below 0 where the last target took more than there was.
    """

    __slots__ = ("_automaton", "fuel")

    def __init__(self, automaton: Automaton, fuel: int) -> None:
        self._automaton = automaton
        self.fuel = fuel

    @property
    def table(self) -> NDArray[np.int32]:
        return self._automaton.table

    def find(self, state: int, byte: int) -> bool:
        if self.fuel <= 0:
            return False
        before = self._automaton.steps
        self._automaton.step(state, byte)
        self.fuel -= max(1, self._automaton.steps - before)
        return True


class Walk(Protocol):
    def __call__(
        self, trie: Trie, rows: Rows, work: NDArray[np.int32], bits: NDArray[np.uint32], limit: int
    ) -> tuple[NDArray[np.int32], int]:
        """Sets the bits of the tokens that are let through.

        Args:
            work: [n, 3], n > 0.
            bits: [words] of a mask; written to.
            limit: of nodes to visit before the rest is handed back; at least one is visited where it is known.

        Returns:
            The work that is left, and the nodes visited.

        Raises:
            LimitExceeded: of the automaton.
        """


def work_of(sections: list[Section], state: int) -> NDArray[np.int32]:
    """Returns [n, 3] ranges of nodes, all entered in one state."""
    return np.array([(section.begin, section.end, state) for section in sections], np.int32).reshape(-1, 3)


def work_below(trie: Trie, sections: list[int], row: NDArray[np.int32], state: int) -> NDArray[np.int32]:
    """Returns [n, 3] whole sections entered in one state, whose row of the table is known.

    The subtrees of dead bytes are left out: they lie megabytes apart, and looking at one is a cache miss.
    """
    starts = trie.roots[sections][:, row >= 0]
    starts = starts[starts >= 0]
    work = np.empty((len(starts), 3), np.int32)
    work[:, 0] = starts
    work[:, 1] = trie.nodes[starts, END]
    work[:, 2] = state
    return work


class NumpyWalk:
    """Walks with numpy, level by level.

    Needs the children of every node: made at the first walk through a trie, forgotten with it.
    """

    def __init__(self) -> None:
        self._families: weakref.WeakKeyDictionary[Trie, _Families] = weakref.WeakKeyDictionary()

    def __call__(
        self, trie: Trie, rows: Rows, work: NDArray[np.int32], bits: NDArray[np.uint32], limit: int
    ) -> tuple[NDArray[np.int32], int]:
        families = self._families.get(trie)
        if families is None:
            families = self._families[trie] = _Families.of(trie)
        nodes, states = families.siblings(work[:, 0], work[:, 1], work[:, 2])
        left: list[NDArray[np.int32]] = []
        visited = 0
        goes_on = True
        while len(nodes):
            if visited >= limit:
                left.append(np.stack([nodes, trie.nodes[nodes, END], states], axis=1).astype(np.int32))
                break
            goes_on = goes_on and _find_all(rows, states, trie.nodes[nodes, STEP] & 0xFF)
            following = rows.table[states, trie.nodes[nodes, STEP] & 0xFF]
            unknown = following == UNKNOWN
            if unknown.any():
                apart = nodes[unknown]
                left.append(np.stack([apart, trie.nodes[apart, END], states[unknown]], axis=1).astype(np.int32))
            visited += len(nodes) - int(np.count_nonzero(unknown))
            live = following >= 0
            nodes, states = nodes[live], following[live]
            _allow(trie, nodes, bits)
            nodes, states = families.children(nodes, states)
        return (np.concatenate(left) if left else np.empty((0, 3), np.int32)), visited


def _find_all(rows: Rows, states: NDArray[np.int32], steps: NDArray[np.int32]) -> bool:
    """Asks for all that is not known; whether it was to be had."""
    unknown = rows.table[states, steps] == UNKNOWN
    for question in np.unique(states[unknown].astype(np.int64) << 8 | steps[unknown]).tolist():
        state, byte = question >> 8, question & 0xFF
        if rows.table.item(state, byte) == UNKNOWN and not rows.find(state, byte):  # a target is that of many bytes
            return False
    return True


def _allow(trie: Trie, nodes: NDArray[np.int32], bits: NDArray[np.uint32]) -> None:
    """Sets the bits of all tokens that end in these nodes."""
    tokens = trie.nodes[nodes, TOKEN]
    single = tokens[tokens >= 0]
    groups = nodes[tokens < NO_TOKEN].tolist()
    if groups:
        single = np.concatenate([single, np.array([t for node in groups for t in trie.tokens_at(node)], np.int32)])
    np.bitwise_or.at(bits, single >> 5, np.uint32(1) << (single & 31).astype(np.uint32))


@dataclass(frozen=True, slots=True)
class _Families:
    """Nodes by parent: those of parent p are members[first[p + 1] : first[p + 2]]; roots have the parent −1."""

    members: NDArray[np.int32]  # [nodes] ascending within a parent
    first: NDArray[np.int64]  # [nodes + 2]
    parents: NDArray[np.int32]  # [nodes]
    keys: NDArray[np.int64]  # [nodes] of members: parent, then node; ascending

    @classmethod
    def of(cls, trie: Trie) -> _Families:
        count = len(trie.nodes)
        depth = trie.nodes[:, STEP] >> 8
        parents = np.full(count, -1, np.int32)
        by_depth = np.argsort(depth, kind="stable")
        bounds = np.searchsorted(depth[by_depth], np.arange(1, int(depth.max(initial=0)) + 2))
        above: NDArray[np.int64] | None = None
        for low, high in itertools.pairwise(bounds):
            level = by_depth[low:high]
            if above is not None:
                parents[level] = above[np.searchsorted(above, level) - 1]
            above = level
        members = np.argsort(parents, kind="stable").astype(np.int32)
        first = np.searchsorted(parents[members], np.arange(-1, count + 1))
        keys = _keys(parents[members], members, count)
        return cls(members, first, parents, keys)

    def siblings(
        self, begins: NDArray[np.int32], ends: NDArray[np.int32], states: NDArray[np.int32]
    ) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Returns the nodes of each range that hang where its first one hangs, each with the state of its range."""
        parents, count = self.parents[begins], len(self.members)
        low = np.searchsorted(self.keys, _keys(parents, begins, count))
        high = np.searchsorted(self.keys, _keys(parents, ends, count))
        return self._spread(low, high, states)

    def children(
        self, nodes: NDArray[np.int32], states: NDArray[np.int32]
    ) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        return self._spread(self.first[nodes + 1], self.first[nodes + 2], states)

    def _spread(
        self, low: NDArray[np.int64], high: NDArray[np.int64], states: NDArray[np.int32]
    ) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        sizes = high - low
        begins = np.cumsum(sizes) - sizes
        places = np.arange(int(sizes.sum())) - np.repeat(begins, sizes) + np.repeat(low, sizes)
        return self.members[places], np.repeat(states, sizes)


def _keys(parents: NDArray[np.int32], nodes: NDArray[np.int32], count: int) -> NDArray[np.int64]:
    return (parents.astype(np.int64) + 1) * (count + 1) + nodes
