"""Lays out layers with a recurrent state for the native decoder, which computes them within its step: recurrent.h.

The first map and that of the rates are one product. The kernels find what they read of its outputs by tables of
columns, so checkpoints that store heads next to each other and those that do not run alike.
"""

import ctypes
from collections.abc import Sequence
from typing import assert_never

import numpy as np
import torch
from numpy.typing import NDArray

from ..layers.checkpoint import Checkpoint, LinearTensors
from .decoder_config import DecoderConfig, recurrent_maps
from .recurrent_config import DeltaNetConfig, MambaConfig, Recurrent, ShortConvConfig

_POINTER = ctypes.c_void_p
_LONG = ctypes.c_long
_FLOAT = ctypes.c_float
_SHORT_CONVOLUTION, _DELTA_NET, _MAMBA = range(3)  # `RecurrentKind` of recurrent.h
COLUMNS = 128  # channels of a convolution that one thread takes at a time


class RecurrentArguments(ctypes.Structure):
    """`Recurrent` of recurrent.h. Fields that are left out are null or 0: this kind of layer does not have them."""

    _fields_ = [
        ("kind", ctypes.c_int),
        *((name, _LONG) for name in ("first_width", "width", "channels", "kernel")),
        *((name, _POINTER) for name in ("taps", "bias", "columns")),
        ("column_count", _LONG),
        ("activation", ctypes.c_int),
        ("heads", _LONG),
        ("groups", _LONG),
        ("tiled", ctypes.c_int),
        *((name, _LONG) for name in ("key_dim", "value_dim", "queries", "keys", "values")),
        *((name, _POINTER) for name in ("gates", "steps", "strengths", "step_bias", "decay", "through")),
        ("least_step", _FLOAT),
        ("most_step", _FLOAT),
        ("norm", _POINTER),
    ]


