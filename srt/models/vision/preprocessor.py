"""Reads preprocessor_config.json: the way pictures are cut (`PictureFormat`) and normalised (`Normalisation`).

Here it is part of the configuration, under `PREPROCESSOR`, so that gateway and engine read the same one. Settings that
are not implemented are refused by name. No torch: the gateway reads it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ....lang.errors import ModelError
from ...core.config import PictureLimits
from ...layers.config_values import Config, flag, positive_int, positive_number, section
from ...multimodal.format import PictureFormat, Resample, dynamic_tokens
from .config import GRID_DECODERS, VisionConfig, read_grids, read_vision, sees_grids
from .grid_config import read_grid_vision

PREPROCESSOR = "preprocessor_config"
MOST_TOKENS = 4096  # of a picture of any size; its own setting may allow 16,384, which would fill most contexts

_CLIP_MEAN, _CLIP_STD = [0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711]
_HALF = [0.5, 0.5, 0.5]
_CLIP = {
    "do_resize": True,
    "do_center_crop": True,
    "do_rescale": True,
    "do_normalize": True,
    "rescale_factor": 1 / 255,
    "size": {"shortest_edge": 224},
    "crop_size": {"height": 224, "width": 224},
    "resample": 3,
    "image_mean": _CLIP_MEAN,
    "image_std": _CLIP_STD,
}
_SIGLIP = {**_CLIP, "do_center_crop": False, "size": {"height": 224, "width": 224}} | {
    "image_mean": _HALF,
    "image_std": _HALF,
}
_QWEN = {
    "do_resize": True,
    "do_rescale": True,
    "do_normalize": True,
    "rescale_factor": 1 / 255,
    "size": {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280},
    "resample": 3,
    "image_mean": _CLIP_MEAN,
    "image_std": _CLIP_STD,
    "patch_size": 14,
    "temporal_patch_size": 2,
    "merge_size": 2,
}
_GRID_PROCESSOR = "Qwen2VLImageProcessor"
# The defaults of transformers' image processors, by their names without "Fast" and "Pil". Any: JSON values.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "CLIPImageProcessor": _CLIP,
    "LlavaImageProcessor": {**_CLIP, "do_pad": False},
    "LlavaNextImageProcessor": _CLIP,
    "SiglipImageProcessor": _SIGLIP,
    "Gemma3ImageProcessor": {**_SIGLIP, "resample": 2},
    _GRID_PROCESSOR: _QWEN,
}
_USUAL = {
    "llava": "CLIPImageProcessor",
    "llava_next": "LlavaNextImageProcessor",
    "gemma3": "Gemma3ImageProcessor",
    **dict.fromkeys(GRID_DECODERS, _GRID_PROCESSOR),
}
_FILTERS: dict[int, Resample] = {1: "lanczos", 2: "bilinear", 3: "bicubic", 4: "box", 5: "hamming"}  # as PIL counts

_READ = frozenset(_CLIP) | {"default_to_square", "do_pad", "image_grid_pinpoints"}
_READ_OF_GRIDS = frozenset(_QWEN) | {"min_pixels", "max_pixels", "default_to_square"}  # the last of single numbers
# They name classes, state facts that always hold here (pictures come as RGB, one at a time), or are for Python callers
# of the processor.
_WITHOUT_EFFECT = frozenset(
    {
        "_processor_class",
        "_valid_processor_keys",
        "data_format",
        "device",
        "disable_grouping",
        "do_convert_rgb",
        "feature_extractor_type",
        "image_processor_type",
        "image_seq_length",
        "input_data_format",
        "processor_class",
        "return_tensors",
    }
)


@dataclass(frozen=True, slots=True)
class Normalisation:
    """Normalises a pixel 0 … 255 to (pixel × factor − mean) / std, by channel."""

    factor: float
    mean: tuple[float, float, float]
    std: tuple[float, float, float]


def read_picture_format(config: Config, *, before: str = "", after: str = "") -> PictureFormat:
    """Reads the format of pictures. Raises ModelError for settings that are missing, wrong, not implemented, or do not
    fit the tower."""
    if sees_grids(config):
        return _read_dynamic(config, before, after)
    vision = read_vision(config)
    name, settings = _settings(config)
    side = vision.tower.image_size
    resize, made = _sizes(settings, square=flag(settings, "default_to_square", name == "Gemma3ImageProcessor"))
    if made != (side, side):
        raise ModelError(
            f"{PREPROCESSOR} makes tiles of {made[0]} × {made[1]} pixels (height × width), and the tower takes "
            f"{side} × {side}; check that the files belong together"
        )
    if vision.family == "llava_next":
        _check_grids(settings, vision)
        if resize not in (side, (side, side)):
            raise ModelError(
                f"{PREPROCESSOR}: size {settings['size']!r}; an anyres model's is that of its tiles, {side}"
            )
        resize = (side, side)  # the overview is stretched
    mean = settings["image_mean"]
    padded = name == "LlavaImageProcessor" and flag(settings, "do_pad", False)
    if padded and resize is None:
        raise ModelError(f"{PREPROCESSOR}: do_pad without do_resize would make squares of any size; write both as true")
    return PictureFormat(
        layout="anyres" if vision.family == "llava_next" else "fixed",
        tile_height=side,
        tile_width=side,
        tile_tokens=vision.tile_tokens,
        patch_size=vision.tower.patch_size,
        resize=resize,
        resample=_filter(settings["resample"]),
        pad_colour=_colour(_triple("image_mean", mean)) if padded else None,
        grids=vision.grids,
        before=before,
        after=after,
    )


def _read_dynamic(config: Config, before: str, after: str) -> PictureFormat:
    vision, (_, settings) = read_grid_vision(config), _settings(config)
    tower = {"patch_size": vision.patch_size, "merge_size": vision.merged, "temporal_patch_size": vision.frames}
    for key, expected in tower.items():
        if settings[key] != expected:
            raise ModelError(
                f"{PREPROCESSOR}: {key}={settings[key]!r}, and the tower's is {expected}; check that the files belong "
                "together"
            )
    if not flag(settings, "do_resize", True):
        raise ModelError(f"{PREPROCESSOR}: do_resize=false leaves sides that are no multiples of {vision.unit}")
    size = section(settings, "size")
    least = positive_int(settings, "min_pixels", positive_int(size, "shortest_edge", size.get("min_pixels")))
    most = positive_int(settings, "max_pixels", positive_int(size, "longest_edge", size.get("max_pixels")))
    if least > most:
        raise ModelError(f"{PREPROCESSOR}: min_pixels={least} is more than max_pixels={most}")
    most = min(most, MOST_TOKENS * vision.unit**2, PictureLimits().most_pixels)
    least = min(least, most)
    return PictureFormat(
        layout="dynamic",
        tile_height=vision.unit,
        tile_width=vision.unit,
        tile_tokens=dynamic_tokens(vision.unit, least, most),
        patch_size=vision.unit,
        resize=None,
        resample=_filter(settings["resample"]),
        least_pixels=least,
        most_pixels=most,
        before=before,
        after=after,
        clips=vision.clips,
        part_frames=vision.frames,
        positions_per_second=vision.positions_per_second,
    )


def read_normalisation(config: Config) -> Normalisation:
    """Reads the normalisation. Raises ModelError for settings that are missing or wrong."""
    _, settings = _settings(config)
    factor = positive_number(settings, "rescale_factor") if flag(settings, "do_rescale", True) else 1.0
    if not flag(settings, "do_normalize", True):
        return Normalisation(factor, (0.0, 0.0, 0.0), (1.0, 1.0, 1.0))
    std = _triple("image_std", settings["image_std"])
    if min(std) <= 0:
        raise ModelError(f"{PREPROCESSOR}: image_std={settings['image_std']!r}; write three positive numbers")
    return Normalisation(factor, _triple("image_mean", settings["image_mean"]), std)


# ------------------------------------------------------------------------------------------ how


def _settings(config: Config) -> tuple[str, dict[str, Any]]:
    """Returns the image processor's name, and its settings with its defaults."""
    stated = section(config, PREPROCESSOR)
    if not stated:
        raise ModelError(
            f"there is no {PREPROCESSOR}.json, which says how pictures are cut and normalised; download it from the "
            "model's page into its folder"
        )
    given = stated.get("image_processor_type") or stated.get("feature_extractor_type") or _USUAL[config["model_type"]]
    name = str(given).removesuffix("Fast").removesuffix("Pil").replace("FeatureExtractor", "ImageProcessor")
    if name not in _DEFAULTS:
        raise ModelError(f"{PREPROCESSOR}: image_processor_type {given!r} is not one of {', '.join(_DEFAULTS)}")
    if (name == "LlavaNextImageProcessor") != (config["model_type"] == "llava_next"):
        raise ModelError(f"{PREPROCESSOR}: image_processor_type {given!r} does not suit a {config['model_type']} model")
    if (name == _GRID_PROCESSOR) != (config["model_type"] in GRID_DECODERS):
        raise ModelError(f"{PREPROCESSOR}: image_processor_type {given!r} does not suit a {config['model_type']} model")
    read = _READ_OF_GRIDS if name == _GRID_PROCESSOR else _READ
    for key, value in stated.items():
        known = key in read or key in _WITHOUT_EFFECT or key.startswith("pan_and_scan_")  # of what do_… turns on
        if key == "aspect_ratio_setting":  # older files say so what their type says
            known = value == "anyres" and name == "LlavaNextImageProcessor"
        if not known and value is not None and value is not False:
            raise ModelError(f"{PREPROCESSOR}: {key}={value!r} is not implemented; only null can be read")
    return name, _DEFAULTS[name] | {key: value for key, value in stated.items() if value is not None}


