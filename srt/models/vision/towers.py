"""Runs CLIP's and SigLIP's vision transformers: pixels of tiles → the states of their patches after chosen layers.

    pixels → patches × matrix → (class token) + positions → (norm) → layers × [ norm → attention → + norm → MLP → + ]

T tiles, P positions, D the tower's width. Layers after the deepest chosen one are not even read.
"""

from collections.abc import Sequence

import torch
from torch.nn import functional

from ....lang.errors import ModelError
from ...layers.checkpoint import Checkpoint, LinearTensors
from ...layers.linear import ACTIVATIONS, Linear, dense_method
from .config import TowerConfig

BATCH_ROWS = 4096  # positions of one pass, over all its tiles: bounds the widest intermediate at about 64 MiB
_ROOT = "vision_tower"


def quick_gelu(x: torch.Tensor) -> torch.Tensor:
    """Computes x · sigmoid(1.702 x)."""
    return (x * 1.702).sigmoid_().mul_(x)


TOWER_ACTIVATIONS = {**ACTIVATIONS, "quick_gelu": quick_gelu}


class LayerNorm:
    """Centres x, scales it by its deviation, and applies weight and bias."""

    def __init__(self, name: str, config: TowerConfig, weights: Checkpoint) -> None:
        self._shape = (config.hidden_size,)
        self._weight = weights.take(f"{name}.weight", config.hidden_size)
        self._bias = weights.take(f"{name}.bias", config.hidden_size)
        self._eps = config.norm_eps

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return functional.layer_norm(x, self._shape, self._weight, self._bias, self._eps)


class TowerLayer:
    """Runs bidirectional attention within each tile, and an MLP."""

    def __init__(self, index: int, config: TowerConfig, weights: Checkpoint, *, pack: bool) -> None:
        name = f"{_ROOT}.encoder.layers.{index}"
        width, wide = config.hidden_size, config.intermediate_size
        names = tuple(f"{name}.self_attn.{part}_proj" for part in "qkv")
        self._heads = config.heads
        self._norm_before_attention = LayerNorm(f"{name}.layer_norm1", config, weights)
        method = dense_method(packed=pack)
        self._qkv = Linear(method, weights, LinearTensors(names, (width,) * 3, width, biased=True))

        def linear(part: str, outputs: int, inputs: int) -> Linear:
            return Linear(method, weights, LinearTensors((f"{name}.{part}",), (outputs,), inputs, biased=True))

        self._output = linear("self_attn.out_proj", width, width)
        self._norm_before_mlp = LayerNorm(f"{name}.layer_norm2", config, weights)
        self._up = linear("mlp.fc1", wide, width)
        self._down = linear("mlp.fc2", width, wide)
        self._activation = TOWER_ACTIVATIONS[config.activation]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self._attend(self._norm_before_attention(x))
        return x + self._down(self._activation(self._up(self._norm_before_mlp(x))))

    def _attend(self, x: torch.Tensor) -> torch.Tensor:
        tiles, positions, width = x.shape
        qkv = self._qkv(x).view(tiles, positions, 3, self._heads, -1)
        queries, keys, values = qkv.permute(2, 0, 3, 1, 4)  # each [T, heads, P, D / heads]
        attended = functional.scaled_dot_product_attention(queries, keys, values)
        return self._output(attended.transpose(1, 2).reshape(tiles, positions, width))


class Tower:
    """A whole tower.

    Args:
        depths: numbers of layers after which the state is taken; the states of several are concatenated.
        last_norm: normalise the state after the last layer, as Gemma 3 does and LLaVA does not.
        pack: lay weights out for oneDNN, see `linear.PackedMethod`. With the hundreds of rows of a tile that pays in
            bfloat16 only, 10 to 30 % of a product; in float32 it costs 5 to 15 %.
    """

    def __init__(
        self, config: TowerConfig, depths: Sequence[int], weights: Checkpoint, *, last_norm: bool, pack: bool
    ) -> None:
        if config.activation not in TOWER_ACTIVATIONS:
            raise ModelError(
                f"vision_config: hidden_act {config.activation!r} is not one of {', '.join(TOWER_ACTIVATIONS)}"
            )
        clip = config.kind == "clip"
        width, side = config.hidden_size, config.patch_size
        self._config = config
        self._depths = tuple(depths)
        embeddings = f"{_ROOT}.embeddings"
        patch = weights.take(f"{embeddings}.patch_embedding.weight", width, 3, side, side)
        self._patch = patch.flatten(1)  # [D, 3 · side²]: patches do not overlap, so the convolution is a product
        self._patch_bias = None if clip else weights.take(f"{embeddings}.patch_embedding.bias", width)
        self._positions = weights.take(f"{embeddings}.position_embedding.weight", config.positions, width)
        self._class = weights.take(f"{embeddings}.class_embedding", width) if clip else None
        # The name is CLIP's, and misspelt in every checkpoint.
        self._first_norm = LayerNorm(f"{_ROOT}.pre_layrnorm", config, weights) if clip else None
        self._layers = [TowerLayer(index, config, weights, pack=pack) for index in range(max(depths))]
        self._last_norm = LayerNorm(f"{_ROOT}.post_layernorm", config, weights) if last_norm else None

    def __call__(self, pixels: torch.Tensor) -> torch.Tensor:
        """pixels [T, 3, image_size, image_size], normalised, in the weights' dtype → [T, P, D · depths]"""
        tiles = max(1, BATCH_ROWS // self._config.positions)
        return torch.cat([self._see(part) for part in torch.split(pixels, tiles)])

    def _see(self, pixels: torch.Tensor) -> torch.Tensor:
        x = self._embed(pixels)
        states = {0: x}
        for depth, layer in enumerate(self._layers, 1):
            x = layer(x)
            if depth in self._depths:
                states[depth] = x
        if self._last_norm is not None:
            states = {depth: self._last_norm(state) for depth, state in states.items()}
        return torch.cat([states[depth] for depth in self._depths], dim=-1)

    def _embed(self, pixels: torch.Tensor) -> torch.Tensor:
        count, side = self._config.patches, self._config.patch_size
        whole = pixels[:, :, : count * side, : count * side]
        patches = whole.reshape(len(pixels), 3, count, side, count, side)  # [T, 3, rows, side, columns, side]
        patches = patches.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)  # [T, rows · columns, 3 · side²]
        x = functional.linear(patches, self._patch, self._patch_bias)
        if self._class is not None:
            x = torch.cat([self._class.expand(len(x), 1, -1), x], dim=1)
        x = x + self._positions
        return x if self._first_norm is None else self._first_norm(x)


def unread(config: TowerConfig, depths: Sequence[int], *, last_norm: bool) -> tuple[str, ...]:
    """Returns prefixes of the names of tensors that a tower of this configuration has and does not use: layers after
    the deepest chosen one, and the head of a tower that was trained to classify pictures."""
    layers = [f"{_ROOT}.encoder.layers.{index}." for index in range(max(depths), config.layers)]
    ends = [] if last_norm else [f"{_ROOT}.post_layernorm."]
    return (*layers, *ends, f"{_ROOT}.head.", f"{_ROOT}.embeddings.position_ids")
