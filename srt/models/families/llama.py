"""Llama 2 and 3: the plain decoder that the other families vary."""

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
