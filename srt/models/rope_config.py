"""Reads rotary embedding parameters in the spellings of transformers 4 and 5."""

from typing import Any

from ...lang.errors import ModelError
from ..layers.config_values import Config, flag, positive_int, positive_number, section
from ..layers.rope import RopeConfig, RopeType, yarn_attention_factor

# Any, here and below: a section of parsed JSON, whose values are checked when they are read.
Section = dict[str, Any]


def read_rope(config: Config, *, default_theta: float) -> RopeConfig:
    """One set of frequencies for all layers: `rope_parameters`, or `rope_theta` and `rope_scaling`."""
    parameters = section(config, "rope_scaling") or section(config, "rope_parameters")
    return _read(parameters, config, theta=positive_number(config, "rope_theta", default_theta))


def read_rope_by_layer_type(config: Config) -> dict[str, RopeConfig]:
    """Gemma 3: full layers take `rope_theta` and `rope_scaling`, sliding layers `rope_local_base_freq` alone."""
    nested = section(config, "rope_parameters")
    if nested and not {"full_attention", "sliding_attention"} & set(nested):
        raise ModelError(
            f"rope_parameters {nested!r}: write them per layer type, "
            '{"full_attention": {...}, "sliding_attention": {...}}'
        )
    full = section(nested, "full_attention") | section(config, "rope_scaling")
    sliding = section(nested, "sliding_attention")
    return {
        "full_attention": _read(full, config, theta=positive_number(config, "rope_theta", 1_000_000.0)),
        "sliding_attention": _read(sliding, config, theta=positive_number(config, "rope_local_base_freq", 10_000.0)),
    }


def _read(parameters: Section, config: Config, *, theta: float) -> RopeConfig:
    name = parameters.get("rope_type") or parameters.get("type") or "default"
    try:
        kind = RopeType(name)
    except ValueError:
        raise ModelError(
            f"rope_type {name!r} is not one of {', '.join(kind.value for kind in RopeType)}; "
            "variants that depend on the length of the sequence cannot share cached keys"
        ) from None
    partial = positive_number(dict(config) | parameters, "partial_rotary_factor", 1.0)
    if partial != 1.0:
        raise ModelError(f"partial_rotary_factor={partial}: these families turn whole heads")
    theta = positive_number(parameters, "rope_theta", theta)
    match kind:
        case RopeType.DEFAULT:
            return RopeConfig(kind, theta)
        case RopeType.LINEAR:
            return RopeConfig(kind, theta, factor=positive_number(parameters, "factor"))
        case RopeType.LLAMA3:
            return RopeConfig(
                kind,
                theta,
                factor=positive_number(parameters, "factor"),
                original_length=_original_length(parameters, config),
                low_freq_factor=positive_number(parameters, "low_freq_factor"),
                high_freq_factor=positive_number(parameters, "high_freq_factor"),
            )
        case RopeType.YARN:
            return _read_yarn(parameters, config, theta)


def _read_yarn(parameters: Section, config: Config, theta: float) -> RopeConfig:
    original = _original_length(parameters, config)
    factor = positive_number(parameters, "factor", positive_int(config, "max_position_embeddings") / original)
    if parameters.get("attention_factor") is not None:
        attention_factor = positive_number(parameters, "attention_factor")
    else:
        mscale, all_dim = (
            positive_number(parameters, key) if parameters.get(key) else None for key in ("mscale", "mscale_all_dim")
        )
        attention_factor = yarn_attention_factor(factor, mscale, all_dim)
    return RopeConfig(
        RopeType.YARN,
        theta,
        factor=factor,
        original_length=original,
        beta_fast=positive_number(parameters, "beta_fast", 32.0),
        beta_slow=positive_number(parameters, "beta_slow", 1.0),
        truncate=flag(parameters, "truncate", True),
        attention_factor=attention_factor,
    )


def _original_length(parameters: Section, config: Config) -> int:
    """The configuration's own field wins over the nested one, as in transformers."""
    key = "original_max_position_embeddings"
    if config.get(key) is not None:
        return positive_int(config, key)
    return positive_int(parameters, key, positive_int(config, "max_position_embeddings"))
