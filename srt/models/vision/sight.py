"""Computes the rows of the decoder from the bytes of a picture: tower (CLIP or SigLIP), projector and layout.

    pixels → patches × matrix → (class token) + positions → (norm) → layers × [ norm → attention → + norm → MLP → + ]

T tiles, P positions of a tile, F features of a position, hidden the decoder's width. The rows of LLaVA-NeXT's tiles
(anyres) are concatenated:

    overview, whole                          P × P rows
    the grid's tiles as one large picture    without its padding, line by line of patches, and after each the newline
"""

from collections.abc import Sequence
from math import prod
from typing import Protocol

import torch
from msgspec.structs import replace
from torch.nn import functional

from ....lang.errors import ModelError, RequestError
from ...core.batch import PICTURE_BASE
from ...core.messages import EnginePicture
from ...layers.checkpoint import Checkpoint, LinearTensors, Tensors
from ...layers.linear import ACTIVATIONS, Linear, RMSNorm, can_pack, dense_method
from ...multimodal.format import anyres_tokens, unpadded
from .config import TowerConfig, VisionConfig
from .preprocessor import Normalisation

BATCH_ROWS = 4096  # positions of one pass, over all its tiles: bounds the widest intermediate at about 64 MiB
CHANNELS = 3
_ROOT = "vision_tower"
_PROJECTOR = "multi_modal_projector"


def quick_gelu(x: torch.Tensor) -> torch.Tensor:
    """Computes x · sigmoid(1.702 x)."""
    return (x * 1.702).sigmoid_().mul_(x)


TOWER_ACTIVATIONS = {**ACTIVATIONS, "quick_gelu": quick_gelu}


class LayerNorm:
    """Centres x, scales it by its deviation, and applies weight and bias."""

    def __init__(self, name: str, width: int, weights: Checkpoint, *, eps: float) -> None:
        self._shape = (width,)
        self._weight = weights.take(f"{name}.weight", width)
        self._bias = weights.take(f"{name}.bias", width)
        self._eps = eps

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return functional.layer_norm(x, self._shape, self._weight, self._bias, self._eps)


class TowerLayer:
    """Runs bidirectional attention within each tile, and an MLP."""

    def __init__(self, index: int, config: TowerConfig, weights: Checkpoint, *, pack: bool) -> None:
        name = f"{_ROOT}.encoder.layers.{index}"
        width, wide = config.hidden_size, config.intermediate_size
        names = tuple(f"{name}.self_attn.{part}_proj" for part in "qkv")
        self._heads = config.heads
        self._norm_before_attention = LayerNorm(f"{name}.layer_norm1", width, weights, eps=config.norm_eps)
        method = dense_method(packed=pack)
        self._qkv = Linear(method, weights, LinearTensors(names, (width,) * 3, width, biased=True))

        def linear(part: str, outputs: int, inputs: int) -> Linear:
            return Linear(method, weights, LinearTensors((f"{name}.{part}",), (outputs,), inputs, biased=True))

        self._output = linear("self_attn.out_proj", width, width)
        self._norm_before_mlp = LayerNorm(f"{name}.layer_norm2", width, weights, eps=config.norm_eps)
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
        self._first_norm = LayerNorm(f"{_ROOT}.pre_layrnorm", width, weights, eps=config.norm_eps) if clip else None
        self._layers = [TowerLayer(index, config, weights, pack=pack) for index in range(max(depths))]
        self._last_norm: LayerNorm | None = None
        if last_norm:
            self._last_norm = LayerNorm(f"{_ROOT}.post_layernorm", width, weights, eps=config.norm_eps)

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


class Projector(Protocol):
    def __call__(self, features: torch.Tensor) -> torch.Tensor:
        """[T, P, F] → [T, tokens of a tile, hidden]"""


