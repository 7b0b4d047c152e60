"""Rows times rows of a matrix: the loop of products in which reading the matrix is all that costs.

    row      [ · · · · | · · · · | … ]     BLOCK_K numbers at a time
    tile     [ · · · · | · · · · | … ]     BLOCK_N rows of the matrix, 16 bytes a load; the next numbers are on
             [ · · · · | · · · · | … ]     their way while these are multiplied

The first tile is read by the kernel itself, because it may be before the row is there (`early.py`). Sums are float32;
products of numbers of 16 bits are exact in it.
"""

import torch
import triton.language as tl

from .jit import block_of, jit


def depth_for(size: int, dtype: torch.dtype, warps: int) -> int:
    """BLOCK_K for rows of `size` numbers: what so many warps read at once, 16 bytes each thread.

    Then every thread has the same numbers of all rows of a tile, and the row reaches it without shared memory.
    """
    return min(warps * 512 // dtype.itemsize, block_of(size))


@jit
def weights_of_tile(at: tl.tensor, inside: tl.tensor, start: int, SIZE: tl.constexpr, BLOCK_K: tl.constexpr):  # type: ignore[no-untyped-def]
    """[BLOCK_N, BLOCK_K] numbers from `start` on.

    at: [BLOCK_N, BLOCK_K] of the first numbers; inside: [BLOCK_N, 1] rows that are there.
    """
    there = (tl.arange(0, BLOCK_K) < SIZE - start)[None, :]
    return tl.load(at + start, mask=inside & there, other=0.0)


@jit
def sums_of_rows(  # type: ignore[no-untyped-def]
    row: tl.tensor,
    at: tl.tensor,
    inside: tl.tensor,
    ahead: tl.tensor,
    SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """float32 [BLOCK_N]: each row of the matrix times its row.

    row: of the first numbers, [1, BLOCK_K] where all have the same row, [BLOCK_N, BLOCK_K] where each has its own.
    at, inside, ahead: of the matrix, as `weights_of_tile` takes and gives them.
    """
    total = tl.zeros([BLOCK_N, BLOCK_K], dtype=tl.float32)
    for start in range(0, SIZE, BLOCK_K):
        weights = ahead.to(tl.float32)
        ahead = weights_of_tile(at, inside, start + BLOCK_K, SIZE, BLOCK_K)
        there = (tl.arange(0, BLOCK_K) < SIZE - start)[None, :]
        numbers = tl.load(row + start, mask=there, other=0.0).to(tl.float32)
        total = tl.fma(weights, tl.broadcast_to(numbers, [BLOCK_N, BLOCK_K]), total)
    return tl.sum(total, axis=1)
