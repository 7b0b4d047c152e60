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

    `dynamic` and `longrope` are absent on purpose: they change the rotation of all keys when a sequence exceeds a
    length, so a cached key would be wrong for a longer continuation.
    """

    DEFAULT = "default"
    LINEAR = "linear"
    LLAMA3 = "llama3"
    YARN = "yarn"


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """One set of frequencies. Fields after `factor` belong to LLAMA3 (low, high) and YARN (the rest)."""

    type: RopeType
    theta: float
    factor: float = 1.0
    original_length: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0  # multiplies cosines and sines


def yarn_attention_factor(factor: float, mscale: float | None, mscale_all_dim: float | None) -> float:
    """Computes the temperature that YaRN applies to queries and keys if the configuration does not state it."""

    def temperature(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if mscale and mscale_all_dim:
        return temperature(mscale) / temperature(mscale_all_dim)
    return temperature(1.0)


def frequencies(config: RopeConfig, head_dim: int) -> torch.Tensor:
    """Computes radians per position, float32 [head_dim / 2]."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    plain = 1.0 / (config.theta**exponents)
    match config.type:
        case RopeType.DEFAULT:
            return plain
        case RopeType.LINEAR:
            return plain / config.factor
        case RopeType.LLAMA3:
            return _llama3(plain, config)
        case RopeType.YARN:
            return _yarn(config, exponents)


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

    def angles(self, positions: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Computes cosines, and sines with the sign that `apply_rope` needs; each [R, 1, head_dim]."""
        angle = positions[:, None].float() * self._frequencies
        cos, sin = angle.cos() * self._factor, angle.sin() * self._factor
        both = torch.cat([cos, cos], dim=-1), torch.cat([-sin, sin], dim=-1)
        return both[0].to(dtype)[:, None], both[1].to(dtype)[:, None]


def apply_rope(heads: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Rotates dimension i with dimension i + head_dim/2. heads: [R, heads, head_dim]"""
    cos, sin = angles
    halves = heads.view(*heads.shape[:-1], 2, heads.shape[-1] // 2)
    swapped = halves.flip(-2).view(heads.shape)
    return heads * cos + swapped * sin


_POSITIONS_AT_ONCE = 8192  # angles are float32, and wider than what is kept of them


def rope_table(
    config: RopeConfig, head_dim: int, positions: int, *, dtype: torch.dtype, device: torch.device | str
) -> torch.Tensor:
    """Computes a table [positions, head_dim]: cosines of head_dim / 2 frequencies, then their sines, in `dtype`.

    131,072 positions of 128 dimensions in bfloat16 are 32 MiB.
    """
    rope = Rope(config, head_dim, device)
    table = torch.empty((positions, head_dim), dtype=dtype, device=device)
    half = head_dim // 2
    for part in torch.split(torch.arange(positions, device=device), _POSITIONS_AT_ONCE):
        cos, sin = rope.angles(part, dtype)  # [n, 1, head_dim], sines with the sign that `apply_rope` needs
        rows = table[int(part[0]) : int(part[-1]) + 1]
        rows[:, :half] = cos[:, 0, :half]
        rows[:, half:] = sin[:, 0, half:]
    return table
