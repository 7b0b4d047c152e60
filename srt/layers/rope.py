"""Computes rotary position embeddings: frequencies of the scaling variants, and the rotation of queries and keys.

Frequencies and angles are float32; cosines and sines are rounded to the model's dtype before use, as
transformers does, so that both give the same logits.
"""

import math
from dataclasses import dataclass
from enum import Enum

import torch


class RopeType(Enum):
    """Variants whose frequencies do not depend on the length of the sequence.

    `dynamic` is absent on purpose: it changes the rotation of all keys when a sequence exceeds a length, so a cached
    key would be wrong for a longer continuation. LONGROPE has two sets of factors for the same reason; one of them is
    chosen for good when the configuration is read, see `read_fields`.
    """

    NONE = "none"  # nothing is rotated (NoPE): the layer knows the order of its keys by the mask alone
    DEFAULT = "default"
    LINEAR = "linear"
    LLAMA3 = "llama3"
    YARN = "yarn"
    LONGROPE = "longrope"
    PROPORTIONAL = "proportional"  # only the first frequencies of a whole head turn; the others are 0


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """One set of frequencies, and which dimensions of a head it rotates.

    `low_freq_factor` and `high_freq_factor` belong to LLAMA3, `divisors` to LONGROPE, `beta_fast`, `beta_slow` and
    `truncate` to YARN.
    """

    type: RopeType
    theta: float
    fraction: float = 1.0  # of a head's dimensions, the first ones, are rotated; the others stay as they are
    interleaved: bool = False  # dimension 2i rotates with 2i + 1; else i with i + half of the rotated ones
    factor: float = 1.0
    original_length: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    divisors: tuple[float, ...] = ()  # of each frequency
    # Of each frequency the axis of the positions that it turns by: 0 time, 1 height, 2 width. Empty: there is one axis.
    axes: tuple[int, ...] = ()
    attention_factor: float = 1.0  # multiplies cosines and sines

    def rotated(self, head_dim: int) -> int:
        """Returns the number of dimensions of a head that are rotated, an even number."""
        if self.type is RopeType.PROPORTIONAL:
            return head_dim
        return 0 if self.type is RopeType.NONE else int(head_dim * self.fraction)


