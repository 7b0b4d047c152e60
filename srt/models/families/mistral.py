"""Mistral: Llama with a sliding window in every layer, or in none. Ministral has it in some layers.

Ministral 3 scales queries by their position.
"""

from dataclasses import replace

from ....lang.errors import ModelError
from ...layers.config_values import Config, positive_int, positive_number, section
from ...layers.rope import QueryScale
from ..decoder_config import DecoderConfig
from ..read_fields import FULL, SLIDING, layer_count, listed_kinds, read_decoder, read_layers


def read(config: Config) -> DecoderConfig:
    return read_decoder(config, read_layers(config, _kinds(config, 4096)))


def read_ministral(config: Config) -> DecoderConfig:
    return read_decoder(config, read_layers(config, listed_kinds(config) or _kinds(config, 4096)))


def read_ministral3(config: Config) -> DecoderConfig:
    parameters = section(config, "rope_parameters") or section(config, "rope_scaling")
    if not parameters:
        raise ModelError("configuration: rope_parameters=None; write Ministral 3's: rope_type, rope_theta, factor, ...")
    layers = read_layers(config, _kinds(config, None), default_theta=1_000_000.0)
    if parameters.get("llama_4_scaling_beta"):
        scale = QueryScale(
            positive_number(parameters, "llama_4_scaling_beta"),
            positive_int(parameters, "original_max_position_embeddings"),
        )
        layers = tuple(replace(layer, query_scale=scale) for layer in layers)
    return read_decoder(config, layers, default_head_dim=128, default_eps=1e-5)


def _kinds(config: Config, default_window: int | None) -> list[str]:
    """Reads the kinds of layers, all the same: a window of null means none."""
    kind = FULL if config.get("sliding_window", default_window) is None else SLIDING
    return [kind] * layer_count(config)
