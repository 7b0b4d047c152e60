"""Gathers items of a plan into groups, each computed by one padded torch call.

Any torch call costs about 20 µs, so items of similar size share one:

    group of 3 items     keys, padded to the longest     rows, padded to the most
      item 4             [k k k k k k]                   [r .]
      item 1             [k k k k . .]                   [r r]
      item 7             [k k k k k .]                   [r .]

Padding repeats the item's own last key (masked) and last row (dropped), so that a broken value of one request cannot
reach another: zero weight times another request's NaN would still be NaN.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from .plan import AttentionPlan

Places = slice | torch.Tensor  # int64 indices; consecutive ones are a slice, which reads without a copy
SMALL_CELLS = 4096  # padding below this many (row, key) cells costs less than another call


@dataclass(frozen=True, slots=True)
class ItemGroup:
    """G items padded to N rows and L keys."""

    items: int  # G
    keys: Places  # [G*L] pool slots
    rows: Places  # [G*N] query rows
    mask: torch.Tensor | None  # float32 [G, 1, N, 1, L], 0 or -inf, to be added; None: nothing is masked
    # Destinations of results. `*_from` index the G*N padded rows; None: all of them, in order.
    direct_from: torch.Tensor | None
    direct_to: Places  # row of the output
    partial_from: torch.Tensor  # int64, empty when no row of the group has further parts
    partial_to: torch.Tensor  # int64: place in the workspace of partial results


@dataclass(frozen=True, slots=True)
class TorchPlan:
    """A plan in the form that torch reads: groups, and the merge of partial results of split rows."""

    host: AttentionPlan
    groups: tuple[ItemGroup, ...]
    partials: int  # places in the workspace; one more, the last, stays empty
    merge_rows: torch.Tensor  # int64 [M] rows with more than one part
    merge_from: torch.Tensor  # int64 [M, most parts] places in the workspace, padded with the empty one


def group_items(plan: AttentionPlan, *, max_keys: int, max_cells: int, slices: bool, device: torch.device) -> TorchPlan:
    """Makes groups of at most `max_keys` padded keys and `max_cells` padded (row, key) cells; one item may exceed them.

    `slices`: consecutive places become slices.
    """
    parts = np.diff(plan.merge_ptr)  # [R]
    split_slots = np.flatnonzero(parts[plan.q_rows] > 1)  # partial slots that need the workspace
    place = np.full(len(plan.q_rows), -1, dtype=np.int64)
    place[split_slots] = np.arange(len(split_slots))
    groups = tuple(
        _prepare(plan, items, place, slices, device) for items in _pack(plan, max_keys=max_keys, max_cells=max_cells)
    )
    merge_rows = np.flatnonzero(parts > 1)
    most = int(parts.max(initial=1))
    column = np.arange(most)
    entry = plan.merge_ptr[merge_rows][:, None] + np.minimum(column, parts[merge_rows][:, None] - 1)
    merge_from = np.where(column < parts[merge_rows][:, None], place[plan.merge_slot[entry]], len(split_slots))
    return TorchPlan(
        host=plan,
        groups=groups,
        partials=len(split_slots),
        merge_rows=_index(merge_rows, device),
        merge_from=_index(merge_from, device),
    )


def _pack(plan: AttentionPlan, *, max_keys: int, max_cells: int) -> list[NDArray[np.int64]]:
    """Sorts items by size and cuts the sorted list where a group grows too large or would be mostly padding."""
    rows = np.diff(plan.item_q)
    keys = plan.item_kv[:, 1] - plan.item_kv[:, 0]
    order = np.lexsort((keys, rows))
    groups: list[NDArray[np.int64]] = []
    start = most_keys = used = 0
    for end, (row_count, key_count) in enumerate(zip(rows[order].tolist(), keys[order].tolist(), strict=True)):
        count = end - start + 1
        longest = max(most_keys, key_count)
        padded = count * row_count * longest  # rows ascend along `order`
        used += row_count * key_count
        too_large = count * longest > max_keys or padded > max_cells
        if count > 1 and (too_large or padded > 2 * used + SMALL_CELLS):
            groups.append(order[start:end])
            start, longest, used = end, key_count, row_count * key_count
        most_keys = longest
    groups.append(order[start:])
    return groups


def _prepare(
    plan: AttentionPlan, items: NDArray[np.int64], place: NDArray[np.int64], slices: bool, device: torch.device
) -> ItemGroup:
    places = _places if slices else _index
    first_key, end_key = plan.item_kv[items, 0], plan.item_kv[items, 1]
    first_slot, end_slot = plan.item_q[items], plan.item_q[items + 1]
    column = np.arange((end_key - first_key).max(), dtype=np.int32)  # [L]
    keys = plan.kv_idx[np.minimum(first_key[:, None] + column, end_key[:, None] - 1)]  # [G, L]
    number = np.arange((end_slot - first_slot).max())  # [N]
    unclipped = first_slot[:, None] + number  # [G, N]
    slots = np.minimum(unclipped, end_slot[:, None] - 1)
    rows = plan.q_rows[slots]

    target = place[slots].ravel()
    real = (unclipped == slots).ravel()
    direct = np.flatnonzero(real & (target < 0))
    partial = np.flatnonzero(real & (target >= 0))
    return ItemGroup(
        items=len(items),
        keys=places(keys.ravel(), device),
        rows=places(rows.ravel(), device),
        mask=_mask(plan, items, rows, column, device),
        direct_from=None if len(direct) == rows.size else _index(direct, device),
        direct_to=places(rows.ravel()[direct], device),
        partial_from=_index(partial, device),
        partial_to=_index(target[partial], device),
    )


def _mask(
    plan: AttentionPlan,
    items: NDArray[np.int64],
    rows: NDArray[np.int32],  # [G, N]
    column: NDArray[np.int32],  # [L]
    device: torch.device,
) -> torch.Tensor | None:
    lengths = plan.item_kv[items, 1] - plan.item_kv[items, 0]
    if plan.item_full[items].all() and (lengths == len(column)).all():
        return None
    position = plan.item_pos[items][:, None] + column  # [G, L]
    hidden = (position[:, None, :] < plan.row_lo[rows][:, :, None]) | (
        position[:, None, :] >= plan.row_hi[rows][:, :, None]
    )
    if (lengths < len(column)).any():
        hidden |= (column >= lengths[:, None])[:, None, :]
    blocked = torch.from_numpy(hidden).to(device)
    mask = torch.zeros(blocked.shape, dtype=torch.float32, device=device).masked_fill_(blocked, float("-inf"))
    return mask[:, None, :, None, :]


def _places(values: NDArray[np.integer], device: torch.device) -> Places:
    if len(values) and (values[1:] - values[:-1] == 1).all():
        return slice(int(values[0]), int(values[-1]) + 1)
    return _index(values, device)


def _index(values: NDArray[np.integer], device: torch.device) -> torch.Tensor:
    return torch.from_numpy(values.astype(np.int64)).to(device)
