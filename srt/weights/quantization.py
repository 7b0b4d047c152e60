"""Defines weight formats by the names that the option `weights` takes, and their classes on each engine.

                 torch, Triton       native CPU kernels
    auto         the dtype           as stored: blocks of a GGUF file, float16, bfloat16, float32
    float32      dtype float32       Format.F32
    bf16         dtype bfloat16      Format.BF16
    int8         no                  Format.INT8: symmetric, one scale for each output
    int4         Int4Method          Q4_0's arithmetic: 32 inputs share a float16 scale; head Format.INT8
    as packed    QuantizedMethod     native_rows.py: codes as they are; with integers, inputs of 16 bits

`QuantMethod` is the interface: create, stored, load, apply, changes (layers/linear.py). A new format is a line here,
its name in `lang.runtime_options.Weights`, and a method if none of those below fits.
"""

import ctypes
import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray

from ...lang.errors import ParameterError
from ...lang.runtime_options import Weights
from ..kernels.cpu.linear import BLOCKS, Dequantised, Format, IntegerRows, PackedMatrix, dequantise
from ..kernels.cpu.linear import Weights as PackedSource
from ..kernels.cpu.quantise import GROUP as INT4_GROUP
from ..kernels.cpu.quantise import quantise_int4
from ..layers.checkpoint import Checkpoint, LinearTensors
from ..layers.low_rank import TorchChanges
from ..layers.quantized import (
    Codes,
    QuantizedMethod,
    QuantizedTensor,
    QuantizedWeight,
    is_quantized,
    stacked,
    take_quantized,
)
from .gguf_tensors import restored
from .native_rows import is_int8_by_output, native_rows, native_stack

_log = logging.getLogger("umbel.engine")


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


