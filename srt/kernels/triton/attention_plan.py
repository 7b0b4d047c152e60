"""A plan as the attention kernels read it: one int32 buffer on the device, filled by one transfer.

    bounds   [few, items, merged]   items of few rows are [0, few), those of more [few, items)
    items    [I, 5]                 first place in slots, places, first key in kv_idx, keys, position of the first key
    slots    [S, 4]                 row, place among the partial results or −1, first visible position, end of them
    merges   [M, 3]                 row, first place of its parts, which lie side by side, and how many there are
    kv_idx   [T]                    slots of the pool that items read; last, for only what is used of it is sent

Items of both kinds come in descending cost: the last ones to run are short. The host's memory is fresh for each plan:
torch's pinned allocator gives it out again when the copy is done, so no transfer is waited for.
"""

from dataclasses import dataclass

import numpy as np
import torch

from ...attention.backend import AttentionGeometry
from ...attention.plan import AttentionPlan, Int32
from .attention_tiles import Tile

BOUNDS = 3
ALIGNMENT = 4  # int32: Triton reads 16 bytes at once where it knows that an address is a multiple of them


@dataclass(frozen=True, slots=True)
class Capacity:
    """The capacity of a buffer: I items, S places of rows in them, M rows with several parts, T keys."""

    items: int
    slots: int
    merged: int
    places: int  # partial results
    keys: int

    def holds(self, other: "Capacity") -> bool:
        return (
            other.items <= self.items
            and other.slots <= self.slots
            and other.merged <= self.merged
            and other.places <= self.places
            and other.keys <= self.keys
        )


@dataclass(frozen=True, slots=True)
class PackedPlan:
    """The arrays of the drawing, on the host, and what they hold."""

    items: Int32  # [I, 5]
    slots: Int32  # [S, 4]
    merges: Int32  # [M, 3]
    kv_idx: Int32  # [T]
    few: int  # items of few rows

    @property
    def size(self) -> Capacity:
        places = int(self.merges[:, 2].sum())
        return Capacity(len(self.items), len(self.slots), len(self.merges), places, len(self.kv_idx))


def pack(plan: AttentionPlan, few_rows: int) -> PackedPlan:
    """Packs a plan. `few_rows`: most rows of an item of the first kind."""
    counts = np.diff(plan.item_q)
    descending = np.arange(plan.items - 1, -1, -1)
    small = counts[descending] <= few_rows
    order = np.concatenate([descending[small], descending[~small]])
    length = plan.item_kv[order, 1] - plan.item_kv[order, 0]
    first_key, kv_idx = _read_keys(plan.item_kv[order, 0], length, plan.kv_idx)
    items = np.stack([plan.item_q[order], counts[order], first_key, length, plan.item_pos[order]], axis=1)

    parts = np.diff(plan.merge_ptr)  # [R]
    rows = np.flatnonzero(parts > 1)
    by_row = plan.merge_slot[np.repeat(parts > 1, parts)]  # places in q_rows of all parts that are merged, row by row
    place = np.full(len(plan.q_rows), -1, dtype=np.int32)
    place[by_row] = np.arange(len(by_row), dtype=np.int32)
    merged = parts[rows]
    return PackedPlan(
        items=items.astype(np.int32, copy=False),
        slots=np.stack([plan.q_rows, place, plan.row_lo[plan.q_rows], plan.row_hi[plan.q_rows]], axis=1),
        merges=np.stack([rows, np.cumsum(merged) - merged, merged], axis=1).astype(np.int32),
        kv_idx=kv_idx,
        few=int(small.sum()),
    )


def _read_keys(first: Int32, length: Int32, kv_idx: Int32) -> tuple[Int32, Int32]:
    """The keys that items read, moved together, and where each item finds its first.

    Of keys that many sequences share, only one copy is read, and of those before a window none: mostly far fewer than
    the sequences have.
    """
    order = np.argsort(first, kind="stable")
    ascending = first[order]
    reach = np.maximum.accumulate(ascending + length[order])
    apart = np.concatenate([[True], ascending[1:] > reach[:-1]])  # begins a run that those before do not touch
    begin = ascending[apart]
    end = reach[np.concatenate([np.flatnonzero(apart)[1:] - 1, [len(reach) - 1]])]
    if (end - begin).sum() == len(kv_idx):
        return first, kv_idx
    moved = np.cumsum(end - begin) - end  # from old to new places
    places = np.empty_like(first)
    places[order] = ascending + moved[np.cumsum(apart) - 1]
    return places, np.concatenate([kv_idx[i:j] for i, j in zip(begin.tolist(), end.tolist(), strict=True)])


class TritonPlan:
    """A plan on the device, and room for its partial results. Arrays stay where they are for good.

    Args:
        capacity: what it can be filled with.
        tiles: of the two kinds of items, few rows and more.
        fixed: captured graphs read it, so launches must not depend on what it is filled with.
    """

    def __init__(
        self,
        capacity: Capacity,
        tiles: tuple[Tile, Tile],
        geometry: AttentionGeometry,
        device: torch.device,
        *,
        fixed: bool,
    ) -> None:
        self.capacity = capacity
        self.tiles = tiles
        self.fixed = fixed
        self.counts = (0, 0, 0)  # items of few rows, items of more, merged rows
        sizes = (BOUNDS, 5 * capacity.items, 4 * capacity.slots, 3 * capacity.merged, capacity.keys)
        ends = np.cumsum([-(-size // ALIGNMENT) * ALIGNMENT for size in sizes]).tolist()
        self._starts = [0, *ends[:-1]]
        self._buffer = torch.empty(ends[-1], dtype=torch.int32, device=device)
        if fixed:
            self._buffer[:BOUNDS] = 0  # no items, until it is filled
        views = [self._buffer[start:] for start in self._starts]
        self.bounds, self.items, self.slots, self.merges, self.kv_idx = views
        parts = (capacity.places, geometry.heads)
        self.part_out = torch.empty((*parts, geometry.head_dim), dtype=torch.float32, device=device)
        self.part_lse = torch.empty(parts, dtype=torch.float32, device=device)

    def fill(self, packed: PackedPlan) -> None:
        """Sends a plan that fits. Earlier kernels have read the old one: copies and kernels are in one stream."""
        assert self.capacity.holds(packed.size), "a plan that is larger than its buffer"
        items, merged = len(packed.items), len(packed.merges)
        self.counts = (packed.few, items - packed.few, merged)
        bounds = np.array([packed.few, items, merged], dtype=np.int32)
        arrays = (bounds, packed.items, packed.slots, packed.merges, packed.kv_idx)
        used = self._starts[-1] + len(packed.kv_idx)
        pinned = self._buffer.is_cuda
        host = torch.empty(used, dtype=torch.int32, pin_memory=pinned)
        numbers = host.numpy()
        for start, array in zip(self._starts, arrays, strict=True):
            numbers[start : start + array.size] = array.ravel()
        self._buffer[:used].copy_(host, non_blocking=pinned)
