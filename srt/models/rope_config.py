"""Reads rotary embedding parameters in the spellings of transformers 4 and 5."""

from collections.abc import Mapping
from typing import Any

from ...lang.errors import ModelError
from .rope import RopeConfig, RopeType, yarn_attention_factor

# Any: parsed JSON; every value is checked when it is read.
Config = Mapping[str, Any]


def read_rope(config: Config, *, default_theta: float) -> RopeConfig:
    """One set of frequencies for all layers: `rope_parameters`, or `rope_theta` and `rope_scaling`."""
    parameters = {**(config.get("rope_scaling") or config.get("rope_parameters") or {})}
    return _read(parameters, config, theta=config.get("rope_theta", default_theta))


def read_rope_by_layer_type(config: Config) -> dict[str, RopeConfig]:
    """Gemma 3: full layers take `rope_theta` and `rope_scaling`, sliding layers `rope_local_base_freq` alone."""
    nested = config.get("rope_parameters") or {}
    if nested and not {"full_attention", "sliding_attention"} & set(nested):
        raise ModelError(
            f"rope_parameters {dict(nested)!r}: write them per layer type, "
            '{"full_attention": {...}, "sliding_attention": {...}}'
        )
    full = {**(nested.get("full_attention") or {}), **(config.get("rope_scaling") or {})}
    sliding = {**(nested.get("sliding_attention") or {})}
    return {
        "full_attention": _read(full, config, theta=config.get("rope_theta", 1_000_000.0)),
        "sliding_attention": _read(sliding, config, theta=config.get("rope_local_base_freq", 10_000.0)),
    }


def _read(parameters: dict[str, Any], config: Config, *, theta: object) -> RopeConfig:
    name = parameters.get("rope_type") or parameters.get("type") or "default"
    try:
        kind = RopeType(name)
    except ValueError:
        raise ModelError(
            f"rope_type {name!r} is not one of {', '.join(kind.value for kind in RopeType)}; "
            "variants that depend on the length of the sequence cannot share cached keys"
        ) from None
    partial = parameters.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0
    if partial != 1.0:
        raise ModelError(f"partial_rotary_factor={partial}: these families turn whole heads")
    theta = _required({"rope_theta": theta, **parameters}, "rope_theta")
    match kind:
        case RopeType.DEFAULT:
            return RopeConfig(kind, theta)
        case RopeType.LINEAR:
            return RopeConfig(kind, theta, factor=_required(parameters, "factor"))
        case RopeType.LLAMA3:
            return RopeConfig(
                kind,
                theta,
                factor=_required(parameters, "factor"),
                original_length=_original_length(parameters, config),
                low_freq_factor=_required(parameters, "low_freq_factor"),
                high_freq_factor=_required(parameters, "high_freq_factor"),
            )
        case RopeType.YARN:
            return _read_yarn(parameters, config, theta)


def _read_yarn(parameters: dict[str, Any], config: Config, theta: float) -> RopeConfig:
    original = _original_length(parameters, config)
    factor = parameters.get("factor") or config["max_position_embeddings"] / original
    attention_factor = parameters.get("attention_factor")
    if attention_factor is None:
        attention_factor = yarn_attention_factor(factor, parameters.get("mscale"), parameters.get("mscale_all_dim"))
    return RopeConfig(
        RopeType.YARN,
        theta,
        factor=factor,
        original_length=original,
        beta_fast=parameters.get("beta_fast") or 32.0,
        beta_slow=parameters.get("beta_slow") or 1.0,
        truncate=bool(parameters.get("truncate", True)),
        attention_factor=attention_factor,
    )


def _original_length(parameters: dict[str, Any], config: Config) -> int:
    """The configuration's own field wins over the nested one, as in transformers."""
    outer = config.get("original_max_position_embeddings")
    value = outer or parameters.get("original_max_position_embeddings") or config.get("max_position_embeddings")
    if not isinstance(value, int) or value < 1:
        raise ModelError(f"original_max_position_embeddings={value!r}; write a whole number of at least 1")
    return value


def _required(parameters: dict[str, Any], key: str) -> float:
    value = parameters.get(key)
    if not isinstance(value, (int, float)) or isinstance(value, bool) or value <= 0:
        raise ModelError(f"rope parameters {parameters!r}: {key}={value!r}; write a positive number")
    return float(value)
