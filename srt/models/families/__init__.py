"""Reads the configurations of the decoder families that run on umbel's own kernels, one file for each.

A family differs from the others by the fields of `DecoderConfig`, not by code: three executors (torch, the CPU kernels,
CUDA) run the same description, see `decoder_config.py`. A new family is a file here and a line below:
docs/add_a_model.md.
"""

from collections.abc import Callable, Iterable

from ....lang.errors import ModelError
from ...layers.config_values import Config
from ..decoder_config import DecoderConfig
from . import (
    bamba,
    deepseek_v3,
    exaone4,
    gemma,
    gemma3,
    gemma4,
    glm,
    gpt_oss,
    granite,
    lfm2,
    llama,
    llama4,
    mistral,
    mixtral,
    nemotron_h,
    olmo2,
    phi3,
    qwen2,
    qwen3,
    qwen3_next,
    smollm3,
)

_MTP = ("mtp.", None)  # layers that predict several tokens
_GRANITE = (
    ("block_sparse_moe.input_linear.weight", "block_sparse_moe.experts.gate_up_proj"),
    ("block_sparse_moe.output_linear.weight", "block_sparse_moe.experts.down_proj"),
    ("block_sparse_moe.router.layer.", "block_sparse_moe.router."),
)

# model_type → its reader
FAMILIES: dict[str, Callable[[Config], DecoderConfig]] = {
    "llama": llama.read,
    "mistral": mistral.read,
    "ministral": mistral.read_ministral,
    "ministral3": mistral.read_ministral3,
    "qwen2": qwen2.read,
    "qwen2_vl_text": qwen2.read_vl,
    "qwen2_5_vl_text": qwen2.read_vl,
    "qwen3": qwen3.read,
    "qwen3_vl_text": qwen3.read_vl,
    "gemma": gemma.read,
    "gemma2": gemma.read_gemma2,
    "gemma3_text": gemma3.read,
    "phi3": phi3.read,
    "smollm3": smollm3.read,
    "olmo2": olmo2.read,
    "olmo3": olmo2.read_olmo3,
    "granite": granite.read,
    "granitemoe": granite.read_moe,
    "granitemoeshared": granite.read_moe_shared,
    "granitemoehybrid": granite.read_hybrid,
    "glm": glm.read,
    "glm4": glm.read_glm4,
    "exaone4": exaone4.read,
    "seed_oss": llama.read_seed_oss,
    "mixtral": mixtral.read,
    "qwen2_moe": qwen2.read_moe,
    "qwen3_moe": qwen3.read_moe,
    "qwen3_vl_moe_text": qwen3.read_vl_moe,
    "gemma3n_text": gemma4.read_gemma3n,
    "gemma4_text": gemma4.read,
    "gpt_oss": gpt_oss.read,
    "llama4_text": llama4.read,
    "deepseek_v3": deepseek_v3.read,
    "kimi_k2": deepseek_v3.read,
    "glm4_moe_lite": deepseek_v3.read_glm_lite,
    "qwen3_next": qwen3_next.read,
    "qwen3_5_text": qwen3_next.read_qwen3_5,
    "qwen3_5_moe_text": qwen3_next.read_qwen3_5_moe,
    "lfm2": lfm2.read,
    "bamba": bamba.read,
    "nemotron_h": nemotron_h.read,
}

# model_type → parts of names in its checkpoints, and what stands for them in `decoder_config.py`; the first one that a
# name has counts. None: the tensor is not the decoder's.
SPELLINGS: dict[str, tuple[tuple[str, str | None], ...]] = {
    "qwen3_next": (_MTP,),
    "qwen3_5_text": (_MTP,),
    "qwen3_5_moe_text": (_MTP,),
    "lfm2": (("model.embedding_norm.", "model.norm."),),
    "bamba": (("model.final_layernorm.", "model.norm."),),
    **dict.fromkeys(("granitemoe", "granitemoeshared", "granitemoehybrid"), _GRANITE),
    "nemotron_h": (
        _MTP,
        *((f"{root}.embeddings.", "model.embed_tokens.") for root in ("backbone", "model")),
        *((f"{root}.norm_f.", "model.norm.") for root in ("backbone", "model")),
        ("backbone.", "model."),
    ),
}


def our_names(config: Config, stored: Iterable[str]) -> dict[str, str] | None:
    """Returns names of tensors as the decoders use them → as the checkpoint has them; None: they are the same."""
    spellings = SPELLINGS.get(str(config.get("model_type")), ())
    names = {name: _spelled(name, spellings) for name in stored} if spellings else {}
    if all(name == ours for name, ours in names.items()):
        return None
    return {ours: name for name, ours in names.items() if ours is not None}


def _spelled(name: str, spellings: Iterable[tuple[str, str | None]]) -> str | None:
    for part, ours in spellings:
        if part in name:
            return None if ours is None else name.replace(part, ours)
    return name


def is_family(config: Config) -> bool:
    """Returns whether a model runs on umbel's decoders; the others run in transformers."""
    family = config.get("model_type")
    if family == "gemma4_text" and gemma4.has_experts(config):
        return False
    return isinstance(family, str) and family in FAMILIES


def read_config(config: Config) -> DecoderConfig:
    """Reads the decoder of a Hugging Face configuration.

    Raises:
        ModelError: a value that is missing, wrong, or not implemented here.
    """
    if not is_family(config):
        raise ModelError(f"model_type {config.get('model_type')!r} is not one of {', '.join(FAMILIES)}")
    return FAMILIES[config["model_type"]](config)
