"""Computes attention in plain torch, on any device: the oracle of the other backends.

Logits, softmax and the merge of partial results are float32 for any dtype of the pool. No call makes a tensor of more
than `workspace_bytes`: the C library keeps blocks up to 32 MiB for reuse, larger ones are mapped and page-faulted each
time (about 7 ms per 32 MiB).
"""

import torch

from ...lang.errors import ParameterError
from ..cache.kv_pool import KVPool, movable
from ..core.batch import Batch
from .backend import AttentionCounters, AttentionGeometry
from .plan import Cut, make_plan
from .torch_groups import ItemGroup, Places, TorchPlan, group_items


class TorchBackend:
    """Gathers the keys of a group of items, multiplies, masks, sums.

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

    def plan(self, batch: Batch, window: int | None) -> TorchPlan:
        plan = make_plan(batch, window, self.cut)
        self.counters.add(plan.keys_read, plan.keys_saved)
        return group_items(
            plan, max_keys=self.max_keys, max_cells=self.max_cells, slices=self.slices, device=self.device
        )

    def store(self, layer: int, keys: torch.Tensor, values: torch.Tensor, pool: KVPool, slots: torch.Tensor) -> None:
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
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        heads, head_dim = queries.shape[1:]
        if out is None:
            out = torch.empty_like(queries, memory_format=torch.contiguous_format)
        # One place more than parts: it stays empty (weight 0) and pads rows with fewer parts.
        places = plan.partials + 1 if plan.partials else 0
        part_out = torch.zeros((places, heads, head_dim), device=self.device)
        part_lse = torch.full((places, heads), float("-inf"), device=self.device)
        keys, values = pool.keys[layer], pool.values[layer]
        for group in plan.groups:
            attended, lse = self._attend_group(group, queries, keys, values, scale=scale, softcap=softcap)
            if group.direct_from is None:
                _put(out, group.direct_to, attended)
                continue
            _put(out, group.direct_to, attended.index_select(0, group.direct_from))
            if lse is None:
                continue
            part_out.index_copy_(0, group.partial_to, attended.index_select(0, group.partial_from))
            part_lse.index_copy_(0, group.partial_to, lse.index_select(0, group.partial_from))
        if plan.partials:
            out.index_copy_(0, plan.merge_rows, _merge(part_out, part_lse, plan.merge_from).to(out.dtype))
        return out

    def _attend_group(
        self,
        group: ItemGroup,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        *,
        scale: float,
        softcap: float,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Computes float32 results [G*N, heads, head_dim]; if a row has further parts, log-sum-exps [G*N, heads]."""
        items, kv_heads, head_dim = group.items, self.geometry.kv_heads, self.geometry.head_dim
        packed = (items, -1, kv_heads, self.geometry.group, head_dim)  # [G, N, kv_heads, group, head_dim]
        query = (_take(queries, group.rows).float() * scale).reshape(packed).transpose(1, 2)
        query = query.reshape(items, kv_heads, -1, head_dim)  # [G, kv_heads, N*group, head_dim]
        gathered = (items, -1, kv_heads, head_dim)  # [G, L, kv_heads, head_dim]
        key = _take(keys, group.keys).float().view(gathered).transpose(1, 2)
        value = _take(values, group.keys).float().view(gathered).transpose(1, 2)

        logits = query @ key.transpose(2, 3)  # [G, kv_heads, N*group, L]
        if softcap:
            logits = logits.div_(softcap).tanh_().mul_(softcap)
        if group.mask is not None:
            grouped = logits.view(items, kv_heads, -1, self.geometry.group, logits.shape[-1])
            grouped += group.mask
        attended = logits.softmax(-1) @ value  # [G, kv_heads, N*group, head_dim]
        by_row = attended.view(items, kv_heads, -1, self.geometry.group, head_dim).transpose(1, 2)
        result = by_row.reshape(-1, self.geometry.heads, head_dim)
        if not len(group.partial_from):
            return result, None
        lse = logits.logsumexp(-1).view(items, kv_heads, -1, self.geometry.group).transpose(1, 2)
        return result, lse.reshape(-1, self.geometry.heads)


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
