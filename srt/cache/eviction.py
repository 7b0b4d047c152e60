"""Chooses which evictable leaf of the radix tree gives its slots back next.

The tree owns the nodes. It adds a leaf that nothing holds to its EvictionPolicy, and pops the next leaf to remove when
the pool runs out. A leaf that is locked, grows children or is used afterwards stays in the policy: `pop` skips leaves
that are no longer evictable.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from .radix_cache import RadixNode


class EvictionPolicy(Protocol):
    """Decides the order in which leaves are evicted. The implementation is `LeastRecentlyUsed`."""

    operations: int  # cumulative, each of O(log n) at most; tests bound them by the number of uses and evictions

    def add(self, node: RadixNode) -> None:
        """Adds a node that has become evictable. The policy may have it already."""

    def pop(self) -> RadixNode | None:
        """Removes and returns the next evictable node; None: there is none."""

    def knows(self, node: RadixNode) -> bool:
        """Returns whether `pop` will return the node at some time, if it stays evictable."""

    def clear(self) -> None:
        """Forgets all nodes."""


class LeastRecentlyUsed:
    """Evicts leaves of the lowest priority first, and of these the least recently used.

    A heap has one entry for each node, checked when it is popped: O(log n) for each eviction, and at most one more
    correction for each use.
    """

    def __init__(self) -> None:
        self.operations = 0
        self._heap: list[tuple[int, int, int, RadixNode]] = []  # (priority, last use, node id, node)
        self._known: set[int] = set()  # ids of nodes in the heap

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, node: RadixNode) -> None:
        if node.id not in self._known:
            self._known.add(node.id)
            heapq.heappush(self._heap, (node.priority, node.last_use, node.id, node))
            self.operations += 1

    def pop(self) -> RadixNode | None:
        while self._heap:
            _, last_use, number, node = heapq.heappop(self._heap)
            self.operations += 1
            self._known.discard(number)
            if not node.evictable:
                continue  # held, grown children or gone since; it is added again when that ends
            if node.last_use == last_use:
                return node
            self.add(node)  # used since: at most once per use
        return None

    def knows(self, node: RadixNode) -> bool:
        return node.id in self._known

    def clear(self) -> None:
        self._heap.clear()
        self._known.clear()
