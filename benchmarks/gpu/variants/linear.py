"""Products of few rows as Llama 3 8B launches them: projections, the output map, gates; on Hopper they start early."""

import torch
from umbel.srt.kernels.triton.fitting import Room
from umbel.srt.kernels.triton.linear import SILU, depth_for, gate_row, multiply_few_rows, multiply_row, rows_tile
from umbel.srt.kernels.triton.low_rank import BLOCK_ROWS, changes_tile, low_rank_down, low_rank_up
from umbel.srt.kernels.triton.tuning import GroupedTile, RowsTile, RowTile, Tuning
from umbel.srt.layers.low_rank import TILE_OUTPUTS

from .variant import Variant

_HIDDEN, _WIDTH = 4096, 14336
_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def linear_variants(tuning: Tuning, room: Room) -> list[Variant]:
    row, changes = tuning.linear_row, changes_tile(64, torch.bfloat16, tuning.low_rank, room)
    found = [_linear("bf16", _HIDDEN, row), _linear("bf16", _WIDTH, row), _linear("fp32", _HIDDEN, row)]
    found += [_gate("bf16", tuning.linear_gate)]
    for count in (16, 32):
        tile = rows_tile(count, tuning.linear_rows, room)
        found += [_rows(count, tile, gated=gated) for gated in (False, True)]
    return [*found, _low_rank_down(64, changes), _low_rank_up(64, changes)]


def _low_rank_down(rank: int, tile: GroupedTile) -> Variant:
    return Variant(
        name=f"low rank {rank} down",
        kernel=low_rank_down,
        arguments={
            **dict.fromkeys(("x", "down", "hidden"), "*bf16"),
            "scales": "*fp32",
            **dict.fromkeys(("rows", "owners", "filled"), "*i32"),
            **dict.fromkeys(("x_stride", "count"), "i32"),
        },
        constants={"INPUTS": _HIDDEN, **_low_rank(rank), "BLOCK_K": tile.depth},
        aligned=frozenset({"x_stride"}),
        warps=tile.warps,
        stages=tile.stages,
        products=True,
        gathers=True,
        fused=False,
    )


def _low_rank_up(rank: int, tile: GroupedTile) -> Variant:
    return Variant(
        name=f"low rank {rank} up",
        kernel=low_rank_up,
        arguments={
            **dict.fromkeys(("hidden", "up", "out"), "*bf16"),
            **dict.fromkeys(("tiles", "rows", "owners", "filled"), "*i32"),
            **dict.fromkeys(("out_stride", "count"), "i32"),
        },
        constants={"OUTPUTS": _HIDDEN + 2 * 1024, **_low_rank(rank), "BLOCK_N": TILE_OUTPUTS},
        aligned=frozenset({"out_stride"}),
        warps=tile.warps,
        products=True,
        fused=False,
    )


def _low_rank(rank: int) -> dict[str, object]:
    """Queries, keys and values in one product."""
    return {"RANK": rank, "PARTS": 3, "PRECISION": "tf32", "BLOCK_M": BLOCK_ROWS}


def _linear(dtype: str, inputs: int, tile: RowTile) -> Variant:
    return Variant(
        name=f"row {inputs} {dtype}",
        kernel=multiply_row,
        arguments={**dict.fromkeys(("x", "weight", "bias", "out"), f"*{dtype}"), "outputs": "i32"},
        constants={
            "INPUTS": inputs,
            "BIASED": False,
            "BLOCK_N": tile.outputs,
            "BLOCK_K": depth_for(inputs, _DTYPES[dtype], tile.warps),
            "PDL": True,
        },
        aligned=frozenset({"outputs"}),
        warps=tile.warps,
        fused=False,
    )


def _gate(dtype: str, tile: RowTile) -> Variant:
    return Variant(
        name=f"row gated {_HIDDEN} {dtype}",
        kernel=gate_row,
        arguments=dict.fromkeys(("x", "weight", "bias", "out"), f"*{dtype}"),
        constants={
            "INPUTS": _HIDDEN,
            "WIDTH": _WIDTH,
            "BIASED": False,
            "KIND": SILU.value,
            "BLOCK_N": tile.outputs,
            "BLOCK_K": depth_for(_HIDDEN, _DTYPES[dtype], tile.warps),
            "PDL": True,
        },
        warps=tile.warps,
        fused=False,
    )


def _rows(rows: int, tile: RowsTile, *, gated: bool) -> Variant:
    return Variant(
        name=f"rows {rows} x {_HIDDEN}" + (" gated" if gated else ""),
        kernel=multiply_few_rows,
        arguments={
            **dict.fromkeys(("x", "weight", "bias", "out"), "*bf16"),
            **dict.fromkeys(("bound", "outputs", "x_stride", "out_stride"), "i32"),
        },
        constants={
            "INPUTS": _HIDDEN,
            "BIASED": False,
            "GATED": gated,
            "KIND": SILU.value,
            "BLOCK_M": rows,
            "BLOCK_N": tile.outputs,
            "BLOCK_K": tile.depth,
            "PDL": True,
        },
        warps=tile.warps,
        stages=tile.stages,
        aligned=frozenset({"outputs", "x_stride", "out_stride"}),
        products=True,
        gathers=True,
        fused=False,
    )
