"""Gemma 3's text decoder: norms after attention and MLP too, and two kinds of layers with their own frequencies.

EmbeddingGemma has the same layers, whose rows see those after them, too. There the stated window is that of both sides.
"""

from dataclasses import replace

from ....lang.errors import ModelError
from ...attention.plan import BothWays, Window
from ...layers.config_values import Config, flag, positive_int, positive_number
from ..decoder_config import DecoderConfig, LayerConfig
from ..read_fields import FULL, SLIDING, layer_count, listed_kinds, read_rope_by_layer_type, read_windows
from .gemma import NORMS, read_cap, read_common


def read(config: Config) -> DecoderConfig:
    if config.get("attn_logit_softcapping"):
        raise ModelError("attn_logit_softcapping: Gemma 3 has none (Gemma 2 had); write null")
    return replace(
        read_common(config, _layers(config)),
        qk_norm=True,
        norms=NORMS,
        centered_norm=True,
        attention_scale=positive_number(config, "query_pre_attn_scalar", 256.0) ** -0.5,
        logit_softcap=read_cap(config, "final_logit_softcapping"),
    )


def _layers(config: Config) -> tuple[LayerConfig, ...]:
    kinds = listed_kinds(config)
    if kinds is None:
        pattern = positive_int(config, "sliding_window_pattern", 6)
        kinds = [FULL if (index + 1) % pattern == 0 else SLIDING for index in range(layer_count(config))]
    windows: list[Window] = list(read_windows(config, kinds))
    ropes = read_rope_by_layer_type(config)
    if flag(config, "use_bidirectional_attention", False):
        windows = [BothWays(window // 2 + 1 if isinstance(window, int) else None) for window in windows]
    return tuple(LayerConfig(window, ropes[kind]) for window, kind in zip(windows, kinds, strict=True))
