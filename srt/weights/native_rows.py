"""Converts packed matrices of checkpoints to the forms that the native CPU kernels multiply.

    INT8 with a scale for each output        float32, which the kernels round to Format.INT8
    INT4 in groups of 32, 64, ...            Int4Rows: the same codes and zeros, scales as float16
    E2M1 in groups of 32                     MXFP4: the same codes, the exponents of the scales
    INT8 without zeros in such groups        Q8_0: the same codes, scales as float16 for each 32 inputs
    FLOAT8, tables, other groups             Q8_0 of the dequantised numbers: 8 bits for each 32 inputs
    permuted (GPTQ's act-order)              as without, and products permute inputs; stacked with others: Q8_0
    inputs that 32 does not divide           float32

Int4Rows and BlockTensor are what `PackedMatrix` takes (kernels/cpu/linear.py).
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from ...lang.errors import ModelError
from ..kernels.cpu.linear import Int4Rows
from ..layers.checkpoint import BlockTensor
from ..layers.quantized import Codes, QuantizedTensor

UNIT = 32  # inputs of a block
_LARGEST_SCALE = 65504.0  # of float16


def native_rows(weight: QuantizedTensor) -> Int4Rows | BlockTensor | torch.Tensor:
    """Returns a matrix on the CPU as one that the kernels multiply.

    Raises:
        ModelError: a scale is larger than float16 holds.
    """
    if weight.shape[1] % UNIT:
        return weight.dense()
    if not bool((weight.scales.abs() <= _LARGEST_SCALE).all()):
        raise ModelError(f"a scale of {float(weight.scales.abs().max())}: the weights are damaged; download them again")
    whole = weight.group_size % UNIT == 0 and weight.permutation is None
    if weight.kind is Codes.INT4 and whole:
        return _int4_rows(weight)
    if weight.kind is Codes.INT8 and whole and weight.zeros is None:
        blocks = weight.codes.view(len(weight.codes), -1, UNIT)
        return _q8_0(blocks, weight.scales.half().repeat_interleave(weight.group_size // UNIT, 1), weight.shape)
    if weight.kind is Codes.E2M1 and weight.group_size == UNIT and whole:
        return _mxfp4(weight)
    return _rounded(weight)


def native_stack(
    weights: Sequence[QuantizedTensor],
) -> tuple[list[Int4Rows | BlockTensor | torch.Tensor], NDArray[np.int32] | None]:
    """Returns matrices that one product multiplies, and the order of their inputs, int32 [inputs].

    The order is None where inputs are in order, or where each matrix has an order of its own.

    Raises:
        ModelError: as `native_rows`.
    """
    order = weights[0].permutation
    orders = [weight.permutation for weight in weights]
    if order is None or weights[0].shape[1] % UNIT or not all(own is not None and order.equal(own) for own in orders):
        return [native_rows(weight) for weight in weights], None
    return [native_rows(replace(weight, permutation=None)) for weight in weights], order.int().numpy()


def is_int8_by_output(weight: QuantizedTensor) -> bool:
    """Returns whether a matrix has the kernels' own form of 8 bits, which rounds inputs to 16 bits only."""
    by_output = weight.kind is Codes.INT8 and weight.scales.shape[1] == 1
    return by_output and weight.zeros is None and weight.permutation is None


def _int4_rows(weight: QuantizedTensor) -> Int4Rows:
    units = weight.group_size // UNIT
    repeats = units // (units & -units)  # a group has a power of two of units
    scales = weight.scales.half().repeat_interleave(repeats, 1)
    zeros = None if weight.zeros is None else (weight.zeros + 8).to(torch.uint8).repeat_interleave(repeats, 1).numpy()
    return Int4Rows(weight.codes.numpy(), scales.numpy(), zeros)


def _rounded(weight: QuantizedTensor) -> BlockTensor:
    """Rounds dequantised numbers to 8 bits, piece by piece."""
    outputs, inputs = weight.shape
    codes = torch.empty((outputs, inputs // UNIT, UNIT), dtype=torch.int8)
    scales = torch.empty((outputs, inputs // UNIT), dtype=torch.float16)
    for first, end, values in weight.pieces():
        if weight.permutation is not None:
            values = torch.empty_like(values).index_copy_(1, weight.permutation, values)
        blocks = values.view(end - first, -1, UNIT)
        scales[first:end] = blocks.abs().amax(-1) / 127
        steps = scales[first:end, :, None].float()
        codes[first:end] = torch.where(steps > 0, blocks / steps, 0).round().clamp(-127, 127).to(torch.int8)
    return _q8_0(codes, scales, weight.shape)


def _mxfp4(weight: QuantizedTensor) -> BlockTensor:
    """Scales are powers of two: blocks of ggml have the exponent, then inputs i and i + 16 in byte i."""
    codes = weight.codes.view(len(weight.codes), -1, UNIT // 2)
    nibbles = torch.stack([codes & 15, codes >> 4], dim=-1).flatten(2)
    data = torch.empty((*codes.shape[:2], 1 + UNIT // 2), dtype=torch.uint8)
    data[..., 0] = torch.frexp(weight.scales.float()).exponent + 126
    data[..., 1:] = nibbles[..., : UNIT // 2] | (nibbles[..., UNIT // 2 :] << 4)
    return BlockTensor("MXFP4", weight.shape, data.flatten(1).numpy())


def _q8_0(codes: torch.Tensor, scales: torch.Tensor, shape: tuple[int, int]) -> BlockTensor:
    """codes int8 [outputs, blocks, 32], scales float16 [outputs, blocks] → blocks of ggml: scale, codes"""
    data = np.concatenate([scales[..., None].contiguous().numpy().view(np.uint8), codes.numpy().view(np.uint8)], axis=2)
    return BlockTensor("Q8_0", shape, data.reshape(len(data), -1))
