"""Allocates the slots of the KV pool, and checks in idle time that pool and tree agree on every slot.

One pool serves cache and running requests; a slot holds the key and value of one token in every layer.
At any time a slot is exactly one of: free (here), in the radix tree, or private to a running request.

    slot 0          dummy: rows whose key needs no slot write here; never handed out
    slot 1 … n - 1  handed out in ascending runs, because attention reads runs faster than scattered slots
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ...lang.errors import EngineError
from ..core.instruments import FaultHook, no_faults

if TYPE_CHECKING:
    from .radix_cache import EvictionPolicy, RadixNode
    from .window_slots import WindowSlots


Slots = NDArray[np.int32]

FIRST_SLOT = 1  # after batch.DUMMY_SLOT


class IntegrityError(EngineError):
    """The bookkeeping of pool and tree contradicts itself: a bug of umbel, found before it gives a wrong token."""


class SlotAllocator:
    """Hands out the slots of one pool and takes them back. A tier in host memory would have an allocator of its own.

    Released slots are merged only when the sorted ones run out.

    Args:
        num_slots: size of the runner's pool, the dummy slot included.
        faults: visited at `memory.allocate`.
        windows: the window slots that these slots have; None: window layers have no slots of their own.
    """

    def __init__(self, num_slots: int, faults: FaultHook = no_faults, windows: WindowSlots | None = None) -> None:
        assert num_slots > FIRST_SLOT, "a pool needs a slot after the dummy"
        self.num_slots = num_slots
        self._faults = faults
        self._windows = windows
        self.clear()

    def clear(self) -> None:
        """Frees all slots."""
        self._is_free = np.ones(self.num_slots, dtype=np.bool_)
        self._is_free[:FIRST_SLOT] = False
        self._sorted: Slots = np.arange(FIRST_SLOT, self.num_slots, dtype=np.int32)  # [taken … | still free, ascending]
        self._taken = 0
        self._released: list[Slots] = []
        self._released_count = 0
        if self._windows is not None:
            self._windows.clear()

    @property
    def total(self) -> int:
        return self.num_slots - FIRST_SLOT

    @property
    def free(self) -> int:
        return len(self._sorted) - self._taken + self._released_count

    def allocate(self, count: int) -> Slots:
        """Allocates `count` free slots, ascending, each with a window slot. The caller has made room before."""
        self._faults("memory.allocate")
        assert count <= self.free, f"{count} slots asked for, {self.free} are free: the caller must evict first"
        if count > len(self._sorted) - self._taken:
            self._merge()
        slots = self._sorted[self._taken : self._taken + count].copy()
        self._taken += count
        self._is_free[slots] = False
        if self._windows is not None:
            self._windows.attach(slots)
        return slots

    def release(self, slots: Slots) -> None:
        """Takes slots back. Releasing a free slot is a bug: two requests would get the same slot."""
        if not len(slots):
            return
        if self._is_free[slots].any() or slots.min() < FIRST_SLOT:
            raise IntegrityError("a slot was released twice, or never handed out")
        if self._windows is not None:
            self._windows.detach(slots)
        self._is_free[slots] = True
        self._released.append(slots.copy())
        self._released_count += len(slots)

    def _merge(self) -> None:
        self._sorted = np.sort(np.concatenate([self._sorted[self._taken :], *self._released]))
        self._taken = 0
        self._released.clear()
        self._released_count = 0

    def are_free(self, slots: Slots) -> bool:
        """Returns whether one of them is free."""
        return bool(self._is_free[slots].any())

    def check_map(self, held: NDArray[np.bool_], count: int) -> None:
        """Checks the slots while none is private. held: bool by slot, True in the tree; count: slots in the tree.

        Raises:
            IntegrityError: gives the three numbers.
        """
        self._check_free()
        either = held ^ self._is_free
        if not either[FIRST_SLOT:].all() or held[:FIRST_SLOT].any() or np.count_nonzero(held) != count:
            raise IntegrityError(
                f"free {self.free} + held {count} of {self.total} slots: {int((~either[FIRST_SLOT:]).sum())} lost or "
                f"held twice, {count - np.count_nonzero(held)} held by one node twice"
            )

    def _check_free(self) -> None:
        """Checks the free list against the free map, and the window slots. A millisecond for 500,000 slots."""
        listed = np.concatenate([self._sorted[self._taken :], *self._released])
        frees = np.zeros(self.num_slots, dtype=np.bool_)
        frees[listed] = True
        if not np.array_equal(frees, self._is_free) or np.count_nonzero(frees) != len(listed):
            raise IntegrityError("the free list and the free map disagree")
        if self._windows is not None:
            self._windows.check(self._is_free)

    def check(self, held: Iterable[Slots]) -> None:
        """Checks that free and held slots together are all slots, none twice.

        Raises:
            IntegrityError: gives the three numbers.
        """
        arrays = list(held)
        used = np.concatenate(arrays) if arrays else np.empty(0, dtype=np.int32)
        uses = np.bincount(used, minlength=self.num_slots) if len(used) else np.zeros(self.num_slots, dtype=np.int64)
        if uses[:FIRST_SLOT].any():
            raise IntegrityError("the dummy slot is held")
        self._check_free()
        frees = self._is_free.astype(np.int64)
        if (uses[FIRST_SLOT:] + frees[FIRST_SLOT:] != 1).any():
            lost = int((uses[FIRST_SLOT:] + frees[FIRST_SLOT:] == 0).sum())
            double = int((uses[FIRST_SLOT:] + frees[FIRST_SLOT:] > 1).sum())
            raise IntegrityError(
                f"free {self.free} + held {len(used)} of {self.total} slots: {lost} lost, {double} held twice"
            )


_SLICE = 128  # nodes in a slice at most; about a third of a millisecond
_SLOTS = 64  # slots of a long node that count as one more node


class IdleCheck:
    """Checks the whole tree and pool, a few nodes at a time, while no request runs.

        to visit ──visit──▶ visited      new nodes begin on the left, nodes that change go back, removed ones leave

    The tree reports its changes; roots are left out. Requests may run between two visits. The sums over the visited
    nodes are kept true at all times. So when no node is left to visit they are the sums over the whole tree, and must
    equal the tree's own sums and match the pool's free slots. The next round visits every node again.
    """

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
        """Makes a node unvisited. Called before its tokens, slots, pins or keeps change."""
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

    def end(
        self, *, tokens: int, held: int, pinned: int, kept: int, pins: Mapping[int, int], keeps: Mapping[int, int]
    ) -> None:
        """Compares the sums of all visited nodes with the tree's, and begins the next round. All nodes are visited.

        Args:
            tokens, held, pinned, kept: the sums of the tree.
            pins, keeps: node id → pins and keeps that were put on it.

        Raises:
            IntegrityError: says what contradicts what.
        """
        assert not self._to_visit, "the round is not over"
        under_pins = sum(len(self._visited[number].tokens) for number in {*self._pins, *self._keeps})
        under_keeps = sum(len(self._visited[number].tokens) for number in self._keeps)
        if (self._tokens, under_pins, under_pins, under_keeps) != (tokens, held, pinned, kept):
            raise IntegrityError(
                f"the tree has {self._tokens} tokens, {under_pins} pinned, {under_keeps} of them kept, and no request "
                f"runs; its sums say {tokens}, {held} held, {pinned} pinned, {kept} kept"
            )
        if self._pins != dict(pins) or self._keeps != dict(keeps):
            raise IntegrityError("the tree has pins or keeps that were not put there, or lacks some")
        self._pool.check_map(self._taken, self._tokens)
        self._to_visit, self._visited = self._visited, {}
        self._begin()

    def _begin(self) -> None:
        self._taken = np.zeros(self._pool.num_slots, dtype=np.bool_)  # slots of visited nodes
        self._tokens = 0  # of visited nodes
        self._pins: dict[int, int] = {}  # visited node → its pins
        self._keeps: dict[int, int] = {}

    def _visit(self, node: RadixNode) -> None:
        self.visits += 1
        require_node(node, self._eviction)
        if node.locks:
            raise IntegrityError(f"node {node.id} has {node.locks} locks, and no request runs")
        parent = node.parent
        if parent is None or parent.children.get(node.edge) is not node:
            raise IntegrityError(f"node {node.id} is not in the tree")
        if not (parent.is_root or parent in self) or not all(child in self for child in node.children.values()):
            raise IntegrityError(f"node {node.id} has a parent or a child that is not in the tree")
        if self._taken[node.slots].any() or self._pool.are_free(node.slots):
            raise IntegrityError(f"node {node.id} has slots that are free, or another node's")
        self._taken[node.slots] = True
        self._tokens += len(node.tokens)
        if node.pins:
            self._pins[node.id] = node.pins
        if node.keeps:
            self._keeps[node.id] = node.keeps

    def _subtract(self, node: RadixNode) -> None:
        self._taken[node.slots] = False
        self._tokens -= len(node.tokens)
        self._pins.pop(node.id, None)
        self._keeps.pop(node.id, None)


def require_node(node: RadixNode, eviction: EvictionPolicy) -> None:
    """Checks the invariants of a node that hold at any time.

    Raises:
        IntegrityError: names the node.
    """
    if not 0 < len(node.tokens) == len(node.slots):
        raise IntegrityError(f"node {node.id} has {len(node.tokens)} tokens and {len(node.slots)} slots")
    if node.evictable and not eviction.knows(node):
        raise IntegrityError(f"leaf {node.id} can never be evicted: it is not in the queue")
    for edge, child in node.children.items():
        if child.parent is not node or not len(child.tokens) or child.edge != edge or child.root is not node.root:
            raise IntegrityError(f"node {child.id} is in the wrong place under node {node.id}")
