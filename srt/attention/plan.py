"""The attention plan: one step as a flat list of work items, the same for every backend.

A work item is (query rows) × (a run of KV slots with consecutive logical positions). Every mask is one interval of
positions per row, so causal, sliding window, chunked extend and decode differ only in how rows and runs are cut:

    positions   0         4         8        12
    row 0       [=========]                            row_lo=0  row_hi=5
    row 1       [===========]                          row_lo=0  row_hi=6
    row 2               [===========]                  row_lo=4  row_hi=10   (a window of 6)
                |       |           |
    items       |-- item 0 --|- item 1 -|              rows 0-2 × positions [0,7), rows 2 × positions [7,10)

A row that two items see has two partial results, merged by log-sum-exp; a row with one part is written directly.
The arrays are numpy on the host. A backend copies them to where its kernel reads them.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..batch import Batch

Int32 = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """One step and one window class. R rows, I items, S partial slots (S >= R), T keys.

    item_q   0        3     5          item i owns partial slots [item_q[i], item_q[i+1])
    q_rows   0  1  2  2  3             the row that each partial slot belongs to
    item_kv  [0,7)    [7,10)           item i reads kv_idx[item_kv[i,0] : item_kv[i,1]]
    item_pos 0        7                logical position of the first key of that run
    """

    row_lo: Int32  # [R] first visible position
    row_hi: Int32  # [R] one past the last visible position
    item_q: Int32  # [I+1] ranges in q_rows
    q_rows: Int32  # [S] row of each partial slot
    item_kv: Int32  # [I, 2] ranges in kv_idx
    item_pos: Int32  # [I] logical position of the first key of the range
    item_full: NDArray[np.uint8]  # [I] 1: each of its rows sees the whole range, no mask is needed
    kv_idx: Int32  # [T] physical slots; items may share a range
    merge_ptr: Int32  # [R+1] ranges in merge_slot
    merge_slot: Int32  # [S] partial slots grouped by row

    @property
    def items(self) -> int:
        return len(self.item_pos)

    @property
    def needs_merge(self) -> bool:
        return len(self.q_rows) > len(self.row_lo)


def make_plan(batch: Batch, window: int | None, *, block_rows: int, split: int | None = None) -> AttentionPlan:
    """Cut a batch into items: tiles of at most `block_rows` rows of a sequence × runs of at most `split` keys.

    Keys that no row of a tile sees are left out, and so are rows of a tile that see nothing of a run. `batch.paths`
    is not read yet: an item shared by several sequences is one more entry for `_assemble`.
    """
    assert block_rows >= 1, "a tile holds at least one row"
    assert split is None or split >= 1, "a run holds at least one key"
    assert window is None or window >= 1, "a row sees at least its own key"
    row_lo, row_hi, first_row = _intervals(batch, window)

    # Per sequence: one run of kv_idx, clipped to what its first (lowest) row can see.
    clip = row_lo[first_row]  # [B]
    kv_idx = np.concatenate([slots[start:] for slots, start in zip(batch.slots, clip.tolist(), strict=True)])
    lengths = batch.prefix_lengths + batch.query_lengths - clip
    kv_start = np.cumsum(lengths) - lengths  # [B]

    # Tiles of consecutive rows of one sequence; their keys are [lo of the first row, hi of the last row).
    tile_sequence, tile_index = _cut(batch.query_lengths, block_rows)
    tile_first = first_row[tile_sequence] + tile_index * block_rows
    tile_rows = np.minimum(block_rows, batch.query_lengths[tile_sequence] - tile_index * block_rows)
    tile_lo = row_lo[tile_first]
    tile_hi = row_hi[tile_first + tile_rows - 1]

    # Runs of a tile, as equal as possible: the last of them must not be a crumb.
    span = tile_hi - tile_lo
    parts = np.ones_like(span) if split is None else -(-span // split)
    run_length = -(-span // parts)
    item_tile, part = _cut(span, run_length)
    item_pos = tile_lo[item_tile] + part * run_length[item_tile]
    item_end = np.minimum(item_pos + run_length[item_tile], tile_hi[item_tile])
    offset = (kv_start - clip)[tile_sequence[item_tile]]  # position → index in kv_idx

    slot_item, row_in_tile = _cut(tile_rows[item_tile], 1)
    return _assemble(
        row_lo,
        row_hi,
        kv_idx=kv_idx,
        item_pos=item_pos,
        item_kv=np.stack([item_pos + offset, item_end + offset], axis=1),
        slot_item=slot_item,
        q_rows=tile_first[item_tile][slot_item] + row_in_tile,
    )


def _intervals(batch: Batch, window: int | None) -> tuple[Int32, Int32, Int32]:
    """Per row the visible interval; per sequence its first row."""
    query = batch.query_lengths
    ends = np.cumsum(query, dtype=np.int32)
    first_row = ends - query
    position = np.arange(batch.rows, dtype=np.int32) + np.repeat(batch.prefix_lengths - first_row, query)
    row_lo = np.zeros_like(position) if window is None else np.maximum(position - (window - 1), 0)
    return row_lo, position + 1, first_row


def _cut(lengths: Int32, size: Int32 | int) -> tuple[Int32, Int32]:
    """Cut each length into pieces of `size`: per piece the index of what it is a piece of, and its number in it."""
    counts = -(-lengths // size)
    owner = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
    number = np.arange(len(owner), dtype=np.int32) - np.repeat(np.cumsum(counts) - counts, counts)
    return owner, number.astype(np.int32)


def _assemble(
    row_lo: Int32,
    row_hi: Int32,
    *,
    kv_idx: Int32,
    item_pos: Int32,
    item_kv: Int32,  # [I, 2]
    slot_item: Int32,  # [S] ascending
    q_rows: Int32,  # [S]
) -> AttentionPlan:
    """Drop rows that see nothing of their item, mark items that need no mask, and list the parts of each row.

    Rows of an item may be any rows: items of shared radix nodes enter here as well.
    """
    item_end = item_pos + (item_kv[:, 1] - item_kv[:, 0])
    sees = (row_lo[q_rows] < item_end[slot_item]) & (row_hi[q_rows] > item_pos[slot_item])
    slot_item, q_rows = slot_item[sees], q_rows[sees]
    counts = np.bincount(slot_item, minlength=len(item_pos))
    assert counts.all(), "an item nobody sees: the union of a tile's intervals has a gap"
    item_q = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    whole = (row_lo[q_rows] <= item_pos[slot_item]) & (row_hi[q_rows] >= item_end[slot_item])
    parts = np.bincount(q_rows, minlength=len(row_lo))
    return AttentionPlan(
        row_lo=row_lo,
        row_hi=row_hi,
        item_q=item_q,
        q_rows=q_rows.astype(np.int32),
        item_kv=item_kv.astype(np.int32),
        item_pos=item_pos.astype(np.int32),
        item_full=np.logical_and.reduceat(whole, item_q[:-1]).astype(np.uint8),
        kv_idx=kv_idx.astype(np.int32, copy=False),
        merge_ptr=np.concatenate([[0], np.cumsum(parts)]).astype(np.int32),
        merge_slot=np.argsort(q_rows, kind="stable").astype(np.int32),
    )
