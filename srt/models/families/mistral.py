"""Mistral: Llama with a sliding window in every layer, or in none."""

from ...layers.config_values import Config
from ..decoder_config import DecoderConfig
from ..read_fields import FULL, SLIDING, layer_count, read_decoder, read_layers


def read(config: Config) -> DecoderConfig:
    # An absent window means 4096 to transformers, a null one means none.
    kind = FULL if config.get("sliding_window", 4096) is None else SLIDING
    return read_decoder(config, read_layers(config, [kind] * layer_count(config)))