class LlavaProjector:
    """Computes W₂ activation(W₁ x) for every position."""

    def __init__(self, config: VisionConfig, weights: Checkpoint) -> None:
        if config.activation not in ACTIVATIONS:
            raise ModelError(f"projector_hidden_act {config.activation!r} is not one of {', '.join(ACTIVATIONS)}")
        hidden, features = config.hidden_size, config.tower.hidden_size * len(config.depths)
        bias = config.projector_bias
        self._first = weights.take(f"{_PROJECTOR}.linear_1.weight", hidden, features)
        self._first_bias = weights.take(f"{_PROJECTOR}.linear_1.bias", hidden) if bias else None
        self._second = weights.take(f"{_PROJECTOR}.linear_2.weight", hidden, hidden)
        self._second_bias = weights.take(f"{_PROJECTOR}.linear_2.bias", hidden) if bias else None
        self._activation = ACTIVATIONS[config.activation]
        self._drop_first = config.drop_first

    def __call__(self, features: torch.Tensor) -> torch.Tensor:
        kept = features[:, 1:] if self._drop_first else features
        wide = self._activation(functional.linear(kept, self._first, self._first_bias))
        return functional.linear(wide, self._second, self._second_bias)


class Gemma3Projector:
    """Averages squares of neighbouring patches, normalises the averages and multiplies them by a matrix."""

    def __init__(self, config: VisionConfig, weights: Checkpoint) -> None:
        width, hidden = config.tower.hidden_size, config.hidden_size
        norm = weights.take(f"{_PROJECTOR}.mm_soft_emb_norm.weight", width)
        self._norm = RMSNorm(norm, eps=config.tower.norm_eps, centered=True)
        self._matrix = weights.take(f"{_PROJECTOR}.mm_input_projection_weight", width, hidden)
        self._side = config.pooled_side
        self._pool = config.tower.patches // config.pooled_side

    def __call__(self, features: torch.Tensor) -> torch.Tensor:
        squares = features.view(len(features), self._side, self._pool, self._side, self._pool, -1)
        pooled = squares.mean(dim=(2, 4)).flatten(1, 2)  # [T, side², F]
        return self._norm(pooled) @ self._matrix


def build_projector(config: VisionConfig, weights: Checkpoint) -> Projector:
    return Gemma3Projector(config, weights) if config.family == "gemma3" else LlavaProjector(config, weights)


def arrange(
    features: torch.Tensor, columns: int, rows: int, width: int, height: int, newline: torch.Tensor
) -> torch.Tensor:
    """Puts the tiles of a picture of width × height pixels together (anyres): see the module's drawing.

    features: [1 + rows · columns, patches of a tile, hidden] → [tokens, hidden]. newline: [hidden]
    """
    overview, tiles = features[0], features[1:]
    side = round(features.shape[1] ** 0.5)
    grid = (
        tiles.view(rows, columns, side, side, -1).transpose(1, 2).flatten(2, 3).flatten(0, 1)
    )  # [lines, patches, hidden]
    top, bottom, left, right = unpadded(rows * side, columns * side, width, height)
    shown = grid[top:bottom, left:right]
    lines = torch.cat([shown, newline.expand(len(shown), 1, -1)], dim=1)
    return torch.cat([overview, lines.flatten(0, 1)])


def arranged_tokens(tile_tokens: int, columns: int, rows: int, width: int, height: int) -> int:
    """Returns the number of rows that `arrange` returns."""
    side = round(tile_tokens**0.5)
    top, bottom, left, right = unpadded(rows * side, columns * side, width, height)
    return tile_tokens + anyres_tokens(bottom - top, right - left)


