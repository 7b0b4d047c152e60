"""Computes the rows of the decoder from a picture of any size, as Qwen2-VL, 2.5-VL and 3-VL do.

    pixels → patches × matrix → (+ learned positions) → layers × [ norm → attention → + norm → MLP → + ] → merger

Patches of a token's square follow each other, square by square in the order of reading. So the merger joins
neighbouring rows, and its rows are the picture's tokens. Queries and keys turn by row and column of their patch.

    merged = 2:   0 1 │ 4 5        window = 1:   patches 0 to 3 attend to each other, 4 to 7, …
                  2 3 │ 6 7

N patches, D numbers of a patch's state, hidden the decoder's width. One picture is encoded at a time.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from ....lang.errors import ModelError, RequestError
from ...core.batch import PICTURE_BASE, PictureGrid
from ...core.messages import EnginePicture
from ...layers.checkpoint import Checkpoint, LinearTensors, Tensors
from ...layers.linear import Linear, RMSNorm, can_pack, dense_method
from ...layers.rope import apply_rope
from .grid_config import ROOT, GridVision
from .preprocessor import Normalisation
from .sight import CHANNELS, TOWER_ACTIVATIONS, LayerNorm, PixelReader

_EPS = 1e-6  # of all norms
MLP_PATCHES = 4096  # patches of one pass through an MLP: bounds the widest intermediate


class Windows:
    """Cuts the patches of a picture into squares that attend within themselves, those at the edges smaller.

    Args:
        rows, columns: tokens of the picture.
        window: tokens along the side of a square.
        patches: of a token.
    """

    def __init__(self, rows: int, columns: int, window: int, patches: int, device: torch.device) -> None:
        places = np.arange(rows * columns)
        across = -(-columns // window)
        of_tokens = places // columns // window * across + places % columns // window
        order, counts = np.argsort(of_tokens, kind="stable"), np.bincount(of_tokens)
        # [squares, tokens of the largest]: the tokens of each, the first token where there are fewer
        inside = np.arange(counts.max()) < counts[:, None]
        tokens = np.zeros(inside.shape, dtype=np.int64)
        tokens[inside] = order
        members = _each(tokens, patches)
        self._shape = members.shape
        self._members = torch.from_numpy(members.reshape(-1)).to(device)
        seen = np.repeat(inside, patches, axis=1)
        self._seen = None if seen.all() else torch.from_numpy(seen)[:, None, None].to(device)  # [squares, 1, 1, S]
        back = np.empty(rows * columns, dtype=np.int64)
        back[order] = np.flatnonzero(inside.reshape(-1))
        self._places = torch.from_numpy(_each(back, patches)).to(device)  # of each patch among `_members`

    def attend(self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """[N, heads, D / heads] each → the same shape"""
        q, k, v = (
            part[self._members].view(*self._shape, *part.shape[1:]).transpose(1, 2) for part in (queries, keys, values)
        )
        attended = functional.scaled_dot_product_attention(q, k, v, attn_mask=self._seen)
        return attended.transpose(1, 2).flatten(0, 1)[self._places]


def _each(tokens: NDArray[np.int64], patches: int) -> NDArray[np.int64]:
    """Returns the patches of tokens, along the last axis."""
    return (tokens[..., None] * patches + np.arange(patches)).reshape(*tokens.shape[:-1], -1)


def attend_to_all(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """[N, heads, D / heads] each → the same shape"""
    q, k, v = (part.transpose(0, 1)[None] for part in (queries, keys, values))
    return functional.scaled_dot_product_attention(q, k, v)[0].transpose(0, 1)


def _norm(name: str, width: int, config: GridVision, weights: Checkpoint) -> LayerNorm | RMSNorm:
    if config.rms_norm:
        return RMSNorm(weights.take(f"{name}.weight", width), eps=_EPS, centered=False)
    return LayerNorm(name, width, weights, eps=_EPS)


class GridLayer:
    """Runs attention over the picture or within windows, and an MLP."""

    def __init__(self, index: int, config: GridVision, weights: Checkpoint, *, pack: bool) -> None:
        name, width, wide = f"{ROOT}.blocks.{index}", config.hidden_size, config.intermediate_size
        method = dense_method(packed=pack)

        def linear(parts: tuple[str, ...], outputs: int, inputs: int) -> Linear:
            names = tuple(f"{name}.{part}" for part in parts)
            return Linear(method, weights, LinearTensors(names, (outputs,) * len(parts), inputs, biased=True))

        self._heads = config.heads
        self._norm_before_attention = _norm(f"{name}.norm1", width, config, weights)
        self._qkv = linear(("attn.qkv",), 3 * width, width)
        self._output = linear(("attn.proj",), width, width)
        self._norm_before_mlp = _norm(f"{name}.norm2", width, config, weights)
        self._up = linear(config.names.up, wide, width)
        self._down = linear((config.names.down,), width, wide)
        self._activation = TOWER_ACTIVATIONS[config.activation]
        self._gated = len(config.names.up) == 2

    def __call__(
        self, x: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor], windows: Windows | None
    ) -> torch.Tensor:
        qkv = self._qkv(self._norm_before_attention(x)).view(len(x), 3, self._heads, -1)
        turned = apply_rope(qkv[:, :2].flatten(1, 2).float(), angles).to(x.dtype)  # as transformers, in float32
        queries, keys = turned.chunk(2, dim=1)
        attend = attend_to_all if windows is None else windows.attend
        x = x + self._output(attend(queries, keys, qkv[:, 2]).flatten(1))
        normed = self._norm_before_mlp(x)
        return x + torch.cat([self._mlp(part) for part in torch.split(normed, MLP_PATCHES)])

    def _mlp(self, x: torch.Tensor) -> torch.Tensor:
        if not self._gated:
            return self._down(self._activation(self._up(x)))
        gate, up = self._up(x).chunk(2, dim=-1)
        return self._down(self._activation(gate) * up)


class Merger:
    """Makes one token of each square of patches: W₂ gelu(W₁ x), normalised before patches are joined, or after."""

    def __init__(self, name: str, config: GridVision, weights: Checkpoint, *, join_first: bool) -> None:
        self._width = config.hidden_size * config.merged**2
        self._join_first = join_first
        width = self._width if join_first else config.hidden_size
        self._norm = _norm(f"{name}.{config.names.merger_norm}", width, config, weights)
        first, second = (f"{name}.{part}" for part in config.names.merger_maps)
        method = dense_method(packed=False)
        self._first = Linear(method, weights, LinearTensors((first,), (self._width,), self._width, biased=True))
        hidden = config.output_size
        self._second = Linear(method, weights, LinearTensors((second,), (hidden,), self._width, biased=True))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[N, D] → [tokens, hidden]"""
        joined = self._norm(x.view(-1, self._width)) if self._join_first else self._norm(x).view(-1, self._width)
        return self._second(functional.gelu(self._first(joined)))


