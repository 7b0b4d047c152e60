"""Describes the towers that see a whole picture as a grid of patches of any size: Qwen2-VL, 2.5-VL and 3-VL.

`read_grid_vision` reads their configurations. A value that is not implemented is refused, never ignored. No torch: the
gateway reads the sides of a picture.
"""

from dataclasses import dataclass, replace
from math import isqrt

from ....lang.errors import ModelError
from ...layers.config_values import MOST_LAYERS, Config, positive_int, positive_number, section
from ...multimodal.format import Clips
from .config import decoder_config

ROOT = "visual"  # the tower's module in every checkpoint
MOST_UNIT = 256  # pixels along the side of a token's square; a picture has at least one square


@dataclass(frozen=True, slots=True)
class GridNames:
    """The tensors of a tower, by their names in the checkpoint."""

    up: tuple[str, ...]  # of the MLP; two: gate and up
    down: str
    merger_norm: str
    merger_maps: tuple[str, str]


@dataclass(frozen=True, slots=True)
class GridVision:
    """A transformer over the patches of a picture, and a merger that makes one token of each square of patches.

    Attributes:
        frames: pictures that a patch is made of; a still picture is as many equal ones.
        merged: patches along one side of a token's square.
        output_size: the width of tokens, that of the decoder.
        table_side: side of the square of learned positions, which is stretched over a picture; 0: there are none.
        window: tokens along one side of the squares within which patches attend; 0: they attend to all.
        whole: layers in which they attend to all nevertheless.
        added: layers whose states become features for the first layers of the decoder, which add them (DeepStack).
        clips, positions_per_second: as of `PictureFormat`.
    """

    layers: int
    hidden_size: int
    intermediate_size: int
    heads: int
    patch_size: int
    frames: int
    merged: int
    output_size: int
    activation: str
    theta: float
    names: GridNames
    rms_norm: bool = False
    patch_bias: bool = False
    table_side: int = 0
    window: int = 0
    whole: frozenset[int] = frozenset()
    added: tuple[int, ...] = ()
    clips: Clips = "joined"
    positions_per_second: float = 0.0

    @property
    def unit(self) -> int:
        """Side of a token's square, in pixels. The sides of a picture are multiples of it."""
        return self.patch_size * self.merged

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.heads


_TWO_MAPS = GridNames(("mlp.fc1",), "mlp.fc2", "ln_q", ("mlp.0", "mlp.2"))
_GATED = GridNames(("mlp.gate_proj", "mlp.up_proj"), "mlp.down_proj", "ln_q", ("mlp.0", "mlp.2"))
_THIRD = GridNames(("mlp.linear_fc1",), "mlp.linear_fc2", "norm", ("linear_fc1", "linear_fc2"))


def read_grid_vision(config: Config) -> GridVision:
    """Reads a configuration. Raises ModelError for a value that is wrong or not implemented."""
    stated = section(config, "vision_config")
    match config["model_type"]:
        case "qwen2_vl":
            width = positive_int(stated, "embed_dim", 1280)
            vision = _read(
                stated,
                hidden_size=width,
                intermediate_size=width * positive_int(stated, "mlp_ratio", 4),
                heads=16,
                patch=14,
                output_size=positive_int(stated, "hidden_size", 3584),
                activation="quick_gelu",
                names=_TWO_MAPS,
            )
        case "qwen2_5_vl":
            vision = _read(
                stated,
                hidden_size=positive_int(stated, "hidden_size", 3584),
                intermediate_size=positive_int(stated, "intermediate_size", 3420),
                heads=16,
                patch=14,
                output_size=positive_int(stated, "out_hidden_size", 3584),
                activation="silu",
                names=_GATED,
                rms_norm=True,
                window=112,
                whole=[7, 15, 23, 31],
            )
            vision = replace(vision, positions_per_second=positive_number(stated, "tokens_per_second", 4.0))
        case family:
            assert family in ("qwen3_vl", "qwen3_vl_moe"), "one of `config.GRID_DECODERS`"
            vision = _read(
                stated,
                hidden_size=positive_int(stated, "hidden_size", 1152),
                intermediate_size=positive_int(stated, "intermediate_size", 4304),
                heads=16,
                patch=16,
                output_size=positive_int(stated, "out_hidden_size", 3584),
                activation="gelu_pytorch_tanh",
                names=_THIRD,
                table=2304,
                added=[8, 16, 24],
            )
            vision = replace(vision, clips="timed")
    hidden_size = positive_int(decoder_config(config), "hidden_size")
    if vision.output_size != hidden_size:
        raise ModelError(
            f"vision_config: the tower's tokens have {vision.output_size} numbers, and the decoder's hidden_size is "
            f"{hidden_size}; check that the parts belong together"
        )
    return vision


