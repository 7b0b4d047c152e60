"""Defines the kernels that the CUDA decoder launches, and the weight formats that multiply with them."""

from collections.abc import Sequence
from typing import Protocol, TypeVar

import torch

from ...layers.checkpoint import Checkpoint, LinearTensors
from ...layers.linear import DenseMethod, HeadNorm, QuantMethod
from ...layers.low_rank import Adapter, AdapterBlocks, LowRankStack, StackedChanges
from ...layers.quantized import QuantizedMethod, QuantizedTensor, QuantizedWeight
from ...models.experts import ExpertKernels

Weight = TypeVar("Weight")


class FusedKernels(ExpertKernels, Protocol):
    """The decoder's kernels: those in Triton, or `kernels.triton.reference` in plain torch.

    The files in `kernels/triton` document their arguments and results.
    """

    def rms_norm(
        self, x: torch.Tensor, weight: torch.Tensor, *, eps: float, centered: bool, out: torch.Tensor | None = None
    ) -> torch.Tensor: ...

    def add_rms_norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor | None,
        *,
        eps: float,
        centered: bool,
        after: torch.Tensor | None = None,
        scale: float = 1.0,
        factor: torch.Tensor | None = None,
    ) -> torch.Tensor: ...

    def gated(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str
    ) -> torch.Tensor: ...

    def rope_and_store(
        self,
        qkv: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        table: torch.Tensor,
        keys: torch.Tensor | None,
        values: torch.Tensor | None,
        *,
        head_norm: HeadNorm | None = None,
        rotated: int | None = None,
        interleaved: bool = False,
        gated: bool = False,
    ) -> torch.Tensor: ...

    def act_and_multiply(self, gate_up: torch.Tensor, activation: str) -> torch.Tensor: ...

    def adapter_blocks(self, adapters: torch.Tensor, count: int) -> AdapterBlocks: ...

    def add_low_rank(self, x: torch.Tensor, out: torch.Tensor, blocks: AdapterBlocks, stack: LowRankStack) -> None: ...

    def quantized_linear(
        self, x: torch.Tensor, weight: QuantizedTensor, *, out: torch.Tensor | None = None
    ) -> torch.Tensor: ...


class FusedMethod(QuantMethod[Weight], Protocol[Weight]):
    """A weight format of the CUDA decoder, which can multiply and gate in one call."""

    def apply_gated(self, weight: Weight, x: torch.Tensor, bias: torch.Tensor | None, activation: str) -> torch.Tensor:
        """Computes activation(gate) × up for [gate, up] = x Wᵀ + bias: [R, inputs] → [R, outputs / 2]"""


class _KernelChanges:
    """Base of the decoder's weight formats: its kernels multiply the changes of adapters."""

    _kernels: FusedKernels

    def changes(
        self, adapters: Sequence[Adapter], tensors: LinearTensors, *, dtype: torch.dtype, device: torch.device
    ) -> StackedChanges:
        return StackedChanges(
            LowRankStack.of(adapters, tensors, dtype=dtype, device=device), self._kernels.add_low_rank
        )


class KernelMethod(_KernelChanges, DenseMethod):
    """Stores weights as floats of the model's dtype and multiplies them with the decoder's kernels."""

    def __init__(self, kernels: FusedKernels) -> None:
        self._kernels = kernels

    def apply(self, weight: torch.Tensor, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return self._kernels.linear(x, weight, bias)

    def apply_gated(
        self, weight: torch.Tensor, x: torch.Tensor, bias: torch.Tensor | None, activation: str
    ) -> torch.Tensor:
        return self._kernels.gated(x, weight, bias, activation)


class QuantizedKernelMethod(_KernelChanges, QuantizedMethod):
    """Multiplies what another method loads, packed matrices, with the decoder's kernels.

    Args:
        loader: loads the weights.
    """

    def __init__(self, loader: QuantizedMethod, kernels: FusedKernels) -> None:
        self._loader = loader
        self._kernels = kernels
        self.name = loader.name
        self.rounds_vocabulary = loader.rounds_vocabulary
        self.keeps_packed = loader.keeps_packed

    def load(self, checkpoint: Checkpoint, tensors: LinearTensors) -> QuantizedWeight:
        return self._loader.load(checkpoint, tensors)

    def round(self, weight: torch.Tensor) -> QuantizedTensor | None:
        return self._loader.round(weight)

    def apply(self, weight: QuantizedWeight, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        if len(weight) == 1 and isinstance(weight[0], torch.Tensor):
            return self._kernels.linear(x, weight[0], bias)
        products = [
            self._kernels.quantized_linear(x, part)
            if isinstance(part, QuantizedTensor)
            else self._kernels.linear(x, part)
            for part in weight
        ]
        out = products[0] if len(products) == 1 else torch.cat(products, dim=1)
        return out if bias is None else out + bias

    def apply_gated(
        self, weight: QuantizedWeight, x: torch.Tensor, bias: torch.Tensor | None, activation: str
    ) -> torch.Tensor:
        if len(weight) == 1 and isinstance(weight[0], torch.Tensor):
            return self._kernels.gated(x, weight[0], bias, activation)
        return self._kernels.act_and_multiply(self.apply(weight, x, bias), activation)
