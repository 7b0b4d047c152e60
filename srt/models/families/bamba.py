"""Bamba: Mamba 2 layers, and attention in a few, whose heads are rotated by half."""

from dataclasses import replace

from ....lang.errors import ModelError
from ...layers.config_values import Config, flag
from ..decoder_config import DecoderConfig, NormNames, ProjectionNames
from ..read_fields import FULL, layer_count, read_decoder, read_layers
from ..read_recurrent import LINEAR, MambaKeys, read_mamba, read_step_limits, with_recurrent


def read(config: Config) -> DecoderConfig:
    attending = config.get("attn_layer_indices") or []
    if not isinstance(attending, list) or not all(isinstance(index, int) for index in attending):
        raise ModelError(f"configuration: attn_layer_indices={attending!r}; write the numbers of layers that attend")
    kinds = [FULL if index in attending else LINEAR for index in range(layer_count(config))]
    mamba = read_mamba(config, MambaKeys(), limits=read_step_limits(config), state_size=256)
    layers = with_recurrent(read_layers(config, kinds, default_fraction=0.5), kinds, LINEAR, mamba)
    biased = flag(config, "attention_bias", False)
    return replace(
        read_decoder(config, layers, default_eps=1e-5),
        qkv_bias=biased,
        output_bias=biased,
        mlp_bias=flag(config, "mlp_bias", False),
        norms=NormNames(before_mlp="pre_ff_layernorm"),
        projections=ProjectionNames(mlp="feed_forward"),
    )
