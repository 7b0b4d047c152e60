"""Qwen 2 and 2.5, dense and with experts: queries, keys and values have biases; upper layers may have a window."""

from dataclasses import replace
from typing import Any

from ....lang.errors import ModelError
from ...layers.config_values import Config, flag, positive_int, section
from ..decoder_config import DecoderConfig
from ..read_fields import (
    FULL,
    SLIDING,
    layer_count,
    listed_kinds,
    read_decoder,
    read_layers,
    read_some_experts,
)


def read(config: Config) -> DecoderConfig:
    return replace(read_decoder(config, read_layers(config, layer_kinds(config))), qkv_bias=True)


def read_moe(config: Config) -> DecoderConfig:
    kinds = listed_kinds(config)
    if kinds is None:
        if slides(config):  # transformers 4 and 5 differ in which layers these are
            raise ModelError(
                "configuration: use_sliding_window=true without layer_types; write them, one for each layer"
            )
        kinds = [FULL] * layer_count(config)
    shared = positive_int(config, "shared_expert_intermediate_size", 5632)
    layers = read_layers(config, kinds, experts=read_some_experts(config, count=60, chosen=4, shared_width=shared))
    return replace(read_decoder(config, layers), qkv_bias=flag(config, "qkv_bias", True))


def read_vl(config: Config) -> DecoderConfig:
    """Reads the decoder of Qwen 2-VL and 2.5-VL: the first frequencies turn by time, then height, then width."""
    defaults = {"rope_theta": 1_000_000.0, "rms_norm_eps": 1e-5, "max_window_layers": 80}
    stated = {key: value for key, value in config.items() if value is not None}
    decoder = read(plain_positions({**defaults, **stated}))
    time, height, width = read_axes(config, decoder, (16, 24, 24))
    return with_axes(decoder, (0,) * time + (1,) * height + (2,) * width)


def read_axes(config: Config, decoder: DecoderConfig, default: tuple[int, int, int]) -> tuple[int, int, int]:
    """Reads the number of frequencies that turn by time, height and width, see `RopeConfig.axes`."""
    parameters = section(config, "rope_scaling") or section(config, "rope_parameters")
    stated = parameters.get("mrope_section")
    pairs = decoder.head_dim // 2
    sections = list(default) if stated is None else stated
    whole = isinstance(sections, list | tuple) and all(type(number) is int and number >= 0 for number in sections)
    if not whole or len(sections) != 3 or sum(sections) != pairs:
        raise ModelError(
            f"configuration: mrope_section={sections!r}; write three numbers, of time, height and width, that are "
            f"{pairs} together, half of head_dim={decoder.head_dim}"
        )
    time, height, width = sections
    return time, height, width


def with_axes(decoder: DecoderConfig, axes: tuple[int, ...]) -> DecoderConfig:
    """Returns the decoder with the axis that each frequency turns by."""
    layers = (replace(layer, rope=replace(layer.rope, axes=axes)) for layer in decoder.layers)
    return replace(decoder, layers=tuple(layers))


def plain_positions(config: Config) -> dict[str, Any]:  # Any: parsed JSON
    """Spells rotary embedding over three axes (time, height, width) as over one, which it is in text."""
    spelled = dict(config)
    for key in ("rope_scaling", "rope_parameters"):
        parameters = section(config, key)
        if "mrope_section" in parameters:
            kept = {name: value for name, value in parameters.items() if not name.startswith("mrope_")}
            for name in ("type", "rope_type"):
                if kept.get(name) == "mrope":
                    kept[name] = "default"
            spelled[key] = kept
    return spelled


def slides(config: Config) -> bool:
    """Returns whether some layers have a window."""
    return flag(config, "use_sliding_window", False) and config.get("sliding_window", 4096) is not None


def layer_kinds(config: Config) -> list[str]:
    """Reads the layer kinds of Qwen 2 and Qwen 3: as listed, else layers from `max_window_layers` on slide."""
    kinds = listed_kinds(config)
    if kinds is not None:
        return kinds
    count, first = layer_count(config), config.get("max_window_layers", 28)  # 0 is meant: every layer slides
    if not isinstance(first, int):
        raise ModelError(f"configuration: max_window_layers={first!r}; write a whole number")
    first_sliding = first if slides(config) else count
    return [SLIDING if index >= first_sliding else FULL for index in range(count)]
