"""LFM2: gated short convolutions, and attention with normed heads in some layers."""

from dataclasses import replace

from ....lang.errors import ModelError
from ...layers.config_values import Config, flag, positive_int, positive_number
from ..decoder_config import DecoderConfig, NormNames, ProjectionNames
from ..read_fields import FULL, layer_count, listed_kinds, read_decoder, read_layers
from ..read_recurrent import read_kernel, with_recurrent
from ..recurrent_config import ShortConvConfig

CONV = "conv"
NAMES = ProjectionNames(
    output="out_proj",
    query_norm="q_layernorm",
    key_norm="k_layernorm",
    mlp="feed_forward",
    gate_up=("w1", "w3"),
    down="w2",
)


def read(config: Config) -> DecoderConfig:
    kinds = _kinds(config)
    channels = positive_int(config, "hidden_size")
    kernel = read_kernel(config, "conv_L_cache", 3)
    convolution = ShortConvConfig(CONV, channels, kernel, flag(config, "conv_bias", False))
    spelled = {
        **config,
        "rms_norm_eps": positive_number(config, "norm_eps", 1e-5),
        "intermediate_size": _width(config),
        "tie_word_embeddings": flag(config, "tie_embedding", flag(config, "tie_word_embeddings", True)),
    }
    layers = read_layers(config, kinds, default_theta=1_000_000.0)
    return replace(
        read_decoder(spelled, with_recurrent(layers, kinds, CONV, convolution)),
        qk_norm=True,
        norms=NormNames(before_attention="operator_norm", before_mlp="ffn_norm"),
        projections=NAMES,
    )


def _kinds(config: Config) -> list[str]:
    kinds = listed_kinds(config, (CONV, FULL))
    if kinds is not None:
        return kinds
    attending = config.get("full_attn_idxs")
    if not isinstance(attending, list) or not all(isinstance(index, int) for index in attending):
        raise ModelError(f"configuration: full_attn_idxs={attending!r}; write the numbers of layers that attend")
    return [FULL if index in attending else CONV for index in range(layer_count(config))]


def _width(config: Config) -> int:
    """Reads the width of the MLP: by default two thirds of the stated one, times a factor, rounded up."""
    width = positive_int(config, "block_ff_dim", positive_int(config, "intermediate_size", 12288))
    if not flag(config, "block_auto_adjust_ff_dim", True):
        return width
    width = int(2 * width / 3)
    if config.get("block_ffn_dim_multiplier", 1.0) is None:
        return width
    unit = positive_int(config, "block_multiple_of", 256)
    return -(int(positive_number(config, "block_ffn_dim_multiplier", 1.0) * width) // -unit) * unit
