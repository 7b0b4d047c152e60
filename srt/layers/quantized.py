"""Matrices of 4 or 8 bits with scales by group: one layout for all packed formats of checkpoints, and its product.

    weight[o, i] = (value(codes[o, i]) − zeros[o, g]) · scales[o, g]        g = i // group_size

    INT4      value = nibble − 8, two codes a byte, that of the even input in the low nibble
    INT8      value = code, signed
    FLOAT8    value = code, e4m3
    NF4, FP4, E2M1      value = TABLES[kind][nibble]

Inputs may be permuted (GPTQ's act-order), so that those of a group are adjacent: code i is that of input
permutation[i], and x is permuted once for a product. Checkpoints that round x as well (W8A8, FP8) are multiplied with
exact x: a row then has the same numbers in a prompt and alone, and is closer to the model. Readers in
`weights/packed_tensors.py` translate to this layout.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import cache
from typing import Any, Protocol, runtime_checkable

import torch
from torch.nn import functional

from .checkpoint import Checkpoint, LinearTensors, Tensors
from .low_rank import TorchChanges

PIECE = 1 << 22  # weights that are dequantised at a time: 16 MiB of float32
_UNIT = 32  # least inputs of a group in a tile


class Codes(Enum):
    """The numbers that codes stand for."""

    INT4 = "int4"
    INT8 = "int8"
    FLOAT8 = "float8"
    NF4 = "nf4"
    FP4 = "fp4"  # that of bitsandbytes: E2M1 with another step next to zero, as parts of 1
    E2M1 = "e2m1"  # that of MXFP4

    @property
    def bits(self) -> int:
        return 8 if self in (Codes.INT8, Codes.FLOAT8) else 4


_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_FP4 = (0.0, 1 / 192, 2 / 3, 1.0, 1 / 3, 1 / 2, 1 / 6, 1 / 4)
# The quantiles of a normal distribution that QLoRA (Dettmers et al. 2023, appendix E) lists.
_NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
TABLES: Mapping[Codes, tuple[float, ...]] = {
    Codes.NF4: _NF4,
    Codes.FP4: (*_FP4, *(-value for value in _FP4)),
    Codes.E2M1: (*_E2M1, *(-value for value in _E2M1)),
}


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedTensor:
    """A matrix [outputs, inputs] in the layout above. All tensors are on one device and contiguous.

    Attributes:
        codes: uint8 [outputs, inputs / 2] for kinds of 4 bits; int8 or float8_e4m3fn [outputs, inputs].
        scales: floats [outputs, groups]; float8_e8m0fnu where all are powers of two (MXFP4).
        zeros: int8 [outputs, groups]; None: zero.
        permutation: int64 [inputs]; None: inputs are in order.
    """

    kind: Codes
    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None = None
    permutation: torch.Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.codes), self.codes.shape[1] * (8 // self.kind.bits)

    @property
    def group_size(self) -> int:
        return self.shape[1] // self.scales.shape[1]

    @property
    def fits_tiles(self) -> bool:
        """Returns whether a group is a power of two of at least 32 inputs, or all inputs: kernels multiply tiles."""
        size, inputs = self.group_size, self.shape[1]
        whole = size == inputs or (size >= _UNIT and size & (size - 1) == 0)
        return whole and inputs % _UNIT == 0

    def part(self, first: int, end: int) -> "QuantizedTensor":
        """Returns outputs [first, end), in the same memory."""
        zeros = None if self.zeros is None else self.zeros[first:end]
        return replace(self, codes=self.codes[first:end], scales=self.scales[first:end], zeros=zeros)

    def rows(self, first: int, end: int) -> torch.Tensor:
        """Dequantises outputs [first, end) → float32 [end − first, inputs], in the order of the codes."""
        groups = self.scales.shape[1]
        values = self._values(self.codes[first:end]).view(end - first, groups, -1)
        if self.zeros is not None:
            values = values - self.zeros[first:end, :, None]
        scaled: torch.Tensor = values * self.scales[first:end, :, None].float()
        return scaled.flatten(1)

    def select(self, outputs: torch.Tensor) -> "QuantizedTensor":
        """Returns some outputs, int64 [n]."""
        zeros = None if self.zeros is None else self.zeros[outputs]
        return replace(self, codes=_chosen(self.codes, outputs), scales=_chosen(self.scales, outputs), zeros=zeros)

    def take(self, outputs: torch.Tensor) -> torch.Tensor:
        """Dequantises some outputs, int64 [n] → float32 [n, inputs], in the order of the codes."""
        return self.select(outputs).rows(0, len(outputs))

    def pieces(self) -> Iterator[tuple[int, int, torch.Tensor]]:
        """Yields (first, end, rows) with at most `PIECE` weights at a time."""
        outputs, inputs = self.shape
        step = max(1, PIECE // inputs)
        for first in range(0, outputs, step):
            end = min(first + step, outputs)
            yield first, end, self.rows(first, end)

    def dense(self) -> torch.Tensor:
        """Dequantises all of it, with the inputs in their own order: float32 [outputs, inputs]."""
        out = torch.empty(self.shape, device=self.codes.device)
        for first, end, values in self.pieces():
            if self.permutation is None:
                out[first:end] = values
            else:
                out[first:end, self.permutation] = values
        return out

    def to(self, device: torch.device) -> "QuantizedTensor":
        return replace(
            self,
            codes=self.codes.to(device),
            scales=self.scales.to(device),
            zeros=None if self.zeros is None else self.zeros.to(device),
            permutation=None if self.permutation is None else self.permutation.to(device),
        )

    def stacks_on(self, other: "QuantizedTensor") -> bool:
        """Returns whether both are parts of one product: the same layout, and the same order of inputs."""
        if self.permutation is None or other.permutation is None:
            ordered = self.permutation is other.permutation
        else:
            ordered = torch.equal(self.permutation, other.permutation)
        return ordered and self._layout() == other._layout()

    def _layout(self) -> tuple[object, ...]:
        return self.kind, self.shape[1], self.group_size, self.scales.dtype, self.zeros is None

    def _values(self, codes: torch.Tensor) -> torch.Tensor:
        if self.kind.bits == 8:
            return codes.float()
        nibbles = torch.stack([codes & 15, codes >> 4], dim=-1).flatten(1)
        if self.kind is Codes.INT4:
            return nibbles.float().sub_(8)
        return _table(self.kind, codes.device)[nibbles.int()]


@cache
def _table(kind: Codes, device: torch.device) -> torch.Tensor:
    return torch.tensor(TABLES[kind], device=device)


def stacked(parts: Sequence[QuantizedTensor]) -> QuantizedTensor:
    """Stacks parts that `stacks_on` each other along their outputs."""
    first = parts[0]
    zeros = [part.zeros for part in parts if part.zeros is not None]
    if len(parts) == 1:
        return first
    return replace(
        first,
        codes=_joined([part.codes for part in parts]),
        scales=torch.cat([part.scales for part in parts]),
        zeros=torch.cat(zeros) if zeros else None,
    )


def _chosen(values: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    if values.dtype.itemsize > 1:
        return values[rows]
    return values.view(torch.uint8)[rows].view(values.dtype)  # indexing lacks float8 on some devices


class QuantizedStack:
    """Stacks matrices of one layout along their outputs as they are read: at most one of them is in memory twice.

    Args:
        outputs: of all matrices together.
    """

    def __init__(self, outputs: int, device: torch.device) -> None:
        self._outputs = outputs
        self._device = device
        self._stack: QuantizedTensor | None = None
        self._filled = 0

    @property
    def matrix(self) -> QuantizedTensor:
        """The stack, [outputs, inputs], when all its matrices are there."""
        assert self._stack is not None, "it has matrices"
        assert self._filled == self._outputs, "it has all of them"
        return self._stack

    def add(self, matrix: QuantizedTensor) -> bool:
        """Copies a matrix below those before.

        Returns False if it cannot: the matrix has another layout, permuted inputs, or groups that do not fit tiles.
        """
        if matrix.permutation is not None or not matrix.fits_tiles:
            return False
        if self._stack is None:
            self._stack = self._room_for(matrix)
        stack, rows = self._stack, slice(self._filled, self._filled + len(matrix.codes))
        if replace(matrix, zeros=None)._layout() != replace(stack, zeros=None)._layout():
            return False
        stack.codes.view(torch.uint8)[rows] = matrix.codes.view(torch.uint8).to(self._device)
        stack.scales[rows] = matrix.scales.to(self._device)
        if matrix.zeros is not None:
            zeros = stack.zeros
            if zeros is None:  # those before have none, which is the same as zeros of 0
                zeros = torch.zeros(stack.scales.shape, dtype=torch.int8, device=self._device)
                self._stack = replace(stack, zeros=zeros)
            zeros[rows] = matrix.zeros.to(self._device)
        self._filled = rows.stop
        return True

    def _room_for(self, matrix: QuantizedTensor) -> QuantizedTensor:
        def empty(tensor: torch.Tensor) -> torch.Tensor:
            return torch.empty((self._outputs, tensor.shape[1]), dtype=tensor.dtype, device=self._device)

        return QuantizedTensor(matrix.kind, empty(matrix.codes), empty(matrix.scales))


def _joined(codes: Sequence[torch.Tensor]) -> torch.Tensor:
    kind = codes[0].dtype
    return torch.cat([part.view(torch.uint8) for part in codes]).view(kind)  # torch.cat lacks float8 on some devices


@runtime_checkable
class QuantizedSource(Protocol):
    """Tensors of a packed checkpoint: by name they are dequantised, by `quantized` they are as stored."""

    @property
    def quantized_names(self) -> frozenset[str]:
        """The names of all packed matrices."""

    def packed_bytes(self, name: str) -> int:
        """Returns the bytes of a packed matrix in the file; nothing is read."""

    def quantized(self, name: str) -> QuantizedTensor | None:
        """Returns the matrix as stored; None for one that is stored as floats. Raises ModelError for damaged parts."""


def quantise_int8(weight: torch.Tensor) -> QuantizedTensor:
    """Rounds a matrix to 8 bits, with a scale for each output."""
    codes = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
    scales = torch.empty((len(weight), 1), device=weight.device)
    step = max(1, PIECE // weight.shape[1])
    for first in range(0, len(weight), step):
        rows = weight[first : first + step].float()
        steps = scales[first : first + step] = rows.abs().amax(1, keepdim=True) / 127
        codes[first : first + step] = torch.where(steps != 0, rows / steps, 0).round().to(torch.int8)
    return QuantizedTensor(Codes.INT8, codes, scales)


@runtime_checkable
class QuantizedStacks(Protocol):
    """Tensors of a checkpoint that packs stacks of experts; by name a stack is dequantised."""

    @property
    def stacked_names(self) -> frozenset[str]:
        """The names of all packed stacks."""

    def quantized_expert(self, name: str, expert: int, *shape: int) -> QuantizedTensor:
        """Returns one matrix [outputs, inputs] of a stack as stored.

        Args:
            shape: (experts, outputs, inputs). Raises ModelError if the stack has another one.
        """


@runtime_checkable
class KeepsQuantized(Protocol):
    """A weight format that may keep packed matrices of a checkpoint."""

    @property
    def keeps_packed(self) -> bool: ...

    def create_quantized(self, source: QuantizedTensor) -> Any:  # Any: only the method reads its weights
        """Lays out a packed matrix."""


QuantizedWeight = tuple[QuantizedTensor | torch.Tensor, ...]  # parts of a product, stacked along the outputs


class QuantizedMethod(TorchChanges):
    """Keeps matrices as their checkpoint packs them, and dequantises them piece by piece in products.

    Matrices that the checkpoint stores as floats stay floats of the model's dtype.
    """

    name = "packed"
    rounds_vocabulary = False  # embedding and head are kept in 8 bits
    keeps_packed = True  # embedding, head, and experts of one layout stay as the checkpoint packs them

    def create(self, sources: Sequence[torch.Tensor]) -> QuantizedWeight:
        return (torch.cat(list(sources)),)

    def stored(self, tensors: LinearTensors) -> list[str]:
        return tensors.weights

    def load(self, checkpoint: Checkpoint, tensors: LinearTensors) -> QuantizedWeight:
        parts: list[QuantizedTensor | torch.Tensor] = []
        for name, width in zip(tensors.weights, tensors.widths, strict=True):
            packed = take_quantized(checkpoint, name, width, tensors.inputs)
            part = checkpoint.take(name, width, tensors.inputs) if packed is None else packed
            last = parts[-1] if parts else None
            if isinstance(part, QuantizedTensor) and isinstance(last, QuantizedTensor) and part.stacks_on(last):
                parts[-1] = stacked([last, part])
            elif isinstance(part, torch.Tensor) and isinstance(last, torch.Tensor):
                parts[-1] = torch.cat([last, part])
            else:
                parts.append(part)
        return tuple(parts)

    def round(self, weight: torch.Tensor) -> QuantizedTensor | None:
        """Rounds a matrix of an expert that is stored as floats; None: it stays floats."""
        return None

    def apply(self, weight: QuantizedWeight, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        products = [
            multiply(part, x) if isinstance(part, QuantizedTensor) else functional.linear(x, part) for part in weight
        ]
        out = products[0] if len(products) == 1 else torch.cat(products, dim=1)
        return out if bias is None else out + bias


def vocabulary_matrix(method: object, weight: torch.Tensor) -> torch.Tensor | QuantizedTensor:
    """Returns embedding or head as the weight format of a model keeps them."""
    rounds = isinstance(method, QuantizedMethod) and method.rounds_vocabulary
    return quantise_int8(weight) if rounds else weight


def packed_vocabulary(method: object, checkpoint: Checkpoint, name: str, *shape: int) -> QuantizedTensor | None:
    """Takes embedding or head as the checkpoint packs it; None: it stores floats, or the format of a model converts."""
    if not isinstance(method, QuantizedMethod) or not method.keeps_packed:
        return None
    packed = take_quantized(checkpoint, name, *shape)
    return None if packed is None or packed.permutation is not None else packed


def take_quantized(checkpoint: Checkpoint, name: str, *shape: int) -> QuantizedTensor | None:
    """Takes a matrix as the checkpoint packs it, onto its device; None: it is stored as floats."""
    packed = checkpoint.tensors.quantized(name) if isinstance(checkpoint.tensors, QuantizedSource) else None
    if packed is None:
        return None
    checkpoint.mark_taken(name, packed.shape, shape)
    return packed.to(checkpoint.device)


def is_quantized(tensors: Tensors) -> bool:
    """Returns whether a checkpoint has packed matrices."""
    return isinstance(tensors, QuantizedSource) and bool(tensors.quantized_names)


def is_stacked(tensors: Tensors) -> bool:
    """Returns whether a checkpoint packs stacks of experts."""
    return isinstance(tensors, QuantizedStacks) and bool(tensors.stacked_names)


def multiply(weight: QuantizedTensor, x: torch.Tensor) -> torch.Tensor:
    """Computes x Wᵀ [R, outputs] in the dtype of x [R, inputs], with weights rounded to it."""
    if weight.permutation is not None:
        x = x.index_select(1, weight.permutation)
    out = x.new_empty((len(x), weight.shape[0]))
    for first, end, values in weight.pieces():
        out[:, first:end] = functional.linear(x, values.to(x.dtype))
    return out
