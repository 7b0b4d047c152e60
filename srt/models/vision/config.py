"""Describes a vision model as data: its tower, the layers of the tower that are read, and its projector.

`read_vision` reads the configurations of LLaVA, LLaVA-NeXT and Gemma 3; those of Qwen-VL are read in `grid_config.py`.
A value that is not implemented is refused, never ignored. No torch: the gateway reads the number of tokens of a
picture.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import isqrt
from typing import Any, Literal

from ....lang.errors import ModelError
from ...layers.config_values import MOST_LAYERS, Config, flag, positive_int, positive_number, section

# The defaults of transformers' configuration classes, for fields without a default in `read_decoder`: a text model's
# file states them, a `text_config` need not. Any: parsed JSON.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {
        "vocab_size": 32_000,
        "hidden_size": 4096,
        "intermediate_size": 11_008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "max_position_embeddings": 2048,
    },
    "mistral": {
        "vocab_size": 32_000,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131_072,
    },
    "qwen2": {
        "vocab_size": 151_936,
        "hidden_size": 4096,
        "intermediate_size": 22_016,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "max_position_embeddings": 32_768,
    },
    "gemma3_text": {
        "vocab_size": 262_208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "max_position_embeddings": 131_072,
    },
}
# Vision families, each with the decoders that it may have, the usual one first.
DECODERS = {
    "llava": ("llama", "mistral", "qwen2"),
    "llava_next": ("llama", "mistral", "qwen2"),
    "gemma3": ("gemma3_text",),
}
# Vision families that see a whole picture as a grid of any size, each with its decoder.
GRID_DECODERS = {
    "qwen2_vl": "qwen2_vl_text",
    "qwen2_5_vl": "qwen2_5_vl_text",
    "qwen3_vl": "qwen3_vl_text",
    "qwen3_vl_moe": "qwen3_vl_moe_text",
}
# Vision families of which only the decoder runs, each with the decoder of those that do not state one. Text alone is
# read as by a text model: positions in three axes are equal there, and attention is causal.
TEXT_ONLY = {
    **{family: decoders[0] for family, decoders in DECODERS.items()},  # with towers of other kinds
    **GRID_DECODERS,  # without a tower
    "mistral3": "mistral",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
    "gemma3n": "gemma3n_text",
    "gemma4": "gemma4_text",
    "llama4": "llama4_text",
    "llava_onevision": "qwen2",
    "internvl": "qwen2",
    "idefics3": "llama",
    "smolvlm": "llama",
}


def sees(config: Config) -> bool:
    """Returns whether this is the configuration of a vision model that umbel runs itself."""
    return sees_grids(config) or sees_tiles(config)


def sees_tiles(config: Config) -> bool:
    """Returns whether it is one of `DECODERS`, with a tower that is implemented."""
    return config.get("model_type") in DECODERS and _tower_name(config) in _TOWERS


def sees_grids(config: Config) -> bool:
    """Returns whether it is one of `GRID_DECODERS`, with a tower."""
    return config.get("model_type") in GRID_DECODERS and bool(config.get("vision_config"))


def reads_text_only(config: Config) -> bool:
    """Returns whether this is the configuration of a vision model whose decoder alone runs."""
    family = config.get("model_type")
    return isinstance(family, str) and family in TEXT_ONLY and not sees(config)


def decoder_config(config: Config) -> Config:
    """Returns the configuration of the decoder: a part of a vision model's, all of a text model's.

    Raises:
        ModelError: a part that is no object, or a decoder that the family does not have.
    """
    if sees_tiles(config):
        return text_config(config)
    if config.get("model_type") not in TEXT_ONLY:
        return config
    stated = section(config, "text_config")
    if not stated:  # Qwen's first ones state the decoder's fields next to the tower's
        stated = {key: value for key, value in config.items() if key not in ("model_type", "vision_config")}
    return {
        **stated,
        "model_type": stated.get("model_type") or TEXT_ONLY[config["model_type"]],
        # The whole model's counts, where both parts state one: the class of the decoder alone has another default.
        "tie_word_embeddings": flag(config, "tie_word_embeddings", flag(stated, "tie_word_embeddings", False)),
    }


def text_config(config: Config) -> dict[str, Any]:
    """Returns the configuration of the decoder only, for `families.read_config`.

    Raises:
        ModelError: the decoder is none of `DECODERS`.
    """
    known = DECODERS[config["model_type"]]
    stated = section(config, "text_config")
    family = stated.get("model_type") or known[0]
    if family not in known:
        raise ModelError(
            f"text_config has model_type {family!r}; a {config['model_type']} model's is one of {', '.join(known)}"
        )
    whole = {key: value for key, value in _DEFAULTS[family].items() if stated.get(key) is None}
    return {**stated, **whole, "model_type": family, "tie_word_embeddings": _tied(config, stated, family)}


def _tied(config: Config, stated: Config, family: str) -> bool:
    """Reads tie_word_embeddings: older files state it for the decoder, newer ones for the whole model."""
    if family == "gemma3_text":
        return flag(config, "tie_word_embeddings", flag(stated, "tie_word_embeddings", True))
    return flag(config, "tie_word_embeddings", False) or flag(stated, "tie_word_embeddings", False)


Kind = Literal["clip", "siglip"]

_TOWERS: dict[str, Kind] = {"clip_vision_model": "clip", "siglip_vision_model": "siglip"}
_USUAL_TOWER = {"llava": "clip_vision_model", "llava_next": "clip_vision_model", "gemma3": "siglip_vision_model"}
# transformers' default for a LLaVA whose configuration has no tower: CLIP ViT-L/14 at 336 pixels.
_LLAVA_TOWER = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "image_size": 336,
    "patch_size": 14,
}
_LLAVA_NEXT_GRIDS = [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]]


@dataclass(frozen=True, slots=True)
class TowerConfig:
    """A transformer over the patches of a square tile."""

    kind: Kind  # "clip" has a class token before the patches, and a norm before the layers
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    image_size: int  # side of a tile, in pixels
    patch_size: int
    activation: str
    norm_eps: float

    @property
    def patches(self) -> int:
        """Patches along one side. Pixels beyond whole patches are not read."""
        return self.image_size // self.patch_size

    @property
    def positions(self) -> int:
        return self.patches**2 + (self.kind == "clip")


@dataclass(frozen=True, slots=True)
class VisionConfig:
    family: str
    tower: TowerConfig
    # Features are the states after so many layers (0: before the first), side by side where there are several.
    depths: tuple[int, ...]
    drop_first: bool  # the first position of the tower is not passed on
    hidden_size: int  # of the decoder
    activation: str = "gelu"  # of LLaVA's projector
    projector_bias: bool = True
    grids: tuple[tuple[int, int], ...] = ()  # LLaVA-NeXT: sizes (height, width) that anyres may choose from
    pooled_side: int = 0  # Gemma 3: a tile's patches are averaged to a square of this side

    @property
    def tile_tokens(self) -> int:
        return self.pooled_side**2 if self.pooled_side else self.tower.positions - self.drop_first

    @property
    def both_ways(self) -> bool:
        """Returns whether the decoder's rows of a picture attend to the whole picture, not only to earlier rows."""
        return self.family == "gemma3"


