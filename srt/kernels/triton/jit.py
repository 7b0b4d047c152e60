"""Wraps Triton's compiler in one typed decorator, so that the files of kernels are type-checked like all others.

Launches name what they pass, but for the tensors that a kernel is about: a name costs 0.06 µs of the 5 to 20 in which
Triton looks at the arguments, and a captured graph passes none.

Triton reads TRITON_INTERPRET when it is imported: with it, every kernel runs in the interpreter, on the CPU.

Programmatic dependent launch (PDL), from Hopper on: programs are there before the kernel in front of them is done.

    without     kernel 1 ─────────┤ drain, launch ├─ kernel 2 ─────────
    PDL         kernel 1 ─────────┤─ kernel 2 ─────────
                     └ programs of kernel 2 are there, their first weights on their way

A kernel that is launched with PDL may read what no kernel writes, weights for one, before it waits. It reads and writes
nothing else before. Every program waits: only so is all that came before the kernel in front done, too.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


# Any: what Triton makes of a function is launched as `kernel[grid](...)`, or called from another kernel.
def jit(function: Callable[..., Any]) -> Any:
    """Compiles a kernel, or a function that kernels call."""
    return triton.jit(function)


def block_of(size: int, *, least: int = 1) -> int:
    """Returns the smallest power of two of at least `size` and `least`: a valid size of a Triton block."""
    return max(least, 1 << (size - 1).bit_length())


FP8_LARGEST = tl.constexpr(448.0)  # of float8_e4m3fn, which has no infinity
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@jit
def rounded(x: tl.tensor, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    """Rounds x, float32, to a dtype; for float8 x is at most FP8_LARGEST."""
    if INTERPRETED:
        if dtype == tl.bfloat16:
            bits = x.to(tl.uint32, bitcast=True)
            bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
            x = tl.where(x == x, bits.to(tl.float32, bitcast=True), x)
        elif dtype == tl.float8e4nv:
            power = (x.to(tl.uint32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
            step = tl.maximum(power, 0.015625) * 0.125  # between two neighbours: 3 bits after the first
            x = (x + step * 12582912.0) - step * 12582912.0  # ± 1.5 · 2²³ steps leave a whole number of them
    return x.to(dtype)


@jit
def multiplied(left: tl.tensor, right: tl.tensor, total: tl.tensor, PRECISION: tl.constexpr):  # type: ignore[no-untyped-def]
    """Computes total + left · right, in float32."""
    if INTERPRETED:
        return tl.dot(left.to(tl.float32), right.to(tl.float32), total)
    return tl.dot(left, right, total, input_precision=PRECISION)


CAPABILITY = (9, 0)  # of devices with PDL


# Any: a switch that the kernel is compiled for, and an option of the launch.
def pdl_options(device: torch.device) -> dict[str, Any]:
    """Options for the launch of a kernel that calls `wait_for_previous_kernels`, on devices of all kinds."""
    return {"PDL": True, "launch_pdl": True} if supports_pdl(device) else {"PDL": False}


@cache
def supports_pdl(device: torch.device) -> bool:
    if device.type != "cuda" or triton.knobs.runtime.interpret:
        return False
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= CAPABILITY


@jit
def wait_for_previous_kernels(PDL: tl.constexpr):  # type: ignore[no-untyped-def]
    """Waits until all that was launched before is done; from then on the kernel after this one may be there."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
