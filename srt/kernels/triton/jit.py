"""Where Triton's compiler is reached: one typed decorator, so that the files of kernels are checked like all others.

Triton reads TRITON_INTERPRET when it is imported: with it, every kernel runs in the interpreter, on the CPU.
"""

from collections.abc import Callable
from typing import Any

import triton


# Any: what Triton makes of a function is launched as `kernel[grid](...)`, or called from another kernel.
def jit(function: Callable[..., Any]) -> Any:
    """A kernel, or a function that kernels call."""
    return triton.jit(function)


def block_of(size: int, *, least: int = 1) -> int:
    """The smallest power of two that holds `size` elements, `least` at least: what a block of Triton can be."""
    return max(least, 1 << (size - 1).bit_length())
