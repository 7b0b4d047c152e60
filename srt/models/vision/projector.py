"""From the tower's features to rows of the decoder: LLaVA's two matrices, Gemma 3's averages and one matrix.

T tiles, P positions of a tile, F features of a position, hidden the decoder's width.
"""

from typing import Protocol

import torch
from torch.nn import functional

from ....lang.errors import ModelError
from ...layers.checkpoint import Checkpoint
from ...layers.linear import ACTIVATIONS
from ...layers.norm import RMSNorm
from .config import VisionConfig

_ROOT = "multi_modal_projector"


class Projector(Protocol):
    def __call__(self, features: torch.Tensor) -> torch.Tensor:
        """[T, P, F] → [T, tokens of a tile, hidden]"""


class LlavaProjector:
    """W₂ activation(W₁ x), for every position by itself."""

    def __init__(self, config: VisionConfig, weights: Checkpoint) -> None:
        if config.activation not in ACTIVATIONS:
            raise ModelError(f"projector_hidden_act {config.activation!r} is not one of {', '.join(ACTIVATIONS)}")
        hidden, features = config.hidden_size, config.tower.hidden_size * len(config.depths)
        bias = config.projector_bias
        self._first = weights.take(f"{_ROOT}.linear_1.weight", hidden, features)
        self._first_bias = weights.take(f"{_ROOT}.linear_1.bias", hidden) if bias else None
        self._second = weights.take(f"{_ROOT}.linear_2.weight", hidden, hidden)
        self._second_bias = weights.take(f"{_ROOT}.linear_2.bias", hidden) if bias else None
        self._activation = ACTIVATIONS[config.activation]
        self._drop_first = config.drop_first

    def __call__(self, features: torch.Tensor) -> torch.Tensor:
        kept = features[:, 1:] if self._drop_first else features
        wide = self._activation(functional.linear(kept, self._first, self._first_bias))
        return functional.linear(wide, self._second, self._second_bias)


class Gemma3Projector:
    """Squares of neighbouring patches are averaged to one, which is normalised and multiplied."""

    def __init__(self, config: VisionConfig, weights: Checkpoint) -> None:
        width, hidden = config.tower.hidden_size, config.hidden_size
        norm = weights.take(f"{_ROOT}.mm_soft_emb_norm.weight", width)
        self._norm = RMSNorm(norm, eps=config.tower.norm_eps, centered=True)
        self._matrix = weights.take(f"{_ROOT}.mm_input_projection_weight", width, hidden)
        self._side = config.pooled_side
        self._pool = config.tower.patches // config.pooled_side

    def __call__(self, features: torch.Tensor) -> torch.Tensor:
        squares = features.view(len(features), self._side, self._pool, self._side, self._pool, -1)
        pooled = squares.mean(dim=(2, 4)).flatten(1, 2)  # [T, side², F]
        return self._norm(pooled) @ self._matrix


def build_projector(config: VisionConfig, weights: Checkpoint) -> Projector:
    return Gemma3Projector(config, weights) if config.family == "gemma3" else LlavaProjector(config, weights)
