"""Converts packed matrices of checkpoints to the forms that the native CPU kernels multiply.

    INT8 with a scale for each output        float32, which the kernels round to Format.INT8
    INT4, INT8 in groups of 32, 64, ...      IntegerRows: the same codes and zeros, scales as float16
    E2M1 in groups of 32                     MXFP4: the same codes, the exponents of the scales
    FLOAT8, tables in groups of 8, 16, ...   CodedRows: the same codes, scales as float32
    permuted (GPTQ's act-order)              as without, and products permute inputs
    other groups; permuted among others      float32

A group of 96 inputs is three of 32 with one scale. IntegerRows, CodedRows and BlockTensor are what `PackedMatrix` takes
(kernels/cpu/linear.py).
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from ...lang.errors import ModelError
from ..kernels.cpu.linear import CodedRows, Format, IntegerRows
from ..layers.checkpoint import BlockTensor
from ..layers.quantized import Codes, QuantizedTensor

UNIT = 32  # inputs of a block
_LINE = 8  # inputs of codes that the kernels read at a time
_LARGEST_SCALE = 65504.0  # of float16

NativeRows = IntegerRows | CodedRows | BlockTensor | torch.Tensor


def native_rows(weight: QuantizedTensor) -> NativeRows:
    """Returns a matrix on the CPU as one that the kernels multiply.

    Raises:
        ModelError: a scale is larger than float16 holds.
    """
    largest = float(weight.scales.float().abs().max())
    if not largest <= _LARGEST_SCALE:
        raise ModelError(f"a scale of {largest}: the weights are damaged; download them again")
    whole = weight.group_size % UNIT == 0 and weight.permutation is None
    if weight.kind in (Codes.INT4, Codes.INT8):
        return _integer_rows(weight) if whole else weight.dense()
    if weight.kind is Codes.E2M1 and whole and weight.group_size == UNIT:
        return _mxfp4(weight)
    if weight.group_size % _LINE or weight.permutation is not None:
        return weight.dense()
    codes = weight.codes.view(torch.uint8).numpy()
    return CodedRows(Format[weight.kind.name], codes, weight.scales.float().numpy())


def native_stack(weights: Sequence[QuantizedTensor]) -> tuple[list[NativeRows], NDArray[np.int32] | None]:
    """Returns matrices that one product multiplies, and the order of their inputs, int32 [inputs].

    The order is None where inputs are in order, or where each matrix has an order of its own.

    Raises:
        ModelError: as `native_rows`.
    """
    order = weights[0].permutation
    orders = [weight.permutation for weight in weights]
    if order is None or not all(own is not None and order.equal(own) for own in orders):
        return [native_rows(weight) for weight in weights], None
    rows = [native_rows(replace(weight, permutation=None)) for weight in weights]
    if all(isinstance(part, IntegerRows) for part in rows):
        return rows, order.int().numpy()
    return [weight.dense() for weight in weights], None


def is_int8_by_output(weight: QuantizedTensor) -> bool:
    """Returns whether a matrix has the kernels' own form of 8 bits, which rounds inputs to 16 bits only."""
    by_output = weight.kind is Codes.INT8 and weight.scales.shape[1] == 1
    return by_output and weight.zeros is None and weight.permutation is None


def _integer_rows(weight: QuantizedTensor) -> IntegerRows:
    bits = weight.kind.bits
    middle = 1 << (bits - 1)
    units = weight.group_size // UNIT
    repeats = units // (units & -units)  # a group has a power of two of units
    scales = weight.scales.half().repeat_interleave(repeats, 1)
    codes = weight.codes if bits == 4 else weight.codes.view(torch.uint8) ^ middle
    zeros = None
    if weight.zeros is not None:
        zeros = (weight.zeros.int() + middle).to(torch.uint8).repeat_interleave(repeats, 1).numpy()
    return IntegerRows(codes.numpy(), scales.numpy(), zeros, bits)


def _mxfp4(weight: QuantizedTensor) -> BlockTensor:
    """Scales are powers of two: blocks of ggml have the exponent, then inputs i and i + 16 in byte i."""
    codes = weight.codes.view(len(weight.codes), -1, UNIT // 2)
    nibbles = torch.stack([codes & 15, codes >> 4], dim=-1).flatten(2)
    data = torch.empty((*codes.shape[:2], 1 + UNIT // 2), dtype=torch.uint8)
    data[..., 0] = torch.frexp(weight.scales.float()).exponent + 126
    data[..., 1:] = nibbles[..., : UNIT // 2] | (nibbles[..., UNIT // 2 :] << 4)
    return BlockTensor("MXFP4", weight.shape, data.flatten(1).numpy())
