"""The protocol of a model: rows in, logits out. Attention and its pool come with each call."""

from dataclasses import dataclass
from typing import Protocol

import torch

from ..attention.backend import AttentionGeometry, AttentionStep
from ..cache.kv_pool import KVGeometry
from ..core.model import Given


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of one step, on the model's device."""

    token_ids: torch.Tensor  # int64 [R] all of the vocabulary; those of given rows mean nothing
    positions: torch.Tensor  # int64 [R]
    logit_rows: torch.Tensor  # int64 [L]
    given: Given | None = None


class Model(Protocol):
    """A causal language model. The families' is `decoder.TorchDecoder`, the rest run in `transformers_model`."""

    vocab_size: int
    context_length: int
    heads: int
    kv_geometry: KVGeometry
    windows: tuple[int | None, ...]  # the window classes it asks `AttentionStep` for
    device: torch.device

    def forward(self, rows: Rows, attention: AttentionStep, *, out: torch.Tensor) -> torch.Tensor:
        """Logits of `rows.logit_rows`, written to `out` (float32 [L, vocab_size]) and returned."""


def attention_geometry(model: Model) -> AttentionGeometry:
    return AttentionGeometry(model.heads, model.kv_geometry.kv_heads, model.kv_geometry.head_dim)
