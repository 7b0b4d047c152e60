"""Qwen 3, dense and with experts: each head of queries and keys is normalised."""

from collections.abc import Callable
from dataclasses import replace
from itertools import cycle, islice

from ...layers.config_values import Config, flag
from ..decoder_config import DecoderConfig, ExpertNames
from ..read_fields import FULL, SLIDING, layer_count, read_decoder, read_layers, read_some_experts
from .qwen2 import layer_kinds, plain_positions, read_axes, slides, with_axes


def read(config: Config) -> DecoderConfig:
    biased = flag(config, "attention_bias", False)
    decoder = read_decoder(config, read_layers(config, layer_kinds(config)), default_head_dim=128)
    return replace(decoder, qk_norm=True, qkv_bias=biased, output_bias=biased)


def read_moe(config: Config) -> DecoderConfig:
    biased = flag(config, "attention_bias", False)
    kinds = [SLIDING if slides(config) else FULL] * layer_count(config)
    layers = read_layers(config, kinds, experts=read_some_experts(config, count=128, chosen=8))
    return replace(read_decoder(config, layers), qk_norm=True, qkv_bias=biased, output_bias=biased)


def read_vl(config: Config) -> DecoderConfig:
    """Reads the decoder of Qwen 3-VL."""
    return _on_axes(config, read)


def read_vl_moe(config: Config) -> DecoderConfig:
    """Reads the decoder of Qwen 3-VL with experts, which are stacked with inputs first as published."""
    decoder = _on_axes({**config, "norm_topk_prob": True}, read_moe)
    names = ExpertNames(inputs_first=True)
    layers = (
        layer if layer.experts is None else replace(layer, experts=replace(layer.experts, names=names))
        for layer in decoder.layers
    )
    return replace(decoder, layers=tuple(layers))


def _on_axes(config: Config, reader: Callable[[Config], DecoderConfig]) -> DecoderConfig:
    """Reads a decoder whose frequencies turn by time, height and width in turn.

    Where the frequencies of height or width are used up, and in the last ones, they turn by time.
    """
    stated = {key: value for key, value in config.items() if value is not None}
    decoder = reader(plain_positions({"rope_theta": 500_000.0, **stated, "layer_types": None}))
    _, *ends = read_axes(config, decoder, (24, 20, 20))
    axes = (axis if axis and index < 3 * ends[axis - 1] else 0 for index, axis in enumerate(cycle(range(3))))
    return with_axes(decoder, tuple(islice(axes, decoder.head_dim // 2)))
