"""Building blocks: linear maps, norms and activations, rounded where transformers rounds."""

from collections.abc import Callable
from functools import cache
from typing import cast

import torch
from torch.nn import functional

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
