"""Qwen3-Next and Qwen 3.5: three gated delta nets to each layer of gated attention, dense or with experts."""

from collections.abc import Sequence
from dataclasses import replace

from ...layers.config_values import Config, flag, positive_int
from ..decoder_config import DecoderConfig, ExpertsConfig
from ..read_fields import FULL, layer_count, listed_kinds, read_decoder, read_layers, read_some_experts
from ..read_recurrent import LINEAR, read_delta_net, with_recurrent


def read(config: Config) -> DecoderConfig:
    shared = positive_int(config, "shared_expert_intermediate_size", 512)
    # Qwen3-Next sums the weights of a token's experts to one unless the configuration says otherwise.
    spelled = {"norm_topk_prob": True, "moe_intermediate_size": 512, "intermediate_size": 5632, **config}
    experts = read_some_experts(spelled, count=512, chosen=10, shared_width=shared)
    return _read(spelled, interleaved=True, experts=experts)


def read_qwen3_5(config: Config) -> DecoderConfig:
    return _read(config, interleaved=False)


def read_qwen3_5_moe(config: Config) -> DecoderConfig:
    shared = positive_int(config, "shared_expert_intermediate_size", 512)
    width = positive_int(config, "moe_intermediate_size", 512)
    spelled = {**config, "norm_topk_prob": True, "moe_intermediate_size": width, "intermediate_size": width}
    experts = read_some_experts(spelled, count=256, chosen=8, shared_width=shared)
    return _read(spelled, interleaved=False, experts=experts)


def _read(config: Config, *, interleaved: bool, experts: Sequence[ExpertsConfig | None] | None = None) -> DecoderConfig:
    kinds = listed_kinds(config, (LINEAR, FULL))
    if kinds is None:
        interval = positive_int(config, "full_attention_interval", 4)
        kinds = [LINEAR if (index + 1) % interval else FULL for index in range(layer_count(config))]
    layers = read_layers(config, kinds, default_fraction=0.25, experts=experts)
    biased = flag(config, "attention_bias", False)
    decoder = read_decoder(
        config,
        with_recurrent(layers, kinds, LINEAR, read_delta_net(config, interleaved=interleaved)),
        default_head_dim=256,
    )
    return replace(
        decoder,
        qk_norm=True,
        centered_norm=True,
        gated_attention=True,
        qkv_bias=biased,
        output_bias=biased,
    )
