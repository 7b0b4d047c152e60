"""Describes layers with a recurrent state as data, next to the layers of attention in `decoder_config.py`.

    ShortConvConfig    LFM2                                   gate · convolution(gate · x)
    DeltaNetConfig     Qwen3-Next, Qwen 3.5                   convolution, then a memory that each token corrects
    MambaConfig        Granite 4-H, Nemotron-H, Bamba         convolution, then a memory that decays (Mamba 2)

A convolution looks at the `kernel` last tokens, so its state is its last kernel − 1 inputs. A memory is a matrix of
each head, kept in float32. `mixers.py` computes them.
"""

from dataclasses import dataclass

import torch

from ..cache.state_pool import StatePart
from ..layers.checkpoint import LinearTensors


@dataclass(frozen=True, slots=True)
class ShortConvConfig:
    """A gated short convolution over all channels of the hidden state."""

    name: str  # in a layer of the checkpoint
    channels: int
    kernel: int
    biased: bool  # its maps and the convolution

    def state(self, dtype: torch.dtype) -> tuple[StatePart, ...]:
        return (StatePart((self.kernel - 1, self.channels), dtype),)

    def maps(self, prefix: str, hidden: int) -> list[LinearTensors]:
        """Returns the map in, and the map out."""
        return [
            LinearTensors((f"{prefix}.in_proj",), (3 * self.channels,), hidden, self.biased),
            LinearTensors((f"{prefix}.out_proj",), (hidden,), self.channels, self.biased),
        ]


@dataclass(frozen=True, slots=True)
class DeltaNetConfig:
    """A gated delta net (arXiv:2412.06464). Value heads share key heads in groups.

    Checkpoints differ in the order of outputs: `interleaved` ones have what belongs to a key head next to each other.
    """

    name: str  # as above
    key_heads: int
    value_heads: int
    key_dim: int  # numbers of a key head
    value_dim: int  # numbers of a value head
    kernel: int
    interleaved: bool  # of one map: queries, keys, values and gates; else two have them, each of all heads
    interleaved_rates: bool  # of one map: strengths and steps; else two have them
    tiled: bool = False  # a group is every `key_heads`-th value head; else consecutive ones

    @property
    def keys(self) -> int:
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        return self.value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """Those of the convolution: queries, keys and values."""
        return 2 * self.keys + self.values

    def state(self, dtype: torch.dtype) -> tuple[StatePart, ...]:
        memory = (self.value_heads, self.key_dim, self.value_dim)
        return StatePart((self.kernel - 1, self.channels), dtype), StatePart(memory, torch.float32)

    def maps(self, prefix: str, hidden: int) -> list[LinearTensors]:
        """Returns the map in, that of strengths and steps, and the map out."""
        heads = self.value_heads
        if self.interleaved:
            into = LinearTensors((f"{prefix}.in_proj_qkvz",), (self.channels + self.values,), hidden)
        else:
            names = f"{prefix}.in_proj_qkv", f"{prefix}.in_proj_z"
            into = LinearTensors(names, (self.channels, self.values), hidden)
        if self.interleaved_rates:
            rates = LinearTensors((f"{prefix}.in_proj_ba",), (2 * heads,), hidden)
        else:
            rates = LinearTensors((f"{prefix}.in_proj_b", f"{prefix}.in_proj_a"), (heads, heads), hidden)
        return [into, rates, LinearTensors((f"{prefix}.out_proj",), (hidden,), self.values)]


@dataclass(frozen=True, slots=True)
class MambaConfig:
    """A Mamba 2 layer (arXiv:2405.21060). Heads share their inputs and outputs to the memory in groups."""

    name: str  # as above
    heads: int
    head_dim: int
    groups: int
    state_size: int  # numbers that the memory keeps for each number of a head
    kernel: int
    conv_bias: bool
    biased: bool  # its maps
    activation: str
    least_step: float  # bounds of the time step
    most_step: float

    @property
    def width(self) -> int:
        return self.heads * self.head_dim

    @property
    def channels(self) -> int:
        """Those of the convolution: heads, and of each group what goes into the memory and what reads it."""
        return self.width + 2 * self.groups * self.state_size

    def state(self, dtype: torch.dtype) -> tuple[StatePart, ...]:
        memory = (self.heads, self.state_size, self.head_dim)
        return StatePart((self.kernel - 1, self.channels), dtype), StatePart(memory, torch.float32)

    def maps(self, prefix: str, hidden: int) -> list[LinearTensors]:
        """Returns the map in, and the map out."""
        width = self.width + self.channels + self.heads
        return [
            LinearTensors((f"{prefix}.in_proj",), (width,), hidden, self.biased),
            LinearTensors((f"{prefix}.out_proj",), (hidden,), self.width, self.biased),
        ]


Recurrent = ShortConvConfig | DeltaNetConfig | MambaConfig
