"""EXAONE 4: norms after attention and MLP, normed heads; if some layers slide, the others do not encode positions."""

from dataclasses import replace

from ....lang.errors import ModelError
from ...layers.config_values import Config
from ..decoder_config import DecoderConfig
from ..read_fields import FULL, SLIDING, layer_count, listed_kinds, read_decoder, read_layers
from .olmo2 import NORMS
from .smollm3 import NO_ROPE


def read(config: Config) -> DecoderConfig:
    slides = config.get("sliding_window", 4096) is not None
    kinds = _kinds(config) if slides else [FULL] * layer_count(config)
    layers = tuple(
        replace(layer, rope=NO_ROPE) if slides and layer.window is None else layer
        for layer in read_layers(config, kinds)
    )
    return replace(read_decoder(config, layers, default_eps=1e-5), norms=NORMS, qk_norm=True)


def _kinds(config: Config) -> list[str]:
    """Reads the kinds of layers: as listed, else by a pattern, "LLLG" or the number of layers up to a full one."""
    kinds, pattern = listed_kinds(config), config.get("sliding_window_pattern", 4)
    if kinds is not None:
        return kinds
    if not isinstance(pattern, int) or pattern < 1:
        raise ModelError(f"configuration: sliding_window_pattern={pattern!r}; write layer_types, one for each layer")
    return [FULL if (index + 1) % pattern == 0 else SLIDING for index in range(layer_count(config))]
