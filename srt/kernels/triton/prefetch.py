"""Weights on their way to the second level of the cache while a kernel that reads little runs: from Hopper on.

    | products of q, k, v | turn, store | attention of one row: memory has little to do | output map |
                             └ ask ────────► its weights come to the cache meanwhile ───────┘

Asking takes one instruction for each piece, and nobody waits for what comes. What does not fit beside the keys and
values that attention reads is not asked for: it would drive them out, or be driven out by them.
"""

from functools import cache

import torch
import triton.language as tl

from .early import can_launch_early
from .jit import jit

PIECE = tl.constexpr(16_384)  # bytes that are asked for at once
_SHARE = 0.75  # of the cache, for the weights and what is read before them


@cache
def cache_for_weights(device: torch.device) -> int:
    """Bytes of the cache that weights, and what is read before them, may take; 0 where nothing can be asked for."""
    if not can_launch_early(device):
        return 0
    return int(_SHARE * torch.cuda.get_device_properties(device).L2_cache_size)


@jit
def ask_for(weight: tl.tensor, size: int, first: int, step: int, TURNS: tl.constexpr, THREADS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The first `size` bytes behind `weight`: pieces `first`, `first` + `step` and so on, one for each thread."""
    piece = first + tl.arange(0, THREADS)
    for _ in tl.static_range(TURNS):
        there = (piece + 1).to(tl.int64) * PIECE <= size
        ask(weight.to(tl.int64) + tl.where(there, piece, 0).to(tl.int64) * PIECE, tl.where(there, PIECE, 0))
        piece += step


@jit
def ask(at: tl.tensor, size: tl.tensor):  # type: ignore[no-untyped-def]
    """at: int64, addresses that 16 divides; size: int32, bytes of each, a multiple of 16; of 0 nothing is asked for."""
    tl.inline_asm_elementwise(
        "{ .reg .pred there; setp.ne.s32 there, $2, 0;"
        " @there cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0; }",
        "=r,l,r",
        [at, size],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
