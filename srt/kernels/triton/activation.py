"""Computes act(gate) × up, the middle of an MLP, in one pass. The reference is `reference.act_and_multiply`."""

import torch
import triton
import triton.language as tl

from .jit import jit, pdl_options, rounded, wait_for_previous_kernels

_BLOCK = 1024  # columns of a program: eight for each of its threads

SILU = tl.constexpr(0)
GELU = tl.constexpr(1)
GELU_TANH = tl.constexpr(2)
RELU = tl.constexpr(3)

# `linear.ACTIVATIONS`, as numbers that kernels are compiled for.
ACTIVATION_KINDS: dict[str, int] = {
    "silu": SILU.value,
    "swish": SILU.value,
    "gelu": GELU.value,
    "gelu_new": GELU_TANH.value,
    "gelu_pytorch_tanh": GELU_TANH.value,
    "relu": RELU.value,
}


def act_and_multiply(gate_up: torch.Tensor, activation: str) -> torch.Tensor:
    """Computes the activation of the first half of each row, times the second half.

    Args:
        gate_up: [R, 2 width] of the model's dtype; rows may lie apart.
        activation: one of `linear.ACTIVATIONS`.

    Returns:
        [R, width] in the same dtype; the activation is rounded before the product, as torch rounds it.
    """
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    assert gate_up.shape[1] == 2 * width, "a gate for each column"
    assert gate_up.stride(1) == 1, "the elements of a row lie side by side"
    out = torch.empty((rows, width), dtype=gate_up.dtype, device=gate_up.device)
    if rows:
        grid = (rows, triton.cdiv(width, _BLOCK))
        act_and_multiply_rows[grid](
            *(gate_up, out, gate_up.stride(0), width),
            KIND=ACTIVATION_KINDS[activation],
            BLOCK=_BLOCK,
            num_warps=4,
            enable_fp_fusion=False,
            **pdl_options(gate_up.device),
        )
    return out


@jit
def activated(x: tl.tensor, KIND: tl.constexpr):  # type: ignore[no-untyped-def]
    """Computes the activation of float32 values, in float32."""
    if KIND == SILU:
        return x / (1.0 + tl.exp(-x))
    elif KIND == GELU:
        return 0.5 * x * (1.0 + tl.math.erf(x * 0.7071067811865476))
    elif KIND == GELU_TANH:
        # (1 + tanh u) / 2 is the sigmoid of 2u, and has no cancellation where tanh is near −1.
        return x / (1.0 + tl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))
    else:
        tl.static_assert(KIND == RELU)
        return tl.maximum(x, 0.0)


@jit
def act_and_multiply_rows(  # type: ignore[no-untyped-def]
    gate_up: tl.tensor,
    out: tl.tensor,
    stride: int,
    width: int,
    KIND: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_previous_kernels(PDL)
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    dtype: tl.constexpr = out.dtype.element_ty
    gate = tl.load(gate_up + row * stride + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * stride + width + at, mask=inside, other=0.0).to(tl.float32)
    product = rounded(activated(gate, KIND), dtype).to(tl.float32) * up
    tl.store(out + row * width + at, rounded(product, dtype), mask=inside)
