"""Defines weight formats by the names that the option `weights` takes, and their classes on each engine.

                 torch, Triton       native CPU kernels
    float32      dtype float32       Format.F32
    bf16         dtype bfloat16      Format.BF16
    int8         no                  Format.INT8: symmetric, one scale for each output
    int4         Int4Method          Q4_0's arithmetic: 32 inputs share a float16 scale; head Format.INT8
    as packed    QuantizedMethod     native_rows.py: 4 bits as they are, others in blocks of 8 bits

`QuantMethod` is the interface: create, stored, load, apply (layers/linear.py). A new format is a line here, its name in
`lang.runtime_options.Weights`, and a method if none of those below fits.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ...lang.errors import ParameterError
from ...lang.runtime_options import Weights
from ..kernels.cpu.linear import Format, Int4Rows, PackedMatrix
from ..kernels.cpu.quantise import GROUP as INT4_GROUP
from ..kernels.cpu.quantise import quantise_int4
from ..layers.checkpoint import BlockTensors, Checkpoint, LinearTensors, Tensors
from ..layers.quantized import (
    Codes,
    QuantizedMethod,
    QuantizedTensor,
    QuantizedWeight,
    is_quantized,
    stacked,
    take_quantized,
)
from ..models.decoder_config import EMBEDDING
from .native_rows import is_int8_by_output, native_rows


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """One line of the table above."""

    native: Format  # of the head, and of what has no other form
    dense: torch.dtype | None  # None: torch and Triton have no such dtype


FORMATS = {
    "float32": WeightFormat(Format.F32, torch.float32),
    "bf16": WeightFormat(Format.BF16, torch.bfloat16),
    "int8": WeightFormat(Format.INT8, None),
    "int4": WeightFormat(Format.INT8, None),
}


class CpuMethod:
    """Implements `QuantMethod` for the native CPU kernels: matrices packed in one of their formats.

    Args:
        form: of matrices that are stored as floats.
        exact: BF16 leaves inputs in float32, see `PackedMatrix`.
        keeps_packed: matrices that the checkpoint packs stay so; otherwise they are dequantised and stored in `form`.
    """

    def __init__(self, library: ctypes.CDLL, form: Format, *, exact: bool, keeps_packed: bool = False) -> None:
        self._library = library
        self._form = form
        self._exact = exact
        self._keeps_packed = keeps_packed
        self.name = "packed" if keeps_packed else form.name.lower()

    @property
    def of_head(self) -> "CpuMethod":
        """The method for the matrix of the vocabulary."""
        return self

    def create(self, sources: Sequence[torch.Tensor]) -> PackedMatrix:
        """Packs the sources, which may be freed afterwards. Raises EngineError when there is no memory."""
        return PackedMatrix(self._library, list(map(_readable, sources)), self._form, exact=self._exact)

    def stored(self, tensors: LinearTensors) -> list[str]:
        return tensors.weights

    def load(self, checkpoint: Checkpoint, tensors: LinearTensors) -> PackedMatrix:
        if not self._keeps_packed:
            return self.create(checkpoint.take_weights(tensors, as_stored=True))
        parts: list[torch.Tensor | QuantizedTensor] = []
        for name, width in zip(tensors.weights, tensors.widths, strict=True):
            packed = take_quantized(checkpoint, name, width, tensors.inputs)
            parts.append(checkpoint.take_as_stored(name, width, tensors.inputs) if packed is None else packed)
        matrices = [part for part in parts if isinstance(part, QuantizedTensor)]
        if len(matrices) == len(parts) and all(map(is_int8_by_output, matrices)):
            return PackedMatrix(self._library, [matrix.dense() for matrix in matrices], Format.INT8, exact=self._exact)
        sources = [native_rows(part) if isinstance(part, QuantizedTensor) else _readable(part) for part in parts]
        return PackedMatrix(self._library, sources, self._form, exact=self._exact)

    def apply(self, weight: PackedMatrix, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return weight(x, bias)


class CpuInt4Method(CpuMethod):
    """Rounds matrices to 4 bits when they are loaded; those with inputs that 32 does not divide, to 8."""

    def __init__(self, library: ctypes.CDLL, *, exact: bool) -> None:
        super().__init__(library, FORMATS["int4"].native, exact=exact)
        self.name = "int4"

    @property
    def of_head(self) -> CpuMethod:
        return CpuMethod(self._library, self._form, exact=self._exact)

    def create(self, sources: Sequence[torch.Tensor]) -> PackedMatrix:
        rows = [_int4_rows(_readable(source)) for source in sources]
        return PackedMatrix(self._library, rows, self._form, exact=self._exact)


def _int4_rows(weight: torch.Tensor) -> torch.Tensor | Int4Rows:
    if weight.shape[1] % INT4_GROUP:
        return weight
    codes, scales = quantise_int4(weight)
    return Int4Rows(codes.numpy(), scales.numpy())


class Int4Method(QuantizedMethod):
    """Rounds matrices to 4 bits when they are loaded, for torch and Triton; others stay floats of the model's dtype."""

    name = "int4"
    rounds_vocabulary = True

    def load(self, checkpoint: Checkpoint, tensors: LinearTensors) -> QuantizedWeight:
        if tensors.inputs % INT4_GROUP:
            return self.create(checkpoint.take_weights(tensors))
        parts = []
        for weight in checkpoint.take_weights(tensors, as_stored=True):
            codes, scales = quantise_int4(_readable(weight).cpu())
            parts.append(QuantizedTensor(Codes.INT4, codes, scales).to(checkpoint.device))
        return (stacked(parts),)


def cpu_method(name: Weights, tensors: Tensors, library: ctypes.CDLL, *, exact: bool) -> CpuMethod:
    """Returns the method of that name; "auto" is bf16 for a checkpoint that stores 16 bits, else float32."""
    if name == "int4":
        return CpuInt4Method(library, exact=exact)
    if name != "auto":
        return CpuMethod(library, FORMATS[name].native, exact=exact)
    if is_quantized(tensors):  # the dtype of what is not packed
        stored = Format.BF16 if tensors[EMBEDDING].dtype is torch.bfloat16 else Format.F32
        return CpuMethod(library, stored, exact=exact, keeps_packed=True)
    probe = "model.layers.0.self_attn.o_proj.weight"
    if isinstance(tensors, BlockTensors) and probe in tensors and tensors.block(probe) is not None:
        return CpuMethod(library, Format.BF16, exact=exact)
    first = tensors.get(probe)
    stored = Format.BF16 if first is not None and first.dtype is torch.bfloat16 else Format.F32
    return CpuMethod(library, stored, exact=exact)


def require_dense(name: Weights, dtype: torch.dtype, who: str) -> None:
    """Checks that the format is the compute dtype, the only one that torch and Triton support.

    Args:
        who: the computing component, as a clause for the message.

    Raises:
        ParameterError: another format is requested.
    """
    if name not in ("auto", "int4") and FORMATS[name].dense is not dtype:
        raise ParameterError(
            f"weights={name!r}: {who}, with weights of the dtype, {dtype}; leave weights out, or run on the native "
            "CPU kernels"
        )


def _readable(weight: torch.Tensor) -> torch.Tensor:
    """Returns the weight as stored if the kernels read that dtype, else in float32."""
    return weight if weight.dtype in (torch.float32, torch.bfloat16) else weight.float()