class GridTower:
    """A whole tower with its mergers."""

    def __init__(self, config: GridVision, weights: Checkpoint, *, pack: bool) -> None:
        if config.activation not in TOWER_ACTIVATIONS:
            raise ModelError(
                f"vision_config: hidden_act {config.activation!r} is not one of {', '.join(TOWER_ACTIVATIONS)}"
            )
        self._config = config
        width, side = config.hidden_size, config.patch_size
        patch = f"{ROOT}.patch_embed.proj"
        stored = weights.take_as_stored(f"{patch}.weight", width, CHANNELS, config.frames, side, side)
        self._patch = stored.to(weights.dtype).flatten(1)  # of a part of a clip: [D, 3 · frames · side²]
        # All frames of a still picture are equal, so their weights are summed: [D, 3 · side²]
        self._still_patch = stored.float().sum(2).flatten(1).to(weights.dtype)
        self._patch_bias = weights.take(f"{patch}.bias", width) if config.patch_bias else None
        self._table: torch.Tensor | None = None
        if config.table_side:
            self._table = weights.take(f"{ROOT}.pos_embed.weight", config.table_side**2, width)
        self._layers = [GridLayer(index, config, weights, pack=pack) for index in range(config.layers)]
        self._merger = Merger(f"{ROOT}.merger", config, weights, join_first=False)
        self._mergers = {
            layer: Merger(f"{ROOT}.deepstack_merger_list.{index}", config, weights, join_first=True)
            for index, layer in enumerate(config.added)
        }
        exponents = torch.arange(0, config.head_dim // 2, 2, device=weights.device) / (config.head_dim // 2)
        self._frequencies = 1.0 / config.theta**exponents  # of rows, and the same of columns

    def __call__(self, pixels: torch.Tensor) -> torch.Tensor:
        """pixels [frames, height, width, 3], normalised, in the weights' dtype → [tokens, (1 + added layers) · hidden]

        frames: those of a part of a clip, or 1 of a still picture.
        """
        config, device = self._config, pixels.device
        frames, rows, columns = pixels.shape[0], pixels.shape[1] // config.unit, pixels.shape[2] // config.unit
        side, merged = config.patch_size, config.merged
        squares = pixels.view(frames, rows, merged, side, columns, merged, side, CHANNELS)
        patches = squares.permute(1, 4, 2, 5, 7, 0, 3, 6).reshape(rows * columns * merged**2, -1)
        x = functional.linear(patches, self._still_patch if frames == 1 else self._patch, self._patch_bias)
        heights, widths = self._places(rows, columns, device)
        if self._table is not None:
            x = x + self._learned(self._table, heights, widths, rows * merged, columns * merged)
        angles = self._angles(heights, widths)
        windows = Windows(rows, columns, config.window, merged**2, device) if config.window else None
        added = []
        for index, layer in enumerate(self._layers):
            x = layer(x, angles, None if index in config.whole else windows)
            if index in self._mergers:
                added.append(self._mergers[index](x))
        return torch.cat([self._merger(x), *added], dim=-1)

    def _places(self, rows: int, columns: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns row and column of each patch: [N] each"""
        merged = self._config.merged
        square = (rows, columns, merged, merged)
        height = torch.arange(rows * merged, device=device).view(rows, 1, merged, 1)
        width = torch.arange(columns * merged, device=device).view(1, columns, 1, merged)
        return height.expand(square).flatten(), width.expand(square).flatten()

    def _angles(self, heights: torch.Tensor, widths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Computes cosines and sines for `apply_rope`: [N, 1, D / heads] each"""
        turns = (places[:, None].float() * self._frequencies for places in (heights, widths))
        angle = torch.cat([*turns], dim=-1)
        cos, sin = angle.cos(), angle.sin()
        return torch.cat([cos, cos], dim=-1)[:, None], torch.cat([-sin, sin], dim=-1)[:, None]

    def _learned(
        self, table: torch.Tensor, heights: torch.Tensor, widths: torch.Tensor, rows: int, columns: int
    ) -> torch.Tensor:
        """Stretches the square of learned positions over the picture, corner to corner: [N, D]"""
        side = self._config.table_side
        positions = torch.zeros((len(heights), table.shape[1]), device=table.device)
        for row, of_row in _neighbours(heights, rows, side):
            for column, of_column in _neighbours(widths, columns, side):
                positions += table[row * side + column].float() * (of_row * of_column)[:, None]
        return positions.to(table.dtype)


def _neighbours(places: torch.Tensor, length: int, side: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Returns the two places among `side` that each of `length` lies between, each with its weight: [N] and [N]"""
    exact = places.float() * (side - 1) / max(length - 1, 1)
    lower = exact.floor().clamp(max=side - 1)
    upper = (lower + 1).clamp(max=side - 1)
    weight = exact - lower
    return [(lower.long(), 1 - weight), (upper.long(), weight)]


class GridSight:
    """Implements `batch.VisionModel` for families that see grids, Qwen-VL.

    Args:
        tensors: of the tower only.
        most_tokens: of a picture.

    Raises:
        ModelError: tensors are missing, left over or of another shape.
    """

    both_ways = False
    on_axes = True

    def __init__(
        self,
        config: GridVision,
        normalisation: Normalisation,
        tensors: Tensors,
        *,
        most_tokens: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        weights = Checkpoint(tensors, dtype=dtype, device=device)
        pack = device.type == "cpu" and dtype is torch.bfloat16 and can_pack(dtype)
        self.added_layers = len(config.added)
        self._unit, self._frames = config.unit, config.frames
        self._most_tokens = most_tokens
        self._tower = GridTower(config, weights, pack=pack)
        weights.finish(is_unused=lambda name: False)
        self._pixels = PixelReader(normalisation, dtype=dtype, device=device)

    def grid(self, picture: EnginePicture) -> PictureGrid:
        return PictureGrid(picture.tile_height // self._unit, picture.tile_width // self._unit, picture.time)

    def tokens(self, picture: EnginePicture) -> int:
        """See VisionModel. Raises RequestError for a picture that was cut for another model."""
        height, width = picture.tile_height, picture.tile_width
        if picture.columns * picture.rows or min(height, width) < 1 or height % self._unit or width % self._unit:
            raise RequestError(
                f"a picture was cut into {1 + picture.columns * picture.rows} tiles of {height} × {width} pixels, and "
                f"the tower sees one whose sides are multiples of {self._unit}; cut it by the model's own format"
            )
        if picture.frames not in (1, self._frames):
            raise RequestError(f"a part of a clip has {picture.frames} frames, and the tower joins {self._frames}")
        expected = picture.frames * height * width * CHANNELS
        if len(picture.pixels) != expected:
            raise RequestError(
                f"a picture has {len(picture.pixels)} bytes of pixels; one of {height} × {width} has {expected}"
            )
        grid = self.grid(picture)
        return grid.rows * grid.columns

    def largest(self) -> EnginePicture:
        """See VisionModel. The picture is a black line, which has the most tokens of all forms."""
        height, width = self._unit, self._most_tokens * self._unit
        return EnginePicture(
            number=PICTURE_BASE,
            tokens=self._most_tokens,
            width=width,
            height=height,
            columns=0,
            rows=0,
            tile_height=height,
            tile_width=width,
            pixels=bytes(height * width * CHANNELS),
        )

    def encode(self, picture: EnginePicture) -> torch.Tensor:
        return self._tower(self._pixels(picture))
