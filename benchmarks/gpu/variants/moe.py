"""Mixture of experts as Mixtral 8x7B and Qwen 3 30B A3B launch it, and packed as gpt-oss 20B and Qwen 3 do."""

from dataclasses import replace

import torch
from umbel.srt.kernels.triton.fitting import Room
from umbel.srt.kernels.triton.jit import block_of
from umbel.srt.kernels.triton.linear import SILU, depth_for
from umbel.srt.kernels.triton.moe import (
    arrange_pairs,
    block_cut,
    code_cut,
    combine_pairs,
    down_blocks,
    down_tokens,
    gate_up_blocks,
    gate_up_pairs,
    route_tokens,
)
from umbel.srt.kernels.triton.quantized import BYTES, FLOAT4, NIBBLES, TABLE
from umbel.srt.kernels.triton.tuning import MoeTiles, RowTile, Tuning

from .variant import Variant

_MODELS = {"8x7B": (8, 2, 4096, 14336), "30B": (128, 8, 2048, 768)}  # experts, of a token, hidden, width
_FLOATS = {"scales": None, "zeros": None, "table": None, "CODES": None, "GROUPS": 1, "ZEROS": False}
# Name → choices, hidden, width, type of codes, kind, inputs of a group, zeros, type of scales.
_PACKED = {
    "mxfp4": (4, 2880, 2880, "*u8", FLOAT4.value, 32, False, "*u8"),
    "int4": (8, 2048, 768, "*u8", NIBBLES.value, 128, True, "*fp16"),
    "fp8": (8, 2048, 768, "*fp8e4nv", BYTES.value, 128, False, "*fp32"),
    "nf4": (8, 2048, 768, "*u8", TABLE.value, 64, False, "*fp32"),
}


def moe_variants(tuning: Tuning, room: Room) -> list[Variant]:
    cuts = {"decode": tuning.moe_decode, "middle": tuning.moe_middle, "prefill": tuning.moe_prefill}
    code_cuts = (tuning.moe_codes_decode, tuning.moe_codes_middle, tuning.moe_codes_prefill)
    gates, downs = tuning.moe_gate_pairs, tuning.moe_down_tokens
    found = []
    for model, (experts, top_k, hidden, width) in _MODELS.items():
        found += [_route(model, experts, top_k), _arrange(model, experts, tuning), _combine(model, top_k, tuning)]
        found += [_gate_up_few(model, hidden, width, gates), _down_few(model, top_k, hidden, width, downs)]
        for cut, wanted in cuts.items():
            tiles = block_cut(wanted, None, torch.bfloat16, room)
            found += [_gate_up(f"{model} {cut}", tiles, hidden, width), _down(f"{model} {cut}", tiles, hidden, width)]
    for name in _PACKED:
        found += [_packed_few_gate_up(name, tuning), _packed_few_down(name, tuning)]
        bits = 8 if _PACKED[name][4] == BYTES.value else 4
        for cut, wanted in zip(cuts, code_cuts, strict=True):
            tiles = block_cut(wanted, bits, torch.bfloat16, room)
            found += [_packed_gate_up(name, cut, tiles), _packed_down(name, cut, tiles)]
    return [replace(variant, fused=False) for variant in found]


def _route(name: str, experts: int, top_k: int) -> Variant:
    return Variant(
        name=f"route {name}",
        kernel=route_tokens,
        arguments={"logits": "*bf16", "weights": "*fp32", "chosen": "*i32", "stride": "i32", "experts": "i32"},
        constants={
            "TOP_K": top_k,
            "RENORMALISE": True,
            "CHOICES": block_of(top_k),
            "BLOCK": block_of(experts),
            "PDL": True,
        },
        warps=1,
    )


def _arrange(name: str, experts: int, tuning: Tuning) -> Variant:
    return Variant(
        name=f"arrange {name}",
        kernel=arrange_pairs,
        arguments={**dict.fromkeys(("experts", "rows", "owners", "filled"), "*i32"), "pairs": "i32"},
        constants={"EXPERTS": experts, "BINS": block_of(experts + 1), "BLOCK_M": 16, "TILE": tuning.moe_arrange.pairs},
        warps=tuning.moe_arrange.warps,
    )


def _combine(name: str, top_k: int, tuning: Tuning) -> Variant:
    return Variant(
        name=f"combine {name}",
        kernel=combine_pairs,
        arguments={"mixed": "*bf16", "out": "*bf16", "hidden": "i32"},
        constants={"TOP_K": top_k, "BLOCK": tuning.moe_combine.columns},
        warps=tuning.moe_combine.warps,
        aligned=frozenset({"hidden"}),
    )


def _gate_up(name: str, tiles: MoeTiles, hidden: int, width: int) -> Variant:
    return Variant(
        name=f"gate up {name}",
        kernel=gate_up_blocks,
        arguments={
            **dict.fromkeys(("x", "weight", "middle"), "*bf16"),
            **dict.fromkeys(("rows", "owners", "filled"), "*i32"),
            **dict.fromkeys(("x_stride", "pairs", "top_k"), "i32"),
        },
        constants={**_into(hidden, width), **_cut(tiles, tiles.columns)},
        warps=tiles.warps,
        stages=tiles.stages,
        aligned=frozenset({"x_stride"}),
        products=True,
        gathers=True,
    )


