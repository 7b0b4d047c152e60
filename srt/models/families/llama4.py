"""Llama 4's text decoder: chunks, layers without positions, and experts whose weights multiply what goes in."""

from dataclasses import replace

from ....lang.errors import ModelError
from ...attention.plan import Chunk
from ...layers.config_values import Config, flag, positive_int, positive_number
from ...layers.rope import QueryScale
from ..decoder_config import DecoderConfig, ExpertNames, LayerConfig, ProjectionNames, RouterScore
from ..read_fields import FULL, layer_count, read_decoder, read_experts, read_rope
from .smollm3 import NO_ROPE, rotating_layers

CHUNKED = "chunked_attention"
NAMES = ExpertNames(block="feed_forward", router="router", inputs_first=True)


def read(config: Config) -> DecoderConfig:
    width = positive_int(config, "intermediate_size")
    shape = {**config, "intermediate_size": positive_int(config, "intermediate_size_mlp", 16_384)}
    decoder = read_decoder(shape, _layers(config, width), default_head_dim=128, default_eps=1e-5)
    biased = flag(config, "attention_bias", False)
    return replace(decoder, qkv_bias=biased, output_bias=biased, projections=ProjectionNames(mlp="feed_forward"))


def _layers(config: Config, width: int) -> tuple[LayerConfig, ...]:
    rotates = rotating_layers({**config, "no_rope_layers": config.get("no_rope_layers") or None})
    rope = replace(read_rope(config, default_theta=500_000.0), interleaved=True)
    normed = flag(config, "use_qk_norm", True)
    scale = None
    if flag(config, "attn_temperature_tuning", True):
        length = positive_int(config, "floor_scale", 8192)
        scale = QueryScale(positive_number(config, "attn_scale", 0.1), length, offset=1)
    experts = replace(
        read_experts(config, width_key="intermediate_size", count=16, chosen=1, renormalise=False),
        scoring=RouterScore.SIGMOID,
        weigh_input=True,
        shared_width=width,
        shared_gated=False,
        names=NAMES,
    )
    sparse = _sparse_layers(config)
    return tuple(
        LayerConfig(
            _chunk(config) if kind == CHUNKED else None,
            rope if rotated else NO_ROPE,
            experts if index in sparse else None,
            query_scale=None if rotated else scale,
            bare_head_norm=normed and rotated,
        )
        for index, (kind, rotated) in enumerate(zip(_kinds(config, rotates), rotates, strict=True))
    )


def _kinds(config: Config, rotates: list[bool]) -> list[str]:
    given = config.get("layer_types")
    if given is None:
        return [CHUNKED if rotated else FULL for rotated in rotates]
    if not isinstance(given, list) or len(given) != len(rotates) or not set(given) <= {CHUNKED, FULL}:
        raise ModelError(f"layer_types {given!r}: write {len(rotates)} times {CHUNKED!r} or {FULL!r}")
    return given


def _chunk(config: Config) -> Chunk:
    if config.get("attention_chunk_size", 8192) is None:
        raise ModelError(f"attention_chunk_size=null: write a size, or {FULL!r} for all layers in layer_types")
    return Chunk(positive_int(config, "attention_chunk_size", 8192))


def _sparse_layers(config: Config) -> frozenset[int]:
    """Reads the numbers of the layers with experts: as listed, else every n-th."""
    stated, count = config.get("moe_layers"), layer_count(config)
    if stated is None:
        step = positive_int(config, "interleave_moe_layer_step", 1)
        return frozenset(range(step - 1, count, step))
    if not isinstance(stated, list) or not all(isinstance(index, int) for index in stated):
        raise ModelError(f"configuration: moe_layers={stated!r}; write a list of the numbers of layers")
    return frozenset(stated)
