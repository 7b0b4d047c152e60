"""The text decoders of Gemma 3n and 4: keys that layers share, and per-layer embeddings.

Gemma 4's heads differ between layers. Gemma 3n has residual streams in parallel, and MLPs whose gates are mostly zero.
"""

from dataclasses import replace

from ....lang.errors import ModelError
from ...layers.config_values import Config, flag, positive_int, section
from ..decoder_config import DecoderConfig, LayerConfig, SideConfig, StreamsConfig
from ..read_fields import FULL, SLIDING, layer_count, listed_kinds, read_rope_by_layer_type, read_windows
from .gemma import NORMS, read_cap, read_common

ROPES = {
    SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
}
PATTERN = 6  # every sixth layer is full, unless layers are listed


def has_experts(config: Config) -> bool:
    """Returns whether layers have experts next to their MLP: such a model runs in transformers."""
    return bool(config.get("enable_moe_block"))


def read(config: Config) -> DecoderConfig:
    if config.get("use_bidirectional_attention") == "all":
        raise ModelError('use_bidirectional_attention="all" makes an encoder; load a text-generating Gemma 4')
    return replace(
        read_common(config, _layers(config)),
        qk_norm=True,
        value_norm=True,
        norms=NORMS,
        attention_scale=1.0,
        logit_softcap=read_cap(config, "final_logit_softcapping"),
        layer_scales=True,
        side=_side(config),
    )


def read_gemma3n(config: Config) -> DecoderConfig:
    widths = _by_layer(config, "intermediate_size")
    layers = _gemma3n_layers(config, widths)
    active, count = _number(config, "altup_active_idx", 1 << 10), positive_int(config, "altup_num_inputs", 4)
    if active >= count:
        raise ModelError(f"configuration: altup_active_idx={active} of altup_num_inputs={count}; write a number below")
    return replace(
        read_common({**config, "intermediate_size": widths[0]}, layers),
        qk_norm=True,
        value_norm=True,
        norms=NORMS,
        attention_scale=1.0,
        logit_softcap=read_cap(config, "final_logit_softcapping", 30.0),
        side=_side(config),
        streams=StreamsConfig(
            count,
            active,
            scaled=flag(config, "altup_correct_scale", True),
            residual_rank=positive_int(config, "laurel_rank", 64),
        ),
    )


def _gemma3n_layers(config: Config, widths: list[int]) -> tuple[LayerConfig, ...]:
    count = layer_count(config)
    kinds = listed_kinds(config) or [SLIDING if (index + 1) % 5 else FULL for index in range(count)]
    reads = _shared_keys(config, kinds, default=15)
    stated = config.get("activation_sparsity_pattern")
    parts = [0.95 if count > 10 and index < 10 else 0.0 for index in range(count)] if stated is None else stated
    numbers = isinstance(parts, list) and all(isinstance(part, int | float) and 0 <= part < 1 for part in parts)
    if not numbers or len(parts) != count:
        raise ModelError(f"activation_sparsity_pattern={stated!r}: write {count} numbers of at least 0 and below 1")
    ropes = read_rope_by_layer_type(config)
    windows = read_windows({"sliding_window": 512, **config}, kinds)
    return tuple(
        LayerConfig(window, ropes[kind], width=width, keys_of=source, sparsity=float(part))
        for window, kind, width, source, part in zip(windows, kinds, widths, reads, parts, strict=True)
    )


def _by_layer(config: Config, key: str) -> list[int]:
    """Reads a size of each layer, or one for all."""
    stated, count = config.get(key), layer_count(config)
    if not isinstance(stated, list):
        return [positive_int(config, key)] * count
    if len(stated) != count:
        raise ModelError(f"configuration: {key} lists {len(stated)} numbers; write one, or {count}")
    return [positive_int({key: size}, key) for size in stated]


def _shared_keys(config: Config, kinds: list[str], *, default: int) -> list[int | None]:
    """Reads which layer's keys each layer reads; None: its own."""
    count = len(kinds)
    shared = _number(config, "num_kv_shared_layers", count - 1, default=min(default, count - 1))
    last = {kind: index for index, kind in enumerate(kinds[: count - shared])}  # whose keys are shared
    if set(last) != set(kinds):
        raise ModelError(f"num_kv_shared_layers={shared}: no layer before those has keys of each kind; write fewer")
    return [last[kind] if index >= count - shared else None for index, kind in enumerate(kinds)]


def _layers(config: Config) -> tuple[LayerConfig, ...]:
    count = layer_count(config)
    kinds = listed_kinds(config) or [SLIDING if (index + 1) % PATTERN else FULL for index in range(count)]
    kinds[-1] = FULL  # as transformers has it, whatever is listed
    ropes = read_rope_by_layer_type({**config, "rope_parameters": config.get("rope_parameters") or ROPES})
    sources = _shared_keys(config, kinds, default=0)
    width = positive_int(config, "intermediate_size")
    doubled = 2 * width if flag(config, "use_double_wide_mlp", False) else None
    alike = flag(config, "attention_k_eq_v", False)
    layers = []
    for index, (window, kind) in enumerate(
        zip(read_windows({"sliding_window": 512, **config}, kinds), kinds, strict=True)
    ):
        head_dim, kv_heads = _shape(config, index, kind)
        reads = sources[index]
        layers.append(
            LayerConfig(
                window,
                ropes[kind],
                head_dim=head_dim,
                kv_heads=kv_heads,
                width=doubled if reads is not None else None,
                keys_of=reads,
                values_are_keys=alike and kind == FULL,
            )
        )
    return tuple(layers)


def _shape(config: Config, index: int, kind: str) -> tuple[int | None, int | None]:
    """Reads the head size and the key heads of a layer; None: those of the model."""
    own = section(config, "per_layer_config")
    if own:
        layer = section(own, str(index))
        if set(layer) - {"head_dim", "num_key_value_heads"}:
            raise ModelError(f"per_layer_config {layer!r}: write head_dim and num_key_value_heads only")
        head_dim, kv_heads = (
            positive_int(layer, key) if key in layer else None for key in ("head_dim", "num_key_value_heads")
        )
        return head_dim, kv_heads
    if kind != FULL:
        return None, None
    heads = None
    if flag(config, "attention_k_eq_v", False) and config.get("num_global_key_value_heads") is not None:
        heads = positive_int(config, "num_global_key_value_heads")
    return positive_int(config, "global_head_dim", 512), heads


def _side(config: Config) -> SideConfig | None:
    width = _number(config, "hidden_size_per_layer_input", 1 << 20, default=256)
    return SideConfig(width, positive_int(config, "vocab_size_per_layer_input", 262_144)) if width else None


def _number(config: Config, key: str, most: int, *, default: int = 0) -> int:
    """Reads a whole number that may be 0."""
    value = config.get(key)
    value = default if value is None else value
    return 0 if value == 0 and not isinstance(value, bool) else positive_int(config, key, default or 1, most=most)
