"""Computes layers with a recurrent state in torch: short convolutions, gated delta nets and Mamba 2.

Each has a map in, a scan over the tokens of every sequence, and a map out. Maps take the rows of all sequences at once;
the scan takes sequences of equally many rows (`state_pool.Scan`). Rounding follows transformers.

A memory S of one head takes tokens one by one, or in chunks of CHUNK with a few products; the papers have the algebra.
With the decay exp(g) of each token, G the running sum of g in a chunk, and rows of Q, K, V for its tokens:

    one token     S ← exp(g) S + kᵀ v                  y = q S
    a chunk       Y = exp(G) Q S + (Q Kᵀ ∘ exp(Gᵢ − Gⱼ), j ≤ i) V
                  S ← exp(G_end) S + (exp(G_end − G) K)ᵀ V

A delta net stores what is new in v only: U with (I + A) U = β (V − exp(G) K S) takes the place of V, where A is the
part of β K Kᵀ ∘ exp(Gᵢ − Gⱼ) with j < i.
"""

from collections.abc import Sequence
from typing import Any, Protocol, assert_never

import torch
from torch.nn import functional

from ..cache.state_pool import States, StepStates
from ..layers.checkpoint import Checkpoint
from ..layers.linear import ACTIVATIONS, Linear, QuantMethod
from ..layers.low_rank import Adapter, AdapterBlocks, AdapterRows
from .decoder_config import DecoderConfig
from .recurrent_config import DeltaNetConfig, MambaConfig, Recurrent, ShortConvConfig

CHUNK = 64  # tokens that are taken into a memory together


class RecurrentMixer(Protocol):
    """The recurrent part of a layer, in place of its attention."""

    def __call__(
        self, x: torch.Tensor, states: StepStates, adapted: AdapterRows | AdapterBlocks | None
    ) -> torch.Tensor:
        """[R, hidden] → [R, hidden]"""


def build_mixer(
    index: int,
    config: DecoderConfig,
    weights: Checkpoint,
    method: QuantMethod[Any],  # Any: each method has its own form of weight, and only the method reads it
    adapters: Sequence[Adapter],
) -> RecurrentMixer:
    """Builds the mixer of a layer that has a recurrent state. index: of the layer."""
    layer = config.layers[index].recurrent
    assert layer is not None, "the layer attends"
    tensors = _MixerTensors(index, config, f"{config.layer_prefix(index)}.{layer.name}", weights, method, adapters)
    match layer:
        case ShortConvConfig():
            return ShortConv(layer, tensors)
        case DeltaNetConfig():
            return GatedDeltaNet(layer, tensors)
        case MambaConfig():
            return Mamba2(layer, tensors)
        case _:
            assert_never(layer)


class _MixerTensors:
    """Reads the tensors of one mixer."""

    def __init__(
        self,
        index: int,
        config: DecoderConfig,
        prefix: str,
        weights: Checkpoint,
        method: QuantMethod[Any],  # Any: as above
        adapters: Sequence[Adapter],
    ) -> None:
        self.config = config
        self.number = sum(layer.recurrent is not None for layer in config.layers[:index])  # among those with states
        self._prefix = prefix
        self._weights = weights
        self._method = method
        self._adapters = adapters

    def maps(self, config: Recurrent) -> list[Linear]:
        """Reads the maps of the mixer, in its order."""
        tensors = config.maps(self._prefix, self.config.hidden_size)
        return [Linear(self._method, self._weights, some, self._adapters) for some in tensors]

    def take(self, name: str, *shape: int) -> torch.Tensor:
        return self._weights.take(f"{self._prefix}.{name}", *shape)

    def take_float(self, name: str, *shape: int) -> torch.Tensor:
        """Takes a tensor in float32, whatever the model's dtype."""
        return self._weights.take_as_stored(f"{self._prefix}.{name}", *shape).float()

    def convolution(self, name: str, channels: int, kernel: int, *, biased: bool) -> "_Convolution":
        weight = self.take(f"{name}.weight", channels, 1, kernel)
        return _Convolution(weight, self.take(f"{name}.bias", channels) if biased else None)


