"""Computes the rows of the decoder from the bytes of a picture: tower, projector and layout.

T tiles, P positions of a tile, F features of a position, hidden the decoder's width. The rows of LLaVA-NeXT's tiles
(anyres) are concatenated:

    overview, whole                          P × P rows
    the grid's tiles as one large picture    without its padding, line by line of patches, and after each the newline
"""

from math import prod
from typing import Protocol

import torch
from msgspec.structs import replace
from torch.nn import functional

from ....lang.errors import ModelError, RequestError
from ...core.image_token_ids import PICTURE_BASE
from ...core.messages import EnginePicture
from ...layers.checkpoint import Checkpoint, Tensors
from ...layers.linear import ACTIVATIONS, RMSNorm, can_pack
from ...multimodal.format import anyres_tokens, unpadded
from .config import VisionConfig
from .preprocessor import Normalisation
from .towers import Tower, unread

_ROOT = "multi_modal_projector"


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
    """Averages squares of neighbouring patches, normalises the averages and multiplies them by a matrix."""

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


CHANNELS = 3


class Sight:
    """Implements `model.VisionModel` for the families of `registry`.

    Args:
        tensors: of tower and projector only, by the names that `registry` gives them.

    Raises:
        ModelError: tensors are missing, left over or of another shape.
    """

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
        self._dtype = dtype
        self._device = device
        pack = device.type == "cpu" and dtype is torch.bfloat16 and can_pack(dtype)
        self._tower = Tower(config.tower, config.depths, weights, last_norm=last_norm, pack=pack)
        self._projector = build_projector(config, weights)
        self._newline = weights.take("image_newline", config.hidden_size) if config.family == "llava_next" else None
        beginnings = unread(config.tower, config.depths, last_norm=last_norm)
        weights.finish(ignored=frozenset(name for name in tensors if name.startswith(beginnings)))
        self._factor = normalisation.factor
        self._mean = torch.tensor(normalisation.mean, device=device)
        self._std = torch.tensor(normalisation.std, device=device)

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
        features = self._projector(self._tower(self._pixels(picture)))  # [tiles, tokens of a tile, hidden]
        if len(features) == 1:
            return features[0]
        assert self._newline is not None, "checked when the picture came"
        return arrange(features, picture.columns, picture.rows, picture.width, picture.height, self._newline)

    def _pixels(self, picture: EnginePicture) -> torch.Tensor:
        """Returns the pixels [tiles, 3, height, width], normalised in float32 as image processors do it."""
        raw = torch.frombuffer(bytearray(picture.pixels), dtype=torch.uint8)
        if self._device.type == "cuda":
            raw = raw.pin_memory()  # else the host would wait for the step that runs
        tiles = raw.view(-1, picture.tile_height, picture.tile_width, CHANNELS).to(self._device, non_blocking=True)
        tiles = tiles.float()
        normalised = (tiles.mul_(self._factor) - self._mean).div_(self._std)
        return normalised.to(self._dtype).permute(0, 3, 1, 2)
