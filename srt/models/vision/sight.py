"""A model's eye: tower, projector and layout, from the bytes of a picture to rows of the decoder."""

from math import prod

import torch
from msgspec.structs import replace

from ....lang.errors import RequestError
from ...core.image_token_ids import PICTURE_BASE
from ...core.messages import EnginePicture
from ...layers.checkpoint import Checkpoint, Tensors
from ...layers.linear import can_pack
from .config import VisionConfig
from .layout import arrange, arranged_tokens
from .preprocessor import Normalisation
from .projector import build_projector
from .towers import Tower, unread

CHANNELS = 3


class Sight:
    """A `model.VisionModel` of the families of `registry`.

    Args:
        tensors: of tower and projector alone, by the names that `registry` gives them.

    Raises:
        ModelError: tensors that are missing, left over or of another shape.
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
        """See VisionModel. It is black."""
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
        """[tiles, 3, height, width], normalised in float32 as image processors do it."""
        raw = torch.frombuffer(bytearray(picture.pixels), dtype=torch.uint8)
        if self._device.type == "cuda":
            raw = raw.pin_memory()  # else the host would wait for the step that runs
        tiles = raw.view(-1, picture.tile_height, picture.tile_width, CHANNELS).to(self._device, non_blocking=True)
        tiles = tiles.float()
        normalised = (tiles.mul_(self._factor) - self._mean).div_(self._std)
        return normalised.to(self._dtype).permute(0, 3, 1, 2)