class _Convolution:
    """A causal convolution of each channel by itself. weight: [channels, 1, kernel]"""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._weight = weight
        self._bias = bias

    def __call__(self, inputs: torch.Tensor, before: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """inputs [n, T, channels], before [n, kernel − 1, channels] → outputs [n, T, channels], and the state after."""
        whole = torch.cat([before, inputs], dim=1)
        out = functional.conv1d(whole.transpose(1, 2), self._weight, self._bias, groups=len(self._weight))
        return out.transpose(1, 2), whole[:, whole.shape[1] - before.shape[1] :]


class ShortConv:
    """LFM2's: out(c · convolution(b · x)), with b, c and x from one map."""

    def __init__(self, config: ShortConvConfig, tensors: _MixerTensors) -> None:
        self._number = tensors.number
        self._into, self._out = tensors.maps(config)
        self._convolution = tensors.convolution("conv", config.channels, config.kernel, biased=config.biased)

    def __call__(
        self, x: torch.Tensor, states: StepStates, adapted: AdapterRows | AdapterBlocks | None
    ) -> torch.Tensor:
        before, after, values = self._into(x, adapted).chunk(3, dim=-1)
        return self._out(after * states.scan(self._number, before * values, self._scan), adapted)

    def _scan(self, inputs: torch.Tensor, states: States) -> tuple[torch.Tensor, States]:
        out, state = self._convolution(inputs, states[0])
        return out, (state,)


class GatedDeltaNet:
    """Qwen3-Next's and Qwen 3.5's: a memory of each value head that a token first decays, then corrects at its key."""

    def __init__(self, config: DeltaNetConfig, tensors: _MixerTensors) -> None:
        self._config = config
        self._number = tensors.number
        self._eps = tensors.config.norm_eps
        self._activation = ACTIVATIONS[tensors.config.activation]
        heads = config.value_heads
        self._into, self._rates, self._out = tensors.maps(config)
        self._convolution = tensors.convolution("conv1d", config.channels, config.kernel, biased=False)
        self._step_bias = tensors.take("dt_bias", heads)
        self._decay = -tensors.take_float("A_log", heads).exp()
        self._norm = tensors.take("norm.weight", config.value_dim)

    def __call__(
        self, x: torch.Tensor, states: StepStates, adapted: AdapterRows | AdapterBlocks | None
    ) -> torch.Tensor:
        config = self._config
        mixed, gates, strength, step = self._projected(x, adapted)
        decay = self._decay * functional.softplus(step.float() + self._step_bias)  # log of what is left, [R, heads]
        # One tensor for the scan; float32 holds what both halves have.
        inputs = torch.cat([mixed.float(), decay, strength.sigmoid().float()], dim=-1)
        out = states.scan(self._number, inputs, self._scan).view(len(x), config.value_heads, config.value_dim)
        out = functional.rms_norm(out.to(x.dtype).float(), (config.value_dim,), eps=self._eps)
        gates = functional.silu(gates.float()).view_as(out)
        return self._out(((self._norm * out.to(x.dtype)) * gates).to(x.dtype).flatten(1), adapted)

    def _projected(
        self, x: torch.Tensor, adapted: AdapterRows | AdapterBlocks | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns queries, keys and values [R, channels], gates [R, values], strengths and steps [R, value heads]."""
        config, rows = self._config, len(x)
        whole, rates = self._into(x, adapted), self._rates(x, adapted)
        if config.interleaved_rates:
            rates = rates.view(rows, config.key_heads, -1)
        strength, step = (part.reshape(rows, -1) for part in rates.chunk(2, dim=-1))
        if not config.interleaved:
            mixed, gates = torch.split(whole, [config.channels, config.values], dim=-1)
            return mixed, gates, strength, step
        group = config.value_heads // config.key_heads  # value heads of a key head
        sizes = [config.key_dim, config.key_dim, group * config.value_dim, group * config.value_dim]
        parts = torch.split(whole.view(rows, config.key_heads, -1), sizes, dim=-1)
        query, key, value, gates = (part.reshape(rows, -1) for part in parts)
        return torch.cat([query, key, value], dim=-1), gates, strength, step

    def _scan(self, inputs: torch.Tensor, states: States) -> tuple[torch.Tensor, States]:
        config = self._config
        heads = config.value_heads
        mixed, decay, strength = torch.split(inputs, [config.channels, heads, heads], dim=-1)
        dtype = states[0].dtype
        mixed, window = self._convolution(mixed.to(dtype), states[0])
        query, key, value = torch.split(
            self._activation(mixed).float(), [config.keys, config.keys, config.values], dim=-1
        )
        group = heads // config.key_heads
        query, key = (_normalised(_heads(part, config.key_heads)) for part in (query, key))
        if config.tiled:
            query, key = (part.repeat(1, group, 1, 1) for part in (query, key))
        else:
            query, key = (part.repeat_interleave(group, 1) for part in (query, key))
        query = query * config.key_dim**-0.5
        decay, strength = decay.transpose(1, 2), strength.transpose(1, 2)  # [n, heads, T]
        out, memory = _corrected(query, key, _heads(value, heads), decay, strength, states[1])
        return out.transpose(1, 2).flatten(2), (window, memory)


class Mamba2:
    """Mamba 2's: a memory of each head that decays by the token's step, to which the step's share of it is added."""

    def __init__(self, config: MambaConfig, tensors: _MixerTensors) -> None:
        self._config = config
        self._number = tensors.number
        self._eps = tensors.config.norm_eps
        self._activation = ACTIVATIONS[config.activation]
        heads = config.heads
        self._into, self._out = tensors.maps(config)
        self._convolution = tensors.convolution("conv1d", config.channels, config.kernel, biased=config.conv_bias)
        self._step_bias = tensors.take("dt_bias", heads)
        self._decay = -tensors.take_float("A_log", heads).exp()
        self._through = tensors.take("D", heads)
        self._norm = tensors.take("norm.weight", config.width)

    def __call__(
        self, x: torch.Tensor, states: StepStates, adapted: AdapterRows | AdapterBlocks | None
    ) -> torch.Tensor:
        config = self._config
        whole = self._into(x, adapted)
        gates, inputs = torch.split(whole, [config.width, config.channels + config.heads], dim=-1)
        out = states.scan(self._number, inputs, self._scan)
        gated = out.to(x.dtype).float() * functional.silu(gates.float())
        grouped = gated.view(len(x), config.groups, -1)
        normed = functional.rms_norm(grouped, grouped.shape[-1:], eps=self._eps).view_as(gated)
        return self._out((self._norm * normed.to(x.dtype)), adapted)

    def _scan(self, inputs: torch.Tensor, states: States) -> tuple[torch.Tensor, States]:
        config = self._config
        mixed, step = torch.split(inputs, [config.channels, config.heads], dim=-1)
        mixed, window = self._convolution(mixed, states[0])
        shared = config.groups * config.state_size
        values, key, query = torch.split(self._activation(mixed).float(), [config.width, shared, shared], dim=-1)
        step = functional.softplus(step.float() + self._step_bias.float()).clamp(config.least_step, config.most_step)
        values = _heads(values, config.heads)  # [n, heads, T, head_dim]
        key, query = (
            _heads(part, config.groups).repeat_interleave(config.heads // config.groups, 1) for part in (key, query)
        )
        step = step.transpose(1, 2)
        out, memory = _decayed(query, key, values * step[..., None], step * self._decay[:, None], states[1])
        out = out + values * self._through.float()[:, None, None]
        return out.transpose(1, 2).flatten(2), (window, memory)


# ------------------------------------------------------------------------------------------ memories


def _heads(values: torch.Tensor, heads: int) -> torch.Tensor:
    """[n, T, heads · D] → [n, heads, T, D]"""
    return values.view(*values.shape[:2], heads, -1).transpose(1, 2)


def _normalised(values: torch.Tensor) -> torch.Tensor:
    """Scales rows to length 1, [..., D]."""
    return values * torch.rsqrt(values.square().sum(dim=-1, keepdim=True) + 1e-6)


def _decayed(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, decay: torch.Tensor, memory: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Adds values to a memory at their keys, and reads it at queries.

    Args:
        query, key: [n, heads, T, K]; value: [n, heads, T, V]; all float32.
        decay: log of what is left of the memory after each token, [n, heads, T].
        memory: [n, heads, K, V]

    Returns:
        What the queries read, [n, heads, T, V], and the memory after the last token.
    """
    if query.shape[2] == 1:
        memory = decay.exp()[..., None] * memory + key.transpose(-1, -2) @ value
        return query @ memory, memory
    outputs = []
    for start in range(0, query.shape[2], CHUNK):
        q, k, v = (part[:, :, start : start + CHUNK] for part in (query, key, value))
        total = decay[:, :, start : start + CHUNK].cumsum(2)
        out, memory = _chunk(q, k, v, total, _between(total), memory)
        outputs.append(out)
    return torch.cat(outputs, dim=2), memory


def _corrected(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    decay: torch.Tensor,
    strength: torch.Tensor,
    memory: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Moves what a memory has at each key towards the value, and reads it at queries.

    Args: as for `_decayed`, and strength: how far, 0 to 1, [n, heads, T].
    """
    if query.shape[2] == 1:
        memory = decay.exp()[..., None] * memory
        new = strength[..., None] * (value - key @ memory)
        memory = memory + key.transpose(-1, -2) @ new
        return query @ memory, memory
    outputs = []
    for start in range(0, query.shape[2], CHUNK):
        q, k, v = (part[:, :, start : start + CHUNK] for part in (query, key, value))
        beta = strength[:, :, start : start + CHUNK, None]
        total = decay[:, :, start : start + CHUNK].cumsum(2)
        between = _between(total)
        known = total.exp()[..., None] * (k @ memory)
        system = ((beta * k) @ k.transpose(-1, -2) * between).tril(-1)
        new = torch.linalg.solve_triangular(system, beta * (v - known), upper=False, unitriangular=True)
        out, memory = _chunk(q, k, new, total, between, memory)
        outputs.append(out)
    return torch.cat(outputs, dim=2), memory


def _between(total: torch.Tensor) -> torch.Tensor:
    """Returns what is left at token i of what token j has stored, for j ≤ i, else 0: [n, heads, T, T]."""
    size = total.shape[-1]
    later = torch.ones(size, size, dtype=torch.bool, device=total.device).triu(1)
    return (total[..., :, None] - total[..., None, :]).masked_fill(later, -torch.inf).exp()


def _chunk(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    total: torch.Tensor,
    between: torch.Tensor,
    memory: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Takes one chunk into a memory. total: the decay from the start of the chunk, [n, heads, T]."""
    out = total.exp()[..., None] * (query @ memory) + (query @ key.transpose(-1, -2) * between) @ value
    left = (total[..., -1:] - total).exp()[..., None]
    return out, total[..., -1:].exp()[..., None] * memory + (left * key).transpose(-1, -2) @ value
