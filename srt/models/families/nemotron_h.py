"""Nemotron-H: layers of one part each, Mamba 2, attention without positions, an MLP or experts without a gate."""

from dataclasses import replace

from ....lang.errors import ModelError
from ...layers.config_values import MOST_LAYERS, Config, flag, positive_int, positive_number
from ...layers.rope import RopeConfig, RopeType
from ..decoder_config import DecoderConfig, ExpertNames, ExpertsConfig, LayerConfig, NormNames, ProjectionNames
from ..read_fields import FULL, read_decoder
from ..read_recurrent import LINEAR, MambaKeys, read_mamba
from .deepseek_v3 import read_grouped_experts

MLP, EXPERTS = "mlp", "moe"
KINDS = {"M": LINEAR, "mamba": LINEAR, "*": FULL, "attention": FULL, "-": MLP, "E": EXPERTS}
KEYS = MambaKeys(
    name="mixer",
    heads="mamba_num_heads",
    head_dim="mamba_head_dim",
    groups="n_groups",
    state_size="ssm_state_size",
    kernel="conv_kernel",
    conv_bias="use_conv_bias",
    activation="mamba_hidden_act",
)


def read(config: Config) -> DecoderConfig:
    kinds = _kinds(config)
    experts = _experts(config) if EXPERTS in kinds else None
    if FULL not in kinds:
        raise ModelError("layers_block_type: no layer attends; the decoders need at least one that does")
    if flag(config, "use_bias", False) != flag(config, "mamba_proj_bias", False):
        raise ModelError("configuration: use_bias and mamba_proj_bias differ; write the same for both")
    # transformers bounds the time step from below by `time_step_min`, and not from above.
    limits = positive_number(config, "time_step_min", 0.001), float("inf")
    mamba = read_mamba(config, KEYS, limits=limits, state_size=128, groups=8)
    rope = RopeConfig(RopeType.NONE, theta=1.0)
    layers = tuple(
        LayerConfig(
            window=None,
            rope=rope,
            recurrent=mamba if kind == LINEAR else None,
            experts=experts if kind == EXPERTS else None,
            mixes=kind in (LINEAR, FULL),
            mlp=kind in (MLP, EXPERTS),
        )
        for kind in kinds
    )
    spelled = {**config, "rms_norm_eps": positive_number(config, "layer_norm_epsilon", 1e-5)}
    return replace(
        read_decoder(
            spelled, layers, default_head_dim=128, activation_key="mlp_hidden_act", default_activation="relu2"
        ),
        mlp_bias=flag(config, "mlp_bias", False),
        gated_mlp=False,
        norms=NormNames(before_attention="norm", before_mlp="norm"),
        projections=ProjectionNames(attention="mixer", mlp="mixer", gate_up=("up_proj",)),
    )


def _experts(config: Config) -> ExpertsConfig:
    if config.get("moe_latent_size") is not None:
        raise ModelError(
            f"moe_latent_size={config['moe_latent_size']!r}: experts on latents are not implemented; "
            "load a model of Nemotron-H whose moe_latent_size is null"
        )
    spelled = {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 7688, **config}
    groups, chosen_groups = positive_int(config, "n_group", 1), positive_int(config, "topk_group", 1)
    return replace(
        read_grouped_experts(spelled, groups, chosen_groups),
        renormalise=flag(config, "norm_topk_prob", True),
        scale=positive_number(config, "routed_scaling_factor", 1.0),
        shared_width=positive_int(config, "moe_shared_expert_intermediate_size", 7688),
        gated=False,
        names=ExpertNames(block="mixer", correction="gate.e_score_correction_bias", shared="shared_experts"),
    )


def _kinds(config: Config) -> list[str]:
    """Reads the kinds of layers: a list, or a string of one letter for each."""
    given = config.get("layers_block_type") or config.get("layer_types") or config.get("hybrid_override_pattern")
    kinds = [KINDS.get(str(kind), str(kind)) for kind in given] if isinstance(given, list | str) else []
    if not 0 < len(kinds) <= MOST_LAYERS or any(kind not in (LINEAR, FULL, MLP, EXPERTS) for kind in kinds):
        raise ModelError(f"layers_block_type {given!r:.200}: write mamba, attention, mlp or moe for each layer")
    return kinds
