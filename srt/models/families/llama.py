"""Llama 2 and 3, the plain decoder that the other families vary; Seed-OSS, which adds biases."""

from dataclasses import replace

from ...layers.config_values import Config, flag
from ..decoder_config import DecoderConfig
from ..read_fields import FULL, layer_count, read_decoder, read_layers


def read(config: Config) -> DecoderConfig:
    biased = flag(config, "attention_bias", False)
    return replace(
        read_decoder(config, read_layers(config, [FULL] * layer_count(config))),
        qkv_bias=biased,
        output_bias=biased,
        mlp_bias=flag(config, "mlp_bias", False),
    )


def read_seed_oss(config: Config) -> DecoderConfig:
    return replace(
        read_decoder(config, read_layers(config, [FULL] * layer_count(config)), default_head_dim=128),
        qkv_bias=flag(config, "attention_bias", True),
        output_bias=flag(config, "attention_out_bias", False),
        mlp_bias=flag(config, "mlp_bias", False),
    )
