"""Allocates the slots of recurrent states: one for each running request, the others for snapshots at tree nodes.

A layer with a recurrent state (a gated delta net, Mamba 2, a short convolution) keeps no keys: all it knows of a
sequence is a state of fixed size, which every token changes. So a cached prefix is of use to such a layer only where
its state was saved. A slot holds the states of all such layers of one sequence after one of its tokens.

    slot 0          the state before the first token: zeros, never written
    slot 1 … n - 1  free · of a running request · a snapshot: the state after the last token of a node of the tree

A snapshot goes when its node is evicted. It may also go alone: the keys of the node stay, and a request that needs the
state computes the tokens again from the nearest snapshot before. Least recently used ones go first, and those at nodes
with a pin or a keep after all others.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Collection, Container, Iterable
from typing import TYPE_CHECKING

from .slot_allocator import IntegrityError

if TYPE_CHECKING:
    from .radix_cache import RadixNode

NO_STATE = 0  # the slot of zeros; of a node: it has no snapshot


class StateSlots:
    """Hands out the slots of recurrent states, and knows the snapshots. Nothing here touches the states themselves.

    Args:
        num_states: size of the runner's pool of states, the slot of zeros included.
    """

    def __init__(self, num_states: int) -> None:
        assert num_states > NO_STATE + 2, "a request needs a slot of its own next to the snapshot that it begins with"
        self.num_states = num_states
        self.clear()

    def clear(self) -> None:
        """Frees all slots, after the tree was forgotten."""
        self._free = list(range(self.num_states - 1, NO_STATE, -1))
        self._snapshots: OrderedDict[RadixNode, None] = OrderedDict()  # least recently used first
        self._locks: Counter[RadixNode] = Counter()

    @property
    def total(self) -> int:
        return self.num_states - 1

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def snapshots(self) -> int:
        """The number of snapshots."""
        return len(self._snapshots)

    def allocate(self) -> int | None:
        """Returns a slot for a running request. It evicts a snapshot if none is free; None: all are locked."""
        return self._free.pop() if self._free or self._evict(self._unlocked()) else None

    def allocate_spare(self) -> int | None:
        """Returns a slot for one more snapshot, as `allocate`, but evicts none at a node with a pin or a keep."""
        unpinned = (node for node in self._unlocked() if not (node.pins or node.keeps))
        return self._free.pop() if self._free or self._evict(unpinned) else None

    def allocate_apart(self, used: Container[int]) -> int | None:
        """Returns a slot that is not in `used`, as `allocate_spare`: it need not be the last one to be written."""
        place = next((place for place in range(len(self._free) - 1, -1, -1) if self._free[place] not in used), None)
        if place is not None:
            return self._free.pop(place)
        apart = (node for node in self._unlocked() if not (node.pins or node.keeps or node.state in used))
        return self._free.pop() if self._evict(apart) else None

    def release(self, slot: int) -> None:
        """Takes the slot of a request back."""
        self._free.append(slot)

    # ------------------------------------------------------------------------------------------ snapshots

    def put(self, node: RadixNode, slot: int) -> None:
        """Makes an allocated slot the snapshot at the end of a node that has none."""
        assert node.state == NO_STATE, "a node has one end"
        assert node.parent is not None, "roots and evicted nodes have no snapshot"
        node.state = slot
        self._snapshots[node] = None

    def use(self, node: RadixNode) -> None:
        """Makes a snapshot the most recently used one."""
        self._snapshots.move_to_end(node)

    def lock(self, node: RadixNode) -> None:
        """Keeps a snapshot until `unlock`. The caller also holds the node."""
        self._locks[node] += 1

    def unlock(self, node: RadixNode) -> None:
        assert self._locks[node] > 0, "unlock without lock"
        self._locks[node] -= 1
        if not self._locks[node]:
            del self._locks[node]

    def take_over(self, node: RadixNode) -> int | None:
        """Makes the slot of a snapshot that only the caller has locked the caller's; None: others have locked it."""
        if self._locks[node] != 1:
            return None
        del self._locks[node], self._snapshots[node]
        slot, node.state = node.state, NO_STATE
        return slot

    def drop(self, node: RadixNode) -> None:
        """Frees the snapshot of a node."""
        assert node not in self._locks, "evicting a locked snapshot frees a state in use"
        del self._snapshots[node]
        self._free.append(node.state)
        node.state = NO_STATE

    def _unlocked(self) -> Iterable[RadixNode]:
        """Yields snapshots in the order of eviction: pinned ones last."""
        for pinned in (False, True):
            for node in self._snapshots:
                if node not in self._locks and bool(node.pins or node.keeps) == pinned:
                    yield node

    def _evict(self, candidates: Iterable[RadixNode]) -> bool:
        node = next(iter(candidates), None)
        if node is not None:
            self.drop(node)
        return node is not None

    # ------------------------------------------------------------------------------------------ check

    def check(self, held: Collection[int], locked: Iterable[RadixNode]) -> None:
        """Checks that every slot is free, a snapshot or in `held`, and that the locks are those on `locked`.

        Raises:
            IntegrityError: says what contradicts what.
        """
        owned = [*self._free, *held, *(node.state for node in self._snapshots)]
        if sorted(owned) != list(range(1, self.num_states)):
            raise IntegrityError(
                f"free {self.free} + held {len(held)} + snapshots {self.snapshots} of {self.total} states: a state is "
                "lost or has two owners"
            )
        if Counter(locked) != self._locks:
            raise IntegrityError("snapshots have locks that running requests do not explain")
        if any(node.parent is None for node in self._snapshots):
            raise IntegrityError("a node that left the tree has a snapshot")

    def check_nodes(self, nodes: Collection[RadixNode]) -> None:
        """Checks that `nodes`, those of the tree with a state, are those with a snapshot.

        Raises:
            IntegrityError: they are not.
        """
        if set(nodes) != set(self._snapshots):
            raise IntegrityError(f"{len(nodes)} nodes have a state, and {self.snapshots} snapshots are known")
