"""Allocates the slots of window layers, and maps the slot of a token to its window slot.

A layer with a window never reads a token again that is further back than its window. Where a model mixes such layers
with others, their keys lie in a smaller pool of their own, and only some of the tokens in the pool have a slot there:

    slot           1   2   3   4   5   6   7   8       one for each token, in full layers
    window slot    0   0   0   0   3   6   1   2       in window layers; 0: none

A slot gets a window slot when it is allocated, and loses it at the latest when it is released. So every window slot is
free or belongs to one slot, and nothing locks it. When window slots run out, they are taken from tokens that no running
request can see (`reclaim`): first from those inside texts, the oldest first; then from windows where a request began or
ended, least recently used first; last from windows at the ends of pins and kept prefixes. The keys in full layers stay,
and a request that needs the window computes its tokens again.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..core.batch import DUMMY_SLOT, WindowPool
from .slot_allocator import IntegrityError, SlotAllocator, Slots

_RANK = 1 << 40  # uses; more than a process counts
_TAKEN_AT_ONCE = 16  # at most this part of the pool is reclaimed before it is needed, so that few calls look for slots


class WindowSlots:
    """Owns the window slots. `SlotAllocator` calls `attach` and `detach`, so they come and go with their slots.

    Args:
        num_slots: size of the pool of full layers, the dummy slot included.
        pool: the size of the window layers' pool, and how far they see.
    """

    def __init__(self, num_slots: int, pool: WindowPool) -> None:
        assert pool.num_slots > pool.reach, "the window of one request fits, next to the dummy slot"
        self.reach = pool.reach
        self._num_slots = num_slots
        self._pool = SlotAllocator(pool.num_slots)
        self.clear()

    def clear(self) -> None:
        """Frees all window slots, after all slots were freed."""
        self._pool.clear()
        self._of: Slots = np.zeros(self._num_slots, dtype=np.int32)  # slot → window slot
        self._owner: Slots = np.zeros(self._pool.num_slots, dtype=np.int32)  # window slot → slot; 0: free
        self._used: NDArray[np.int64] = np.zeros(self._pool.num_slots, dtype=np.int64)  # lowest: reclaimed first
        self._time = 0  # counts uses; the order is all that matters

    @property
    def total(self) -> int:
        return self._pool.total

    @property
    def free(self) -> int:
        return self._pool.free

    def none(self) -> NDArray[np.bool_]:
        """Returns False for each slot, to be filled in."""
        return np.zeros(self._num_slots, dtype=np.bool_)

    def of(self, slots: Slots) -> Slots:
        """Returns the window slot of each slot; DUMMY_SLOT where it has none."""
        return self._of[slots]

    def attach(self, slots: Slots) -> None:
        """Gives slots without a window slot one. The caller has made room before."""
        found = self._pool.allocate(len(slots))
        assert not self._of[slots].any(), "a slot has one window slot"
        self._of[slots] = found
        self._owner[found] = slots
        self._time += 1
        self._used[found] = self._time - _RANK

    def detach(self, slots: Slots) -> None:
        """Frees the window slots of slots, where they have one."""
        found = self._of[slots]
        self._free(found[found != DUMMY_SLOT])

    def move(self, sources: Slots, targets: Slots) -> None:
        """Gives the window slots of `sources` to those of `targets`, one by one, that have none.

        A source and its target are slots of the same token after the same prefix, so their keys are equal.
        """
        lacking = (self._of[targets] == DUMMY_SLOT) & (self._of[sources] != DUMMY_SLOT)
        sources, targets = sources[lacking], targets[lacking]
        found = self._of[sources]
        self._of[targets] = found
        self._owner[found] = targets
        self._of[sources] = DUMMY_SLOT

    def use(self, slots: Slots) -> None:
        """Notes that a request has begun or ended after these tokens: their window is reclaimed after most others."""
        found = self._of[slots]
        self._time += 1
        self._used[found] = self._time
        self._used[DUMMY_SLOT] = 0

    def usable(self, slots: Slots, reach: int) -> int:
        """Returns the most tokens, of those in `slots`, after which a row finds all that it sees in window layers.

        Args:
            slots: of a sequence from its beginning.
            reach: tokens that a row sees, its own included.
        """
        present = self._of[slots] != DUMMY_SLOT
        if present[max(0, len(slots) - reach + 1) :].all():
            return len(slots)
        lacking = np.flatnonzero(~present)
        starts = np.concatenate([[-1], lacking])
        ends = np.concatenate([lacking, [len(slots)]])
        whole = (starts < 0) | (ends - starts >= reach)
        return int(ends[np.flatnonzero(whole)[-1]])

    def reclaim(self, count: int, *, held: NDArray[np.bool_], spared: NDArray[np.bool_]) -> int:
        """Frees at least `count` window slots, or all that it may; returns the number.

        Args:
            held: bool by slot: a running request needs its window slot.
            spared: bool by slot: reclaimed after all others.
        """
        owned = np.flatnonzero(self._owner)
        owners = self._owner[owned]
        candidates = owned[~held[owners]]
        last = spared[self._owner[candidates]]
        more = min(self.total // _TAKEN_AT_ONCE, len(candidates) - int(np.count_nonzero(last)))
        count = min(max(count, more), len(candidates))
        if 0 < count < len(candidates):
            order = np.argpartition(self._used[candidates] + last * _RANK, count - 1)
            candidates = candidates[order[:count]]
        self._free(candidates[:count].astype(np.int32))
        return count

    def _free(self, found: Slots) -> None:
        self._of[self._owner[found]] = DUMMY_SLOT
        self._owner[found] = DUMMY_SLOT
        self._pool.release(found)

    def check(self, free: NDArray[np.bool_]) -> None:
        """Checks that each window slot is free, or has one slot, which is not free. free: bool by slot.

        Raises:
            IntegrityError: says what contradicts what.
        """
        slots = np.flatnonzero(self._of)
        found = self._of[slots]
        owned = np.flatnonzero(self._owner)
        if not (np.array_equal(np.sort(found), owned) and np.array_equal(self._owner[found], slots)):
            raise IntegrityError("the maps of slots to window slots and back disagree")
        if free[slots].any():
            raise IntegrityError(f"{int(free[slots].sum())} free slots have a window slot")
        self._pool.check([found])