def _sizes(settings: Config, *, square: bool) -> tuple[tuple[int, int] | int | None, tuple[int, int]]:
    """Returns the size that a picture is resized to, and the size of a tile at the end (height, width)."""
    resize = _size("size", settings["size"], square) if flag(settings, "do_resize", True) else None
    if flag(settings, "do_center_crop", False):
        crop = _size("crop_size", settings["crop_size"], True)
        assert isinstance(crop, tuple), "a single number was read as a square"
        return resize, crop
    if isinstance(resize, tuple):
        return resize, resize
    raise ModelError(
        f"{PREPROCESSOR}: pictures are neither cut (do_center_crop) nor resized to one height and width, so that each "
        "would have its own number of tokens; that is not implemented"
    )


def _size(key: str, value: object, square: bool) -> tuple[int, int] | int:
    """Reads (height, width), or the length of the shorter side. A single number is a square if `square`."""
    if _positive(value):
        assert isinstance(value, int), "just checked"
        return (value, value) if square else value
    if isinstance(value, list | tuple) and len(value) == 2 and all(map(_positive, value)):
        return value[0], value[1]
    if isinstance(value, Mapping) and all(map(_positive, value.values())):
        if value.keys() == {"height", "width"}:
            return value["height"], value["width"]
        if value.keys() == {"shortest_edge"} and key == "size":
            return int(value["shortest_edge"])
    raise ModelError(
        f'{PREPROCESSOR}: {key}={value!r} is not implemented; write {{"height": …, "width": …}}'
        + (' or {"shortest_edge": …}' if key == "size" else "")
    )


