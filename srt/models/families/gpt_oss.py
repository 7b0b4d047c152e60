"""gpt-oss: attention sinks, windows in every second layer, and experts with biases and a clamped gate."""

from dataclasses import replace

from ....lang.errors import ModelError
from ...layers.config_values import Config, flag, positive_int, positive_number
from ...layers.rope import RopeConfig
from ..decoder_config import ClampedGate, DecoderConfig, ExpertNames, LayerConfig
from ..read_fields import FULL, SLIDING, layer_count, listed_kinds, read_decoder, read_experts, read_rope

NAMES = ExpertNames(router="router", inputs_first=True, alternating=True)
# Of a configuration that says nothing about rotary embedding.
ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def read(config: Config) -> DecoderConfig:
    if config.get("sliding_window", 128) is None:
        raise ModelError("configuration: sliding_window=null; write the window of gpt-oss, 128")
    kinds = listed_kinds(config) or [FULL if index % 2 else SLIDING for index in range(layer_count(config))]
    window, rope = positive_int(config, "sliding_window", 128), _rope(config)
    experts = replace(
        read_experts(config, width_key="intermediate_size", count=128, chosen=4, renormalise=True),
        biased=True,
        gate=ClampedGate(
            limit=positive_number(config, "swiglu_limit", 7.0), alpha=positive_number(config, "swiglu_alpha", 1.702)
        ),
        names=NAMES,
    )
    layers = tuple(LayerConfig(window if kind == SLIDING else None, rope, experts) for kind in kinds)
    biased = flag(config, "attention_bias", True)
    decoder = read_decoder(config, layers, default_head_dim=64, default_eps=1e-5)
    return replace(decoder, qkv_bias=biased, output_bias=biased, sinks=True)


def _rope(config: Config) -> RopeConfig:
    if config.get("rope_parameters") or config.get("rope_scaling"):
        return read_rope(config, default_theta=150_000.0)
    return read_rope({**config, "rope_parameters": ROPE}, default_theta=150_000.0)
