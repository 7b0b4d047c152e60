"""Lays out residual streams in parallel for the native decoder, which computes them within its step: streams.h."""

import ctypes

import torch

from ..kernels.cpu.linear import PackedMatrix
from ..layers.checkpoint import Checkpoint, LinearTensors
from ..layers.linear import QuantMethod
from .decoder_config import DecoderConfig, StreamsConfig
from .streams import INTO, OUT_OF, StreamTensors, stream_maps

MOST_STREAMS = 16  # as streams.h has it
_POINTER = ctypes.c_void_p
_LONG = ctypes.c_long


class StreamsArguments(ctypes.Structure):
    """`Streams` of streams.h."""

    _fields_ = [
        *((name, _LONG) for name in ("count", "active")),
        *((name, _POINTER) for name in ("into", "out_of")),
    ]


class LayerStreamsArguments(ctypes.Structure):
    """`LayerStreams` of streams.h."""

    _fields_ = [
        *((name, _POINTER) for name in ("router", "predict", "correct", "scale", "down", "up")),
        ("rank", _LONG),
        ("residual_norm", _POINTER),
    ]


class CpuStreams:
    """The streams of a model. What it returns points to its matrices, and is valid as long as it is."""

    def __init__(
        self, config: DecoderConfig, streams: StreamsConfig, weights: Checkpoint, *, method: QuantMethod[PackedMatrix]
    ) -> None:
        assert streams.count <= MOST_STREAMS, "the runner refuses more"
        self._kept: list[object] = []
        self._config = config
        self._streams = streams
        self._weights = weights
        self._method = method
        self.arguments = StreamsArguments(
            count=streams.count, active=streams.active, into=self._maps(INTO), out_of=self._maps(OUT_OF)
        )

    def layer(self, prefix: str) -> LayerStreamsArguments:
        """Lays out the streams at the layer whose names have a prefix."""
        hidden, count, weights = self._config.hidden_size, self._streams.count, self._weights
        tensors = StreamTensors.of(prefix, self._config, self._streams)
        scale = weights.take(tensors.scale, hidden)
        arguments = LayerStreamsArguments(
            router=self._tensor(weights.take(tensors.router, count, hidden) * self._norm(tensors.router_norm) / hidden),
            predict=self._tensor(weights.take(tensors.predict, count * count, count)),
            correct=self._tensor(weights.take(tensors.correct, count, count)),
            scale=self._tensor(scale if self._streams.scaled else torch.ones_like(scale)),
            down=self._matrix(tensors.down),
            up=self._matrix(tensors.up),
            rank=self._streams.residual_rank,
            residual_norm=self._tensor(self._norm(tensors.residual_norm)),
        )
        self._kept.append(arguments)
        return arguments

    def _maps(self, name: str) -> int:
        """Loads the maps of one end and returns the address of their addresses."""
        matrices = [self._matrix(tensors) for tensors in stream_maps(self._config, self._streams, name)]
        table = (_POINTER * len(matrices))(*matrices)
        self._kept.append(table)
        return ctypes.addressof(table)

    def _matrix(self, tensors: LinearTensors) -> int:
        matrix = self._method.load(self._weights, tensors)
        self._kept.append(matrix)
        return matrix.handle

    def _norm(self, name: str) -> torch.Tensor:
        weight = self._weights.take(name, self._config.hidden_size)
        return weight + 1.0 if self._config.centered_norm else weight

    def _tensor(self, tensor: torch.Tensor) -> int:
        contiguous = tensor.contiguous()
        self._kept.append(contiguous)
        return contiguous.data_ptr()
