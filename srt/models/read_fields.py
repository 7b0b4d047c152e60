"""Reads the fields that the configurations of several families have in common.

Configurations may be spelled as in transformers 4 (`rope_theta`, `rope_scaling`) or 5 (`rope_parameters`). A value that
the decoders do not implement is refused with a ModelError, never ignored. Defaults are those of transformers.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

from ...lang.errors import ModelError
from ..layers.config_values import MOST_LAYERS, MOST_POSITIONS, Config, flag, positive_int, positive_number, section
from ..layers.linear import ACTIVATIONS
from ..layers.rope import RopeConfig, RopeType, yarn_attention_factor
from .decoder_config import DecoderConfig, ExpertsConfig, LayerConfig

SLIDING, FULL = "sliding_attention", "full_attention"
CONTEXT_LENGTH = "runtime_context_length"  # the key under which a runtime puts its own context into a configuration

_GEMMA_SLIDING = ("rope_local_base_freq", 10_000.0)

# Any: a section of parsed JSON, whose values are checked when they are read.
Section = dict[str, Any]


def read_decoder(
    config: Config,
    layers: tuple[LayerConfig, ...],
    *,
    default_head_dim: int | None = None,
    default_eps: float = 1e-6,
    default_tied: bool = False,
    activation_key: str = "hidden_act",
    default_activation: str = "silu",
) -> DecoderConfig:
    """Reads a decoder like Llama's, without biases; a family replaces the fields in which it differs.

    Args:
        default_head_dim: None: the hidden size, divided by the heads.
    """
    heads = positive_int(config, "num_attention_heads")
    hidden_size = positive_int(config, "hidden_size")
    kv_heads = positive_int(config, "num_key_value_heads", heads)
    head_dim = positive_int(config, "head_dim", default_head_dim or hidden_size // heads)
    if heads % kv_heads:
        raise ModelError(f"num_attention_heads={heads} is not a multiple of num_key_value_heads={kv_heads}")
    if head_dim % 2:
        raise ModelError(f"head_dim={head_dim} is odd, so its dimensions cannot be turned in pairs")
    activation = str(config.get(activation_key) or default_activation)
    if activation not in ACTIVATIONS:
        raise ModelError(f"{activation_key} {activation!r} is not one of {', '.join(ACTIVATIONS)}")
    for layer in layers:
        _check_rotation(layer.rope, head_dim)
    return DecoderConfig(
        vocab_size=positive_int(config, "vocab_size"),
        context_length=_context_length(config, layers),
        hidden_size=hidden_size,
        intermediate_size=positive_int(config, "intermediate_size"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        layers=layers,
        activation=activation,
        norm_eps=positive_number(config, "rms_norm_eps", default_eps),
        tied=flag(config, "tie_word_embeddings", default_tied),
        attention_scale=float(head_dim) ** -0.5,
    )


def _context_length(config: Config, layers: tuple[LayerConfig, ...]) -> int:
    """Reads the context length, that of the runtime if it is shorter. With YaRN, max_position_embeddings often is the
    original length, which the factor extends."""
    stated = positive_int(config, "max_position_embeddings", most=MOST_POSITIONS)
    ropes = [layer.rope for layer in layers if layer.rope.type is RopeType.YARN]
    stretched = (int(min(rope.original_length * rope.factor, MOST_POSITIONS)) for rope in ropes)
    longest = max([stated, *stretched])
    return min(longest, positive_int(config, CONTEXT_LENGTH, longest))


def _check_rotation(rope: RopeConfig, head_dim: int) -> None:
    rotated = rope.rotated(head_dim)
    if rope.fraction > 1 or rotated % 2 or (rope.type is not RopeType.NONE and not rotated):
        raise ModelError(
            f"configuration: partial_rotary_factor={rope.fraction}; write a part of head_dim={head_dim} that is a "
            "number of pairs of dimensions"
        )
    if rope.type is RopeType.LONGROPE and len(rope.divisors) != rotated // 2:
        raise ModelError(
            f"configuration: short_factor or long_factor has {len(rope.divisors)} numbers; write {rotated // 2}, one "
            "for each pair of dimensions"
        )


# ------------------------------------------------------------------------------------------ layers


def layer_count(config: Config) -> int:
    return positive_int(config, "num_hidden_layers", most=MOST_LAYERS)


def listed_kinds(config: Config, known: Collection[str] = (SLIDING, FULL)) -> list[str] | None:
    """Reads `layer_types`, one of `known` for each layer; None: the configuration does not list them."""
    given, count = config.get("layer_types"), layer_count(config)
    if given is None:
        return None
    if not isinstance(given, list) or len(given) != count or any(kind not in known for kind in given):
        raise ModelError(f"layer_types {given!r}: write {count} times {' or '.join(map(repr, known))}")
    return list(given)


def read_windows(config: Config, kinds: Sequence[str]) -> list[int | None]:
    """Reads the window of each layer; None: the layer attends to everything."""
    return [positive_int(config, "sliding_window", 4096) if kind == SLIDING else None for kind in kinds]


def read_layers(
    config: Config,
    kinds: Sequence[str],
    *,
    default_theta: float = 10_000.0,
    default_fraction: float | None = None,
    experts: Sequence[ExpertsConfig | None] | None = None,
) -> tuple[LayerConfig, ...]:
    """Reads layers that share one set of frequencies.

    Args:
        default_fraction: of the dimensions of a head that are rotated; None: the family rotates whole heads.
        experts: of each layer; None: all MLPs are dense.
    """
    windows = read_windows(config, kinds)
    rope = read_rope(config, default_theta=default_theta, default_fraction=default_fraction)
    by_layer = experts or [None] * len(windows)
    return tuple(LayerConfig(window, rope, some) for window, some in zip(windows, by_layer, strict=True))


# ------------------------------------------------------------------------------------------ experts


def read_some_experts(config: Config, *, count: int, chosen: int, shared_width: int = 0) -> list[ExpertsConfig | None]:
    """Reads the experts of each layer, as Qwen's configurations spell them; None: the layer's MLP is dense."""
    experts = read_experts(
        config,
        width_key="moe_intermediate_size",
        count=count,
        chosen=chosen,
        renormalise=flag(config, "norm_topk_prob", False),
        rounded=True,
        shared_width=shared_width,
    )
    dense = config.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(isinstance(index, int) for index in dense):
        raise ModelError(f"configuration: mlp_only_layers={dense!r}; write a list of the numbers of layers")
    step = positive_int(config, "decoder_sparse_step", 1)
    return [experts if index not in dense and (index + 1) % step == 0 else None for index in range(layer_count(config))]


def read_experts(
    config: Config,
    *,
    width_key: str,
    count: int,
    chosen: int,
    renormalise: bool,
    rounded: bool = False,
    shared_width: int = 0,
) -> ExpertsConfig:
    """Reads one set of experts. `count` and `chosen`: the defaults of transformers."""
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


# ------------------------------------------------------------------------------------------ rotary embedding


def read_rope(config: Config, *, default_theta: float, default_fraction: float | None = None) -> RopeConfig:
    """Reads one set of frequencies for all layers: `rope_parameters`, or `rope_theta` and `rope_scaling`."""
    parameters = section(config, "rope_scaling") or section(config, "rope_parameters")
    theta = positive_number(config, "rope_theta", default_theta)
    fraction = positive_number(dict(config) | parameters, "partial_rotary_factor", default_fraction or 1.0)
    if default_fraction is None and fraction != 1.0:
        raise ModelError(f"partial_rotary_factor={fraction}: this family rotates whole heads")
    return replace(_read(parameters, config, theta=theta), fraction=fraction)


def read_rope_by_layer_type(
    config: Config, *, default_theta: float = 1_000_000.0, sliding_theta: tuple[str, float] = _GEMMA_SLIDING
) -> dict[str, RopeConfig]:
    """Reads Gemma 3's and OLMo 3's: full layers use `rope_theta` and `rope_scaling`, sliding layers a theta only.

    Args:
        default_theta: of full layers.
        sliding_theta: the key of the theta of sliding layers, and its default.
    """
    nested = section(config, "rope_parameters")
    if nested and not {"full_attention", "sliding_attention"} & set(nested):
        raise ModelError(
            f"rope_parameters {nested!r}: write them per layer type, "
            '{"full_attention": {...}, "sliding_attention": {...}}'
        )
    full = section(nested, "full_attention") | section(config, "rope_scaling")
    sliding = section(nested, "sliding_attention")
    return {
        "full_attention": _read(full, config, theta=positive_number(config, "rope_theta", default_theta)),
        "sliding_attention": _read(sliding, config, theta=positive_number(config, *sliding_theta)),
    }


def _read(parameters: Section, config: Config, *, theta: float) -> RopeConfig:
    name = parameters.get("rope_type") or parameters.get("type") or "default"
    known = {kind.value: kind for kind in RopeType if kind is not RopeType.NONE}
    kind = known.get(name) if isinstance(name, str) else None
    if kind is None:
        raise ModelError(
            f"rope_type {name!r} is not one of {', '.join(known)}; "
            "variants that depend on the length of the sequence cannot share cached keys"
        )
    theta = positive_number(parameters, "rope_theta", theta)
    match kind:
        case RopeType.NONE | RopeType.DEFAULT:
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
        case RopeType.PROPORTIONAL:
            fraction = positive_number(parameters, "partial_rotary_factor", 1.0)
            return RopeConfig(kind, theta, fraction=fraction, factor=positive_number(parameters, "factor", 1.0))
        case RopeType.LONGROPE:
            return _read_longrope(parameters, config, theta)


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


def _read_longrope(parameters: Section, config: Config, theta: float) -> RopeConfig:
    """Reads LongRoPE, which has factors for sequences within the original length and others for longer ones.

    One set is chosen for good, by the longest sequence that may come: keys in the cache keep their rotation. The long
    one is right for a context beyond the original length, and then also rotates short sequences.
    """
    stated, original = positive_int(config, "max_position_embeddings"), _original_length(parameters, config)
    factor = positive_number(parameters, "factor", stated / original)
    default = 1.0 if factor <= 1 or original < 2 else math.sqrt(1 + math.log(factor) / math.log(original))
    key = "long_factor" if min(stated, positive_int(config, CONTEXT_LENGTH, stated)) > original else "short_factor"
    divisors = parameters.get(key)
    if not isinstance(divisors, list):
        raise ModelError(f"configuration: {key}={divisors!r}; write a list of positive numbers")
    return RopeConfig(
        RopeType.LONGROPE,
        theta,
        factor=factor,
        original_length=original,
        divisors=tuple(positive_number({key: divisor}, key) for divisor in divisors),
        attention_factor=positive_number(parameters, "attention_factor", default),
    )


def _original_length(parameters: Section, config: Config) -> int:
    """Reads the original length. The configuration's own field precedes the nested one, as in transformers."""
    key = "original_max_position_embeddings"
    if config.get(key) is not None:
        return positive_int(config, key)
    return positive_int(parameters, key, positive_int(config, "max_position_embeddings"))
