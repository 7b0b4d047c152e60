"""DeepSeek V3 and R1, Kimi K2 and GLM 4.7 Flash: latent attention, and experts that are chosen by groups."""

from dataclasses import replace

from ....lang.errors import ModelError
from ...layers.config_values import Config, flag, positive_int, positive_number, section
from ...layers.rope import RopeType, yarn_temperature
from ..decoder_config import DecoderConfig, ExpertNames, ExpertsConfig, LatentConfig, LayerConfig, RouterScore
from ..read_fields import layer_count, read_decoder, read_rope

NAMES = ExpertNames(correction="gate.e_score_correction_bias", shared="shared_experts")
DENSE, SPARSE = "dense", "sparse"


def read(config: Config) -> DecoderConfig:
    dense = _count(config, "first_k_dense_replace", 3)
    kinds = [DENSE if index < dense else SPARSE for index in range(layer_count(config))]
    return _read(config, kinds, _count(config, "n_group", 8), _count(config, "topk_group", 4))


def read_glm_lite(config: Config) -> DecoderConfig:
    kinds = config.get("mlp_layer_types")
    count = layer_count(config)
    if kinds is None:
        kinds = [DENSE, *[SPARSE] * (count - 1)]
    if not isinstance(kinds, list) or len(kinds) != count or not set(kinds) <= {DENSE, SPARSE}:
        raise ModelError(f"mlp_layer_types {kinds!r}: write {count} times {DENSE!r} or {SPARSE!r}")
    return _read(config, kinds, _count(config, "n_group", 1), _count(config, "topk_group", 1), default_eps=1e-5)


def _read(
    config: Config, kinds: list[str], groups: int, chosen_groups: int, *, default_eps: float = 1e-6
) -> DecoderConfig:
    rope = replace(read_rope(config, default_theta=10_000.0), interleaved=flag(config, "rope_interleave", True))
    experts = read_grouped_experts(config, groups, chosen_groups) if SPARSE in kinds else None
    layers = tuple(LayerConfig(None, rope, experts if kind == SPARSE else None) for kind in kinds)
    latent = LatentConfig(
        query_rank=0 if config.get("q_lora_rank") is None else positive_int(config, "q_lora_rank"),
        rank=positive_int(config, "kv_lora_rank"),
        plain=positive_int(config, "qk_nope_head_dim"),
        rotated=positive_int(config, "qk_rope_head_dim"),
        value_dim=positive_int(config, "v_head_dim"),
    )
    biased = flag(config, "attention_bias", False)
    if biased and not latent.query_rank:
        raise ModelError("configuration: attention_bias=true without q_lora_rank; write false, or the rank")
    shape = {**config, "num_key_value_heads": 1, "head_dim": latent.rotated}
    decoder = read_decoder(shape, layers, default_eps=default_eps)
    scale = latent.query_dim**-0.5
    parameters = section(config, "rope_scaling") or section(config, "rope_parameters")
    if rope.type is not RopeType.DEFAULT and parameters.get("mscale_all_dim"):
        scale *= yarn_temperature(rope.factor, positive_number(parameters, "mscale_all_dim")) ** 2
    return replace(
        decoder,
        latent=latent,
        attention_scale=scale,
        qkv_bias=biased,
        output_bias=biased,
        layers_after=_count(config, "num_nextn_predict_layers", 1),
    )


def read_grouped_experts(config: Config, groups: int, chosen_groups: int) -> ExpertsConfig:
    """Reads experts that are chosen by sigmoids, from the best groups of them."""
    width = positive_int(config, "moe_intermediate_size")
    count, chosen = positive_int(config, "n_routed_experts"), positive_int(config, "num_experts_per_tok", 8)
    if not 1 <= chosen_groups <= groups or count % groups or (groups > 1 and count // groups < 2):
        raise ModelError(
            f"configuration: n_group={groups}, topk_group={chosen_groups} of n_routed_experts={count}; "
            "write groups of equal size, two experts or more, and at most as many chosen ones"
        )
    if chosen > count // groups * chosen_groups:
        raise ModelError(
            f"configuration: num_experts_per_tok={chosen} of {count // groups * chosen_groups} experts in the chosen "
            "groups; write at most as many"
        )
    return ExpertsConfig(
        count=count,
        chosen=chosen,
        width=width,
        renormalise=flag(config, "norm_topk_prob", True),
        rounded=False,
        shared_width=width * _count(config, "n_shared_experts", 1),
        shared_gated=False,
        scoring=RouterScore.SIGMOID,
        groups=groups,
        chosen_groups=chosen_groups,
        scale=positive_number(config, "routed_scaling_factor", 2.5),
        names=NAMES,
    )


def _count(config: Config, key: str, default: int) -> int:
    """Reads a whole number that may be 0."""
    value = config.get(key)
    return 0 if value == 0 and not isinstance(value, bool) else positive_int(config, key, default)
