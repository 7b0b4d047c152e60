"""The kernels that the decoder is made of, as one thing: those in Triton, or their twins in plain torch.

Both are modules: `kernels.triton.twins`, and `triton_kernels` beside this file.
"""

from typing import Protocol

import torch

from ...kernels.triton.head_norm import HeadNorm
from ...models.experts import ExpertKernels


class FusedKernels(ExpertKernels, Protocol):
    """See the files in `kernels/triton` for what each takes and gives."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, *, eps: float, centered: bool) -> torch.Tensor: ...

    def add_rms_norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        *,
        eps: float,
        centered: bool,
        after: torch.Tensor | None = None,
    ) -> torch.Tensor: ...

    def linear(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        *,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor: ...

    def gated(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str
    ) -> torch.Tensor: ...

    def turn_and_store(
        self,
        qkv: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        table: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        *,
        head_norm: HeadNorm | None = None,
    ) -> torch.Tensor: ...
