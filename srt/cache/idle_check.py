"""Checks the whole tree and pool, a few nodes at a time, while no request runs.

    to visit ──visit──▶ visited      new nodes begin on the left, nodes that change go back there, removed ones leave

Requests may run between two visits. The sums over the visited nodes are kept true at all times. So when no node is left
to visit they are the sums over the whole tree, and must equal the tree's own sums and match the pool's free slots. The
next round visits every node again.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from .slot_allocator import IntegrityError, SlotAllocator

if TYPE_CHECKING:
    from .eviction import EvictionPolicy
    from .radix_cache import RadixNode

_SLICE = 128  # nodes in a slice at most; about a third of a millisecond
_SLOTS = 64  # slots of a long node that count as one more node


class IdleCheck:
    """Keeps all nodes of one tree and the progress of the check. The tree reports changes; roots are left out."""

    def __init__(self, pool: SlotAllocator, eviction: EvictionPolicy) -> None:
        self._pool = pool
        self._eviction = eviction
        self.visits = 0  # cumulative
        self.forget()

    def __len__(self) -> int:
        return len(self._to_visit) + len(self._visited)

    def __contains__(self, node: RadixNode) -> bool:
        return node.id in self._to_visit or node.id in self._visited

    # ------------------------------------------------------------------------------------------ the tree says

    def forget(self) -> None:
        """Forgets all nodes, after the tree was emptied."""
        self._to_visit: dict[int, RadixNode] = {}
        self._visited: dict[int, RadixNode] = {}
        self._begin()

    def added(self, node: RadixNode) -> None:
        self._to_visit[node.id] = node

    def changes(self, node: RadixNode) -> None:
        """Makes a node unvisited. Called before its tokens, slots or pins change."""
        if self._visited.pop(node.id, None) is not None:
            self._subtract(node)
            self._to_visit[node.id] = node

    def removed(self, node: RadixNode) -> None:
        if self._to_visit.pop(node.id, None) is None:
            del self._visited[node.id]
            self._subtract(node)

    # ------------------------------------------------------------------------------------------ the check

    def visit_some(self) -> bool:
        """Visits the nodes of one slice; no request may hold a node. False: none is left.

        Raises:
            IntegrityError: names the node.
        """
        work = 0
        while self._to_visit and work < _SLICE:
            _, node = self._to_visit.popitem()
            self._visit(node)
            self._visited[node.id] = node
            work += 1 + len(node.slots) // _SLOTS
        return bool(self._to_visit)

    def end(self, *, tokens: int, held: int, pinned: int, pins: Mapping[int, int]) -> None:
        """Compares the sums of all visited nodes with the tree's, and begins the next round. All nodes are visited.

        Args:
            tokens, held, pinned: the sums of the tree.
            pins: node id → pins that were put on it.

        Raises:
            IntegrityError: says what contradicts what.
        """
        assert not self._to_visit, "the round is not over"
        under_pins = sum(len(self._visited[number].tokens) for number in self._pins)
        if (self._tokens, under_pins, under_pins) != (tokens, held, pinned):
            raise IntegrityError(
                f"the tree has {self._tokens} tokens, {under_pins} pinned, and nobody runs; its sums say {tokens}, "
                f"{held} held, {pinned} pinned"
            )
        if self._pins != dict(pins):
            raise IntegrityError("the tree has pins that nobody has put there, or lacks some")
        self._pool.check_map(self._taken, self._tokens)
        self._to_visit, self._visited = self._visited, {}
        self._begin()

    def _begin(self) -> None:
        self._taken = np.zeros(self._pool.num_slots, dtype=np.bool_)  # slots of visited nodes
        self._tokens = 0  # of visited nodes
        self._pins: dict[int, int] = {}  # visited node → its pins

    def _visit(self, node: RadixNode) -> None:
        self.visits += 1
        require_node(node, self._eviction)
        if node.locks:
            raise IntegrityError(f"node {node.id} has {node.locks} locks, and nobody runs")
        parent = node.parent
        if parent is None or parent.children.get(int(node.tokens[0])) is not node:
            raise IntegrityError(f"node {node.id} is not in the tree")
        if not (parent.is_root or parent in self) or not all(child in self for child in node.children.values()):
            raise IntegrityError(f"node {node.id} has a parent or a child that is not in the tree")
        if self._taken[node.slots].any() or self._pool.are_free(node.slots):
            raise IntegrityError(f"node {node.id} has slots that are free, or another node's")
        self._taken[node.slots] = True
        self._tokens += len(node.tokens)
        if node.pins:
            self._pins[node.id] = node.pins

    def _subtract(self, node: RadixNode) -> None:
        self._taken[node.slots] = False
        self._tokens -= len(node.tokens)
        self._pins.pop(node.id, None)


def require_node(node: RadixNode, eviction: EvictionPolicy) -> None:
    """Checks the invariants of a node that hold at any time.

    Raises:
        IntegrityError: names the node.
    """
    if not 0 < len(node.tokens) == len(node.slots):
        raise IntegrityError(f"node {node.id} has {len(node.tokens)} tokens and {len(node.slots)} slots")
    if node.evictable and not eviction.knows(node):
        raise IntegrityError(f"leaf {node.id} can never be evicted: it is not in the queue")
    for first, child in node.children.items():
        if child.parent is not node or child.tokens[:1].tolist() != [first] or child.salt != node.salt:
            raise IntegrityError(f"node {child.id} is in the wrong place under node {node.id}")
