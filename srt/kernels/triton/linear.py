"""Computes linear maps of few rows, and the gates of an MLP after them: most of the time of decoding.

    one row          `multiply_row`, `gate_row`: no tensor cores, only reading
    up to 32 rows    `multiply_few_rows`, on tensor cores: the matrix fills the instruction, x is its narrow side
    more             torch

Of few rows a product costs reading its matrix, and nothing else should. cuBLAS leaves a part of the bandwidth unused
there, and its kernels begin when the one before has ended; here programs are there by then, and of one row they have
their first weights on their way (`jit.py`). Asking for more of them ahead, into the cache, was measured and costs
more than it brings: attention in front waits until that has come.

Measured on an H100, whole steps of 4 to 32 rows of an 8B model take 6 to 7 % less than with torch's products, which
need a launch more for gates and one for sums that they split. Tiles of both factors are on their way, several deep,
while others are multiplied. The references are `reference.linear` and `reference.gated`.
"""

import torch
import triton
import triton.language as tl
from torch.nn import functional

from .fitting import Room, largest_that_fits, launch_fitting, room_of, shared_bytes
from .jit import block_of, jit, multiplied, pdl_options, rounded, wait_for_previous_kernels
from .tuning import RowsTile, tuning_for

SILU = tl.constexpr(0)
GELU = tl.constexpr(1)
GELU_TANH = tl.constexpr(2)
RELU = tl.constexpr(3)
RELU_SQUARED = tl.constexpr(4)

# `layers.linear.ACTIVATIONS`, as numbers that kernels are compiled for.
ACTIVATION_KINDS: dict[str, int] = {
    "silu": SILU.value,
    "swish": SILU.value,
    "gelu": GELU.value,
    "gelu_new": GELU_TANH.value,
    "gelu_pytorch_tanh": GELU_TANH.value,
    "relu": RELU.value,
    "relu2": RELU_SQUARED.value,
}

LEAST_ROWS = 16  # of x in a product of tensor cores
_ITEM = 2  # bytes of a number; those of four are not multiplied on tensor cores without being rounded


