"""Gemma 1 and 2. Gemma 2 alternates sliding and full layers, normalises what it adds, and caps scores and logits."""

from dataclasses import replace

from ....lang.errors import ModelError
from ...layers.config_values import Config, flag, positive_number
from ..decoder_config import DecoderConfig, LayerConfig, NormNames
from ..read_fields import FULL, SLIDING, layer_count, listed_kinds, read_decoder, read_layers

NORMS = NormNames(
    after_attention="post_attention_layernorm",
    before_mlp="pre_feedforward_layernorm",
    after_mlp="post_feedforward_layernorm",
)


def read(config: Config) -> DecoderConfig:
    # Files say "gelu" where the models were trained with its approximation by tanh.
    stated = config.get("hidden_act")
    spelled = {**config, "hidden_act": "gelu_pytorch_tanh" if stated in (None, "gelu") else stated}
    layers = read_layers(config, [FULL] * layer_count(config))
    return replace(_read(spelled, layers, activation_key="hidden_act"), centered_norm=True)


def read_gemma2(config: Config) -> DecoderConfig:
    kinds = listed_kinds(config) or [FULL if index % 2 else SLIDING for index in range(layer_count(config))]
    return replace(
        _read(config, read_layers(config, kinds)),
        centered_norm=True,
        norms=NORMS,
        attention_scale=positive_number(config, "query_pre_attn_scalar", 256.0) ** -0.5,
        attention_softcap=read_cap(config, "attn_logit_softcapping", 50.0),
        logit_softcap=read_cap(config, "final_logit_softcapping", 30.0),
    )


def _read(
    config: Config, layers: tuple[LayerConfig, ...], *, activation_key: str = "hidden_activation"
) -> DecoderConfig:
    if flag(config, "use_bidirectional_attention", False):
        raise ModelError("use_bidirectional_attention=true makes an encoder; load a text-generating Gemma")
    return read_common(config, layers, activation_key=activation_key)


def read_common(
    config: Config, layers: tuple[LayerConfig, ...], *, activation_key: str = "hidden_activation"
) -> DecoderConfig:
    """Reads what all Gemmas have in common: biases, the embedding's scale, tied weights."""
    biased = flag(config, "attention_bias", False)
    decoder = read_decoder(
        config,
        layers,
        default_head_dim=256,
        activation_key=activation_key,
        default_activation="gelu_pytorch_tanh",
        default_tied=True,
    )
    return replace(
        decoder,
        qkv_bias=biased,
        output_bias=biased,
        embedding_scale=decoder.hidden_size**0.5,
    )


def read_cap(config: Config, key: str, default: float = 0.0) -> float:
    """Reads a soft cap: an absent one is the default of transformers, a null one or 0 is none."""
    return positive_number(config, key, default) if config.get(key, default) else 0.0