def read_vision(config: Config) -> VisionConfig:
    """Reads a configuration. Raises ModelError for a value that is wrong or not implemented."""
    family = config.get("model_type")
    if family not in DECODERS:
        known = ", ".join((*DECODERS, *GRID_DECODERS))
        raise ModelError(f"model_type {family!r} does not see; those that do are {known}")
    tower = _read_tower(config, _USUAL_TOWER[family])
    hidden_size = positive_int(text_config(config), "hidden_size")
    if family == "gemma3":
        side = _pooled_side(config, tower)
        return VisionConfig(family, tower, (tower.layers,), False, hidden_size, pooled_side=side)
    strategy = config.get("vision_feature_select_strategy") or "default"
    if strategy not in ("default", "full"):
        raise ModelError(f'vision_feature_select_strategy {strategy!r}; write "default" or "full"')
    read = VisionConfig(
        family,
        tower,
        _read_depths(config, tower.layers),
        strategy == "default",
        hidden_size,
        activation=str(config.get("projector_hidden_act") or "gelu"),
        projector_bias=flag(config, "multimodal_projector_bias", True),
        grids=_read_grids(config, tower.image_size) if family == "llava_next" else (),
    )
    if family == "llava_next" and read.tile_tokens != tower.patches**2:
        raise ModelError(
            f"vision_feature_select_strategy {strategy!r} leaves {read.tile_tokens} of the {tower.kind} tower's "
            f"{tower.positions} positions, which is no square of patches that a grid could be put together of; "
            f'write "{"default" if tower.kind == "clip" else "full"}"'
        )
    return read


