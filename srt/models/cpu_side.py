"""Lays out per-layer embeddings for the native decoder, which adds them within its step: side.h."""

import ctypes

import torch

from ..kernels.cpu.linear import FLOAT_FORMATS, PackedMatrix
from ..layers.checkpoint import Checkpoint, LinearTensors
from ..layers.linear import QuantMethod
from .decoder_config import SIDE_EMBEDDING, SIDE_NORM, DecoderConfig, SideConfig, SideTensors
from .side import side_map

_POINTER = ctypes.c_void_p
_FLOAT = ctypes.c_float


class SideArguments(ctypes.Structure):
    """`Side` of side.h."""

    _fields_ = [
        *((name, ctypes.c_long) for name in ("width", "layers")),
        ("embedding", _POINTER),
        ("embedding_format", ctypes.c_int),
        ("embedding_row_bytes", ctypes.c_long),
        *((name, _FLOAT) for name in ("embedding_scale", "map_scale")),
        *((name, _POINTER) for name in ("map", "norm")),
    ]


class SideLayerArguments(ctypes.Structure):
    """`SideLayer` of side.h."""

    _fields_ = [(name, _POINTER) for name in ("gate", "output", "norm")]


class CpuSide:
    """The per-layer embeddings of a model. What it returns points to its matrices, and is valid as long as it is."""

    def __init__(
        self, config: DecoderConfig, side: SideConfig, weights: Checkpoint, *, method: QuantMethod[PackedMatrix]
    ) -> None:
        self._kept: list[object] = []
        self._config = config
        self._weights = weights
        self._method = method
        table = weights.take_as_stored(SIDE_EMBEDDING, side.vocab_size, len(config.layers) * side.width)
        self._kept.append(table)
        self.arguments = SideArguments(
            width=side.width,
            layers=len(config.layers),
            embedding=table.data_ptr(),
            embedding_format=FLOAT_FORMATS[table.dtype].value,
            embedding_row_bytes=table.stride(0) * table.element_size(),
            embedding_scale=side.width**0.5,
            map_scale=config.hidden_size**-0.5,
            map=self._matrix(side_map(config, side)),
            norm=self._norm(SIDE_NORM, side.width),
        )

    def layer(self, tensors: SideTensors) -> SideLayerArguments:
        """Lays out the maps of one layer."""
        arguments = SideLayerArguments(
            gate=self._matrix(tensors.gate),
            output=self._matrix(tensors.output),
            norm=self._norm(tensors.norm, self._config.hidden_size),
        )
        self._kept.append(arguments)
        return arguments

    def _matrix(self, tensors: LinearTensors) -> int:
        matrix = self._method.load(self._weights, tensors)
        self._kept.append(matrix)
        return matrix.handle

    def _norm(self, name: str, size: int) -> int:
        weight = self._weights.take(name, size)
        return self._tensor(weight + 1.0 if self._config.centered_norm else weight).data_ptr()

    def _tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        self._kept.append(tensor)
        return tensor
