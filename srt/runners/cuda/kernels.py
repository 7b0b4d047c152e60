"""The kernels that the decoder is made of, as one thing: those in Triton, or their twins in plain torch.

Both are modules: `kernels.triton.twins`, and `triton_kernels` beside this file.
"""

from typing import Protocol, TypeVar

import torch

from ...layers.linear import DenseMethod, QuantMethod
from ...layers.norm import HeadNorm
from ...models.experts import ExpertKernels

Weight = TypeVar("Weight")


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


class FusedMethod(QuantMethod[Weight], Protocol[Weight]):
    """A weight format of the CUDA decoder, which multiplies and gates in one call."""

    def apply_gated(self, weight: Weight, x: torch.Tensor, bias: torch.Tensor | None, activation: str) -> torch.Tensor:
        """activation(gate) × up of [gate, up] = x Wᵀ + bias: [R, inputs] → [R, outputs / 2]"""


class KernelMethod(DenseMethod):
    """Floats of the model's dtype, multiplied by the decoder's kernels."""

    def __init__(self, kernels: FusedKernels) -> None:
        self._kernels = kernels

    def apply(self, weight: torch.Tensor, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return self._kernels.linear(x, weight, bias)

    def apply_gated(
        self, weight: torch.Tensor, x: torch.Tensor, bias: torch.Tensor | None, activation: str
    ) -> torch.Tensor:
        return self._kernels.gated(x, weight, bias, activation)
