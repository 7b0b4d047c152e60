"""Defines the interface between models and attention kernels.

A backend cuts a step (`plan`, once per step and window class), writes new keys and values (`store`) and computes
(`attend`). Every layer stores before it attends, so new keys are read from the pool like all others.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch

from ..cache.kv_pool import KVPool
from ..core.batch import Batch

Prepared = TypeVar("Prepared")  # a backend's form of an AttentionPlan: its tensors, on its device


@dataclass(frozen=True, slots=True)
class AttentionGeometry:
    """Heads as attention sees them; `heads` is a multiple of `kv_heads`."""

    heads: int
    kv_heads: int
    head_dim: int

    @property
    def group(self) -> int:
        """Query heads that share one KV head."""
        return self.heads // self.kv_heads


@dataclass(slots=True)
class AttentionCounters:
    """Sums over all plans so far, per layer and window class. keys_saved: reads that tree attention saved."""

    keys_read: int = 0
    keys_saved: int = 0

    def add(self, keys_read: int, keys_saved: int) -> None:
        self.keys_read += keys_read
        self.keys_saved += keys_saved


class AttentionBackend(Protocol[Prepared]):
    """Plans, stores and attends. The oracle is `torch_backend.TorchBackend`."""

    counters: AttentionCounters

    def plan(self, batch: Batch, window: int | None) -> Prepared:
        """Cuts the step. `window`: a row sees at most this many positions, its own included; None: all."""

    def store(self, layer: int, keys: torch.Tensor, values: torch.Tensor, pool: KVPool, slots: torch.Tensor) -> None:
        """Writes keys and values [R, kv_heads, head_dim] to `slots` [R]."""

    def attend(
        self,
        layer: int,
        queries: torch.Tensor,
        pool: KVPool,
        plan: Prepared,
        *,
        scale: float,
        softcap: float = 0.0,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attends queries [R, heads, head_dim] → same shape. `softcap`: logits become c·tanh(logits/c); 0 is off."""


@dataclass(frozen=True, slots=True)
class AttentionStep:
    """Attention of one step, bound to its pool and plans: a model needs nothing else of them."""

    # Any: each backend has its own prepared form; a step only carries it back to the backend that made it.
    backend: AttentionBackend[Any]
    pool: KVPool
    plans: Mapping[int | None, Any]  # window class → prepared plan; Any: as above
    write_slots: torch.Tensor  # int64 [R]

    def attend(
        self,
        layer: int,
        queries: torch.Tensor,  # [R, heads, head_dim]
        keys: torch.Tensor,  # [R, kv_heads, head_dim]
        values: torch.Tensor,
        *,
        window: int | None,
        scale: float,
        softcap: float = 0.0,
    ) -> torch.Tensor:
        """Stores the new keys and values of this layer, then attends to everything that each row may see."""
        self.backend.store(layer, keys, values, self.pool, self.write_slots)
        return self.backend.attend(layer, queries, self.pool, self.plans[window], scale=scale, softcap=softcap)
