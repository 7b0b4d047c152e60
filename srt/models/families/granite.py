"""Granite 3 and 4: Llama with factors on embedding, attention, residual sums and logits.

Granite 4 has one MLP for all tokens, next to experts in its larger models, and Mamba 2 layers in its H models.
"""

from dataclasses import replace

from ....lang.errors import ModelError
from ...layers.config_values import GGUF_LAYOUT, Config, flag, positive_int, positive_number
from ...layers.rope import RopeConfig, RopeType
from ..decoder_config import DecoderConfig, ExpertNames, ExpertsConfig, LayerConfig, ProjectionNames
from ..read_fields import FULL, layer_count, read_decoder, read_experts, read_layers
from ..read_recurrent import LINEAR, MambaKeys, read_mamba, read_step_limits, with_recurrent

SHARED_MLP = ProjectionNames(mlp="shared_mlp", gate_up=("input_linear",), down="output_linear")


def read(config: Config) -> DecoderConfig:
    decoder = _read(config, read_layers(config, [FULL] * layer_count(config)))
    return replace(decoder, mlp_bias=flag(config, "mlp_bias", False))


def read_hybrid(config: Config) -> DecoderConfig:
    kinds = _kinds(config)
    width = positive_int(config, "shared_intermediate_size", 1024)
    experts = _experts(config, width) if config.get("num_local_experts", 8) != 0 else None
    layers = read_layers(config, kinds, experts=[experts] * len(kinds))
    if config.get("position_embedding_type") != "rope":
        layers = tuple(replace(layer, rope=RopeConfig(RopeType.NONE, theta=1.0)) for layer in layers)
    if LINEAR in kinds:
        mamba = read_mamba(config, MambaKeys(), limits=read_step_limits(config), state_size=256)
        layers = with_recurrent(layers, kinds, LINEAR, mamba)
    names = ProjectionNames(mlp=SHARED_MLP.mlp) if config.get(GGUF_LAYOUT) is True else SHARED_MLP
    return replace(_read(config, layers), projections=names, intermediate_size=width)


def read_moe(config: Config) -> DecoderConfig:
    """Reads Granite 3's models with experts."""
    return _read_moe(config, shared_width=0)


def read_moe_shared(config: Config) -> DecoderConfig:
    return _read_moe(config, shared_width=positive_int(config, "shared_intermediate_size", 1024))


def _read_moe(config: Config, *, shared_width: int) -> DecoderConfig:
    layers = read_layers(
        config, [FULL] * layer_count(config), experts=[_experts(config, shared_width)] * layer_count(config)
    )
    return _read(config, layers)


def _kinds(config: Config) -> list[str]:
    """Reads the kinds of layers, which checkpoints spell in their own words."""
    count, given = layer_count(config), config.get("layer_types") or config.get("layers_block_type")
    known = {"mamba": LINEAR, LINEAR: LINEAR, "attention": FULL, FULL: FULL}
    if not isinstance(given, list) or len(given) != count or any(str(kind) not in known for kind in given):
        raise ModelError(f"layer_types {given!r}: write {count} times 'mamba' or 'attention'")
    return [known[str(kind)] for kind in given]


def _experts(config: Config, shared_width: int) -> ExpertsConfig:
    experts = read_experts(
        config,
        width_key="intermediate_size",
        count=8,
        chosen=2,
        renormalise=True,
        rounded=True,
        shared_width=shared_width,
    )
    names = ExpertNames(block="block_sparse_moe", router="router", shared_maps=SHARED_MLP)
    return replace(experts, shared_gated=False, names=names)


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
