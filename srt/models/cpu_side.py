"""Lays out embeddings for the native decoder: the table of tokens, and per-layer embeddings, which side.h adds."""

import ctypes

import torch

from ..kernels.cpu.linear import BLOCKS, FLOAT_FORMATS, Format, PackedMatrix, give_back
from ..layers.checkpoint import Checkpoint, LinearTensors
from ..layers.linear import QuantMethod
from .decoder_config import SIDE_EMBEDDING, SIDE_NORM, DecoderConfig, SideConfig, SideTensors
from .side import side_map

_POINTER = ctypes.c_void_p
_FLOAT = ctypes.c_float


class EmbeddingRows:
    """An embedding as its file stores it, from which a step reads the rows of its tokens.

    A mapped file's pages are given back after every few rows: the head has a copy of the matrix in another order, and
    both would stay in memory; the table of per-layer embeddings is the largest matrix of its model.
    """

    GIVEN_BACK_AFTER = 256  # rows; reading one may map 16 pages of 4 KiB around it

    def __init__(self, checkpoint: Checkpoint, name: str, vocab_size: int, width: int) -> None:
        block = checkpoint.take_block(name, vocab_size, width)
        self._block = block if block is not None and block.kind in BLOCKS else None
        self._used = 0
        if self._block is not None:
            rows = self._block.data
            self.format, self.address, self.row_bytes = Format[self._block.kind], rows.ctypes.data, rows.strides[0]
            return
        floats = checkpoint.take_as_stored(name, vocab_size, width)
        self._floats = floats if block is None else floats.bfloat16()  # of a type that the kernels do not read
        self.format, self.address = FLOAT_FORMATS[self._floats.dtype], self._floats.data_ptr()
        self.row_bytes = self._floats.stride(0) * self._floats.element_size()

    def used(self, rows: int) -> None:
        """Notes that a step has read so many rows."""
        self._used += rows
        if self._block is not None and self._used >= self.GIVEN_BACK_AFTER:
            give_back(self._block.data)
            self._used = 0


class SideArguments(ctypes.Structure):
    """`Side` of side.h."""

    _fields_ = [
        *((name, ctypes.c_long) for name in ("width", "layers", "vocabulary")),
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
        self.embedding = EmbeddingRows(weights, SIDE_EMBEDDING, side.vocab_size, len(config.layers) * side.width)
        self.arguments = SideArguments(
            width=side.width,
            layers=len(config.layers),
            vocabulary=side.vocab_size,
            embedding=self.embedding.address,
            embedding_format=self.embedding.format.value,
            embedding_row_bytes=self.embedding.row_bytes,
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
