"""The attention kernels as models launch them."""

import torch
from umbel.srt.attention.backend import AttentionGeometry
from umbel.srt.cache.kv_pool import FLOAT8, LayerKV
from umbel.srt.kernels.triton.attention import (
    HeadShape,
    Tile,
    attend_items,
    merge_parts,
    store_rows,
    tiles_for,
    unit_heads,
)
from umbel.srt.kernels.triton.attention_backend import item_constants, merge_constants, store_constants
from umbel.srt.kernels.triton.fitting import Room
from umbel.srt.kernels.triton.tuning import Tuning

from .variant import Variant

EXACT_SPILLS = 2048  # bytes, of both tiles in float32: products without tensor cores are there to be compared with
MEASURED = 256  # numbers of a head
SPILLS = 208  # bytes of tiles of more rows: smaller ones spill nothing and take longer, `many` of 256 twice as long
WIDE_SPILLS = 320  # of `some`, where items start and end: by the disassembler none are in the loops over keys
HUGE_SPILLS = 272  # of tiles of 64 vectors of 512 numbers: with fewer there are no warp groups

_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", FLOAT8: "fp8e4nv"}
_GEOMETRIES = (
    AttentionGeometry(32, 32, 128),
    AttentionGeometry(32, 8, 128),
    AttentionGeometry(32, 8, 64),
    AttentionGeometry(8, 4, 256),
)


def attention_variants(tuning: Tuning, room: Room) -> list[Variant]:
    """Attention on a class of devices. tuning: its numbers; room: its shared memory."""
    found = []
    for geometry in _GEOMETRIES:
        found += _items(tuning, room, geometry, torch.bfloat16, torch.bfloat16)
    eight = AttentionGeometry(32, 8, 128)
    found += _items(tuning, room, eight, torch.bfloat16, FLOAT8)
    found += _items(tuning, room, eight, torch.float16, torch.float16)
    found += _items(tuning, room, eight, torch.bfloat16, torch.bfloat16, softcap=50.0)
    found += _items(tuning, room, eight, torch.float32, torch.float32)
    found += _items(tuning, room, AttentionGeometry(32, 32, 96), torch.bfloat16, torch.bfloat16)
    found += _items(tuning, room, AttentionGeometry(64, 8, 64), torch.bfloat16, torch.bfloat16, sinks=True)  # gpt-oss
    found += _items(tuning, room, AttentionGeometry(16, 2, 512), torch.bfloat16, torch.bfloat16)  # Gemma 4
    for heads in (128, 20):  # DeepSeek V3, GLM 4.7 Flash
        layer = LayerKV(1, 576, 512, latent=True)
        geometry = AttentionGeometry(heads, 1, 576, latent=True)
        found += _items(tuning, room, geometry, torch.bfloat16, torch.bfloat16, layer=layer)
    for geometry in (AttentionGeometry(16, 16, 192), AttentionGeometry(64, 4, 192)):  # DeepSeek V2, MiMo V2 Flash
        layer = LayerKV(geometry.kv_heads, 192, 128)
        found += _items(tuning, room, geometry, torch.bfloat16, torch.bfloat16, sinks=geometry.group > 1, layer=layer)
    found += _items(tuning, room, AttentionGeometry(32, 32, 80), torch.bfloat16, torch.bfloat16)  # Phi 2
    stores = [_store(eight, kind, tuning) for kind in (torch.bfloat16, FLOAT8)]
    return [*found, _merge(eight, torch.bfloat16, tuning), *stores]


