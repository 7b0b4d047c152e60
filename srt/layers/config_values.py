"""Reads and checks values of a Hugging Face configuration. Absent and null mean the default."""

from collections.abc import Mapping
from typing import Any, TypeGuard

from ...lang.errors import ModelError, shown

# Any: a configuration is parsed JSON; every value is checked when it is read.
Config = Mapping[str, Any]


GGUF_LAYOUT = "runtime_gguf_layout"  # the key of configurations that are made for GGUF files of hybrids
MOST_LAYERS = 4096  # the deepest models have some hundred; each is described before any weight is read
MOST_POSITIONS = 1 << 28  # the longest contexts have ten million tokens
MOST_TOKENS = 1 << 22  # the largest vocabularies have some hundred thousand; each token has bytes in memory
_LARGEST = 2**31 - 1  # of any other size: no dimension is larger
_LARGEST_NUMBER = 1e30  # float32 holds it
# Model types whose tokens see those after them, unless is_decoder is true. A table, as asking transformers takes torch.
_ENCODERS = (
    "albert", "bert", "big_bird", "camembert", "convbert", "data2vec-text", "deberta", "deberta-v2", "distilbert",
    "electra", "ernie", "esm", "esmc", "eurobert", "flaubert", "fnet", "funnel", "gte", "ibert", "jina_embeddings_v3",
    "layoutlm", "longformer", "luke", "megatron-bert", "mobilebert", "modernbert", "modernvbert", "mpnet", "mra",
    "neomme", "nomic_bert", "nystromformer", "perceiver", "reformer", "rembert", "roberta", "roberta-prelayernorm",
    "roc_bert", "roformer", "squeezebert", "tapas", "ultrabert", "ultravbert", "xlm", "xlm-roberta", "xlm-roberta-xl",
    "xmod", "yoso",
)  # fmt: skip


def is_token(value: object) -> TypeGuard[int]:
    """Returns whether a value can be the id of a token."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _LARGEST


def positive_int(config: Config, key: str, default: int | None = None, *, most: int = _LARGEST) -> int:
    value = _value(config, key, default)
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
        raise ModelError(f"configuration: {key}={shown(value)}; write a whole number of at least 1, at most {most}")
    return value


def positive_number(config: Config, key: str, default: float | None = None) -> float:
    value = _value(config, key, default)
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value <= _LARGEST_NUMBER:
        raise ModelError(f"configuration: {key}={shown(value)}; write a positive number, at most {_LARGEST_NUMBER:g}")
    return float(value)


def flag(config: Config, key: str, default: bool) -> bool:
    value = _value(config, key, default)
    if not isinstance(value, bool):
        raise ModelError(f"configuration: {key}={shown(value)}; write true or false")
    return value


def section(config: Config, key: str) -> dict[str, Any]:
    """Reads a nested object; absent and null are empty."""
    value = _value(config, key, {})
    if not isinstance(value, Mapping):
        raise ModelError(f"configuration: {key}={value!r}; write an object")
    return dict(value)


def _value(config: Config, key: str, default: object) -> object:
    value = config.get(key)
    return default if value is None else value


def refuse_encoder(config: Config) -> None:
    """Raises ModelError for a configuration that says that the model is no decoder."""
    family = config.get("model_type")
    if config.get("is_encoder_decoder") is True:
        kind = "an encoder with a decoder"
    elif isinstance(family, str) and family in _ENCODERS and config.get("is_decoder") is not True:
        kind = "an encoder, whose tokens see those after them"
    else:
        return
    raise ModelError(
        f"model_type {shown(family)} is {kind}; umbel runs decoders only: for embeddings take one that is trained for "
        "them, such as Qwen/Qwen3-Embedding-0.6B"
    )
