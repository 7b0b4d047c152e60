"""RMS norms in torch, and the norm of each head as data for kernels."""

from dataclasses import dataclass

import torch
from torch.nn import functional


class RMSNorm:
    """Computes x / rms(x) × weight in float32. `centered` (Gemma): the weight is stored minus one; rounding is last."""

    def __init__(self, weight: torch.Tensor, *, eps: float, centered: bool) -> None:
        self._eps = eps
        self._shape = weight.shape[-1:]
        self._centered = centered
        self._weight = weight.float() + 1.0 if centered else weight

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        normed = functional.rms_norm(x.float(), self._shape, eps=self._eps)
        if self._centered:
            return (normed * self._weight).to(x.dtype)
        return self._weight * normed.to(x.dtype)


@dataclass(frozen=True, slots=True)
class HeadNorm:
    """The norm of each head of queries and keys. Weights as the checkpoint stores them, in the model's dtype."""

    query_weight: torch.Tensor  # [head_dim]
    key_weight: torch.Tensor  # [head_dim]
    eps: float
    centered: bool  # weights are stored minus one
