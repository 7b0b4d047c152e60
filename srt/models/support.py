"""Says whether and by which code a model runs: umbel's decoders, transformers with umbel's attention, or not at all.

The answer is read from the registry of families and from the configuration, so it is right when either changes. Loading
a model checks more: its tensors, and for a model of transformers its logits.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from ...lang.errors import ModelError
from ..layers.config_values import Config
from .vision.config import decoder_config, reads_text_only


class RunsBy(StrEnum):
    """The code that runs a model."""

    NATIVE = "native"
    TRANSFORMERS = "transformers"
    NOTHING = "refused"


@dataclass(frozen=True, slots=True)
class Support:
    """`reason`: why a model does not run, or what of it does not; "" for one that runs whole."""

    by: RunsBy
    reason: str = ""


def support_of(config: Config) -> Support:
    """Returns which code runs the model of a configuration, or why none does."""
    from .families import is_family, read_config  # with torch, seconds; a command line is read without it

    part = "its pictures are not read" if reads_text_only(config) else ""
    try:
        text = decoder_config(config)
        if is_family(text):
            read_config(text)
            return Support(RunsBy.NATIVE, part)
    except ModelError as error:
        return Support(RunsBy.NOTHING, str(error))
    from .transformers_model import configuration_obstacle  # with torch and transformers, seconds

    reason = configuration_obstacle(text)
    return Support(RunsBy.TRANSFORMERS, part) if reason is None else Support(RunsBy.NOTHING, reason)


# ----------------------------------------------------------------------------------- the families of today

# Any: values of config.json. The model types that published checkpoints of a family have, with the fields in which
# these differ from the defaults of transformers' configuration.
_DENSE = {"num_local_experts": 0, "num_experts_per_tok": 0}
_HYBRID = {"num_hidden_layers": 2, "layers_block_type": ["mamba", "attention"]}
WANTED: tuple[tuple[str, Mapping[str, Mapping[str, Any]]], ...] = (
    ("Llama 3", {"llama": {}}),
    ("Llama 4", {"llama4_text": {}}),
    ("Qwen 3", {"qwen3": {}, "qwen3_moe": {}}),
    ("Qwen 3.5, 3.6", {"qwen3_5": {}, "qwen3_5_moe": {}}),
    ("Qwen3-Next, Qwen3-Coder-Next", {"qwen3_next": {}}),
    ("Qwen-VL 2.5, 3", {"qwen2_5_vl": {}, "qwen3_vl": {}}),
    ("Gemma 3", {"gemma3_text": {}}),
    ("Gemma 4", {"gemma4_text": {}}),
    ("Mistral Small 3, Ministral 3", {"mistral3": {}, "ministral3": {}}),
    ("Phi-4", {"phi3": {}}),
    ("SmolLM 3", {"smollm3": {}}),
    ("Granite 3, 4", {"granite": {}, "granitemoehybrid": {**_DENSE, "layers_block_type": ["attention"] * 32}}),
    ("Granite 4-H", {"granitemoehybrid": {**_DENSE, **_HYBRID}}),
    ("OLMo 3", {"olmo3": {}}),
    ("gpt-oss", {"gpt_oss": {}}),
    ("GLM 4.7-Flash", {"glm4_moe_lite": {}}),
    ("GLM 5", {"glm_moe_dsa": {}}),
    ("DeepSeek V3, Kimi K2", {"deepseek_v3": {}}),
    ("DeepSeek V4", {"deepseek_v4": {}}),
    ("Nemotron-H", {"nemotron_h": {}}),
    ("LFM2", {"lfm2": {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]}}),
)


@dataclass(frozen=True, slots=True)
class FamilySupport:
    """One row of the table of families."""

    name: str
    model_types: tuple[str, ...]
    support: Support


def wanted_families() -> list[FamilySupport]:
    """Returns the families that are most asked for, each with the code that runs all its model types."""
    rows = []
    for name, types in WANTED:
        found = {model_type: _published(model_type, fields) for model_type, fields in types.items()}
        worst = max(found, key=lambda model_type: (list(RunsBy).index(found[model_type].by), found[model_type].reason))
        support = found[worst]
        if support.reason and len(set(found.values())) > 1:
            support = Support(support.by, f"{worst}: {support.reason}")
        rows.append(FamilySupport(name, tuple(types), support))
    return rows


def _published(model_type: str, fields: Mapping[str, Any]) -> Support:  # Any: values of config.json
    """Returns the support of a model as it is published."""
    from transformers import CONFIG_MAPPING

    if model_type not in CONFIG_MAPPING:
        return Support(RunsBy.NOTHING, f"this transformers does not know model_type {model_type!r}")
    config = CONFIG_MAPPING[model_type](**fields).to_dict()
    return support_of({**config, "model_type": model_type})


def native_types() -> list[str]:
    """Returns every model type that umbel's decoders run."""
    from .families import FAMILIES

    return sorted(FAMILIES)


def transformers_types() -> Sequence[str]:
    """Returns the other model types that transformers has a causal language model for."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    from .families import FAMILIES

    return sorted(set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) - set(FAMILIES))
