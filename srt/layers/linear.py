"""Linear maps and the interface of weight formats, activations, the head, and norms; rounded where transformers rounds.

QuantMethod   DenseMethod        floats, on any device, multiplied by torch
              PackedMethod       floats, laid out for oneDNN
              QuantizedMethod    the matrices of packed checkpoints                   layers/quantized.py
              CpuMethod          float32, bf16 or int8 on the native CPU kernels      weights/quantization.py
              KernelMethod       floats, multiplied by Triton's kernels               runners/cuda/decoder.py
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol, TypeVar, cast

import torch
from torch.nn import functional

from .checkpoint import Checkpoint, LinearTensors
from .low_rank import Adapter, AdapterBlocks, AdapterRows, LowRankChanges, StackedChanges, TorchChanges
from .quantized import QuantizedMethod, QuantizedTensor

HEAD_ROWS = 64  # rows of one product with the vocabulary
HEAD_BLOCK = 65_536  # tokens of one such product where weights are packed; smaller blocks cost speed at one row
PACK_BATCH_HINT = 16  # rows for which oneDNN lays weights out; measured best or equal for 1 to 32 rows

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": functional.silu,
    "swish": functional.silu,
    "gelu": functional.gelu,
    "gelu_new": lambda x: functional.gelu(x, approximate="tanh"),
    "gelu_pytorch_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "relu": functional.relu,
    "relu2": lambda x: functional.relu(x).square(),
}

Weight = TypeVar("Weight")


def keep_highest(gate: torch.Tensor, deviations: float) -> torch.Tensor:
    """Returns what gates [R, width] are above the mean of their row plus so many standard deviations, or 0."""
    deviation = gate.std(dim=-1, keepdim=True, unbiased=False)
    return (gate - (gate.mean(dim=-1, keepdim=True) + deviation * deviations)).relu()


class QuantMethod(Protocol[Weight]):
    """A weight format: reads a linear map from a checkpoint, keeps it in memory, and multiplies it.

    A format that converts weights when they are loaded (int8) has a `create` of its own. One that checkpoints store
    (GPTQ, AWQ) has a `stored` and a `load` of its own, for other tensors than `NAME.weight`. One without kernels for
    adapters inherits `changes` from `TorchChanges`.
    """

    name: str  # in the runner's facts

    def create(self, sources: Sequence[torch.Tensor]) -> Weight:
        """Stacks matrices, each [n_i, inputs], along their outputs and lays them out in this format."""

    def stored(self, tensors: LinearTensors) -> list[str]:
        """Returns the names of the tensors that a checkpoint in this format has for the maps."""

    def load(self, checkpoint: Checkpoint, tensors: LinearTensors) -> Weight:
        """Reads the tensors that this format stores for the maps, and creates one weight of them."""

    def apply(self, weight: Weight, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Computes x [R, inputs] → x Wᵀ + bias [R, outputs]."""

    def changes(
        self, adapters: Sequence[Adapter], tensors: LinearTensors, *, dtype: torch.dtype, device: torch.device
    ) -> LowRankChanges | StackedChanges:
        """Lays out the changes that adapters make to one product."""


class DenseMethod(TorchChanges):
    """Keeps weights as floats of the model's dtype and multiplies in torch."""

    name = "dense"

    def create(self, sources: Sequence[torch.Tensor]) -> torch.Tensor:
        return sources[0] if len(sources) == 1 else torch.cat(list(sources))

    def stored(self, tensors: LinearTensors) -> list[str]:
        return tensors.weights

    def load(self, checkpoint: Checkpoint, tensors: LinearTensors) -> torch.Tensor:
        return self.create(checkpoint.take_weights(tensors))

    def apply(self, weight: torch.Tensor, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return functional.linear(x, weight, bias)


class PackedMethod(DenseMethod):
    """Keeps weights as floats laid out once for oneDNN instead of at every call. CPU only.

    Packing makes float32 maps 1.1 to 4 times faster at 1 to 32 rows. Sums have another order, so results differ in the
    last bits.
    """

    name = "packed"

    def create(self, sources: Sequence[torch.Tensor]) -> torch.Tensor:
        weight = super().create(sources).contiguous()
        return cast(torch.Tensor, torch.ops.mkldnn._reorder_linear_weight(weight, PACK_BATCH_HINT))

    def apply(self, weight: torch.Tensor, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return cast(torch.Tensor, torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], ""))