def _positive(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _filter(value: object) -> Resample:
    if not isinstance(value, int) or value not in _FILTERS:
        known = ", ".join(f"{number} ({name})" for number, name in _FILTERS.items())
        raise ModelError(f"{PREPROCESSOR}: resample={value!r} is not implemented; write one of {known}")
    return _FILTERS[value]


def _triple(key: str, value: object) -> tuple[float, float, float]:
    values = [value] * 3 if isinstance(value, int | float) else value
    if isinstance(values, list | tuple) and len(values) == 3:
        red, green, blue = values
        if all(isinstance(number, int | float) and not isinstance(number, bool) for number in values):
            return float(red), float(green), float(blue)
    raise ModelError(f"{PREPROCESSOR}: {key}={value!r}; write three numbers")


def _colour(mean: tuple[float, float, float]) -> tuple[int, int, int]:
    """Returns the colour of pixels that become about zero after normalisation."""
    red, green, blue = (int(value * 255) for value in mean)
    return red, green, blue


def _check_grids(settings: Config, vision: VisionConfig) -> None:
    """Checks that both lists of grids agree: transformers cuts by the preprocessor's and arranges by the model's."""
    stated = settings.get("image_grid_pinpoints")
    if stated is not None and set(read_grids(stated, vision.tower.image_size)) != set(vision.grids):
        raise ModelError(
            f"{PREPROCESSOR}: image_grid_pinpoints={stated!r} are not those of config.json, "
            f"{[list(grid) for grid in vision.grids]}; write the same"
        )
