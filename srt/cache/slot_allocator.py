"""Allocates the slots of the KV pool.

One pool serves cache and running requests; a slot holds the key and value of one token in every layer.
At any time a slot is exactly one of: free (here), in the radix tree, or private to a running request.

    slot 0          dummy: rows whose key needs no slot write here; never handed out
    slot 1 … n - 1  handed out in ascending runs, because attention reads runs faster than scattered slots
"""

from collections.abc import Iterable
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from ...lang.errors import EngineError
from ..core.faults import FaultHook, no_faults

Slots = NDArray[np.int32]

FIRST_SLOT = 1  # after batch.DUMMY_SLOT


class Place(Enum):
    """The memory in which the keys and values of a run of tokens lie.

    One place today. A tier in host memory or on disk is a further member, with an allocator of its own; the tree then
    moves a node there instead of removing it.
    """

    DEVICE = "device"  # the runner's pool


class IntegrityError(EngineError):
    """The bookkeeping of pool and tree contradicts itself: a bug of umbel, found before it gives a wrong token."""


class SlotAllocator:
    """Hands out the slots of one place and takes them back.

    Released slots are merged only when the sorted ones run out.

    Args:
        num_slots: size of the runner's pool, the dummy slot included.
        faults: visited at `memory.allocate`.
    """

    place = Place.DEVICE

    def __init__(self, num_slots: int, faults: FaultHook = no_faults) -> None:
        assert num_slots > FIRST_SLOT, "a pool needs at least one slot behind the dummy"
        self.num_slots = num_slots
        self._faults = faults
        self.clear()

    def clear(self) -> None:
        """Frees all slots."""
        self._is_free = np.ones(self.num_slots, dtype=np.bool_)
        self._is_free[:FIRST_SLOT] = False
        self._sorted: Slots = np.arange(FIRST_SLOT, self.num_slots, dtype=np.int32)  # [taken … | still free, ascending]
        self._taken = 0
        self._released: list[Slots] = []
        self._released_count = 0

    @property
    def total(self) -> int:
        return self.num_slots - FIRST_SLOT

    @property
    def free(self) -> int:
        return len(self._sorted) - self._taken + self._released_count

    def allocate(self, count: int) -> Slots:
        """Allocates `count` free slots, ascending. The caller has made room before."""
        self._faults("memory.allocate")
        assert count <= self.free, f"{count} slots asked for, {self.free} are free: the caller must evict first"
        if count > len(self._sorted) - self._taken:
            self._merge()
        slots = self._sorted[self._taken : self._taken + count].copy()
        self._taken += count
        self._is_free[slots] = False
        return slots

    def release(self, slots: Slots) -> None:
        """Takes slots back. Releasing a free slot is a bug: two requests would get the same slot."""
        if not len(slots):
            return
        if self._is_free[slots].any() or slots.min() < FIRST_SLOT:
            raise IntegrityError("a slot was released twice, or never handed out")
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

    def _check_free(self) -> NDArray[np.int64]:
        """Checks that the free list agrees with the free map, and returns each slot's count in the free list."""
        listed = np.concatenate([self._sorted[self._taken :], *self._released])
        frees = np.bincount(listed, minlength=self.num_slots)
        if not np.array_equal(frees.astype(np.bool_), self._is_free) or frees.max(initial=0) > 1:
            raise IntegrityError("the free list and the free map disagree")
        return frees

    def check(self, held: Iterable[Slots]) -> None:
        """Checks that free and held slots together are all slots, none twice.

        Raises:
            IntegrityError: gives the three numbers.
        """
        arrays = list(held)
        used = np.concatenate(arrays) if arrays else np.empty(0, dtype=np.int32)
        uses = np.bincount(used, minlength=self.num_slots) if len(used) else np.zeros(self.num_slots, dtype=np.int64)
        if uses[:FIRST_SLOT].any():
            raise IntegrityError("the dummy slot is held by somebody")
        frees = self._check_free()
        if (uses[FIRST_SLOT:] + frees[FIRST_SLOT:] != 1).any():
            lost = int((uses[FIRST_SLOT:] + frees[FIRST_SLOT:] == 0).sum())
            double = int((uses[FIRST_SLOT:] + frees[FIRST_SLOT:] > 1).sum())
            raise IntegrityError(
                f"free {self.free} + held {len(used)} of {self.total} slots: {lost} lost, {double} held twice"
            )
