"""Gives the tensors of a GGUF file under Hugging Face's names: as stored in blocks, or dequantised.

A tensor is dequantised a few rows at a time, so memory stays bounded by its result.
"""

from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray

from ...lang.errors import ModelError
from ..layers.checkpoint import BlockTensor, BlockTensors
from .gguf_parameters import Parameter

CHUNK_ELEMENTS = 1 << 22  # of one dequantised piece: 16 MiB as float32


class GgufTensors(BlockTensors):
    """The parameters of a file. By name a new tensor is made at each access: float16 or bfloat16 where the file has
    them, else float32."""

    def __init__(self, parameters: list[Parameter]) -> None:
        self._parameters = {parameter.name: parameter for parameter in parameters}

    def __getitem__(self, name: str) -> torch.Tensor:
        parameter = self._parameters[name]
        tensor = parameter.source
        values = torch.empty(parameter.shape, dtype=_DTYPES.get(tensor.type_name, torch.float32))
        rows, start = values.view(parameter.rows, -1), parameter.first_row
        step = max(1, CHUNK_ELEMENTS // tensor.shape[-1])
        for first in range(0, parameter.rows, step):
            piece = tensor.read(start + first, start + min(first + step, parameter.rows))
            rows[first : first + step] = dequantised(tensor.type_name, piece)
        if parameter.heads is not None:
            values = restored(values, parameter.heads)
        if parameter.negative_exponential:
            if not (values < 0).all():
                raise ModelError(
                    f"{name}: the file should hold numbers below 0, the decay of a state; download it again"
                )
            values = (-values).log()
        return values - parameter.subtract if parameter.subtract else values

    def without(self, name: str) -> "GgufTensors":
        """Returns all parameters but one."""
        return GgufTensors([each for each in self._parameters.values() if each.name != name])

    def __contains__(self, name: object) -> bool:  # Mapping's own would make the tensor
        return name in self._parameters

    def __iter__(self) -> Iterator[str]:
        return iter(self._parameters)

    def __len__(self) -> int:
        return len(self._parameters)

    def block(self, name: str) -> BlockTensor | None:
        parameter = self._parameters[name]
        if len(parameter.shape) != 2:
            return None
        rows, inputs = parameter.shape
        data = parameter.source.mapped()[parameter.first_row : parameter.first_row + rows]
        return BlockTensor(parameter.source.type_name, (rows, inputs), data, parameter.heads)


_DTYPES = {"F16": torch.float16, "BF16": torch.bfloat16}


def dequantised(kind: str, raw: NDArray[np.uint8]) -> torch.Tensor:
    """Dequantises rows of bytes [rows, row_bytes] of a block type → [rows, columns]: float16 and bfloat16 as they are,
    else float32."""
    if kind in _DTYPES:
        return torch.from_numpy(raw).view(_DTYPES[kind])
    if kind == "F32":
        return torch.from_numpy(raw).view(torch.float32)
    from gguf import GGMLQuantizationType, dequantize  # the kernels read most types by themselves

    return torch.from_numpy(np.asarray(dequantize(raw, GGMLQuantizationType[kind]), np.float32))


def restored(values: torch.Tensor, heads: int) -> torch.Tensor:
    """Undoes llama.cpp's row order, in which the two rows that RoPE rotates together are adjacent.

    file   a0 b0 a1 b1 a2 b2 …      Hugging Face   a0 a1 a2 … b0 b1 b2 …      (of each head)
    """
    pairs = values.shape[0] // heads // 2
    rest = values.shape[1:]
    return values.view(heads, pairs, 2, *rest).transpose(1, 2).reshape(values.shape)