class PixelReader:
    """Normalises pixels in float32, as image processors do it."""

    def __init__(self, normalisation: Normalisation, *, dtype: torch.dtype, device: torch.device) -> None:
        self._factor = normalisation.factor
        self._mean = torch.tensor(normalisation.mean, device=device)
        self._std = torch.tensor(normalisation.std, device=device)
        self._dtype = dtype
        self._device = device

    def __call__(self, picture: EnginePicture) -> torch.Tensor:
        """Returns [tiles, height, width, 3] in the tower's dtype."""
        raw = torch.frombuffer(bytearray(picture.pixels), dtype=torch.uint8)
        if self._device.type == "cuda":
            raw = raw.pin_memory()  # else the host would wait for the step that runs
        tiles = raw.view(-1, picture.tile_height, picture.tile_width, CHANNELS).to(self._device, non_blocking=True)
        tiles = tiles.float()
        return (tiles.mul_(self._factor) - self._mean).div_(self._std).to(self._dtype)


class Sight:
    """Implements `batch.VisionModel` for families that see tiles, LLaVA and Gemma 3.

    Args:
        tensors: of tower and projector only, by the names that `parts.build_vision` gives them.

    Raises:
        ModelError: tensors are missing, left over or of another shape.
    """

    on_axes = False
    added_layers = 0

    def __init__(
        self,
        config: VisionConfig,
        normalisation: Normalisation,
        tensors: Tensors,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        weights = Checkpoint(tensors, dtype=dtype, device=device)
        last_norm = config.family == "gemma3"
        self.both_ways = config.both_ways
        self._config = config
        pack = device.type == "cpu" and dtype is torch.bfloat16 and can_pack(dtype)
        self._tower = Tower(config.tower, config.depths, weights, last_norm=last_norm, pack=pack)
        self._projector = build_projector(config, weights)
        self._newline = weights.take("image_newline", config.hidden_size) if config.family == "llava_next" else None
        beginnings = unread(config.tower, config.depths, last_norm=last_norm)
        weights.finish(is_unused=lambda name: name.startswith(beginnings))
        self._pixels = PixelReader(normalisation, dtype=dtype, device=device)

    def grid(self, picture: EnginePicture) -> None:
        return None

    def tokens(self, picture: EnginePicture) -> int:
        """See VisionModel. Raises RequestError for a picture that was cut for another model."""
        side, tile = self._config.tower.image_size, self._config.tile_tokens
        tiles = 1 + picture.columns * picture.rows
        if (picture.tile_height, picture.tile_width) != (side, side):
            raise RequestError(
                f"a picture was cut into tiles of {picture.tile_height} × {picture.tile_width} pixels, and the model's "
                f"tower sees {side} × {side}; cut it by the model's own format"
            )
        if len(picture.pixels) != tiles * side * side * CHANNELS:
            raise RequestError(
                f"a picture has {len(picture.pixels)} bytes of pixels; {tiles} tiles of {side} × {side} are "
                f"{tiles * side * side * CHANNELS}"
            )
        if tiles == 1:
            return tile
        if self._newline is None or picture.width < 1 or picture.height < 1:
            raise RequestError(
                f"a picture was cut into a grid of {picture.columns} × {picture.rows} tiles; this model sees one tile"
            )
        return arranged_tokens(tile, picture.columns, picture.rows, picture.width, picture.height)

    def largest(self) -> EnginePicture:
        """See VisionModel. The picture is black."""
        side = self._config.tower.image_size
        height, width = max(self._config.grids, key=prod, default=(0, 0))
        columns, rows = width // side, height // side
        picture = EnginePicture(
            number=PICTURE_BASE,
            tokens=0,
            width=max(width, side),
            height=max(height, side),
            columns=columns,
            rows=rows,
            tile_height=side,
            tile_width=side,
            pixels=bytes((1 + columns * rows) * side * side * CHANNELS),
        )
        return replace(picture, tokens=self.tokens(picture))

    def encode(self, picture: EnginePicture) -> torch.Tensor:
        pixels = self._pixels(picture).permute(0, 3, 1, 2)
        features = self._projector(self._tower(pixels))  # [tiles, tokens of a tile, hidden]
        if len(features) == 1:
            return features[0]
        assert self._newline is not None, "checked when the picture came"
        return arrange(features, picture.columns, picture.rows, picture.width, picture.height, self._newline)
