"""Products with packed matrices as Llama 3 8B launches them: 4 bits of AWQ and GPTQ, float8 in blocks, NF4."""

import torch
from umbel.srt.kernels.triton.fitting import Room
from umbel.srt.kernels.triton.quantized import (
    BYTES,
    NIBBLES,
    TABLE,
    codes_tile,
    multiply_codes_row,
    multiply_codes_rows,
    widen_codes,
)
from umbel.srt.kernels.triton.tuning import CodesRowTile, RowsTile, Tuning, WidenTile

from .variant import Variant

_HIDDEN = 4096
# Name → type of codes, kind, inputs of a group, zeros, type of scales.
_FORMATS = {
    "int4": ("*u8", NIBBLES.value, 128, True, "*fp16"),
    "int4 of 32": ("*u8", NIBBLES.value, 32, False, "*fp16"),
    "int8": ("*i8", BYTES.value, _HIDDEN, False, "*fp32"),
    "fp8": ("*fp8e4nv", BYTES.value, 128, False, "*fp32"),
    "nf4": ("*u8", TABLE.value, 64, False, "*fp32"),
}


def quantized_variants(tuning: Tuning, room: Room) -> list[Variant]:
    found = [_row(name, tuning.quantized_row) for name in _FORMATS]
    for name, (_, kind, *_) in _FORMATS.items():
        bits = 8 if kind == BYTES.value else 4
        for rows in (16, 64):
            found.append(_rows(name, rows, codes_tile(rows, bits, torch.bfloat16, tuning.quantized_rows, room)))
    return [*found, *(_widen(name, tuning.quantized_widen) for name in ("int4", "fp8"))]


def _row(name: str, tile: CodesRowTile) -> Variant:
    depth = tile.code_bytes * (1 if _FORMATS[name][1] == BYTES.value else 2)
    return Variant(
        name=f"codes row {name}",
        kernel=multiply_codes_row,
        arguments={"x": "*bf16", **_arguments(name), "outputs": "i32"},
        constants=_constants(name, tile.outputs, depth),
        warps=tile.warps,
        aligned=frozenset({"outputs"}),
        fused=False,
    )


def _rows(name: str, rows: int, tile: RowsTile) -> Variant:
    integers = dict.fromkeys(("bound", "outputs", "x_stride", "out_stride"), "i32")
    return Variant(
        name=f"codes rows {rows} {name}",
        kernel=multiply_codes_rows,
        arguments={"x": "*bf16", **_arguments(name), **integers},
        constants={**_constants(name, tile.outputs, tile.depth), "BLOCK_M": rows},
        warps=tile.warps,
        stages=tile.stages,
        aligned=frozenset({"outputs", "x_stride", "out_stride"}),
        products=True,
        fused=False,
    )


def _widen(name: str, tile: WidenTile) -> Variant:
    return Variant(
        name=f"codes widen {name}",
        kernel=widen_codes,
        arguments={**_arguments(name), "outputs": "i32"},
        constants=_constants(name, tile.outputs, tile.depth),
        warps=tile.warps,
        aligned=frozenset({"outputs"}),
        fused=False,
    )


def _arguments(name: str) -> dict[str, str]:
    codes, _, _, zeros, scales = _FORMATS[name]
    return {"codes": codes, "scales": scales, "zeros": "*i8" if zeros else scales, "table": "*fp32", "out": "*bf16"}


def _constants(name: str, outputs: int, depth: int) -> dict[str, object]:
    _, kind, group, zeros, _ = _FORMATS[name]
    return {
        "INPUTS": _HIDDEN,
        "GROUPS": _HIDDEN // group,
        "KIND": kind,
        "ZEROS": zeros,
        "BLOCK_N": outputs,
        "BLOCK_K": depth,
        "SUB": min(depth, group),
        "PDL": True,
    }
