"""Defines the interface between models and attention kernels, and implements it in plain torch, on any device.

A backend cuts a step (`plan`, once per step and window class), writes new keys and values (`store`) and computes
(`attend`). Every layer stores before it attends, so new keys are read from the pool like all others.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from ...lang.errors import ParameterError
from ..cache.kv_pool import KVPool, LayerKV, movable
from ..core.batch import Batch
from .plan import AttentionPlan, Cut, Window, make_plan

Prepared = TypeVar("Prepared")  # a backend's form of an AttentionPlan: its tensors, on its device


@dataclass(frozen=True, slots=True)
class AttentionGeometry:
    """Heads as attention sees them; `heads` is a multiple of `kv_heads`.

    Where layers differ it is the most that a step is planned for (`covering`): a layer's own shape is that of its
    queries and of its part of the pool.
    """

    heads: int
    kv_heads: int
    head_dim: int  # numbers of a key, or of a value if that is larger
    latent: bool = False  # values lie in their keys

    @classmethod
    def covering(cls, heads: int, layers: Sequence[LayerKV]) -> "AttentionGeometry":
        """Returns the geometry of the largest group of query heads, and of the largest heads, of any layer."""
        sizes = [max(layer.head_dim, layer.value_dim) for layer in layers]
        latent = all(layer.latent for layer in layers)
        return cls(heads, min(layer.kv_heads for layer in layers), max(sizes), latent)

    @property
    def group(self) -> int:
        """Query heads that share one KV head."""
        return self.heads // self.kv_heads


@dataclass(slots=True)
class AttentionCounters:
    """Sums over all plans so far.

    Attributes:
        keys_read: per layer and window class.
        keys_saved: reads that tree attention saved, of them.
        torch_prompts: prompts, or chunks of them, to which some layer attended by torch's kernel (long_prompts.py).
    """

    keys_read: int = 0
    keys_saved: int = 0
    torch_prompts: int = 0

    def add(self, keys_read: int, keys_saved: int) -> None:
        self.keys_read += keys_read
        self.keys_saved += keys_saved


class AttentionBackend(Protocol[Prepared]):
    """Plans, stores and attends. The oracle is `TorchBackend`."""

    counters: AttentionCounters

    def plan(self, batch: Batch, window: Window) -> Prepared:
        """Cuts the step for the layers of one window class."""

    def store(
        self, layer: int, keys: torch.Tensor, values: torch.Tensor | None, pool: KVPool, slots: torch.Tensor
    ) -> None:
        """Writes keys [R, kv_heads, head_dim] and values to `slots` [R]. values: None where they lie in their keys."""

    def attend(
        self,
        layer: int,
        queries: torch.Tensor,
        pool: KVPool,
        plan: Prepared,
        *,
        scale: float,
        softcap: float = 0.0,
        sinks: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attends queries [R, heads, head_dim] → [R, heads, value_dim].

        Args:
            softcap: logits become c·tanh(logits/c); 0 is off.
            sinks: float32 [heads], the logit of a key that every row of the head sees and whose value is zero.
        """


