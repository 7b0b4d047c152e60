"""Granite 3 and 4: Llama with factors on embedding, attention, residual sums and logits.

Granite 4's dense models are the hybrid family with attention in every layer and one MLP for all tokens.
"""

from dataclasses import replace

from ....lang.errors import ModelError
from ...layers.config_values import Config, flag, positive_int, positive_number
from ...layers.rope import RopeConfig, RopeType
from ..decoder_config import DecoderConfig, LayerConfig, ProjectionNames
from ..read_fields import FULL, layer_count, read_decoder, read_layers

SHARED_MLP = ProjectionNames(mlp="shared_mlp", gate_up=("input_linear",), down="output_linear")


def read(config: Config) -> DecoderConfig:
    decoder = _read(config, read_layers(config, [FULL] * layer_count(config)))
    return replace(decoder, mlp_bias=flag(config, "mlp_bias", False))


def read_hybrid(config: Config) -> DecoderConfig:
    count = layer_count(config)
    kinds = config.get("layer_types") or config.get("layers_block_type")
    if not isinstance(kinds, list) or len(kinds) != count or not set(kinds) <= {"attention", FULL}:
        raise ModelError(f"layer_types {kinds!r}: layers with states other than keys and values are not implemented")
    if config.get("num_local_experts") != 0:
        raise ModelError(
            f"num_local_experts={config.get('num_local_experts')!r}: experts of Granite 4 are not implemented; "
            "load a dense one"
        )
    layers = read_layers(config, [FULL] * count)
    if config.get("position_embedding_type") != "rope":
        layers = tuple(replace(layer, rope=RopeConfig(RopeType.NONE, theta=1.0)) for layer in layers)
    decoder = _read(config, layers)
    width = positive_int(config, "shared_intermediate_size", 1024)
    return replace(decoder, projections=SHARED_MLP, intermediate_size=width)


def _read(config: Config, layers: tuple[LayerConfig, ...]) -> DecoderConfig:
    biased = flag(config, "attention_bias", False)
    return replace(
        read_decoder(config, layers),
        qkv_bias=biased,
        output_bias=biased,
        embedding_scale=positive_number(config, "embedding_multiplier", 1.0),
        residual_scale=positive_number(config, "residual_multiplier", 1.0),
        attention_scale=positive_number(config, "attention_multiplier", 1.0),
        logit_scale=1.0 / positive_number(config, "logits_scaling", 1.0),
    )
