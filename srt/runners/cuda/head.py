"""Hidden states → logits, on the device."""

import torch

from ...layers.linear import HEAD_ROWS
from .kernels import FusedKernels


class CudaHead:
    """The output map, and the cap that some models put on their logits.

    Args:
        weight: [vocab, hidden] in the model's dtype.
        softcap: logits stay between it and its negative; 0: there is none.
    """

    def __init__(self, weight: torch.Tensor, *, softcap: float, kernels: FusedKernels) -> None:
        self._weight = weight
        self._softcap = softcap
        self._kernels = kernels

    def __call__(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """x [L, hidden] → out float32 [L, vocab]"""
        for rows, target in zip(torch.split(x, HEAD_ROWS), torch.split(out, HEAD_ROWS), strict=True):
            if self._softcap:
                logits = self._kernels.linear(rows, self._weight)
                target.copy_((logits / self._softcap).tanh() * self._softcap)
            else:
                self._kernels.linear(rows, self._weight, out=target)
