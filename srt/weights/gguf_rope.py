"""Finds the parameters of rotary embedding that a GGUF file states, or that give the factors that it holds."""

import math
from collections.abc import Sequence

from ...lang.errors import ModelError
from .gguf_architectures import Keys, decimal
from .gguf_file import GgufFile

Config = dict[str, object]

LONGROPE_FACTORS = {"rope_factors_long.weight": "long_factor", "rope_factors_short.weight": "short_factor"}
LLAMA3_CONTEXTS = (8192, 4096, 16384)  # original context lengths that Llama 3 scaling may start from


def rope_scaling(gguf: GgufFile, head_dim: int) -> Config | None:
    """Builds the `rope_scaling` of the Hugging Face config; None: plain RoPE."""
    read = Keys(gguf.metadata, gguf.architecture)
    factors = gguf.tensors.get("rope_freqs.weight")
    if factors is not None:
        return _llama3_scaling(gguf, head_dim)
    if any(name in gguf.tensors for name in LONGROPE_FACTORS):
        return _long_scaling(gguf, read, head_dim)
    match read.text("rope.scaling.type", "none"):
        case "none":
            factor = read.positive("rope.scale_linear", 1.0)  # the older spelling of linear scaling
            return None if factor == 1.0 else {"rope_type": "linear", "factor": factor}
        case "linear":
            factor = read.positive("rope.scaling.factor", 1.0)
            return None if factor == 1.0 else {"rope_type": "linear", "factor": factor}
        case "yarn":
            return _yarn_scaling(read)
        case other:
            raise ModelError(
                f"{gguf.path}: RoPE scaling {other!r} is not supported; supported are none, linear, yarn and llama3"
            )


def _yarn_scaling(read: Keys) -> Config:
    factor = read.positive("rope.scaling.factor")
    scaling: Config = {"rope_type": "yarn", "factor": factor}
    if read.has("rope.scaling.original_context_length"):
        scaling["original_max_position_embeddings"] = read.integer("rope.scaling.original_context_length")
    for key, name in (("yarn_beta_fast", "beta_fast"), ("yarn_beta_slow", "beta_slow")):
        if read.has(f"rope.scaling.{key}"):
            scaling[name] = read.positive(f"rope.scaling.{key}")
    if read.has("rope.scaling.yarn_log_multiplier"):
        # mscale_all_dim, or a tenth of it in the files of DeepSeek; mscale is the same in all models that have them.
        tenth = 0.1 if read.prefix == "deepseek2" else 1.0
        scaling["mscale"] = scaling["mscale_all_dim"] = decimal(
            read.positive("rope.scaling.yarn_log_multiplier") / tenth
        )
    multiplier = read.positive("rope.scaling.attn_factor", 1.0)
    if multiplier != 1.0:  # llama.cpp multiplies YaRN's own attention factor by it
        scaling["attention_factor"] = multiplier * (0.1 * math.log(factor) + 1.0)
    return scaling


def _long_scaling(gguf: GgufFile, read: Keys, head_dim: int) -> Config:
    rotated = read.integer("rope.dimension_count", head_dim)
    scaling: Config = {"rope_type": "longrope"}
    for name, key in LONGROPE_FACTORS.items():
        tensor = gguf.tensors.get(name)
        if tensor is None or tensor.type_name != "F32" or tensor.shape != (rotated // 2,):
            raise ModelError(
                f"{gguf.path} is damaged: {name} is no list of {rotated // 2} factors; download the whole model again"
            )
        scaling[key] = list(map(decimal, tensor.read(0, 1).view("<f4")[0].tolist()))
    if read.has("rope.scaling.attn_factor"):
        scaling["attention_factor"] = decimal(read.positive("rope.scaling.attn_factor"))
    return scaling


def _llama3_scaling(gguf: GgufFile, head_dim: int) -> Config | None:
    """Finds the parameters that give the factors in `rope_freqs.weight`, by trying the known context lengths."""
    tensor = gguf.tensors["rope_freqs.weight"]
    if tensor.type_name != "F32" or tensor.shape != (head_dim // 2,):
        raise ModelError(f"{gguf.path} is damaged: rope_freqs.weight is {tensor.type_name} of shape {tensor.shape}")
    found = tensor.read(0, 1).view("<f4")[0].tolist()
    factor = max(found)
    if factor == min(found) == 1.0:
        return None
    read = Keys(gguf.metadata, gguf.architecture)
    theta = read.positive("rope.freq_base", 10_000.0)
    stated = (read.integer("rope.scaling.original_context_length", 0),)
    for context in (*stated, *LLAMA3_CONTEXTS):
        if context and _close(found, llama3_factors(theta, head_dim, factor, context)):
            return {
                "rope_type": "llama3",
                "factor": decimal(factor),
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": context,
            }
    raise ModelError(
        f"{gguf.path}: the factors in rope_freqs.weight are not those of Llama 3 scaling; use the safetensors folder"
    )


def proportional_part(gguf: GgufFile, head_dim: int) -> float:
    """Finds the part of each head that turns, by the divisors in `rope_freqs.weight`: 1, and for the rest a number by
    which no angle is left."""
    tensor = gguf.tensors.get("rope_freqs.weight")
    if tensor is None or tensor.type_name != "F32" or tensor.shape != (head_dim // 2,):
        raise ModelError(f"{gguf.path} is damaged: rope_freqs.weight lists no {head_dim // 2} divisors")
    found: list[float] = tensor.read(0, 1).view("<f4")[0].tolist()
    turning = found.count(1.0)
    if found != [1.0] * turning + found[turning:] or not turning or any(value < 1e20 for value in found[turning:]):
        raise ModelError(f"{gguf.path}: the divisors in rope_freqs.weight are not those of Gemma 4")
    return turning / len(found)


def llama3_factors(theta: float, head_dim: int, factor: float, context: int) -> list[float]:
    """Computes the divisors of Llama 3 for each RoPE frequency: 1 for short waves, `factor` for long ones."""
    low, high = 1.0, 4.0
    factors = []
    for pair in range(head_dim // 2):
        turns = context / (2 * math.pi * theta ** (2 * pair / head_dim))  # of this wave in the original context
        smooth = min(max((turns - low) / (high - low), 0.0), 1.0)
        factors.append(1 / ((1 - smooth) / factor + smooth))
    return factors


def _close(found: Sequence[float], expected: Sequence[float]) -> bool:
    return all(math.isclose(a, b, rel_tol=1e-3) for a, b in zip(found, expected, strict=True))
