"""Building blocks: linear maps, norms and activations, rounded where transformers rounds."""

from collections.abc import Callable
from functools import cache
from typing import cast

import torch
from torch.nn import functional

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
}


class Linear:
    """x → x Wᵀ + b. With `packed`, the weight is laid out once for oneDNN instead of at every call.

    Packing on the CPU makes float32 maps 1.1 to 4 times faster at 1 to 32 rows. The sums are in another order, so
    results differ in the last bits.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None, *, packed: bool) -> None:
        self.out_features, self.in_features = weight.shape
        self._bias = bias
        self._packed = pack(weight) if packed else None
        self._weight = None if packed else weight  # one copy is enough

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self._weight is not None:
            return functional.linear(x, self._weight, self._bias)
        return cast(torch.Tensor, torch.ops.mkldnn._linear_pointwise(x, self._packed, self._bias, "none", [], ""))


class Head:
    """Hidden states → logits, written to the caller's buffer in pieces of at most 16 MiB.

    Whole rows of a large vocabulary would be fresh memory at every step: about 7 ms per 32 MiB. For the same reason
    packed blocks are converted one by one in the same place, so a start is faster and needs less memory.
    """

    def __init__(self, weight: torch.Tensor, *, dtype: torch.dtype, softcap: float, packed: bool) -> None:
        if packed:
            blocks = torch.split(weight, HEAD_BLOCK)
            converted = torch.empty_like(blocks[0], dtype=dtype)
            self._blocks = [Linear(converted[: len(block)].copy_(block), packed=True) for block in blocks]
        else:
            self._blocks = [Linear(weight.to(dtype), packed=False)]
        self._softcap = softcap

    def __call__(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """x [L, hidden] → out [L, vocab]"""
        for rows, target in zip(torch.split(x, HEAD_ROWS), torch.split(out, HEAD_ROWS), strict=True):
            first = 0
            for block in self._blocks:
                logits = block(rows)
                if self._softcap:
                    logits = (logits / self._softcap).tanh() * self._softcap
                target[:, first : first + block.out_features] = logits
                first += block.out_features


def pack(weight: torch.Tensor) -> torch.Tensor:
    return cast(torch.Tensor, torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), PACK_BATCH_HINT))


@cache
def can_pack(dtype: torch.dtype) -> bool:
    """Whether this machine's oneDNN takes packed weights of this dtype (bfloat16 needs AVX-512)."""
    try:
        weight = torch.eye(64, dtype=dtype)
        result = Linear(weight, packed=True)(weight)
    except (RuntimeError, AttributeError, NotImplementedError):  # an operator that is absent or refuses
        return False
    return torch.equal(result, weight)


class RMSNorm:
    """x / rms(x) × weight, in float32. `centered` (Gemma): the weight is stored minus one, and rounding comes last."""

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