def depth_for(size: int, dtype: torch.dtype, warps: int) -> int:
    """BLOCK_K for rows of `size` numbers: what so many warps read at once, 16 bytes each thread.

    Then every thread has the same numbers of all rows of a tile, and the row reaches it without shared memory.
    """
    return min(warps * 512 // dtype.itemsize, block_of(size))


@jit
def weights_of_tile(at: tl.tensor, inside: tl.tensor, start: int, SIZE: tl.constexpr, BLOCK_K: tl.constexpr):  # type: ignore[no-untyped-def]
    """[BLOCK_N, BLOCK_K] numbers from `start` on.

    at: [BLOCK_N, BLOCK_K] of the first numbers; inside: [BLOCK_N, 1] rows that are there.
    """
    there = (tl.arange(0, BLOCK_K) < SIZE - start)[None, :]
    return tl.load(at + start, mask=inside & there, other=0.0)


@jit
def sums_of_rows(  # type: ignore[no-untyped-def]
    row: tl.tensor,
    at: tl.tensor,
    inside: tl.tensor,
    ahead: tl.tensor,
    SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """float32 [BLOCK_N]: each row of the matrix times its row.

    row: of the first numbers, [1, BLOCK_K] where all have the same row, [BLOCK_N, BLOCK_K] where each has its own.
    at, inside, ahead: of the matrix, as `weights_of_tile` takes and gives them.
    """
    total = tl.zeros([BLOCK_N, BLOCK_K], dtype=tl.float32)
    for start in range(0, SIZE, BLOCK_K):
        weights = ahead.to(tl.float32)
        ahead = weights_of_tile(at, inside, start + BLOCK_K, SIZE, BLOCK_K)
        there = (tl.arange(0, BLOCK_K) < SIZE - start)[None, :]
        numbers = tl.load(row + start, mask=there, other=0.0).to(tl.float32)
        total = tl.fma(weights, tl.broadcast_to(numbers, [BLOCK_N, BLOCK_K]), total)
    return tl.sum(total, axis=1)


def linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """x Wᵀ + b, rounded to the dtype of x.

    Args:
        x: [R, inputs] of the model's dtype; rows may lie apart.
        weight: [outputs, inputs] of the same dtype.
        bias: [outputs].
        out: [R, outputs] of that dtype or float32, where the result goes; None: to memory of its own.

    Returns:
        out, or [R, outputs] in the dtype of x.
    """
    outputs, inputs = weight.shape
    if not _takes(x, weight):
        result = functional.linear(x, weight, bias)
        return result if out is None else out.copy_(result)
    if out is None:
        out = torch.empty((len(x), outputs), dtype=x.dtype, device=x.device)
    assert out.stride(1) == 1, "the elements of a row lie side by side"
    if len(x) > 1:
        multiply_few(x, weight, bias, out)
        return out
    tile = tuning_for(x.device).linear_row
    multiply_row[(triton.cdiv(outputs, tile.outputs),)](
        x,
        weight,
        bias=weight if bias is None else bias,
        out=out,
        outputs=outputs,
        INPUTS=inputs,
        BIASED=bias is not None,
        BLOCK_N=tile.outputs,
        BLOCK_K=depth_for(inputs, x.dtype, tile.warps),
        num_warps=tile.warps,
        enable_fp_fusion=False,
        **pdl_options(x.device),
    )
    return out


def gated(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str) -> torch.Tensor:
    """Computes the activation of the gates, times the ups.

    Args:
        x: [R, inputs] of the model's dtype; rows may lie apart.
        weight: [2 width, inputs] of the same dtype, gates above ups.
        bias: [2 width].
        activation: one of `layers.linear.ACTIVATIONS`.

    Returns:
        [R, width] in the dtype of x, rounded where `linear` and `activation.act_and_multiply` round.
    """
    width, inputs = len(weight) // 2, weight.shape[1]
    if not _takes(x, weight):
        return act_and_multiply(functional.linear(x, weight, bias), activation)
    out = torch.empty((len(x), width), dtype=x.dtype, device=x.device)
    if len(x) > 1:
        multiply_few(x, weight, bias, out, kind=ACTIVATION_KINDS[activation])
        return out
    tile = tuning_for(x.device).linear_gate
    gate_row[(triton.cdiv(width, tile.outputs),)](
        x,
        weight,
        bias=weight if bias is None else bias,
        out=out,
        INPUTS=inputs,
        WIDTH=width,
        BIASED=bias is not None,
        KIND=ACTIVATION_KINDS[activation],
        BLOCK_N=tile.outputs,
        BLOCK_K=depth_for(inputs, x.dtype, tile.warps),
        num_warps=tile.warps,
        enable_fp_fusion=False,
        **pdl_options(x.device),
    )
    return out


def _takes(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Returns whether rows are few, and numbers lie as the kernels read them: 16 bytes at once."""
    there = x.stride(1) == 1 and weight.is_contiguous() and weight.shape[1] % 16 == 0
    return there and (len(x) == 1 or multiplies_few(x, weight))


@jit
def multiply_row(  # type: ignore[no-untyped-def]
    x: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    outputs: int,
    INPUTS: tl.constexpr,
    BIASED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    depth = tl.arange(0, BLOCK_K)[None, :]
    at = weight + column.to(tl.int64)[:, None] * INPUTS + depth
    inside = (column < outputs)[:, None]
    ahead = weights_of_tile(at, inside, 0, INPUTS, BLOCK_K)
    wait_for_previous_kernels(PDL)
    result = sums_of_rows(x + depth, at, inside, ahead, INPUTS, BLOCK_N, BLOCK_K)
    if BIASED:
        result += tl.load(bias + column, mask=column < outputs, other=0.0).to(tl.float32)
    tl.store(out + column, rounded(result, x.dtype.element_ty), mask=column < outputs)


@jit
def gate_row(  # type: ignore[no-untyped-def]
    x: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    INPUTS: tl.constexpr,
    WIDTH: tl.constexpr,
    BIASED: tl.constexpr,
    KIND: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    number = tl.arange(0, 2 * BLOCK_N)  # gate 0, up 0, gate 1, up 1, …
    column = tl.program_id(0) * BLOCK_N + number // 2
    line = (number % 2) * WIDTH + column
    depth = tl.arange(0, BLOCK_K)[None, :]
    at = weight + line.to(tl.int64)[:, None] * INPUTS + depth
    inside = (column < WIDTH)[:, None]
    ahead = weights_of_tile(at, inside, 0, INPUTS, BLOCK_K)
    wait_for_previous_kernels(PDL)
    dtype: tl.constexpr = out.dtype.element_ty
    sums = sums_of_rows(x + depth, at, inside, ahead, INPUTS, 2 * BLOCK_N, BLOCK_K)
    if BIASED:
        sums += tl.load(bias + line, mask=column < WIDTH, other=0.0).to(tl.float32)
    gate, up = tl.split(tl.reshape(rounded(sums, dtype).to(tl.float32), [BLOCK_N, 2]))
    own = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    product = rounded(activated(gate, KIND), dtype).to(tl.float32) * up
    tl.store(out + own, rounded(product, dtype), mask=own < WIDTH)


def multiplies_few(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """It takes so many rows of this dtype, and has enough programs for such a matrix."""
    tile = tuning_for(x.device).linear_rows
    return 0 < len(x) <= tile.most_rows and x.dtype.itemsize == _ITEM and len(weight) >= tile.least_outputs


def rows_tile(rows: int, tile: RowsTile, room: Room) -> RowsTile:
    """Returns the tile for so many rows of x, or the largest smaller one that a device holds."""
    block = _block_rows(rows)

    def needs(tile: RowsTile) -> int:
        return shared_bytes(tile, room, stage=(tile.outputs + block) * tile.depth * _ITEM)

    return largest_that_fits("linear_rows", tile, room, needs, shape=block)


def multiply_few(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor, *, kind: int | None = None
) -> None:
    """x Wᵀ + b to `out`; with an activation's `kind`, gates above ups: the activation of the gates, times the ups.

    Args:
        x: [R, inputs] of 16-bit numbers, `most_rows` of the table at most; rows may lie apart.
        weight: [outputs, inputs] in one piece, or [2 outputs, inputs].
        bias: one for each row of the weight.
        out: [R, outputs]; rows may lie apart.
    """
    outputs, inputs = out.shape[1], weight.shape[1]
    block = _block_rows(len(x))

    def launch(tile: RowsTile) -> None:
        multiply_few_rows[(triton.cdiv(outputs, tile.outputs if kind is None else tile.outputs // 2),)](
            x,
            weight,
            bias=weight if bias is None else bias,
            out=out,
            bound=2 * len(x) + 1,
            outputs=outputs,
            x_stride=x.stride(0),
            out_stride=out.stride(0),
            INPUTS=inputs,
            BIASED=bias is not None,
            GATED=kind is not None,
            KIND=0 if kind is None else kind,
            BLOCK_M=block,
            BLOCK_N=tile.outputs,
            BLOCK_K=tile.depth,
            num_warps=tile.warps,
            num_stages=tile.stages,
            enable_fp_fusion=False,
            **pdl_options(x.device),
        )

    tile = rows_tile(len(x), tuning_for(x.device).linear_rows, room_of(x.device))
    launch_fitting("linear_rows", tile, launch, shape=block)


def _block_rows(rows: int) -> int:
    return block_of(rows, least=LEAST_ROWS)


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


def act_and_multiply(gate_up: torch.Tensor, activation: str) -> torch.Tensor:
    """Computes the activation of the first half of each row, times the second half.

    Args:
        gate_up: [R, 2 width] of the model's dtype; rows may lie apart.
        activation: one of `layers.linear.ACTIVATIONS`.

    Returns:
        [R, width] in the same dtype; the activation is rounded before the product, as torch rounds it.
    """
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    assert gate_up.shape[1] == 2 * width, "a gate for each column"
    assert gate_up.stride(1) == 1, "the elements of a row lie side by side"
    out = torch.empty((rows, width), dtype=gate_up.dtype, device=gate_up.device)
    if rows:
        tile = tuning_for(gate_up.device).linear_act
        act_and_multiply_rows[(rows, triton.cdiv(width, tile.columns))](
            gate_up,
            out,
            stride=gate_up.stride(0),
            width=width,
            KIND=ACTIVATION_KINDS[activation],
            BLOCK=tile.columns,
            num_warps=tile.warps,
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
    elif KIND == RELU:
        return tl.maximum(x, 0.0)
    else:
        tl.static_assert(KIND == RELU_SQUARED)
        return tl.maximum(x, 0.0) * tl.maximum(x, 0.0)


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
