"""Qwen 3, dense and with experts: each head of queries and keys is normalised."""

from dataclasses import replace

from ...layers.config_values import Config, flag
from ..decoder_config import DecoderConfig
from ..read_fields import FULL, SLIDING, layer_count, read_decoder, read_layers, read_some_experts
from .qwen2 import layer_kinds, plain_positions, slides


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
    """Reads the decoder of Qwen 3-VL, see `qwen2.read_vl`."""
    stated = {key: value for key, value in config.items() if value is not None}
    return read(plain_positions({"rope_theta": 500_000.0, **stated, "layer_types": None}))