@dataclass(frozen=True, slots=True)
class QueryScale:
    """Scales queries by their position, 1 + beta · log(1 + floor((position + offset) / length)), after the rotation.

    Llama 4 and Ministral 3 keep attention sharp over long contexts this way.
    """

    beta: float
    length: int
    offset: int = 0

    def at(self, positions: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Computes the factors of rows, [R, 1, 1] for queries [R, heads, head_dim]."""
        steps = torch.div(positions + self.offset, self.length, rounding_mode="floor").float()
        return (1.0 + self.beta * torch.log1p(steps)).to(dtype)[:, None, None]


def yarn_attention_factor(factor: float, mscale: float | None, mscale_all_dim: float | None) -> float:
    """Computes the temperature that YaRN applies to queries and keys if the configuration does not state it."""
    if mscale and mscale_all_dim:
        return yarn_temperature(factor, mscale) / yarn_temperature(factor, mscale_all_dim)
    return yarn_temperature(factor, 1.0)


def yarn_temperature(factor: float, weight: float) -> float:
    """Computes YaRN's temperature for a context stretched by `factor` (section 3.4), with a weight of its logarithm."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def frequencies(config: RopeConfig, head_dim: int) -> torch.Tensor:
    """Computes radians per position, float32 [rotated dimensions / 2]."""
    rotated = config.rotated(head_dim)
    exponents = torch.arange(0, rotated, 2, dtype=torch.int64).float() / max(rotated, 1)
    plain = 1.0 / (config.theta**exponents)
    match config.type:
        case RopeType.NONE | RopeType.DEFAULT:
            return plain
        case RopeType.LINEAR:
            return plain / config.factor
        case RopeType.LLAMA3:
            return _llama3(plain, config)
        case RopeType.YARN:
            return _yarn(config, exponents)
        case RopeType.PROPORTIONAL:
            turning = torch.arange(len(plain)) < int(config.fraction * head_dim // 2)
            return plain / config.factor * turning
        case RopeType.LONGROPE:
            return 1.0 / (torch.tensor(config.divisors) * config.theta**exponents)


def _llama3(plain: torch.Tensor, config: RopeConfig) -> torch.Tensor:
    """Stretches long waves by `factor`, keeps short ones, and interpolates those between."""
    wavelength = 2 * math.pi / plain
    longest_kept = config.original_length / config.high_freq_factor
    shortest_stretched = config.original_length / config.low_freq_factor
    kept = (config.original_length / wavelength - config.low_freq_factor) / (
        config.high_freq_factor - config.low_freq_factor
    )
    between = (1 - kept) * plain / config.factor + kept * plain
    result = torch.where(wavelength > shortest_stretched, plain / config.factor, plain)
    return torch.where((wavelength >= longest_kept) & (wavelength <= shortest_stretched), between, result)


def _yarn(config: RopeConfig, exponents: torch.Tensor) -> torch.Tensor:
    """Keeps dimensions that turn more than `beta_fast` times in the original context, stretches those that turn less
    than `beta_slow` times, and interpolates linearly over the dimensions between (YaRN, section 3.2)."""
    half = len(exponents)

    def dimension(turns: float) -> float:
        return half * math.log(config.original_length / (turns * 2 * math.pi)) / math.log(config.theta)

    low, high = dimension(config.beta_fast), dimension(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * half - 1)
    ramp = (torch.arange(half, dtype=torch.float32) - low) / (high - low or 0.001)
    kept = 1 - ramp.clamp(0, 1)
    waves = config.theta**exponents
    return 1.0 / (config.factor * waves) * (1 - kept) + 1.0 / waves * kept


class Rope:
    """One set of frequencies. `angles` is called once per step, `apply_rope` once per layer."""

    def __init__(self, config: RopeConfig, head_dim: int, device: torch.device | str) -> None:
        self._frequencies = frequencies(config, head_dim).to(device)
        self._factor = config.attention_factor
        self.pairs = len(self._frequencies)  # of dimensions that are rotated
        self._axes = torch.tensor(config.axes, dtype=torch.int64, device=device) if config.axes else None

    def angles(self, positions: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Computes cosines, and sines with the sign that `apply_rope` needs; each [R, 1, rotated dimensions].

        Args:
            positions: [R], or [3, R] on the axes of time, height and width, for frequencies with axes.
        """
        if positions.dim() == 1:
            turned_by = positions[:, None]
        else:
            assert self._axes is not None, "a model of one axis has pictures without a grid"
            turned_by = positions[self._axes].T  # [R, frequencies]
        angle = turned_by.float() * self._frequencies
        cos, sin = angle.cos() * self._factor, angle.sin() * self._factor
        both = torch.cat([cos, cos], dim=-1), torch.cat([-sin, sin], dim=-1)
        return both[0].to(dtype)[:, None], both[1].to(dtype)[:, None]


def apply_rope(
    heads: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor], *, interleaved: bool = False
) -> torch.Tensor:
    """Rotates as many dimensions of each head as there are angles. heads: [R, heads, head_dim]

    Args:
        interleaved: dimension 2i rotates with 2i + 1; else i with i + half of the rotated ones.
    """
    cos, sin = angles
    rotated = cos.shape[-1]
    if rotated < heads.shape[-1]:
        turned = apply_rope(heads[..., :rotated], angles, interleaved=interleaved) if rotated else heads[..., :0]
        return torch.cat([turned, heads[..., rotated:]], dim=-1)
    if interleaved:
        pairs, halves = (*heads.shape[:-1], rotated // 2, 2), (*heads.shape[:-1], 2, rotated // 2)
        apart = heads.view(pairs).transpose(-1, -2).flatten(-2)  # the first dimensions of all pairs, then the second
        return apply_rope(apart, angles).view(halves).transpose(-1, -2).flatten(-2)
    swapped = heads.view(*heads.shape[:-1], 2, rotated // 2).flip(-2).view(heads.shape)
    return heads * cos + swapped * sin


_POSITIONS_AT_ONCE = 8192  # angles are float32, and wider than what is kept of them


def rope_table(
    config: RopeConfig, head_dim: int, positions: int, *, dtype: torch.dtype, device: torch.device | str
) -> torch.Tensor:
    """Computes a table [positions, head_dim]: cosines of head_dim / 2 frequencies, then their sines, in `dtype`.

    Frequencies of dimensions that are not rotated are 0. 131,072 positions of 128 dimensions in bfloat16 are 32 MiB.
    """
    places = torch.arange(positions, device=device)
    return rope_rows(Rope(config, head_dim, device), head_dim, places, dtype=dtype)


def rope_rows(rope: Rope, head_dim: int, positions: torch.Tensor, *, dtype: torch.dtype) -> torch.Tensor:
    """Computes rows of such a table for any positions, [R] or on three axes [3, R]: [R, head_dim]"""
    half, pairs = head_dim // 2, rope.pairs
    table = torch.zeros((positions.shape[-1], head_dim), dtype=dtype, device=positions.device)
    table[:, pairs:half] = 1.0
    for part, rows in zip(
        torch.split(positions, _POSITIONS_AT_ONCE, dim=-1), torch.split(table, _POSITIONS_AT_ONCE), strict=True
    ):
        cos, sin = rope.angles(part, dtype)  # [n, 1, 2 pairs], sines with the sign that `apply_rope` needs
        rows[:, :pairs] = cos[:, 0, :pairs]
        rows[:, half : half + pairs] = sin[:, 0, pairs:]
    return table
