"""Computes the rows of the decoder from the bytes of a picture: tower (CLIP or SigLIP), projector and layout.

    pixels → patches × matrix → (class token) + positions → (norm) → layers × [ norm → attention → + norm → MLP → + ]

T tiles, P positions of a tile, F features of a position, hidden the decoder's width. The rows of LLaVA-NeXT's tiles
(anyres) are concatenated:

    overview, whole                          P × P rows
    the grid's tiles as one large picture    without its padding, line by line of patches, and after each the newline

`build_vision` and `text_part` split the tensors of a vision model. Checkpoints name the same ones in several ways, by
the version of transformers that wrote them:

    language_model.model.layers.0…      model.language_model.layers.0…      the decoder's  model.layers.0…
    model.text_model.layers.0…          model.layers.0…                                    model.layers.0…
    language_model.lm_head.weight       lm_head.weight                                     lm_head.weight
    vision_tower.vision_model.encoder…  model.vision_tower.encoder…         the sight's    vision_tower.encoder…
    multi_modal_projector…              model.multi_modal_projector…                       multi_modal_projector…
    image_newline                       model.image_newline                                image_newline
"""

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any, Protocol

import torch
from msgspec.structs import replace
from torch.nn import functional

from ....lang.errors import ModelError, RequestError
from ...core.batch import PICTURE_BASE, VisionModel
from ...core.messages import EnginePicture
from ...layers.checkpoint import Checkpoint, LinearTensors, Tensors
from ...layers.config_values import Config
from ...layers.linear import ACTIVATIONS, Linear, RMSNorm, can_pack, dense_method
from ...layers.quantized import QuantizedSource, QuantizedTensor
from ...multimodal.format import anyres_tokens, unpadded
from .config import TowerConfig, VisionConfig, decoder_config, read_vision, text_config
from .preprocessor import Normalisation, read_normalisation

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


class Sight:
    """Implements `batch.VisionModel` for the families of `config.py`.

    Args:
        tensors: of tower and projector only, by the names that `build_vision` gives them.

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
        weights.finish(is_unused=lambda name: name.startswith(beginnings))
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


class Renamed(Mapping[str, torch.Tensor]):
    """Presents some tensors of a checkpoint under other names; each is read lazily."""

    def __init__(self, tensors: Tensors, names: Mapping[str, str]) -> None:
        self._tensors = tensors
        self._names = names  # new → in the checkpoint

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._tensors[self._names[name]]

    @property
    def quantized_names(self) -> frozenset[str]:
        """The names of packed matrices; see `layers.quantized.QuantizedSource`."""
        if not isinstance(self._tensors, QuantizedSource):
            return frozenset()
        packed = self._tensors.quantized_names
        return frozenset(name for name, stored in self._names.items() if stored in packed)

    def packed_bytes(self, name: str) -> int:
        assert isinstance(self._tensors, QuantizedSource), "it has names of packed matrices"
        return self._tensors.packed_bytes(self._names[name])

    def quantized(self, name: str) -> QuantizedTensor | None:
        return self._tensors.quantized(self._names[name]) if isinstance(self._tensors, QuantizedSource) else None

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def build_vision(config: Config, tensors: Tensors, *, dtype: torch.dtype, device: torch.device) -> VisionModel:
    """Builds tower and projector of a vision model.

    Raises:
        ModelError: configuration, preprocessor or tensors that cannot be used.
    """
    names, _ = _sorted_names(tensors)
    return Sight(read_vision(config), read_normalisation(config), Renamed(tensors, names), dtype=dtype, device=device)


def text_part(config: Config, tensors: Tensors) -> tuple[dict[str, Any], Tensors]:
    """Returns configuration and tensors of the decoder only, as those of a text model. Any: parsed JSON.

    Raises:
        ModelError: the decoder is not implemented, or two tensors are the same one.
    """
    _, names = _sorted_names(tensors)
    return text_config(config), Renamed(tensors, names)


def wrapped_text(config: Config, tensors: Tensors) -> tuple[Config, Tensors]:
    """Returns configuration and tensors of the decoder of a vision model whose tower is left out.

    The head of a checkpoint that has none is its embedding, whatever the configuration says: parts of it differ.

    Raises:
        ModelError: a configuration that cannot be used, or two tensors are the same one.
    """
    names: dict[str, str] = {}
    plain: dict[str, str] = {}  # of checkpoints that name the decoder like a text model
    for stored in tensors:
        text = _decoder_name(stored.removeprefix("model."))
        target, name = (names, text) if text else (plain, stored)
        if name in target:
            raise ModelError(f"the checkpoint has {stored} and {target[name]}, which are the same tensor; keep one")
        target[name] = stored
    if not any(name.startswith("model.") for name in names):
        names |= {name: stored for name, stored in plain.items() if name.startswith(_PLAIN)}
    text_only = dict(decoder_config(config))
    text_only["tie_word_embeddings"] = text_only["tie_word_embeddings"] or "lm_head.weight" not in names
    return text_only, Renamed(tensors, names)


_PLAIN = ("model.layers.", "model.embed_tokens.", "model.norm.")


def _sorted_names(tensors: Tensors) -> tuple[dict[str, str], dict[str, str]]:
    """Returns names of the sight, and names of the decoder, each → names in the checkpoint.

    Names that are neither go to the sight, which refuses unknown ones.
    """
    sight: dict[str, str] = {}
    decoder: dict[str, str] = {}
    for stored in tensors:
        text = _decoder_name(stored.removeprefix("model."))
        target, name = (decoder, text) if text else (sight, _sight_name(stored.removeprefix("model.")))
        if name in target:
            raise ModelError(f"the checkpoint has {stored} and {target[name]}, which are the same tensor; keep one")
        target[name] = stored
    return sight, decoder


def _decoder_name(name: str) -> str | None:
    if name.startswith("lm_head."):
        return name
    owner, _, inner = name.partition(".")
    if owner not in ("language_model", "text_model"):
        return None
    return inner if inner.startswith(("model.", "lm_head.")) else f"model.{inner}"


def _sight_name(name: str) -> str:
    return name.replace("vision_tower.vision_model.", "vision_tower.", 1)
