"""Reads the decoder's part of a configuration: `text_config`, in which fields with transformers' defaults are absent.

No torch: the gateway reads the size of the vocabulary.
"""

from typing import Any

from ....lang.errors import ModelError
from ...layers.config_values import Config, flag, section

# The defaults of transformers' configuration classes, for fields without a default in `read_decoder`: a text model's
# file states them, a `text_config` need not. Any: parsed JSON.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {
        "vocab_size": 32_000,
        "hidden_size": 4096,
        "intermediate_size": 11_008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "max_position_embeddings": 2048,
    },
    "mistral": {
        "vocab_size": 32_000,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131_072,
    },
    "qwen2": {
        "vocab_size": 151_936,
        "hidden_size": 4096,
        "intermediate_size": 22_016,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "max_position_embeddings": 32_768,
    },
    "gemma3_text": {
        "vocab_size": 262_208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "max_position_embeddings": 131_072,
    },
}
# Vision families, each with the decoders that it may have, the usual one first.
DECODERS = {
    "llava": ("llama", "mistral", "qwen2"),
    "llava_next": ("llama", "mistral", "qwen2"),
    "gemma3": ("gemma3_text",),
}


def sees(config: Config) -> bool:
    """Returns whether this is the configuration of a vision model that umbel runs itself."""
    return config.get("model_type") in DECODERS


def text_config(config: Config) -> dict[str, Any]:
    """Returns the configuration of the decoder only, for `families.read_config`.

    Raises:
        ModelError: the decoder is none of `DECODERS`.
    """
    known = DECODERS[config["model_type"]]
    stated = section(config, "text_config")
    family = stated.get("model_type") or known[0]
    if family not in known:
        raise ModelError(
            f"text_config has model_type {family!r}; a {config['model_type']} model's is one of {', '.join(known)}"
        )
    whole = {key: value for key, value in _DEFAULTS[family].items() if stated.get(key) is None}
    return {**stated, **whole, "model_type": family, "tie_word_embeddings": _tied(config, stated, family)}


def _tied(config: Config, stated: Config, family: str) -> bool:
    """Reads tie_word_embeddings: older files state it for the decoder, newer ones for the whole model."""
    if family == "gemma3_text":
        return flag(config, "tie_word_embeddings", flag(stated, "tie_word_embeddings", True))
    return flag(config, "tie_word_embeddings", False) or flag(stated, "tie_word_embeddings", False)
