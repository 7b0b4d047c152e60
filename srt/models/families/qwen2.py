"""Qwen 2 and 2.5, dense and with experts: queries, keys and values have biases; upper layers may have a window."""

from dataclasses import replace

from ....lang.errors import ModelError
from ...layers.config_values import Config, flag, positive_int
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