class CpuRecurrent:
    """The recurrent part of one layer, between its maps. `arguments` is valid as long as this object.

    Args:
        index: of the layer.
        activations: name → code of an activation in the kernels.

    Attributes:
        into, output: the first map, with that of the rates, and the output map.
    """

    def __init__(self, index: int, config: DecoderConfig, weights: Checkpoint, activations: dict[str, int]) -> None:
        recurrent = config.layers[index].recurrent
        assert recurrent is not None, "the layer attends"
        maps = recurrent_maps(config, index)
        self.into, self.output = _stacked(maps[:-1]), maps[-1]
        self._prefix = f"{config.layer_prefix(index)}.{recurrent.name}"
        self._weights = weights
        self._activations = activations
        self._kept: list[object] = []
        self.arguments = RecurrentArguments(
            first_width=sum(self.into.widths),
            width=self.output.inputs,
            channels=recurrent.channels,
            kernel=recurrent.kernel,
        )
        match recurrent:
            case ShortConvConfig():
                self.arguments.kind = _SHORT_CONVOLUTION
                self._convolution("conv", recurrent, [(0, 0, recurrent.channels)], biased=recurrent.biased)
            case DeltaNetConfig():
                self._delta_net(recurrent, config.activation)
            case MambaConfig():
                self._mamba(recurrent)
            case _:
                assert_never(recurrent)

    def _delta_net(self, net: DeltaNetConfig, activation: str) -> None:
        heads, groups, key, value = net.value_heads, net.key_heads, net.key_dim, net.value_dim
        group = heads // groups  # value heads of a key head
        rates = net.channels + net.values  # the column where they begin
        if net.interleaved:
            stride = 2 * key + 2 * group * value
            parts = [(0, key), (key, key), (2 * key, group * value)]  # of a key head: queries, keys, values
            columns = [
                (index * stride + column, first + index * count, count)
                for (column, count), first in zip(parts, (0, net.keys, 2 * net.keys), strict=True)
                for index in range(groups)
            ]
            gates = _heads(groups, group, 2 * key + group * value, stride, value)
        else:
            columns = [(0, 0, net.channels)]
            gates = _heads(1, heads, net.channels, 0, value)
        if net.interleaved_rates:
            strengths = _heads(groups, group, rates, 2 * group, 1)
            steps = strengths + group
        else:
            strengths = _heads(1, heads, rates, 0, 1)
            steps = strengths + heads
        self.arguments.kind = _DELTA_NET
        self.arguments.tiled = net.tiled
        self.arguments.norm = self._take("norm.weight", value)
        self._convolution("conv1d", net, columns, biased=False)
        self._memory((heads, groups, key, value), (0, net.keys, 2 * net.keys), activation)
        self._tables(gates=gates, steps=steps, strengths=strengths)

    def _mamba(self, mamba: MambaConfig) -> None:
        shared = mamba.groups * mamba.state_size
        self.arguments.kind = _MAMBA
        self.arguments.norm = self._take("norm.weight", mamba.width)
        self.arguments.through = self._take("D", mamba.heads)
        self.arguments.least_step, self.arguments.most_step = mamba.least_step, mamba.most_step
        self._convolution("conv1d", mamba, [(mamba.width, 0, mamba.channels)], biased=mamba.conv_bias)
        shape = mamba.heads, mamba.groups, mamba.state_size, mamba.head_dim
        self._memory(shape, (mamba.width + shared, mamba.width, 0), mamba.activation)
        self._tables(
            gates=_heads(1, mamba.heads, 0, 0, mamba.head_dim),
            steps=_heads(1, mamba.heads, mamba.width + mamba.channels, 0, 1),
        )

    def _convolution(
        self, name: str, config: Recurrent, columns: Sequence[tuple[int, int, int]], *, biased: bool
    ) -> None:
        """Lays out the convolution. columns: (first column of the map, first channel, how many) of its inputs."""
        taps = self._weights.take(f"{self._prefix}.{name}.weight", config.channels, 1, config.kernel)
        self.arguments.taps = self._keep(taps.view(config.channels, config.kernel).t())
        if biased:
            self.arguments.bias = self._take(f"{name}.bias", config.channels)
        pieces = [
            (column + start, channel + start, min(COLUMNS, count - start))
            for column, channel, count in columns
            for start in range(0, count, COLUMNS)
        ]
        self.arguments.columns = self._keep(torch.tensor(pieces, dtype=torch.int64))
        self.arguments.column_count = len(pieces)

    def _memory(self, shape: tuple[int, int, int, int], firsts: tuple[int, int, int], activation: str) -> None:
        """Lays out memories. shape: heads, groups, numbers of a key and of a value; firsts: the channels where queries,
        keys and values begin."""
        arguments = self.arguments
        arguments.heads, arguments.groups, arguments.key_dim, arguments.value_dim = shape
        arguments.queries, arguments.keys, arguments.values = firsts
        arguments.activation = self._activations[activation]
        arguments.step_bias = self._take("dt_bias", arguments.heads)
        log = self._weights.take_as_stored(f"{self._prefix}.A_log", arguments.heads)
        arguments.decay = self._keep(-log.float().exp())

    def _tables(self, **tables: NDArray[np.int64]) -> None:
        for name, table in tables.items():
            setattr(self.arguments, name, self._keep(torch.from_numpy(table)))

    def _take(self, name: str, *shape: int) -> int:
        return self._keep(self._weights.take(f"{self._prefix}.{name}", *shape))

    def _keep(self, tensor: torch.Tensor) -> int:
        contiguous = tensor.contiguous()
        self._kept.append(contiguous)
        return contiguous.data_ptr()


def _stacked(maps: Sequence[LinearTensors]) -> LinearTensors:
    """Returns maps of the same inputs as one product."""
    return LinearTensors(
        tuple(name for part in maps for name in part.names),
        tuple(width for part in maps for width in part.widths),
        maps[0].inputs,
        maps[0].biased,
    )


def _heads(groups: int, size: int, first: int, group_stride: int, head_stride: int) -> NDArray[np.int64]:
    """Returns the column of each head: `groups` groups of `size` heads, each so many columns after the one before."""
    columns = np.full((groups, size), first, dtype=np.int64)
    columns += np.arange(groups)[:, None] * group_stride + np.arange(size) * head_stride
    return columns.reshape(-1)
