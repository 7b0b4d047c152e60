"""Reads the configurations of the decoder families that run on umbel's own kernels, one file for each.

A family differs from the others by the fields of `DecoderConfig`, not by code: three executors (torch, the CPU kernels,
CUDA) run the same description, see `decoder_config.py`. A new family is a file here and a line below:
docs/add_a_model.md.
"""

from collections.abc import Callable

from ....lang.errors import ModelError
from ...layers.config_values import Config
from ..decoder_config import DecoderConfig
from . import (
    deepseek_v3,
    exaone4,
    gemma,
    gemma3,
    glm,
    gpt_oss,
    granite,
    llama,
    llama4,
    mistral,
    mixtral,
    olmo2,
    phi3,
    qwen2,
    qwen3,
    smollm3,
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
    "granitemoehybrid": granite.read_hybrid,
    "glm": glm.read,
    "glm4": glm.read_glm4,
    "exaone4": exaone4.read,
    "seed_oss": llama.read_seed_oss,
    "mixtral": mixtral.read,
    "qwen2_moe": qwen2.read_moe,
    "qwen3_moe": qwen3.read_moe,
    "gpt_oss": gpt_oss.read,
    "llama4_text": llama4.read,
    "deepseek_v3": deepseek_v3.read,
    "kimi_k2": deepseek_v3.read,
    "glm4_moe_lite": deepseek_v3.read_glm_lite,
}


def is_family(config: Config) -> bool:
    """Returns whether a model runs on umbel's decoders; the others run in transformers."""
    family = config.get("model_type")
    return isinstance(family, str) and family in FAMILIES


def read_config(config: Config) -> DecoderConfig:
    """Reads the decoder of a Hugging Face configuration.

    Raises:
        ModelError: a value that is missing, wrong, or not implemented here.
    """
    if not is_family(config):
        raise ModelError(f"model_type {config.get('model_type')!r} is not one of {', '.join(FAMILIES)}")
    return FAMILIES[config["model_type"]](config)
