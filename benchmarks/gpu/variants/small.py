"""Norms, heads and activations as models launch them."""

from dataclasses import replace

from umbel.srt.kernels.triton.fitting import Room
from umbel.srt.kernels.triton.jit import block_of
from umbel.srt.kernels.triton.linear import SILU, act_and_multiply_rows
from umbel.srt.kernels.triton.norm import add_and_normalise_rows, normalise_rows, warps_for
from umbel.srt.kernels.triton.rope import rope_and_store_heads
from umbel.srt.kernels.triton.tuning import Columns, HeadsTile, Tuning, WholeRow

from .variant import Variant


def small_variants(tuning: Tuning, room: Room) -> list[Variant]:
    row = tuning.norm
    found = [_norm(hidden, row) for hidden in (4096, 8192)]
    found += [_add_norm(4096, row, sandwich=False), _add_norm(2560, row, sandwich=True)]
    found += [_add_norm(4096, row, sandwich=False, scaled=True), _add_norm(4096, row, sandwich=True, normed=False)]
    found += [_act(dtype, tuning.linear_act) for dtype in ("bf16", "fp32")]
    few, many = tuning.rope.heads_of_few, tuning.rope.heads_of_many
    found += [
        _heads(64, tuning.rope, taken=few, normed=False, pool="bf16"),
        _heads(128, tuning.rope, taken=few, normed=True, pool="bf16"),
        _heads(128, tuning.rope, taken=many, normed=True, pool="bf16"),
        _heads(128, tuning.rope, taken=many, normed=False, pool="fp8e4nv"),
        _heads(256, tuning.rope, taken=many, normed=True, pool="bf16"),
        _heads(128, tuning.rope, taken=many, normed=False, pool="bf16", rotated=96),
        _heads(128, tuning.rope, taken=many, normed=False, pool="bf16", rotated=64, interleaved=True),
    ]
    return [replace(variant, fused=False) for variant in found]


def _norm(hidden: int, row: WholeRow) -> Variant:
    block = block_of(hidden)
    return Variant(
        name=f"norm {hidden} bf16",
        kernel=normalise_rows,
        arguments={
            **dict.fromkeys(("x", "weight", "out"), "*bf16"),
            **dict.fromkeys(("x_stride", "out_stride", "hidden"), "i32"),
            "eps": "fp32",
        },
        constants={"CENTERED": False, "BLOCK": block, "PDL": True},
        warps=warps_for(block, row),
        aligned=frozenset({"x_stride", "out_stride", "hidden"}),
    )


def _add_norm(hidden: int, row: WholeRow, *, sandwich: bool, scaled: bool = False, normed: bool = True) -> Variant:
    block = block_of(hidden)
    return Variant(
        name=f"add norm {hidden} bf16"
        + (" sandwich" if sandwich else "")
        + (" scaled" if scaled else "")
        + ("" if normed else " after only"),
        kernel=add_and_normalise_rows,
        arguments={
            **dict.fromkeys(("x", "residual", "weight", "after", "out"), "*bf16"),
            **dict.fromkeys(("x_stride", "residual_stride", "hidden"), "i32"),
            **dict.fromkeys(("eps", "scale"), "fp32"),
        },
        constants={
            "CENTERED": sandwich,
            "SANDWICH": sandwich,
            "SCALED": scaled,
            "NORMED": normed,
            "BLOCK": block,
            "PDL": True,
        },
        warps=warps_for(block, row),
        aligned=frozenset({"x_stride", "residual_stride", "hidden"}),
    )


def _act(dtype: str, tile: Columns) -> Variant:
    return Variant(
        name=f"act {dtype}",
        kernel=act_and_multiply_rows,
        arguments={**dict.fromkeys(("gate_up", "out"), f"*{dtype}"), "stride": "i32", "width": "i32"},
        constants={"KIND": SILU.value, "BLOCK": tile.columns, "PDL": True},
        warps=tile.warps,
        aligned=frozenset({"stride", "width"}),
    )


def _heads(
    head_dim: int,
    tile: HeadsTile,
    *,
    taken: int,
    normed: bool,
    pool: str,
    rotated: int | None = None,
    interleaved: bool = False,
) -> Variant:
    half = block_of(head_dim // 2)
    return Variant(
        name=f"heads d{head_dim} x{taken} bf16/{pool}" + (" normed" if normed else "") + _part(rotated, interleaved),
        kernel=rope_and_store_heads,
        arguments={
            **dict.fromkeys(("qkv", "table", "queries"), "*bf16"),
            **(dict.fromkeys(("query_weight", "key_weight"), "*bf16") if normed else {}),
            **dict.fromkeys(("positions", "slots"), "*i64"),
            **dict.fromkeys(("keys", "values"), f"*{pool}"),
            **dict.fromkeys(("qkv_stride", "slot_stride", "heads", "kv_heads"), "i32"),
            "eps": "fp32",
        },
        constants={
            **({} if normed else {"query_weight": None, "key_weight": None}),
            "value_weight": None,
            "QUERY_STEP": 1,
            "CENTERED": False,
            "FP8": pool == "fp8e4nv",
            "ROTATED": rotated or head_dim,
            "INTERLEAVED": interleaved,
            "HEAD_DIM": head_dim,
            "HALF_BLOCK": half,
            "HEADS_BLOCK": taken,
            "PDL": True,
        },
        warps=min(max(taken * half // tile.pairs, 1), tile.most_warps),
        aligned=frozenset({"qkv_stride", "slot_stride"}),
    )


def _part(rotated: int | None, interleaved: bool) -> str:
    return ("" if rotated is None else f" of {rotated}") + (" interleaved" if interleaved else "")
