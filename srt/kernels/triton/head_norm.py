"""The norm of each head of queries and keys, as data."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class HeadNorm:
    """Weights as the checkpoint stores them, in the model's dtype; `centered`: minus one."""

    query_weight: torch.Tensor  # [head_dim]
    key_weight: torch.Tensor  # [head_dim]
    eps: float
    centered: bool
