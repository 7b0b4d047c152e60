"""GLM 4 in its two generations: pairs of neighbouring dimensions in half of each head are rotated.

`glm4` (GLM-4-0414, GLM-Z1) also normalises what attention and MLP add.
"""

from dataclasses import replace

from ...layers.config_values import Config, flag
from ..decoder_config import DecoderConfig, NormNames, ProjectionNames
from ..read_fields import FULL, layer_count, read_decoder, read_layers

PROJECTIONS = ProjectionNames(gate_up=("gate_up_proj",))
NORMS = NormNames(
    after_attention="post_self_attn_layernorm",
    after_mlp="post_mlp_layernorm",
)


def read(config: Config) -> DecoderConfig:
    layers = read_layers(config, [FULL] * layer_count(config), default_fraction=0.5)
    turned = tuple(replace(layer, rope=replace(layer.rope, interleaved=True)) for layer in layers)
    decoder = read_decoder(config, turned, default_head_dim=128, default_eps=0.00000015625)
    return replace(decoder, projections=PROJECTIONS, qkv_bias=flag(config, "attention_bias", True))


def read_glm4(config: Config) -> DecoderConfig:
    return replace(read(config), norms=NORMS)