@dataclass(frozen=True, slots=True)
class AttentionStep:
    """Attention of one step, bound to its pool and plans: a model needs nothing else of them."""

    # Any: each backend has its own prepared form; a step only carries it back to the backend that made it.
    backend: AttentionBackend[Any]
    pool: KVPool
    plans: Mapping[Window, Any]  # window class → prepared plan; Any: as above
    write_slots: torch.Tensor  # int64 [R]
    window_write_slots: torch.Tensor | None = None  # the same in window layers; None: as in all others

    def write_slots_of(self, window: Window) -> torch.Tensor:
        """Returns where the rows write in layers of a window class."""
        if window is None or self.window_write_slots is None:
            return self.write_slots
        return self.window_write_slots

    def attend(
        self,
        layer: int,
        queries: torch.Tensor,  # [R, heads, head_dim]
        keys: torch.Tensor | None,  # [R, kv_heads, head_dim]; None: the layer reads those of another
        values: torch.Tensor | None,  # [R, kv_heads, value_dim]; None: as keys, or they lie in the keys
        *,
        window: Window,
        scale: float,
        softcap: float = 0.0,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Stores the new keys and values of this layer, then attends to everything that each row may see."""
        if keys is not None:
            self.backend.store(layer, keys, values, self.pool, self.write_slots_of(window))
        return self.backend.attend(
            layer, queries, self.pool, self.plans[window], scale=scale, softcap=softcap, sinks=sinks
        )


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


class TorchBackend:
    """Gathers the keys of a group of items, multiplies, masks, sums: the oracle of the other backends.

    Logits, softmax and the merge of partial results are float32 for any dtype of the pool. In layers of this geometry
    no call makes a tensor of more than `workspace_bytes`: the C library keeps blocks up to 32 MiB for reuse, larger
    ones are mapped and page-faulted each time (about 7 ms per 32 MiB).

    Args:
        geometry: heads of the model.
        device: where pool and queries are.
        block_rows: most query rows of one item.
        split: most keys of one item; None: as many as fit the workspace.
        workspace_bytes: largest temporary tensor.
        slices: consecutive rows and keys are read in place, not gathered.
        tree_attention: keys that sequences share are read once for all of them, where it pays.
    """

    def __init__(
        self,
        geometry: AttentionGeometry,
        device: torch.device | str,
        *,
        block_rows: int = 128,
        split: int | None = None,
        workspace_bytes: int = 16 << 20,
        slices: bool = True,
        tree_attention: bool = True,
    ) -> None:
        if block_rows < 1 or (split is not None and split < 1):
            raise ParameterError(f"block_rows={block_rows}, split={split}: write numbers of at least 1")
        self.geometry = geometry
        self.device = torch.device(device)
        self.slices = slices
        self.max_keys = max(1, workspace_bytes // (geometry.kv_heads * geometry.head_dim * 4))
        self.max_cells = max(1, workspace_bytes // (geometry.heads * 4))
        fitting = max(1, min(self.max_keys, self.max_cells // block_rows))
        self.cut = Cut(block_rows, fitting if split is None else split, tree=tree_attention)
        self.counters = AttentionCounters()

    def plan(self, batch: Batch, window: Window) -> TorchPlan:
        plan = make_plan(batch, window, self.cut)
        self.counters.add(plan.keys_read, plan.keys_saved)
        return group_items(
            plan, max_keys=self.max_keys, max_cells=self.max_cells, slices=self.slices, device=self.device
        )

    def store(
        self, layer: int, keys: torch.Tensor, values: torch.Tensor | None, pool: KVPool, slots: torch.Tensor
    ) -> None:
        pool.write(layer, keys, values, slots)

    def attend(
        self,
        layer: int,
        queries: torch.Tensor,
        pool: KVPool,
        plan: TorchPlan,
        *,
        scale: float,
        softcap: float = 0.0,
        sinks: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        keys, values = pool.keys[layer], pool.values[layer]
        heads, value_dim = queries.shape[1], values.shape[2]
        if out is None:
            out = queries.new_empty((len(queries), heads, value_dim))
        # One place more than parts: it stays empty (weight 0) and pads rows with fewer parts.
        places = plan.partials + 1 if plan.partials else 0
        part_out = torch.zeros((places, heads, value_dim), device=self.device)
        part_lse = torch.full((places, heads), float("-inf"), device=self.device)
        for group in plan.groups:
            needs_lse = sinks is not None or len(group.partial_from) > 0
            attended, lse = _attend_group(
                group, queries, keys, values, scale=scale, softcap=softcap, needs_lse=needs_lse
            )
            direct = attended if sinks is None else _with_sinks(attended, lse, sinks)
            if group.direct_from is None:
                _put(out, group.direct_to, direct)
                continue
            _put(out, group.direct_to, direct.index_select(0, group.direct_from))
            if not len(group.partial_from):
                continue
            part_out.index_copy_(0, group.partial_to, attended.index_select(0, group.partial_from))
            part_lse.index_copy_(0, group.partial_to, lse.index_select(0, group.partial_from))
        if plan.partials:
            merged = _merge(part_out, part_lse, plan.merge_from)
            if sinks is not None:
                merged = _with_sinks(merged, part_lse[plan.merge_from].logsumexp(1), sinks)
            out.index_copy_(0, plan.merge_rows, merged.to(out.dtype))
        return out


def _attend_group(
    group: ItemGroup,
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    *,
    scale: float,
    softcap: float,
    needs_lse: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes float32 results [G*N, heads, value_dim] and, where needed, log-sum-exps [G*N, heads], else nothing."""
    items, heads, head_dim = group.items, *queries.shape[1:]
    kv_heads, value_dim = values.shape[1:]
    ratio = heads // kv_heads
    packed = (items, -1, kv_heads, ratio, head_dim)  # [G, N, kv_heads, group, head_dim]
    query = (_take(queries, group.rows).float() * scale).reshape(packed).transpose(1, 2)
    query = query.reshape(items, kv_heads, -1, head_dim)  # [G, kv_heads, N*group, head_dim]
    key = _take(keys, group.keys).float().view(items, -1, kv_heads, head_dim).transpose(1, 2)
    value = _take(values, group.keys).float().view(items, -1, kv_heads, value_dim).transpose(1, 2)

    logits = query @ key.transpose(2, 3)  # [G, kv_heads, N*group, L]
    if softcap:
        logits = logits.div_(softcap).tanh_().mul_(softcap)
    if group.mask is not None:
        grouped = logits.view(items, kv_heads, -1, ratio, logits.shape[-1])
        grouped += group.mask
    attended = logits.softmax(-1) @ value  # [G, kv_heads, N*group, value_dim]
    by_row = attended.view(items, kv_heads, -1, ratio, value_dim).transpose(1, 2)
    result = by_row.reshape(-1, heads, value_dim)
    if not needs_lse:
        return result, result.new_empty(0)
    lse = logits.logsumexp(-1).view(items, kv_heads, -1, ratio).transpose(1, 2)
    return result, lse.reshape(-1, heads)


def _with_sinks(attended: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
    """Divides by the sum of exponentials that the sinks are a part of. lse: [rows, heads], of the keys alone."""
    return attended * torch.sigmoid(lse - sinks)[..., None]


def _take(tensor: torch.Tensor, places: Places) -> torch.Tensor:
    if isinstance(places, slice):
        return tensor[places]
    return movable(tensor).index_select(0, places).view(tensor.dtype)


def _put(out: torch.Tensor, places: Places, rows: torch.Tensor) -> None:
    if isinstance(places, slice):
        out[places] = rows
    else:
        out.index_copy_(0, places, rows.to(out.dtype))


def _merge(part_out: torch.Tensor, part_lse: torch.Tensor, merge_from: torch.Tensor) -> torch.Tensor:
    """Averages the parts of each row, weighted by the softmax of their log-sum-exps: [M, heads, head_dim]"""
    weights = part_lse[merge_from].softmax(1)  # [M, parts, heads]
    return (part_out[merge_from] * weights[..., None]).sum(1)


def group_items(plan: AttentionPlan, *, max_keys: int, max_cells: int, slices: bool, device: torch.device) -> TorchPlan:
    """Gathers items of a plan into groups, each computed by one padded torch call.

    Any torch call costs about 20 µs, so items of similar size share one:

        group of 3 items     keys, padded to the longest     rows, padded to the most
          item 4             [k k k k k k]                   [r .]
          item 1             [k k k k . .]                   [r r]
          item 7             [k k k k k .]                   [r .]

    Padding repeats the item's own last key (masked) and last row (dropped), so that a broken value of one request
    cannot reach another: zero weight times another request's NaN would still be NaN.

    A group has at most `max_keys` padded keys and `max_cells` padded (row, key) cells; one item may exceed them.
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