class CpuMethod(TorchChanges):
    """Implements `QuantMethod` for the native CPU kernels. `name` lists the formats of the weights, most bytes first.

    Args:
        form: matrices are packed in this format; None: as the checkpoint stores them, each in its own.
        exact: BF16 leaves inputs in float32, see `PackedMatrix`.
    """

    def __init__(self, library: ctypes.CDLL, form: Format | None, *, exact: bool) -> None:
        self._library = library
        self._form = form
        self._exact = exact
        self._packed: Counter[str] = Counter()  # bytes by format
        self.name = ""

    @property
    def of_head(self) -> "CpuMethod":
        """The method for the matrix of the vocabulary."""
        return self

    def create(self, sources: Sequence[PackedSource], *, fine: bool = False) -> PackedMatrix:
        """Packs the sources, which may be freed afterwards. Raises EngineError when there is no memory.

        Args:
            fine: products with blocks and integers of 4 bits round inputs to 16 bits, not 8, see `PackedMatrix`.
        """
        return self._create(sources, self._form, fine=fine)

    def stored(self, tensors: LinearTensors) -> list[str]:
        return tensors.weights

    def load(self, checkpoint: Checkpoint, tensors: LinearTensors) -> PackedMatrix:
        pairs = zip(tensors.weights, tensors.widths, strict=True)
        if self._form is not None or not is_quantized(checkpoint.tensors):
            sources = [self._source(checkpoint, name, width, tensors.inputs) for name, width in pairs]
            return self.create(sources, fine=tensors.fine_inputs)
        parts: list[torch.Tensor | QuantizedTensor] = []
        for name, width in pairs:
            packed = take_quantized(checkpoint, name, width, tensors.inputs)
            parts.append(checkpoint.take_as_stored(name, width, tensors.inputs) if packed is None else packed)
        matrices = [part for part in parts if isinstance(part, QuantizedTensor)]
        if len(matrices) == len(parts) and all(map(is_int8_by_output, matrices)):
            return self._create([matrix.dense() for matrix in matrices], Format.INT8)
        if len(matrices) == len(parts):
            return self._create_stack(matrices)
        rows = [native_rows(part) if isinstance(part, QuantizedTensor) else part for part in parts]
        return self.create(rows, fine=True)

    @property
    def keeps_packed(self) -> bool:
        return self._form is None

    def create_quantized(self, source: QuantizedTensor) -> PackedMatrix:
        """Packs a matrix as its checkpoint stores it."""
        return self._create_stack([source])

    def apply(self, weight: PackedMatrix, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return weight(x, bias)

    def _create_stack(self, matrices: Sequence[QuantizedTensor]) -> PackedMatrix:
        rows, order = native_stack(matrices)
        return self._create(rows, self._form, fine=True, order=order)

    def _create(
        self,
        sources: Sequence[PackedSource],
        form: Format | None,
        *,
        fine: bool = False,
        order: NDArray[np.int32] | None = None,
    ) -> PackedMatrix:
        matrix = PackedMatrix(self._library, sources, form, exact=self._exact, fine=fine, order=order)
        for part, size in matrix.sizes:
            self._packed[_shown(part)] += size
        self.name = ", ".join(name for name, _ in self._packed.most_common())
        return matrix

    def _source(self, checkpoint: Checkpoint, name: str, width: int, inputs: int) -> PackedSource:
        block = checkpoint.take_block(name, width, inputs)
        if block is None:
            return checkpoint.take_as_stored(name, width, inputs)
        if block.kind in BLOCKS:
            return block if self._form is None else Dequantised(block)
        _warn_of(block.kind)
        floats = checkpoint.take_as_stored(name, width, inputs)
        return floats if self._form is not None else floats.bfloat16()


class CpuInt4Method(CpuMethod):
    """Rounds matrices to 4 bits when they are loaded; those with inputs that 32 does not divide, to 8."""

    def __init__(self, library: ctypes.CDLL, *, exact: bool) -> None:
        super().__init__(library, FORMATS["int4"].native, exact=exact)
        self.name = "int4"

    @property
    def of_head(self) -> CpuMethod:
        return CpuMethod(self._library, self._form, exact=self._exact)

    def create(self, sources: Sequence[PackedSource], *, fine: bool = False) -> PackedMatrix:
        # Inputs of 8 bits cost a KL of 0.003, rounding weights to 4 bits costs a hundred times as much.
        rows = [_int4_rows(self._floats(source)) for source in sources]
        return PackedMatrix(self._library, rows, self._form, exact=self._exact)

    def _floats(self, source: PackedSource) -> torch.Tensor:
        if isinstance(source, torch.Tensor):
            return source.float()
        assert isinstance(source, Dequantised), "matrices that a checkpoint packs are read by name"
        values = dequantise(self._library, source.block)
        return values if source.block.heads is None else restored(values, source.block.heads)


def _int4_rows(weight: torch.Tensor) -> torch.Tensor | IntegerRows:
    if weight.shape[1] % INT4_GROUP:
        return weight
    codes, scales = quantise_int4(weight)
    return IntegerRows(codes.numpy(), scales.numpy())


class Int4Method(QuantizedMethod):
    """Rounds matrices to 4 bits when they are loaded, for torch and Triton; others stay floats of the model's dtype."""

    name = "int4"
    rounds_vocabulary = True
    keeps_packed = False

    def load(self, checkpoint: Checkpoint, tensors: LinearTensors) -> QuantizedWeight:
        if tensors.inputs % INT4_GROUP:
            return self.create(checkpoint.take_weights(tensors))
        weights = checkpoint.take_weights(tensors, as_stored=True)
        return (stacked([_rounded(weight).to(checkpoint.device) for weight in weights]),)

    def round(self, weight: torch.Tensor) -> QuantizedTensor | None:
        return None if weight.shape[1] % INT4_GROUP else _rounded(weight)


def _rounded(weight: torch.Tensor) -> QuantizedTensor:
    codes, scales = quantise_int4(weight.float().cpu())
    return QuantizedTensor(Codes.INT4, codes, scales)


def _shown(form: Format) -> str:
    """Returns a format's name: of blocks as ggml writes it, else as the option `weights` does."""
    return form.name if form.name in BLOCKS and BLOCKS[form.name][0] > 1 else form.name.lower()


@cache
def _warn_of(kind: str) -> None:
    """Logs once that a block type has no kernel."""
    _log.warning(
        "no kernel multiplies blocks of type %s: they are unpacked when the model is loaded, to up to eight times "
        "their memory; requantise the model to one of %s",
        kind,
        ", ".join(BLOCKS),
    )


def cpu_method(name: Weights, library: ctypes.CDLL, *, exact: bool) -> CpuMethod:
    """Returns the method of that name; "auto" keeps what the checkpoint stores."""
    if name == "int4":
        return CpuInt4Method(library, exact=exact)
    return CpuMethod(library, None if name == "auto" else FORMATS[name].native, exact=exact)


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
