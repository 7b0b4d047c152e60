"""Computes latent attention in torch: queries and values meet the cached latents in their own space.

The reference in transformers expands the latents to keys and values of all heads. Here the maps of keys are applied to
queries, and those of values to what attention gives, which is the same sum in another order.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from ..attention.backend import AttentionStep
from ..layers.checkpoint import Checkpoint, LinearTensors
from ..layers.linear import Linear, QuantMethod, RMSNorm
from ..layers.low_rank import Adapter, AdapterBlocks, AdapterRows
from ..layers.rope import apply_rope
from .decoder_config import DecoderConfig, LatentConfig, LatentTensors, LayerTensors


def split_expansion(expand: torch.Tensor, config: LatentConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """Splits a map of latents to keys and values, [heads · (plain + value_dim), rank].

    Returns:
        The maps of queries into latents, [heads, rank, plain], and of latents to values, [heads, value_dim, rank].
    """
    maps = expand.view(-1, config.plain + config.value_dim, config.rank)
    keys, values = maps[:, : config.plain], maps[:, config.plain :]
    return keys.transpose(1, 2), values


def head_maps(tensors: LatentTensors, config: LatentConfig, heads: int) -> tuple[list[LinearTensors], ...]:
    """Returns the names of the same maps where a checkpoint stores them head by head: those of keys, and of values."""
    keys = [LinearTensors((f"{tensors.keys}.{head}",), (config.rank,), config.plain) for head in range(heads)]
    values = [LinearTensors((f"{tensors.values}.{head}",), (config.value_dim,), config.rank) for head in range(heads)]
    return keys, values


def by_head(tensors: LatentTensors, weights: Checkpoint) -> bool:
    """Returns whether a checkpoint stores the maps head by head, as GGUF files do."""
    return weights.holds(f"{tensors.keys}.0.weight")


def take_maps(
    tensors: LatentTensors, config: LatentConfig, heads: int, weights: Checkpoint
) -> tuple[torch.Tensor, torch.Tensor]:
    """Takes the maps of all heads, in the shapes of `split_expansion`."""
    if not by_head(tensors, weights):
        return split_expansion(weights.take_weights(tensors.expand)[0], config)
    into, out_of = (
        torch.stack([weights.take_weights(each)[0] for each in maps]) for maps in head_maps(tensors, config, heads)
    )
    return into, out_of


class LatentAttention:
    """Computes latent attention of one layer."""

    def __init__(
        self,
        index: int,
        tensors: LayerTensors,
        config: DecoderConfig,
        weights: Checkpoint,
        method: QuantMethod[Any],  # Any: each method has its own form of weight, and only the method reads it
        adapters: Sequence[Adapter],
    ) -> None:
        assert config.latent is not None, "built for models with latents"
        assert tensors.latent is not None, "their tensors have names"
        self._index = index
        self._window = config.layers[index].window
        self._turn = partial(apply_rope, interleaved=config.layers[index].rope.interleaved)
        self._config = config
        self._latent = config.latent
        norm = partial(RMSNorm, eps=config.latent.norm_eps, centered=False)
        self._qkv = Linear(method, weights, tensors.qkv, adapters)
        self._query: Linear | None = None
        if tensors.latent.query is not None and tensors.latent.query_norm is not None:
            self._query = Linear(method, weights, tensors.latent.query, adapters)
            self._query_norm = norm(weights.take(tensors.latent.query_norm, config.latent.query_rank))
        self._norm = norm(weights.take(tensors.latent.norm, config.latent.rank))
        into, out_of = take_maps(tensors.latent, config.latent, config.heads, weights)
        self._into_latents, self._to_values = into.contiguous(), out_of.contiguous()
        self._output = Linear(method, weights, tensors.output, adapters)

    def __call__(
        self,
        x: torch.Tensor,
        adapted: AdapterRows | AdapterBlocks | None,
        angles: tuple[torch.Tensor, torch.Tensor],
        attention: AttentionStep,
    ) -> torch.Tensor:
        config, heads = self._latent, self._config.heads
        first = self._qkv(x, adapted)
        sizes = [config.queries(heads), config.rank, config.rotated]
        query, latent, common = torch.split(first, sizes, dim=-1)
        if self._query is not None:
            query = self._query(self._query_norm(query), adapted)
        plain, rotated = torch.split(query.view(len(x), heads, -1), [config.plain, config.rotated], dim=-1)
        into = torch.einsum("rhp,hlp->rhl", plain, self._into_latents)
        attended = attention.attend(
            self._index,
            torch.cat([into, self._turn(rotated, angles)], dim=-1),  # [R, heads, rank + rotated]
            torch.cat([self._norm(latent)[:, None], self._turn(common[:, None], angles)], dim=-1),
            None,
            window=self._window,
            scale=self._config.attention_scale,
        )
        values = torch.einsum("rhl,hvl->rhv", attended, self._to_values)
        return self._output(values.flatten(1), adapted)
