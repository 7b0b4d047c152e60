"""What a layer with experts is, as data, and how configurations spell it."""

from dataclasses import dataclass

from ...lang.errors import ModelError
from ..layers.config_values import Config, flag, positive_int

EXPERT_FAMILIES = ("mixtral", "qwen2_moe", "qwen3_moe")


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """Every token goes through the `chosen` of `count` MLPs that a router finds most probable."""

    count: int
    chosen: int
    width: int
    renormalise: bool  # the weights of a token's experts sum to one
    rounded: bool  # weights are rounded to the model's dtype before they multiply
    shared_width: int = 0  # of one more MLP that every token goes through, behind a gate of its own; 0: there is none


def read_experts(config: Config, family: str, layers: int) -> list[ExpertsConfig | None]:
    """Of each layer; None: its MLP is dense.

    Raises:
        ModelError: a value that is missing, wrong, or not implemented here.
    """
    if family not in EXPERT_FAMILIES:
        return [None] * layers
    if family == "mixtral":
        return [_read(config, width_key="intermediate_size", count=8, chosen=2, renormalise=True)] * layers
    experts = _read(
        config,
        width_key="moe_intermediate_size",
        count=60 if family == "qwen2_moe" else 128,
        chosen=4 if family == "qwen2_moe" else 8,
        renormalise=flag(config, "norm_topk_prob", False),
        rounded=True,
        shared_width=positive_int(config, "shared_expert_intermediate_size", 5632) if family == "qwen2_moe" else 0,
    )
    dense = config.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(isinstance(index, int) for index in dense):
        raise ModelError(f"configuration: mlp_only_layers={dense!r}; write a list of the numbers of layers")
    step = positive_int(config, "decoder_sparse_step", 1)
    return [experts if index not in dense and (index + 1) % step == 0 else None for index in range(layers)]


def _read(
    config: Config,
    *,
    width_key: str,
    count: int,
    chosen: int,
    renormalise: bool,
    rounded: bool = False,
    shared_width: int = 0,
) -> ExpertsConfig:
    """`count` and `chosen` are what transformers takes when the configuration is silent."""
    key = "num_local_experts" if config.get("num_experts") is None else "num_experts"  # transformers writes either
    experts = ExpertsConfig(
        count=positive_int(config, key, count),
        chosen=positive_int(config, "num_experts_per_tok", chosen),
        width=positive_int(config, width_key),
        renormalise=renormalise,
        rounded=rounded,
        shared_width=shared_width,
    )
    if experts.chosen > experts.count:
        raise ModelError(
            f"configuration: num_experts_per_tok={experts.chosen} of {key}={experts.count}; write at most as many"
        )
    return experts