def _tower_name(config: Config) -> str:
    stated = config.get("vision_config")
    name = stated.get("model_type") if isinstance(stated, Mapping) else None
    return str(name or _USUAL_TOWER[config["model_type"]])


def _read_tower(config: Config, usual: str) -> TowerConfig:
    stated = section(config, "vision_config")
    if not stated and usual == "clip_vision_model":
        stated = dict(_LLAVA_TOWER)
    name = _tower_name(config)
    if name not in _TOWERS:
        raise ModelError(f"vision_config has model_type {name!r}; write one of {', '.join(_TOWERS)}")
    clip = _TOWERS[name] == "clip"
    tower = TowerConfig(
        kind=_TOWERS[name],
        hidden_size=positive_int(stated, "hidden_size", 768),
        intermediate_size=positive_int(stated, "intermediate_size", 3072),
        layers=positive_int(stated, "num_hidden_layers", 12, most=MOST_LAYERS),
        heads=positive_int(stated, "num_attention_heads", 12),
        image_size=positive_int(stated, "image_size", 224),
        patch_size=positive_int(stated, "patch_size", 32 if clip else 16),
        activation=str(stated.get("hidden_act") or ("quick_gelu" if clip else "gelu_pytorch_tanh")),
        norm_eps=positive_number(stated, "layer_norm_eps", 1e-5 if clip else 1e-6),
    )
    if tower.hidden_size % tower.heads:
        raise ModelError(
            f"vision_config: hidden_size={tower.hidden_size} is not a multiple of num_attention_heads={tower.heads}"
        )
    if tower.patches < 1:
        raise ModelError(
            f"vision_config: a patch of {tower.patch_size} pixels is larger than the tile, {tower.image_size}"
        )
    channels = positive_int(stated, "num_channels", 3)
    if channels != 3:
        raise ModelError(f"vision_config: num_channels={channels}; pictures are read as red, green and blue")
    return tower


def _read_depths(config: Config, layers: int) -> tuple[int, ...]:
    """Reads the depths. transformers numbers the states before, between and after the layers: −1 is after the last."""
    stated = config.get("vision_feature_layer", -2)
    chosen = stated if isinstance(stated, list) else [-2 if stated is None else stated]
    depths = []
    for number in chosen:
        if not isinstance(number, int) or isinstance(number, bool) or not -layers - 1 <= number <= layers:
            raise ModelError(f"vision_feature_layer={stated!r}; write numbers from {-layers - 1} to {layers}")
        depths.append(number % (layers + 1))
    if not depths:
        raise ModelError(f"vision_feature_layer={stated!r} names no layer; write -2")
    return tuple(depths)


def _read_grids(config: Config, tile: int) -> tuple[tuple[int, int], ...]:
    stated = config.get("image_grid_pinpoints")
    return read_grids(_LLAVA_NEXT_GRIDS if stated is None else stated, tile)


def read_grids(stated: object, tile: int) -> tuple[tuple[int, int], ...]:
    """Reads the sizes of grids. Raises ModelError for sizes that tiles of `tile` pixels do not fill."""
    grids = []
    for pair in stated if isinstance(stated, list) else [None]:
        if not isinstance(pair, list | tuple) or len(pair) != 2 or not all(_fills(size, tile) for size in pair):
            raise ModelError(
                f"image_grid_pinpoints {stated!r}; write pairs [height, width] of multiples of {tile}, a tile's side"
            )
        grids.append((pair[0], pair[1]))
    if not grids:
        raise ModelError(f"image_grid_pinpoints is empty; write at least [[{tile}, {tile}]]")
    return tuple(grids)


def _fills(size: object, tile: int) -> bool:
    return isinstance(size, int) and not isinstance(size, bool) and size > 0 and size % tile == 0


def _pooled_side(config: Config, tower: TowerConfig) -> int:
    if tower.kind != "siglip":
        raise ModelError("vision_config: a gemma3 model's tower is a siglip_vision_model")
    tokens = positive_int(config, "mm_tokens_per_image", 256)
    side = isqrt(tokens)
    if side**2 != tokens or tower.patches % side:
        raise ModelError(
            f"mm_tokens_per_image={tokens}: the tower's {tower.patches} × {tower.patches} patches cannot be averaged "
            "to a square of so many; write the square of a divisor"
        )
    window = positive_int(text_config(config), "sliding_window", 4096)
    if window < tokens:  # versions of transformers differ in whether a picture's rows see its first ones then
        raise ModelError(f"sliding_window={window} is smaller than a picture, mm_tokens_per_image={tokens}")
    return side
