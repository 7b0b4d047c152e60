"""Linear maps of a few rows, and the gates of an MLP after one, on tensor cores.

    matrix   [ BLOCK_N rows | BLOCK_K at a time | … ]     the left factor: its rows fill the instruction
    x        [ all rows     | BLOCK_K at a time | … ]     the narrow side

Tiles of both are on their way, several deep, while others are multiplied. As for one row, reading the matrix is what
costs. Measured on an H100, whole steps of 4 to 32 rows of an 8B model take 6 to 7 % less than with torch's products,
which need a launch more for gates and one for sums that they split.
"""

from functools import cache

import torch
import triton
import triton.language as tl

from .activation import activated
from .jit import block_of, jit, multiplied, rounded
from .pdl import pdl_options, wait_for_previous_kernels

MOST_ROWS = 32  # of x; of more, every program would read more of x than of the matrix
LEAST_OUTPUTS = 2048  # rows of a matrix; torch splits the sums of smaller ones, so that more programs read it
LEAST_ROWS = 16  # of x in a product of tensor cores
OUTPUTS = 64  # rows of the matrix, for each program
DEPTH = 256
STAGES = 4
WARPS = 4
_ITEM = 2  # bytes of a number; those of four are not multiplied on tensor cores without being rounded


def multiplies_few(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """It takes so many rows of this dtype on this device, and has enough programs for such a matrix."""
    if not 0 < len(x) <= MOST_ROWS or x.dtype.itemsize != _ITEM or len(weight) < LEAST_OUTPUTS:
        return False
    return STAGES * (OUTPUTS + _block_rows(len(x))) * DEPTH * _ITEM <= _shared_memory(x.device)


def multiply_few(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor, *, kind: int | None = None
) -> None:
    """x Wᵀ + b to `out`; with an activation's `kind`, gates above ups: the activation of the gates, times the ups.

    Args:
        x: [R, inputs] of 16-bit numbers, `MOST_ROWS` at most; rows may lie apart.
        weight: [outputs, inputs] in one piece, or [2 outputs, inputs].
        bias: one for each row of the weight.
        out: [R, outputs]; rows may lie apart.
    """
    outputs, inputs = out.shape[1], weight.shape[1]
    multiply_few_rows[(triton.cdiv(outputs, OUTPUTS if kind is None else OUTPUTS // 2),)](
        *(x, weight, weight if bias is None else bias, out, 2 * len(x) + 1, outputs, x.stride(0), out.stride(0)),
        INPUTS=inputs,
        BIASED=bias is not None,
        GATED=kind is not None,
        KIND=0 if kind is None else kind,
        BLOCK_M=_block_rows(len(x)),
        BLOCK_N=OUTPUTS,
        BLOCK_K=DEPTH,
        num_warps=WARPS,
        num_stages=STAGES,
        enable_fp_fusion=False,
        **pdl_options(x.device),
    )


def _block_rows(rows: int) -> int:
    return block_of(rows, least=LEAST_ROWS)


@cache
def _shared_memory(device: torch.device) -> float:
    """Bytes that a program may take; the interpreter knows no limit."""
    if device.type != "cuda":
        return float("inf")
    properties = torch.cuda.get_device_properties(device)
    return float(properties.shared_memory_per_block_optin)  # type: ignore[attr-defined]  # it is not in torch's stubs


@jit
def multiply_few_rows(  # type: ignore[no-untyped-def]
    x: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    bound: int,  # 2 rows + 1: odd, or the kernel would be compiled again for 16 rows and for 32
    outputs: int,
    x_stride: int,
    out_stride: int,
    INPUTS: tl.constexpr,
    BIASED: tl.constexpr,
    GATED: tl.constexpr,
    KIND: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_previous_kernels(PDL)
    COLUMNS: tl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    first = tl.program_id(0) * COLUMNS
    number = tl.arange(0, BLOCK_N)
    if GATED:  # gate 0, up 0, gate 1, up 1, …
        column = first + number // 2
        line = (number % 2) * outputs + column
    else:
        column = first + number
        line = column
    line = tl.where(column < outputs, line, 0).to(tl.int64)  # what lies after the matrix repeats its first row
    depth = tl.arange(0, BLOCK_K)
    row = tl.arange(0, BLOCK_M)
    real = 2 * row + 1 < bound
    at = weight + line[:, None] * INPUTS + depth[None, :]
    numbers_at = x + row.to(tl.int64)[None, :] * x_stride + depth[:, None]
    total = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
    for start in range(0, INPUTS, BLOCK_K):
        there = depth < INPUTS - start
        weights = tl.load(at + start, mask=there[None, :], other=0.0)
        numbers = tl.load(numbers_at + start, mask=real[None, :] & there[:, None], other=0.0)
        total = multiplied(weights, numbers, total, "ieee")
    if BIASED:
        total += tl.load(bias + line).to(tl.float32)[:, None]
    dtype: tl.constexpr = x.dtype.element_ty
    if GATED:
        both = tl.reshape(rounded(total, dtype).to(tl.float32), [COLUMNS, 2, BLOCK_M])
        gate, up = tl.split(tl.permute(both, [0, 2, 1]))
        total = rounded(activated(gate, KIND), dtype).to(tl.float32) * up
    target = first + tl.arange(0, COLUMNS)
    inside = (target < outputs)[:, None] & real[None, :]
    tl.store(out + row.to(tl.int64)[None, :] * out_stride + target[:, None], rounded(total, dtype), mask=inside)
