"""SmolLM 3: Llama in which every fourth layer does not encode positions."""

from dataclasses import replace

from ....lang.errors import ModelError
from ...layers.config_values import Config, flag, positive_int
from ...layers.rope import RopeConfig, RopeType
from ..decoder_config import DecoderConfig
from ..read_fields import FULL, SLIDING, layer_count, listed_kinds, read_decoder, read_layers

NO_ROPE = RopeConfig(RopeType.NONE, theta=1.0)


def read(config: Config) -> DecoderConfig:
    rotates = rotating_layers(config)
    slides = flag(config, "use_sliding_window", False) and config.get("sliding_window") is not None
    kinds = listed_kinds(config) or [SLIDING if slides and not rotated else FULL for rotated in rotates]
    if not slides:  # layers are listed by kind even where none has a window
        kinds = [FULL] * len(kinds)
    layers = tuple(
        layer if rotated else replace(layer, rope=NO_ROPE)
        for layer, rotated in zip(read_layers(config, kinds, default_theta=2_000_000.0), rotates, strict=True)
    )
    biased = flag(config, "attention_bias", False)
    return replace(
        read_decoder(config, layers, default_tied=True),
        qkv_bias=biased,
        output_bias=biased,
        mlp_bias=flag(config, "mlp_bias", False),
    )


def rotating_layers(config: Config) -> list[bool]:
    """Reads which layers encode positions: 1 in `no_rope_layers`, which are named for the others."""
    count, stated = layer_count(config), config.get("no_rope_layers")
    if stated is None:
        interval = positive_int(config, "no_rope_layer_interval", 4)
        return [(index + 1) % interval != 0 for index in range(count)]
    if not isinstance(stated, list) or len(stated) < count or not all(value in (0, 1) for value in stated):
        raise ModelError(f"configuration: no_rope_layers={stated!r}; write 1 (with positions) or 0 for {count} layers")
    return [bool(value) for value in stated[:count]]
