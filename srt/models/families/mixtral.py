"""Mixtral: Mistral with experts in every layer."""

from ...layers.config_values import Config
from ..decoder_config import DecoderConfig
from ..read_fields import FULL, SLIDING, layer_count, read_decoder, read_experts, read_layers


def read(config: Config) -> DecoderConfig:
    count = layer_count(config)
    kind = (
        FULL if config.get("sliding_window") is None else SLIDING
    )  # unlike for Mistral, an absent one also means none
    experts = read_experts(config, width_key="intermediate_size", count=8, chosen=2, renormalise=True)
    layers = read_layers(config, [kind] * count, default_theta=1_000_000.0, experts=[experts] * count)
    return read_decoder(config, layers, default_eps=1e-5)
