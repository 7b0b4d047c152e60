"""Computes per-layer embeddings in torch: what each layer of Gemma 4 adds of an embedding of its own.

    side embeddings of all layers, once a step    SideEmbedding
    a layer's share of them, after its MLP        SideLayer

See `SideConfig`, and `side.h` for the native kernels.
"""

from typing import Any

import torch
from torch.nn import functional

from ..layers.checkpoint import Checkpoint, LinearTensors
from ..layers.linear import ACTIVATIONS, Linear, QuantMethod, RMSNorm
from .decoder_config import SIDE_EMBEDDING, SIDE_MAP, SIDE_NORM, DecoderConfig, SideConfig, SideTensors

HALF_ROOT = 0.5**0.5  # of the sum of two parts


def side_map(config: DecoderConfig, side: SideConfig) -> LinearTensors:
    """Returns the map of embeddings to the side embeddings of all layers."""
    return LinearTensors((SIDE_MAP,), (len(config.layers) * side.width,), config.hidden_size)


class SideEmbedding:
    """Computes [R, layers, width] from tokens and their embeddings. The table stays as the file has it."""

    def __init__(
        self,
        config: DecoderConfig,
        side: SideConfig,
        weights: Checkpoint,
        method: QuantMethod[Any],  # Any: each method has its own form of weight, and only the method reads it
        *,
        dtype: torch.dtype,
    ) -> None:
        self._width = side.width
        self._table = weights.take_as_stored(SIDE_EMBEDDING, side.vocab_size, len(config.layers) * side.width)
        self._map = Linear(method, weights, side_map(config, side))
        self._norm = RMSNorm(weights.take(SIDE_NORM, side.width), eps=config.norm_eps, centered=config.centered_norm)
        # Rounded to the model's dtype before the product, as trained.
        self._scale = torch.tensor(side.width**0.5, dtype=dtype, device=weights.device)
        self._map_scale = config.hidden_size**-0.5

    def __call__(self, token_ids: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        known = torch.where(token_ids < len(self._table), token_ids, 0)  # tokens of pictures and sound are past its end
        of_tokens = functional.embedding(known, self._table).to(x.dtype) * self._scale
        of_context = (self._map(x) * self._map_scale).view(len(x), -1, self._width)
        return (self._norm(of_context) + of_tokens.view_as(of_context)) * HALF_ROOT


class SideLayer:
    """Computes what one layer adds to the residual: norm(map(activation(gate(x)) · side))."""

    def __init__(
        self,
        tensors: SideTensors,
        config: DecoderConfig,
        weights: Checkpoint,
        method: QuantMethod[Any],  # Any: as above
    ) -> None:
        self._gate = Linear(method, weights, tensors.gate)
        self._output = Linear(method, weights, tensors.output)
        weight = weights.take(tensors.norm, config.hidden_size)
        self._norm = RMSNorm(weight, eps=config.norm_eps, centered=config.centered_norm)
        self._activation = ACTIVATIONS[config.activation]

    def __call__(self, x: torch.Tensor, side: torch.Tensor) -> torch.Tensor:
        return self._norm(self._output(self._activation(self._gate(x)) * side))
