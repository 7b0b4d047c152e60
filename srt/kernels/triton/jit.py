"""Wraps Triton's compiler in one typed decorator, so that the files of kernels are type-checked like all others.

Triton reads TRITON_INTERPRET when it is imported: with it, every kernel runs in the interpreter, on the CPU.
"""

from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl


# Any: what Triton makes of a function is launched as `kernel[grid](...)`, or called from another kernel.
def jit(function: Callable[..., Any]) -> Any:
    """Compiles a kernel, or a function that kernels call."""
    return triton.jit(function)


def block_of(size: int, *, least: int = 1) -> int:
    """Returns the smallest power of two of at least `size` and `least`: a valid size of a Triton block."""
    return max(least, 1 << (size - 1).bit_length())


FP8_LARGEST = tl.constexpr(448.0)  # of float8_e4m3fn, which has no infinity
_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@jit
def rounded(x: tl.tensor, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    """Rounds x, float32, to a dtype; for float8 x is at most FP8_LARGEST."""
    if _INTERPRETED:
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
    if _INTERPRETED:
        return tl.dot(left.to(tl.float32), right.to(tl.float32), total)
    return tl.dot(left, right, total, input_precision=PRECISION)
