"""OLMo 2 and OLMo 3: norms after attention and MLP instead of before them, and norms of whole queries and keys.

OLMo 3 adds sliding layers; its scaled frequencies are those of full layers only.
"""

from dataclasses import replace

from ...layers.config_values import Config, flag
from ..decoder_config import DecoderConfig, LayerConfig, NormNames
from ..read_fields import (
    FULL,
    SLIDING,
    layer_count,
    listed_kinds,
    read_decoder,
    read_layers,
    read_rope_by_layer_type,
    read_windows,
)

NORMS = NormNames(
    before_attention=None,
    after_attention="post_attention_layernorm",
    before_mlp=None,
    after_mlp="post_feedforward_layernorm",
)


def read(config: Config) -> DecoderConfig:
    return _read(config, read_layers(config, [FULL] * layer_count(config)))


def read_olmo3(config: Config) -> DecoderConfig:
    kinds = listed_kinds(config)
    if kinds is None:
        kinds = [FULL if (index + 1) % 4 == 0 else SLIDING for index in range(layer_count(config))]
    ropes = read_rope_by_layer_type(config, default_theta=500_000.0, sliding_theta=("rope_theta", 500_000.0))
    windows = read_windows(config, kinds)
    return _read(config, tuple(LayerConfig(window, ropes[kind]) for window, kind in zip(windows, kinds, strict=True)))


def _read(config: Config, layers: tuple[LayerConfig, ...]) -> DecoderConfig:
    biased = flag(config, "attention_bias", False)
    return replace(
        read_decoder(config, layers, default_eps=1e-5),
        norms=NORMS,
        qk_norm=True,
        qk_norm_whole=True,
        qkv_bias=biased,
        output_bias=biased,
    )