def dense_method(*, packed: bool) -> DenseMethod:
    return PackedMethod() if packed else DenseMethod()


@cache
def can_pack(dtype: torch.dtype) -> bool:
    """Returns whether this machine's oneDNN takes packed weights of this dtype (bfloat16 needs AVX-512)."""
    method, eye = PackedMethod(), torch.eye(64, dtype=dtype)
    try:
        result = method.apply(method.create([eye]), eye)
    except (RuntimeError, AttributeError, NotImplementedError):  # an operator that is absent or refuses
        return False
    return torch.equal(result, eye)


class Linear:
    """Computes x Wᵀ + b, with weights read from a checkpoint in the format of a method, and the changes of adapters."""

    def __init__(
        self,
        # Any: each method has its own form of weight, and only the method reads it.
        method: QuantMethod[Any],
        checkpoint: Checkpoint,
        tensors: LinearTensors,
        adapters: Sequence[Adapter] = (),
    ) -> None:
        self._method = method
        self._weight = method.load(checkpoint, tensors)
        self._bias = checkpoint.take_bias(tensors)
        self._changes = method.changes(adapters, tensors, dtype=checkpoint.dtype, device=checkpoint.device)

    def __call__(self, x: torch.Tensor, adapted: AdapterRows | AdapterBlocks | None = None) -> torch.Tensor:
        """x [R, inputs] → [R, outputs]. `adapted`: the rows that use adapters; None: no row does."""
        out = self._method.apply(self._weight, x, self._bias)
        if adapted is not None:
            self._changes.add(x, out, adapted)
        return out


class TorchHead:
    """Computes logits from hidden states, into the caller's buffer in pieces of at most 16 MiB.

    Whole rows of a large vocabulary would need newly mapped memory at every step: about 7 ms per 32 MiB. For the same
    reason packed blocks are converted one by one in one buffer, so a start is faster and needs less memory.
    """

    def __init__(
        self, weight: torch.Tensor | QuantizedTensor, *, dtype: torch.dtype, scale: float, softcap: float, packed: bool
    ) -> None:
        # Any: only the method reads its weights.
        self._method: QuantMethod[Any] = dense_method(packed=packed)
        self._scale = scale
        self._softcap = softcap
        if isinstance(weight, QuantizedTensor):
            self._method, self._widths = QuantizedMethod(), [weight.shape[0]]
            self._blocks: list[Any] = [(weight,)]
            return
        blocks = torch.split(weight, HEAD_BLOCK) if packed else (weight,)
        self._widths = [len(block) for block in blocks]
        if packed:
            converted = torch.empty_like(blocks[0], dtype=dtype)
            self._blocks = [self._method.create([converted[: len(block)].copy_(block)]) for block in blocks]
        else:
            self._blocks = [weight.to(dtype)]

    def __call__(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """x [L, hidden] → out [L, vocab]"""
        for rows, target in zip(torch.split(x, HEAD_ROWS), torch.split(out, HEAD_ROWS), strict=True):
            first = 0
            for block, width in zip(self._blocks, self._widths, strict=True):
                logits = self._method.apply(block, rows)
                if self._scale != 1.0:
                    logits = logits * self._scale
                if self._softcap:
                    logits = (logits / self._softcap).tanh() * self._softcap
                target[:, first : first + width] = logits
                first += width


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
    """The norm of each head of queries, keys and values. Weights are as stored, in the model's dtype."""

    query_weight: torch.Tensor  # [head_dim]
    key_weight: torch.Tensor  # [head_dim]
    eps: float
    centered: bool  # weights are stored minus one
    value_weight: torch.Tensor | None = None  # [head_dim]; None: values are not normalised
