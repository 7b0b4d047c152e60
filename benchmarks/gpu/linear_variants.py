"""Products of few rows as Llama 3 8B launches them: projections, the output map, gates; on Hopper they start early."""

import torch
from umbel.srt.kernels.triton.linear import (
    DEPTH,
    GATES,
    OUTPUTS,
    ROWS,
    SILU,
    STAGES,
    WARPS,
    depth_for,
    gate_row,
    multiply_few_rows,
    multiply_row,
)

from .variants import Variant

_HIDDEN, _WIDTH = 4096, 14336
_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def linear_variants() -> list[Variant]:
    found = [_linear("bf16", _HIDDEN), _linear("bf16", _WIDTH), _linear("fp32", _HIDDEN), _gate("bf16")]
    return found + [_rows(rows, gated=gated) for rows in (16, 32) for gated in (False, True)]


def _linear(dtype: str, inputs: int) -> Variant:
    return Variant(
        name=f"row {inputs} {dtype}",
        kernel=multiply_row,
        arguments={**dict.fromkeys(("x", "weight", "bias", "out"), f"*{dtype}"), "outputs": "i32"},
        constants={
            "INPUTS": inputs,
            "BIASED": False,
            "BLOCK_N": ROWS,
            "BLOCK_K": depth_for(inputs, _DTYPES[dtype], WARPS),
            "PDL": True,
        },
        aligned=frozenset({"outputs"}),
        warps=WARPS,
        fused=False,
    )


def _gate(dtype: str) -> Variant:
    return Variant(
        name=f"row gated {_HIDDEN} {dtype}",
        kernel=gate_row,
        arguments=dict.fromkeys(("x", "weight", "bias", "out"), f"*{dtype}"),
        constants={
            "INPUTS": _HIDDEN,
            "WIDTH": _WIDTH,
            "BIASED": False,
            "KIND": SILU.value,
            "BLOCK_N": GATES,
            "BLOCK_K": depth_for(_HIDDEN, _DTYPES[dtype], WARPS),
            "PDL": True,
        },
        warps=WARPS,
        fused=False,
    )


def _rows(rows: int, *, gated: bool) -> Variant:
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
            "BLOCK_N": OUTPUTS,
            "BLOCK_K": DEPTH,
            "PDL": True,
        },
        warps=WARPS,
        stages=STAGES,
        aligned=frozenset({"outputs", "x_stride", "out_stride"}),
        products=True,
        gathers=True,
        fused=False,
    )