def _down(name: str, tiles: MoeTiles, hidden: int, width: int) -> Variant:
    return Variant(
        name=f"down {name}",
        kernel=down_blocks,
        arguments={
            **dict.fromkeys(("middle", "weight", "mixed"), "*bf16"),
            "shares": "*fp32",
            **dict.fromkeys(("rows", "owners", "filled"), "*i32"),
            "pairs": "i32",
        },
        constants={**_out(hidden, width), **_cut(tiles, 2 * tiles.columns)},
        warps=tiles.warps,
        stages=tiles.stages,
        products=True,
        gathers=True,
    )


def _gate_up_few(name: str, hidden: int, width: int, tile: RowTile) -> Variant:
    return Variant(
        name=f"few gate up {name}",
        kernel=gate_up_pairs,
        arguments={
            **dict.fromkeys(("x", "weight", "middle"), "*bf16"),
            "experts": "*i32",
            "x_stride": "i32",
            "top_k": "i32",
        },
        constants={
            **_into(hidden, width),
            "BLOCK_N": tile.outputs,
            "BLOCK_K": depth_for(hidden, torch.bfloat16, tile.warps),
            "SUB": 1,
            "PDL": True,
        },
        warps=tile.warps,
        aligned=frozenset({"x_stride"}),
    )


def _down_few(name: str, top_k: int, hidden: int, width: int, tile: RowTile) -> Variant:
    choices = block_of(top_k)
    return Variant(
        name=f"few down {name}",
        kernel=down_tokens,
        arguments={**dict.fromkeys(("middle", "weight", "out"), "*bf16"), "shares": "*fp32", "experts": "*i32"},
        constants={
            **_out(hidden, width),
            "TOP_K": top_k,
            "CHOICES": choices,
            "BLOCK_N": max(tile.outputs // choices, 1),
            "BLOCK_K": depth_for(width, torch.bfloat16, 1),
            "SUB": 1,
            "PDL": True,
        },
        warps=tile.warps,
    )


def _into(hidden: int, width: int) -> dict[str, object]:
    return {
        "WIDTH": width,
        "HIDDEN": hidden,
        "KIND": SILU.value,
        "GATED": True,
        "LIMIT": None,
        "ALPHA": 0.0,
        "bias": None,
        **_FLOATS,
    }


def _out(hidden: int, width: int) -> dict[str, object]:
    return {"WIDTH": width, "HIDDEN": hidden, "bias": None, **_FLOATS}


def _cut(tiles: MoeTiles, columns: int) -> dict[str, object]:
    return {
        "PRECISION": "tf32",
        "BLOCK_M": tiles.rows,
        "BLOCK_N": columns,
        "BLOCK_K": tiles.depth,
        "GROUP": tiles.group,
        "SUB": 1,
    }


def _packed(dense: Variant, name: str, inputs: int, depth: int) -> Variant:
    """Returns the variant of packed experts. depth: inputs at a time."""
    _, _, _, codes, kind, group, zeros, scales = _PACKED[name]
    pointers = {"weight": codes, "scales": scales, "zeros": "*i8" if zeros else scales, "table": "*fp32"}
    form = {"CODES": kind, "GROUPS": inputs // group, "ZEROS": zeros, "SUB": min(depth, group), "BLOCK_K": depth}
    constants = {key: value for key, value in dense.constants.items() if key not in pointers}
    if name == "mxfp4":  # gpt-oss
        pointers["bias"] = "*bf16"
        constants = {key: value for key, value in constants.items() if key != "bias"}
        constants |= {"LIMIT": 7.0, "ALPHA": 1.702} if "LIMIT" in constants else {}
    return replace(
        dense,
        name=f"packed {dense.name}",
        arguments={**dense.arguments, **pointers},
        constants={**constants, **form},
        gathers=False,  # of weights: they are widened in registers
    )


def _packed_gate_up(name: str, cut: str, tiles: MoeTiles) -> Variant:
    _, hidden, width, *_ = _PACKED[name]
    return _packed(_gate_up(f"{name} {cut}", tiles, hidden, width), name, hidden, tiles.depth)


def _packed_down(name: str, cut: str, tiles: MoeTiles) -> Variant:
    _, hidden, width, *_ = _PACKED[name]
    return _packed(_down(f"{name} {cut}", tiles, hidden, width), name, width, tiles.depth)


def _packed_few_gate_up(name: str, tuning: Tuning) -> Variant:
    _, hidden, width, *_ = _PACKED[name]
    cut = code_cut(2, hidden, tuning.moe_codes_pairs)
    dense = _gate_up_few(name, hidden, width, tuning.moe_gate_pairs)
    dense = replace(dense, constants={**dense.constants, "BLOCK_N": cut.columns}, warps=cut.warps)
    return _packed(dense, name, hidden, cut.depth)


def _packed_few_down(name: str, tuning: Tuning) -> Variant:
    choices, hidden, width, *_ = _PACKED[name]
    cut = code_cut(choices, width, tuning.moe_codes_pairs)
    dense = _down_few(name, choices, hidden, width, tuning.moe_down_tokens)
    dense = replace(dense, constants={**dense.constants, "BLOCK_N": cut.columns}, warps=cut.warps)
    return _packed(dense, name, width, cut.depth)
