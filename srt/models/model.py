"""Defines the protocol of a model: rows in, logits out. Attention and its pool come with each call."""

from dataclasses import dataclass
from typing import Protocol

import torch

from ..attention.backend import AttentionGeometry, AttentionStep
from ..cache.kv_pool import KVGeometry
from ..core.model import Given


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of one step, on the model's device."""

    token_ids: torch.Tensor  # int64 [R] all of the vocabulary; those of given rows are not used
    positions: torch.Tensor  # int64 [R]
    logit_rows: torch.Tensor  # int64 [L]
    given: Given | None = None


class Model(Protocol):
    """A causal language model: `decoder.TorchDecoder` for the families, `transformers_model` for the rest."""

    vocab_size: int
    context_length: int
    heads: int
    kv_geometry: KVGeometry
    windows: tuple[int | None, ...]  # the window classes that it passes to `AttentionStep`
    device: torch.device

    def forward(self, rows: Rows, attention: AttentionStep, *, out: torch.Tensor) -> torch.Tensor:
        """Computes logits of `rows.logit_rows`, writes them to `out` (float32 [L, vocab_size]) and returns them."""


def attention_geometry(model: Model) -> AttentionGeometry:
    return AttentionGeometry(model.heads, model.kv_geometry.kv_heads, model.kv_geometry.head_dim)
