"""Multiplies matrices in codes of 4 or 8 bits (`layers.quantized`), which stay packed in memory; `moe` does stacks.

    one row          `multiply_codes_row`: codes become numbers in registers, groups are summed, then scaled
    up to 64 rows    `multiply_codes_rows`: tiles are widened to the dtype of x in registers, for tensor cores
    more             `widen_codes` writes the numbers of some outputs, torch multiplies them

Few rows cost reading the codes. In the first form a group costs one product with its scale: Σ (code − zero) · scale · x
= scale · (Σ code · x − zero · Σ x). The reference is `reference.quantized_linear`.
"""

from functools import cache

import torch
import triton
import triton.language as tl
from torch.nn import functional

from ...layers.quantized import TABLES, Codes, QuantizedTensor
from .fitting import Room, largest_that_fits, launch_fitting, room_of, shared_bytes
from .jit import block_of, jit, multiplied, pdl_options, rounded, wait_for_previous_kernels
from .tuning import RowsTile, tuning_for

NIBBLES = tl.constexpr(0)
BYTES = tl.constexpr(1)  # int8 and float8
TABLE = tl.constexpr(2)
FLOAT4 = tl.constexpr(3)  # e2m1

LEAST_ROWS = 16  # of x in a product of tensor cores


def quantized_linear(x: torch.Tensor, weight: QuantizedTensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """x Wᵀ, rounded to the dtype of x.

    Args:
        x: [R, inputs] of the model's dtype; rows may lie apart.
        weight: [outputs, inputs], on the device of x.
        out: [R, outputs] of that dtype or float32, where the result goes; None: to memory of its own.

    Returns:
        out, or [R, outputs] in the dtype of x.
    """
    if weight.permutation is not None:
        x = x.index_select(1, weight.permutation)
    outputs, inputs = weight.shape
    if out is None:
        out = torch.empty((len(x), outputs), dtype=x.dtype, device=x.device)
    assert out.stride(1) == 1, "the elements of a row lie side by side"
    if not len(x):
        return out
    if not weight.fits_tiles:
        for first, end, values in weight.pieces():
            out[:, first:end] = functional.linear(x, values.to(x.dtype))
        return out
    x = x if x.stride(1) == 1 else x.contiguous()
    if len(x) == 1:
        _multiply_row(x, weight, out)
    elif len(x) <= tuning_for(x.device).quantized_rows.most_rows:
        _multiply_rows(x, weight, out)
    else:
        tile = tuning_for(x.device).quantized_widen
        step = max(tile.outputs, tile.most // inputs // tile.outputs * tile.outputs)
        for first in range(0, outputs, step):
            end = min(first + step, outputs)
            out[:, first:end] = functional.linear(x, widen(weight, first, end, x.dtype))
    return out


def widen(weight: QuantizedTensor, first: int, end: int, dtype: torch.dtype) -> torch.Tensor:
    """Returns outputs [first, end) as numbers of a dtype, [end − first, inputs], in the order of the codes."""
    inputs = weight.shape[1]
    out = torch.empty((end - first, inputs), dtype=dtype, device=weight.codes.device)
    part = weight.part(first, end)
    tile = tuning_for(out.device).quantized_widen
    widen_codes[(triton.cdiv(end - first, tile.outputs), triton.cdiv(inputs, tile.depth))](
        **pointers_of(part),
        out=out,
        outputs=end - first,
        **_constants(part),
        BLOCK_N=tile.outputs,
        BLOCK_K=tile.depth,
        SUB=sub_of(part, tile.depth),
        num_warps=tile.warps,
        enable_fp_fusion=False,
        **pdl_options(out.device),
    )
    return out


def _multiply_row(x: torch.Tensor, weight: QuantizedTensor, out: torch.Tensor) -> None:
    outputs, inputs = weight.shape
    tile = tuning_for(x.device).quantized_row
    depth = min(tile.code_bytes * 8 // weight.kind.bits, block_of(inputs))
    multiply_codes_row[(triton.cdiv(outputs, tile.outputs),)](
        x,
        **pointers_of(weight),
        out=out,
        outputs=outputs,
        **_constants(weight),
        BLOCK_N=tile.outputs,
        BLOCK_K=depth,
        SUB=sub_of(weight, depth),
        num_warps=tile.warps,
        enable_fp_fusion=False,
        **pdl_options(x.device),
    )


def _multiply_rows(x: torch.Tensor, weight: QuantizedTensor, out: torch.Tensor) -> None:
    outputs = weight.shape[0]
    block, bits = block_of(len(x), least=LEAST_ROWS), weight.kind.bits

    def launch(tile: RowsTile) -> None:
        multiply_codes_rows[(triton.cdiv(outputs, tile.outputs),)](
            x,
            **pointers_of(weight),
            out=out,
            bound=2 * len(x) + 1,
            outputs=outputs,
            x_stride=x.stride(0),
            out_stride=out.stride(0),
            **_constants(weight),
            BLOCK_M=block,
            BLOCK_N=tile.outputs,
            BLOCK_K=tile.depth,
            SUB=sub_of(weight, tile.depth),
            num_warps=tile.warps,
            num_stages=tile.stages,
            enable_fp_fusion=False,
            **pdl_options(x.device),
        )

    tile = codes_tile(block, bits, x.dtype, tuning_for(x.device).quantized_rows, room_of(x.device))
    launch_fitting("quantized_rows", tile, launch, shape=(block, kind_of(weight), x.dtype))


def codes_tile(block: int, bits: int, dtype: torch.dtype, tile: RowsTile, room: Room) -> RowsTile:
    """Returns the tile for a block of rows and codes of so many bits, or the largest smaller one that a device holds.

    What is widened passes through shared memory, in float32 at most.
    """

    def needs(tile: RowsTile) -> int:
        stage = block * tile.depth * dtype.itemsize + tile.outputs * tile.depth * bits // 8
        return shared_bytes(tile, room, stage, fixed=tile.outputs * tile.depth * 4)

    return largest_that_fits("quantized_rows", tile, room, needs, shape=(block, bits, dtype))


def sub_of(weight: QuantizedTensor, depth: int) -> int:
    """Returns how many inputs of a tile share a scale."""
    return depth if weight.group_size == weight.shape[1] else min(depth, weight.group_size)


def pointers_of(weight: QuantizedTensor) -> dict[str, torch.Tensor | None]:
    """Returns codes, scales, zeros and table by name; for those that there are not, the scales stand in."""
    scales = weight.scales.view(torch.uint8) if weight.scales.dtype is torch.float8_e8m0fnu else weight.scales
    zeros = scales if weight.zeros is None else weight.zeros
    table = _table(weight.kind, scales.device) if kind_of(weight) == TABLE else scales
    return {"codes": weight.codes, "scales": scales, "zeros": zeros, "table": table}


def kind_of(weight: QuantizedTensor) -> int:
    """Returns what the codes are, as kernels are compiled for it."""
    if weight.kind.bits == 8:
        return int(BYTES.value)
    kinds = {Codes.INT4: NIBBLES, Codes.E2M1: FLOAT4}
    return int(kinds.get(weight.kind, TABLE).value)


def _constants(weight: QuantizedTensor) -> dict[str, int | bool]:
    return {
        "INPUTS": weight.shape[1],
        "GROUPS": weight.scales.shape[1],
        "KIND": kind_of(weight),
        "ZEROS": weight.zeros is not None,
    }


@cache
def _table(kind: Codes, device: torch.device) -> torch.Tensor:
    return torch.tensor(TABLES[kind], device=device)


@jit
def number_of_float4(code: tl.tensor):  # type: ignore[no-untyped-def]
    """Computes the float32 of e2m1 codes, int32: their bits, in its exponent and mantissa, are 2⁻¹²⁶ times as much."""
    bits = ((code & 7) << 22) | ((code & 8) << 28)
    return bits.to(tl.float32, bitcast=True) * 8.507059173023462e37


@jit
def numbers_of_codes(  # type: ignore[no-untyped-def]
    codes: tl.tensor,
    table: tl.tensor,
    line: tl.tensor,
    start: int,
    INPUTS: tl.constexpr,
    KIND: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """float32 [lines, BLOCK_K]: the numbers of the codes from input `start` on, before zeros and scales.

    line: int64 [lines, 1] of the matrix; all of them are there.
    """
    if KIND == BYTES:
        depth = start + tl.arange(0, BLOCK_K)[None, :]
        return tl.load(codes + line * INPUTS + depth, mask=depth < INPUTS, other=0.0).to(tl.float32)
    else:
        place = start // 2 + tl.arange(0, BLOCK_K // 2)[None, :]
        packed = tl.load(codes + line * (INPUTS // 2) + place, mask=place < INPUTS // 2, other=0)
        low, high = (packed & 15).to(tl.int32), (packed >> 4).to(tl.int32)
        if KIND == TABLE:
            numbers = tl.join(tl.load(table + low), tl.load(table + high))
        elif KIND == FLOAT4:
            numbers = tl.join(number_of_float4(low), number_of_float4(high))
        else:
            numbers = tl.join(low.to(tl.float32), high.to(tl.float32)) - 8.0
        return tl.reshape(numbers, [line.shape[0], BLOCK_K])


@jit
def of_groups(  # type: ignore[no-untyped-def]
    values: tl.tensor,
    line: tl.tensor,
    start: int,
    INPUTS: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SUB: tl.constexpr,
):
    """float32 [lines, BLOCK_K / SUB]: the scales or zeros of the groups from input `start` on.

    values: numbers, or uint8: e, which stands for 2 to the power of e − 127.
    """
    SIZE: tl.constexpr = INPUTS // GROUPS
    group = (start + SUB * tl.arange(0, BLOCK_K // SUB)[None, :]) // SIZE
    found = tl.load(values + line * GROUPS + group, mask=group < GROUPS, other=0)
    if values.dtype.element_ty == tl.uint8:
        bits = tl.where(found > 0, found.to(tl.int32) << 23, 1 << 22)
        return bits.to(tl.float32, bitcast=True)
    else:
        return found.to(tl.float32)


@jit
def weights_of_codes(  # type: ignore[no-untyped-def]
    codes: tl.tensor,
    scales: tl.tensor,
    zeros: tl.tensor,
    table: tl.tensor,
    line: tl.tensor,
    start: int,
    INPUTS: tl.constexpr,
    GROUPS: tl.constexpr,
    KIND: tl.constexpr,
    ZEROS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SUB: tl.constexpr,
):
    """float32 [BLOCK_N, BLOCK_K]: the weights from input `start` on; 0 after the last input."""
    numbers = numbers_of_codes(codes, table, line, start, INPUTS, KIND, BLOCK_K)
    numbers = tl.reshape(numbers, [BLOCK_N, BLOCK_K // SUB, SUB])
    if ZEROS:
        numbers -= of_groups(zeros, line, start, INPUTS, GROUPS, BLOCK_K, SUB)[:, :, None]
    numbers *= of_groups(scales, line, start, INPUTS, GROUPS, BLOCK_K, SUB)[:, :, None]
    return tl.reshape(numbers, [BLOCK_N, BLOCK_K])


@jit
def sums_of_codes(  # type: ignore[no-untyped-def]
    row_at: tl.tensor,
    codes: tl.tensor,
    scales: tl.tensor,
    zeros: tl.tensor,
    table: tl.tensor,
    line: tl.tensor,
    INPUTS: tl.constexpr,
    GROUPS: tl.constexpr,
    KIND: tl.constexpr,
    ZEROS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SUB: tl.constexpr,
):
    """float32 [lines]: each line of the matrix times its row.

    row_at: [rows, BLOCK_K] of the first numbers; as many lines as there are for a row follow each other.
    """
    LINES: tl.constexpr = line.shape[0]
    ROWS: tl.constexpr = row_at.shape[0]
    EACH: tl.constexpr = LINES // ROWS
    SUBS: tl.constexpr = BLOCK_K // SUB
    depth = tl.arange(0, BLOCK_K)[None, :]
    total = tl.zeros([LINES, SUBS], dtype=tl.float32)
    for start in range(0, INPUTS, BLOCK_K):
        numbers = numbers_of_codes(codes, table, line, start, INPUTS, KIND, BLOCK_K)
        row = tl.load(row_at + start, mask=depth < INPUTS - start, other=0.0).to(tl.float32)
        if ROWS == 1:
            numbers *= row
        else:
            numbers = tl.reshape(numbers, [ROWS, EACH, BLOCK_K]) * row[:, None, :]
        sums = tl.sum(tl.reshape(numbers, [LINES, SUBS, SUB]), axis=2)
        if ZEROS:
            own = tl.sum(tl.reshape(row, [ROWS, SUBS, SUB]), axis=2)
            if ROWS > 1:
                own = tl.reshape(tl.broadcast_to(own[:, None, :], [ROWS, EACH, SUBS]), [LINES, SUBS])
            sums -= of_groups(zeros, line, start, INPUTS, GROUPS, BLOCK_K, SUB) * own
        total += sums * of_groups(scales, line, start, INPUTS, GROUPS, BLOCK_K, SUB)
    return tl.sum(total, axis=1)


@jit
def products_of_codes(  # type: ignore[no-untyped-def]
    numbers_at: tl.tensor,
    real: tl.tensor,
    codes: tl.tensor,
    scales: tl.tensor,
    zeros: tl.tensor,
    table: tl.tensor,
    line: tl.tensor,
    INPUTS: tl.constexpr,
    GROUPS: tl.constexpr,
    KIND: tl.constexpr,
    ZEROS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SUB: tl.constexpr,
):
    """float32 [BLOCK_N, BLOCK_M]: lines of the matrix, rounded to the dtype of x, times rows of x.

    numbers_at: [BLOCK_K, BLOCK_M] of the first numbers of the rows; real: [BLOCK_M], rows that are there.
    """
    depth = tl.arange(0, BLOCK_K)
    dtype: tl.constexpr = numbers_at.dtype.element_ty
    total = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
    for start in range(0, INPUTS, BLOCK_K):
        weights = weights_of_codes(
            codes, scales, zeros, table, line, start, INPUTS, GROUPS, KIND, ZEROS, BLOCK_N, BLOCK_K, SUB
        )
        there = (depth < INPUTS - start)[:, None]
        numbers = tl.load(numbers_at + start, mask=real[None, :] & there, other=0.0)
        total = multiplied(rounded(weights, dtype), numbers, total, "ieee")
    return total


@jit
def multiply_codes_row(  # type: ignore[no-untyped-def]
    x: tl.tensor,
    codes: tl.tensor,
    scales: tl.tensor,
    zeros: tl.tensor,
    table: tl.tensor,
    out: tl.tensor,
    outputs: int,
    INPUTS: tl.constexpr,
    GROUPS: tl.constexpr,
    KIND: tl.constexpr,
    ZEROS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SUB: tl.constexpr,
    PDL: tl.constexpr,
):
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    line = tl.where(column < outputs, column, 0).to(tl.int64)[:, None]  # what lies after the matrix repeats a row
    wait_for_previous_kernels(PDL)
    row = (x + tl.arange(0, BLOCK_K))[None, :]
    result = sums_of_codes(row, codes, scales, zeros, table, line, INPUTS, GROUPS, KIND, ZEROS, BLOCK_K, SUB)
    tl.store(out + column, rounded(result, x.dtype.element_ty), mask=column < outputs)


@jit
def multiply_codes_rows(  # type: ignore[no-untyped-def]
    x: tl.tensor,
    codes: tl.tensor,
    scales: tl.tensor,
    zeros: tl.tensor,
    table: tl.tensor,
    out: tl.tensor,
    bound: int,  # 2 rows + 1: odd, or the kernel would be compiled again for 16 rows and for 32
    outputs: int,
    x_stride: int,
    out_stride: int,
    INPUTS: tl.constexpr,
    GROUPS: tl.constexpr,
    KIND: tl.constexpr,
    ZEROS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SUB: tl.constexpr,
    PDL: tl.constexpr,
):
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    line = tl.where(column < outputs, column, 0).to(tl.int64)[:, None]
    depth = tl.arange(0, BLOCK_K)
    row = tl.arange(0, BLOCK_M)
    real = 2 * row + 1 < bound
    numbers_at = x + row.to(tl.int64)[None, :] * x_stride + depth[:, None]
    dtype: tl.constexpr = x.dtype.element_ty
    wait_for_previous_kernels(PDL)
    total = products_of_codes(
        numbers_at, real, codes, scales, zeros, table, line, INPUTS, GROUPS, KIND, ZEROS, BLOCK_M, BLOCK_N, BLOCK_K, SUB
    )
    inside = (column < outputs)[:, None] & real[None, :]
    tl.store(out + row.to(tl.int64)[None, :] * out_stride + column[:, None], rounded(total, dtype), mask=inside)


@jit
def widen_codes(  # type: ignore[no-untyped-def]
    codes: tl.tensor,
    scales: tl.tensor,
    zeros: tl.tensor,
    table: tl.tensor,
    out: tl.tensor,
    outputs: int,
    INPUTS: tl.constexpr,
    GROUPS: tl.constexpr,
    KIND: tl.constexpr,
    ZEROS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SUB: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_previous_kernels(PDL)  # one of them may still read the memory that `out` takes
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    line = tl.where(column < outputs, column, 0).to(tl.int64)[:, None]
    start = tl.program_id(1) * BLOCK_K
    weights = weights_of_codes(
        codes, scales, zeros, table, line, start, INPUTS, GROUPS, KIND, ZEROS, BLOCK_N, BLOCK_K, SUB
    )
    depth = start + tl.arange(0, BLOCK_K)[None, :]
    inside = (column < outputs)[:, None] & (depth < INPUTS)
    tl.store(out + line * INPUTS + depth, rounded(weights, out.dtype.element_ty), mask=inside)
