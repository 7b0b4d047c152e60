"""Few tokens through their experts: two passes in which every pair of token and choice reads its expert for itself.

    gate_up    pair × columns: act(x Gᵀ) × (x Uᵀ) of the pair's expert
    down       token × columns: the k results of the token at once, times the router's weights, and their sum

Nothing is sorted by expert, nor are results written that the sum reads again: of the five passes of `moe.py` two are
left, and for one token they take little longer than reading its experts. Tokens that share an expert read it each, so
this is for so few pairs that hardly any do. What is rounded, and where, is as there.
"""

import torch
import triton
import triton.language as tl

from .activation import ACTIVATION_KINDS, activated
from .early import launched_early, wait_for_kernels_before
from .jit import block_of, jit
from .rounding import rounded
from .row_sums import depth_for, sums_of_rows, weights_of_tile

GATES = 4  # of a program, and as many ups
GATE_WARPS = 2
DOWN_ROWS = 8  # of a program: columns of all its choices
DOWN_WARPS = 4
_SHARE = 4  # with a fourth as many pairs as experts, one of eight pairs repeats an expert


def are_few(pairs: int, experts: int, top_k: int) -> bool:
    """Pairs of so few tokens that experts which several of them chose cost less than sorting; one token always is."""
    return pairs <= max(top_k, experts // _SHARE)


def few_through_experts(
    x: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    weights: torch.Tensor,
    experts: torch.Tensor,
    *,
    activation: str,
) -> torch.Tensor:
    """See `moe.fused_experts`, which has looked at the arguments."""
    tokens, hidden = x.shape
    width, top_k = gate_up.shape[1] // 2, experts.shape[1]
    pairs = tokens * top_k
    middle = torch.empty((pairs, width), dtype=x.dtype, device=x.device)
    out = torch.empty((tokens, hidden), dtype=x.dtype, device=x.device)
    early = launched_early(x.device)
    gate_up_pairs[(triton.cdiv(width, GATES), pairs)](
        *(x, gate_up, middle, experts, x.stride(0), top_k),
        WIDTH=width,
        HIDDEN=hidden,
        KIND=ACTIVATION_KINDS[activation],
        BLOCK_N=GATES,
        BLOCK_K=depth_for(hidden, x.dtype, GATE_WARPS),
        num_warps=GATE_WARPS,
        enable_fp_fusion=False,
        **early,
    )
    choices = block_of(top_k)
    columns = max(DOWN_ROWS // choices, 1)
    down_tokens[(triton.cdiv(hidden, columns), tokens)](
        *(middle, down, out, weights, experts),
        WIDTH=width,
        HIDDEN=hidden,
        TOP_K=top_k,
        CHOICES=choices,
        BLOCK_N=columns,
        BLOCK_K=depth_for(width, x.dtype, 1),  # a warp for each row, which has numbers of its own to meet
        num_warps=DOWN_WARPS,
        enable_fp_fusion=False,
        **early,
    )
    return out


@jit
def gate_up_pairs(  # type: ignore[no-untyped-def]
    x: tl.tensor,
    weight: tl.tensor,
    middle: tl.tensor,
    experts: tl.tensor,
    x_stride: int,
    top_k: int,
    WIDTH: tl.constexpr,
    HIDDEN: tl.constexpr,
    KIND: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EARLY: tl.constexpr,
):
    wait_for_kernels_before(EARLY)
    pair = tl.program_id(1).to(tl.int64)
    first = tl.program_id(0) * BLOCK_N
    number = tl.arange(0, 2 * BLOCK_N)  # gate 0, up 0, gate 1, up 1, …
    column = first + number // 2
    expert = tl.load(experts + pair).to(tl.int64)
    line = expert * (2 * WIDTH) + (number % 2) * WIDTH + column
    at = weight + line[:, None] * HIDDEN + tl.arange(0, BLOCK_K)[None, :]
    inside = (column < WIDTH)[:, None]
    ahead = weights_of_tile(at, inside, 0, HIDDEN, BLOCK_K)
    row = (x + pair // top_k * x_stride + tl.arange(0, BLOCK_K))[None, :]
    sums = sums_of_rows(row, at, inside, ahead, HIDDEN, 2 * BLOCK_N, BLOCK_K)
    gate, up = tl.split(tl.reshape(sums, [BLOCK_N, 2]))
    dtype: tl.constexpr = middle.dtype.element_ty
    acted = rounded(activated(rounded(gate, dtype).to(tl.float32), KIND), dtype).to(tl.float32)
    product = acted * rounded(up, dtype).to(tl.float32)
    own = first + tl.arange(0, BLOCK_N)
    tl.store(middle + pair * WIDTH + own, rounded(product, dtype), mask=own < WIDTH)


@jit
def down_tokens(  # type: ignore[no-untyped-def]
    middle: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    shares: tl.tensor,
    experts: tl.tensor,
    WIDTH: tl.constexpr,
    HIDDEN: tl.constexpr,
    TOP_K: tl.constexpr,
    CHOICES: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EARLY: tl.constexpr,
):
    token = tl.program_id(1).to(tl.int64)
    number = tl.arange(0, CHOICES * BLOCK_N)  # the columns of the first choice, those of the second, …
    choice = number // BLOCK_N
    column = tl.program_id(0) * BLOCK_N + number % BLOCK_N
    real = (choice < TOP_K) & (column < HIDDEN)
    pair = token * TOP_K + choice
    # Chosen before the gates were launched, and those have waited; past what this multiprocessor read in earlier steps.
    expert = tl.load(experts + pair, mask=real, other=0, cache_modifier=".cg").to(tl.int64)
    depth = tl.arange(0, BLOCK_K)[None, :]
    at, inside = weight + (expert * HIDDEN + column)[:, None] * WIDTH + depth, real[:, None]
    ahead = weights_of_tile(at, inside, 0, WIDTH, BLOCK_K)
    wait_for_kernels_before(EARLY)
    row = middle + tl.where(real, pair, 0)[:, None] * WIDTH + depth
    sums = sums_of_rows(row, at, inside, ahead, WIDTH, CHOICES * BLOCK_N, BLOCK_K)
    dtype: tl.constexpr = out.dtype.element_ty
    result = rounded(sums, dtype).to(tl.float32) * tl.load(shares + pair, mask=real, other=0.0).to(tl.float32)
    results = tl.reshape(rounded(result, dtype).to(tl.float32), [CHOICES, BLOCK_N])
    own = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    tl.store(out + token * HIDDEN + own, rounded(tl.sum(results, axis=0), dtype), mask=own < HIDDEN)