def _items(
    tuning: Tuning,
    room: Room,
    geometry: AttentionGeometry,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    *,
    softcap: float = 0.0,
    sinks: bool = False,
    layer: LayerKV | None = None,
) -> list[Variant]:
    tiles = tiles_for(geometry, dtype, kv_dtype, tuning=tuning, room=room)
    heads = HeadShape.of(geometry.heads, layer or _layer(geometry), unit_heads(geometry, dtype))
    query, key = f"*{_NAMES[dtype]}", f"*{_NAMES[kv_dtype]}"
    arguments = {
        **dict.fromkeys(("queries", "out"), query),
        **dict.fromkeys(("keys", "values"), key),
        **dict.fromkeys(("part_out", "part_lse"), "*fp32"),
        **dict.fromkeys(("counters", "bounds", "items", "slots", "merges", "ends", "kv_idx"), "*i32"),
        **dict.fromkeys(("query_stride", "out_stride"), "i32"),
        **dict.fromkeys(("scale", "inner_scale"), "fp32"),
        **({"sinks": "*fp32"} if sinks else {}),
    }
    shape = f"d{geometry.head_dim} group {geometry.group} {_NAMES[dtype]}"
    if kv_dtype is not dtype:
        shape += f"/{_NAMES[kv_dtype]}"
    if layer is not None and not layer.latent:
        shape += f" values d{layer.value_dim}"
    shape += " softcap" * (softcap > 0) + " sinks" * sinks + " latents" * heads.latent
    few, some, many = tiles.few, tiles.some, tiles.many
    launches = {"few": (few, None, few), "many": (None, many, many)}
    launches |= {"some": (None, some, some)} if some.apart else {"few and some": (few, some, some)}
    return [
        Variant(
            name=f"attend {kind} {shape}",
            kernel=attend_items,
            arguments=arguments,
            constants={
                **item_constants(heads, few, more, softcap=softcap, dtype=dtype),
                **({} if sinks else {"sinks": None}),
                "PDL": True,
            },
            warps=max(few.warps if few else 0, last.warps),
            stages=last.stages,
            aligned=frozenset({"query_stride", "out_stride"}),
            products=dtype is not torch.float32,
            gathers=True,
            registers=last.registers,
            spills=_spills(dtype, few, more, large=geometry.head_dim > MEASURED),
        )
        for kind, (few, more, last) in launches.items()
    ]


def _spills(dtype: torch.dtype, few: Tile | None, more: Tile | None, *, large: bool) -> int:
    """Returns the most bytes that a launch of these tiles may spill. large: its heads were not measured."""
    if dtype is torch.float32:
        return EXACT_SPILLS
    if large:
        return HUGE_SPILLS
    if few and more:
        return WIDE_SPILLS
    return SPILLS if more else 0


def _layer(geometry: AttentionGeometry) -> LayerKV:
    return LayerKV(geometry.kv_heads, geometry.head_dim, geometry.head_dim)


def _merge(geometry: AttentionGeometry, dtype: torch.dtype, tuning: Tuning) -> Variant:
    return Variant(
        name=f"merge d{geometry.head_dim} {_NAMES[dtype]}",
        kernel=merge_parts,
        arguments={
            **dict.fromkeys(("part_out", "part_lse"), "*fp32"),
            "out": f"*{_NAMES[dtype]}",
            **dict.fromkeys(("bounds", "merges"), "*i32"),
            "out_stride": "i32",
        },
        constants={
            **merge_constants(HeadShape.of(geometry.heads, _layer(geometry), geometry.group), tuning.attention_merge),
            "sinks": None,
            "PDL": True,
        },
        warps=tuning.attention_merge.warps,
        aligned=frozenset({"out_stride"}),
    )


def _store(geometry: AttentionGeometry, kv_dtype: torch.dtype, tuning: Tuning) -> Variant:
    constants = store_constants(_layer(geometry), kv_dtype, tuning.attention_store)
    return Variant(
        name=f"store d{geometry.head_dim} bf16/{_NAMES[kv_dtype]}",
        kernel=store_rows,
        arguments={
            **dict.fromkeys(("keys", "values"), "*bf16"),
            **dict.fromkeys(("key_pool", "value_pool"), f"*{_NAMES[kv_dtype]}"),
            "slots": "*i64",
            **dict.fromkeys(("key_stride", "value_stride"), "i32"),
        },
        constants=constants,
        warps=tuning.attention_store.warps,
        aligned=frozenset({"key_stride", "value_stride"}),
    )