def _read(
    stated: Config,
    *,
    hidden_size: int,
    intermediate_size: int,
    heads: int,
    patch: int,
    output_size: int,
    activation: str,
    names: GridNames,
    rms_norm: bool = False,
    window: int = 0,
    whole: list[int] | None = None,
    table: int = 0,
    added: list[int] | None = None,
) -> GridVision:
    """Reads what the families have in common. Numbers are their defaults; 0 and None: they have no such part."""
    layers = positive_int(stated, "depth", 27 if table else 32, most=MOST_LAYERS)
    patch = positive_int(stated, "patch_size", patch)
    merged = positive_int(stated, "spatial_merge_size", 2)
    rope = section(stated, "rope_parameters")
    if rope.get("rope_type", "axial") != "axial":
        raise ModelError(f'vision_config: rope_type={rope["rope_type"]!r}; only "axial" is implemented')
    vision = GridVision(
        layers=layers,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        heads=positive_int(stated, "num_heads", heads),
        patch_size=patch,
        frames=positive_int(stated, "temporal_patch_size", 2),
        merged=merged,
        output_size=output_size,
        activation=str(stated.get("hidden_act") or activation),
        theta=positive_number(rope, "rope_theta", 10_000.0),
        names=names,
        rms_norm=rms_norm,
        patch_bias=bool(table),
        table_side=_square_side(stated, table) if table else 0,
        window=positive_int(stated, "window_size", window) // merged // patch if window else 0,
        whole=frozenset(_read_layers(stated, "fullatt_block_indexes", whole, layers)) if whole else frozenset(),
        added=_read_layers(stated, "deepstack_visual_indexes", added, layers) if added else (),
    )
    if vision.unit > MOST_UNIT:
        raise ModelError(
            f"vision_config: patch_size={patch} and spatial_merge_size={merged} make squares of {vision.unit} pixels; "
            f"at most {MOST_UNIT} can be read"
        )
    if vision.hidden_size % vision.heads or vision.head_dim % 4:
        raise ModelError(
            f"vision_config: {vision.heads} heads of a width of {vision.hidden_size}; write a number of heads that "
            "leaves each a multiple of 4, half of which turns by height and half by width"
        )
    if window and not vision.window:
        raise ModelError(
            f"vision_config: window_size={stated['window_size']} pixels is smaller than a token's square, "
            f"{vision.unit}; write a multiple of it"
        )
    channels = positive_int(stated, "in_channels", 3)
    if channels != 3:
        raise ModelError(f"vision_config: in_channels={channels}; pictures are read as red, green and blue")
    return vision


def _square_side(stated: Config, default: int) -> int:
    count = positive_int(stated, "num_position_embeddings", default)
    side = isqrt(count)
    if side * side != count:
        raise ModelError(f"vision_config: num_position_embeddings={count} is no square, and pictures have two sides")
    return side


def _read_layers(stated: Config, key: str, default: list[int], layers: int) -> tuple[int, ...]:
    """Reads the numbers of layers, ascending. The default's last ones are left out of a tower with fewer layers."""
    numbers = stated.get(key)
    if numbers is None:
        return tuple(number for number in default if number < layers)
    known = isinstance(numbers, list | tuple) and all(
        isinstance(number, int) and not isinstance(number, bool) and 0 <= number < layers for number in numbers
    )
    if not known or sorted(set(numbers)) != list(numbers):
        raise ModelError(f"vision_config: {key}={numbers!r}; write ascending numbers of layers, 0 to {layers - 1}")
    return tuple(numbers)
