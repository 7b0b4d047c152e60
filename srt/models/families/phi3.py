"""Phi 3, Phi 3.5 and Phi 4, mini ones too: Llama with fused projections, and long contexts by LongRoPE.

Phi-4-mini rotates three quarters of each head only (`partial_rotary_factor`).
"""

from dataclasses import replace

from ...layers.config_values import Config, section
from ..decoder_config import DecoderConfig, ProjectionNames
from ..read_fields import FULL, SLIDING, layer_count, read_decoder, read_layers

PROJECTIONS = ProjectionNames(qkv=("qkv_proj",), gate_up=("gate_up_proj",))


def read(config: Config) -> DecoderConfig:
    kind = FULL if config.get("sliding_window") is None else SLIDING
    spelled = {**config, "original_max_position_embeddings": config.get("original_max_position_embeddings", 4096)}
    for key in ("rope_scaling", "rope_parameters"):  # "su" and "yarn" are early names of the same frequencies
        parameters = section(config, key)
        if parameters.get("rope_type", parameters.get("type")) in ("su", "yarn"):
            spelled[key] = {**parameters, "rope_type": "longrope"}
    layers = read_layers(spelled, [kind] * layer_count(config), default_fraction=1.0)
    return replace(read_decoder(spelled, layers, default_eps=1e-5), projections=PROJECTIONS)
