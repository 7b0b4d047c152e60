"""Cosines and sines of all positions, made once: what `rope.turn_and_store` reads instead of computing angles."""

import torch

from ...layers.rope import Rope, RopeConfig

_POSITIONS_AT_ONCE = 8192  # angles are float32, and wider than what is kept of them


def rope_table(
    config: RopeConfig, head_dim: int, positions: int, *, dtype: torch.dtype, device: torch.device | str
) -> torch.Tensor:
    """[positions, head_dim]: cosines of the head_dim / 2 frequencies, then their sines, rounded to `dtype`.

    131,072 positions of 128 dimensions in bfloat16 are 32 MiB.
    """
    rope = Rope(config, head_dim, device)
    table = torch.empty((positions, head_dim), dtype=dtype, device=device)
    half = head_dim // 2
    for part in torch.split(torch.arange(positions, device=device), _POSITIONS_AT_ONCE):
        cos, sin = rope.angles(part, dtype)  # [n, 1, head_dim], sines with the sign that the turn needs
        rows = table[int(part[0]) : int(part[-1]) + 1]
        rows[:, :half] = cos[:, 0, :half]
        rows[:, half:] = sin[:, 0, half:]
    return table
