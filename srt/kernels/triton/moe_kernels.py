"""The five passes of a mixture of experts. `moe.py` draws what goes from one to the next."""

import triton.language as tl

from .activation import activated
from .jit import jit, multiplied, rounded
from .pdl import wait_for_previous_kernels


@jit
def route_tokens(  # type: ignore[no-untyped-def]
    logits: tl.tensor,
    weights: tl.tensor,
    chosen: tl.tensor,
    stride: int,
    experts: int,
    TOP_K: tl.constexpr,
    RENORMALISE: tl.constexpr,
    CHOICES: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_previous_kernels(PDL)
    token = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, BLOCK)
    choice = tl.arange(0, CHOICES)
    values = tl.load(logits + token * stride + expert, mask=expert < experts, other=-float("inf")).to(tl.float32)
    left = tl.exp(values - tl.max(values, axis=0))
    left = left / tl.sum(left, axis=0)
    left = tl.where(expert < experts, left, -1.0)
    taken = tl.zeros([CHOICES], dtype=tl.float32)
    for choice_number in tl.static_range(TOP_K):
        winner = tl.minimum(tl.argmax(left, axis=0), experts - 1)  # logits that are no numbers choose some expert too
        taken = tl.where(choice == choice_number, tl.max(left, axis=0), taken)
        tl.store(chosen + token * TOP_K + choice_number, winner)
        left = tl.where(expert == winner, -1.0, left)
    if RENORMALISE:
        taken = taken / tl.sum(taken, axis=0)
    tl.store(weights + token * TOP_K + choice, taken, mask=choice < TOP_K)


@jit
def arrange_pairs(  # type: ignore[no-untyped-def]
    experts: tl.tensor,
    rows: tl.tensor,
    owners: tl.tensor,
    filled: tl.tensor,
    pairs: int,
    EXPERTS: tl.constexpr,
    BINS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TILE: tl.constexpr,
):
    expert = tl.program_id(0)
    counts = tl.zeros([BINS], dtype=tl.int32)
    first = 0
    while first < pairs:
        pair = first + tl.arange(0, TILE)
        counts += tl.histogram(tl.load(experts + pair, mask=pair < pairs, other=EXPERTS), BINS)
        first += TILE
    blocks = (counts + BLOCK_M - 1) // BLOCK_M
    bins = tl.arange(0, BINS)
    before = tl.sum(tl.where(bins < expert, blocks, 0), axis=0)
    own = tl.sum(tl.where(bins == expert, blocks, 0), axis=0)
    if expert == EXPERTS - 1:
        tl.store(filled, before + own)

    place = before * BLOCK_M
    first = 0
    while first < pairs:
        pair = first + tl.arange(0, TILE)
        mine = (tl.load(experts + pair, mask=pair < pairs, other=EXPERTS) == expert).to(tl.int32)
        tl.store(rows + place + tl.cumsum(mine, axis=0) - 1, pair, mask=mine > 0)
        place += tl.sum(mine, axis=0)
        first += TILE
    padding = place + tl.arange(0, BLOCK_M)
    tl.store(rows + padding, tl.full([BLOCK_M], 0, tl.int32) + pairs, mask=padding < (before + own) * BLOCK_M)
    first = 0
    while first < own:
        block = first + tl.arange(0, TILE)
        tl.store(owners + before + block, tl.full([TILE], 0, tl.int32) + expert, mask=block < own)
        first += TILE


@jit
def _place(blocks: int, columns: int, GROUP: tl.constexpr):  # type: ignore[no-untyped-def]
    """The block and the columns of this program: GROUP blocks side by side share each cut of the weights."""
    program = tl.program_id(0)
    group = program // (GROUP * columns)
    size = tl.minimum(blocks - group * GROUP, GROUP)
    within = program % (GROUP * columns)
    return group * GROUP + within % size, within // size


@jit
def gate_up_blocks(  # type: ignore[no-untyped-def]
    x: tl.tensor,
    weight: tl.tensor,
    middle: tl.tensor,
    rows: tl.tensor,
    owners: tl.tensor,
    filled: tl.tensor,
    x_stride: int,
    pairs: int,
    top_k: int,
    WIDTH: tl.constexpr,
    HIDDEN: tl.constexpr,
    KIND: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
):
    COLUMNS: tl.constexpr = (WIDTH + BLOCK_N - 1) // BLOCK_N
    blocks = tl.load(filled)
    if tl.program_id(0) < blocks * COLUMNS:
        block, columns = _place(blocks, COLUMNS, GROUP)
        dtype: tl.constexpr = middle.dtype.element_ty
        pair = tl.load(rows + block * BLOCK_M + tl.arange(0, BLOCK_M))
        expert = tl.load(owners + block).to(tl.int64)
        column = columns * BLOCK_N + tl.arange(0, BLOCK_N)
        depth = tl.arange(0, BLOCK_K)
        there = (pair < pairs)[:, None]
        inputs = x + (pair // top_k).to(tl.int64)[:, None] * x_stride + depth[None, :]
        gates = weight + expert * (2 * WIDTH * HIDDEN) + column[None, :] * HIDDEN + depth[:, None]
        gate = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
        up = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
        for start in range(0, HIDDEN, BLOCK_K):
            inside = depth < HIDDEN - start
            mask = (column < WIDTH)[None, :] & inside[:, None]
            left = tl.load(inputs + start, mask=there & inside[None, :], other=0.0)
            gate = multiplied(left, tl.load(gates + start, mask=mask, other=0.0), gate, PRECISION)
            ups = tl.load(gates + WIDTH * HIDDEN + start, mask=mask, other=0.0)
            up = multiplied(left, ups, up, PRECISION)
        acted = rounded(activated(rounded(gate, dtype).to(tl.float32), KIND), dtype).to(tl.float32)
        product = acted * rounded(up, dtype).to(tl.float32)
        at = pair.to(tl.int64)[:, None] * WIDTH + column[None, :]
        tl.store(middle + at, rounded(product, dtype), mask=there & (column < WIDTH)[None, :])


@jit
def down_blocks(  # type: ignore[no-untyped-def]
    middle: tl.tensor,
    weight: tl.tensor,
    mixed: tl.tensor,
    shares: tl.tensor,
    rows: tl.tensor,
    owners: tl.tensor,
    filled: tl.tensor,
    pairs: int,
    WIDTH: tl.constexpr,
    HIDDEN: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
):
    COLUMNS: tl.constexpr = (HIDDEN + BLOCK_N - 1) // BLOCK_N
    blocks = tl.load(filled)
    if tl.program_id(0) < blocks * COLUMNS:
        block, columns = _place(blocks, COLUMNS, GROUP)
        dtype: tl.constexpr = mixed.dtype.element_ty
        pair = tl.load(rows + block * BLOCK_M + tl.arange(0, BLOCK_M))
        expert = tl.load(owners + block).to(tl.int64)
        column = columns * BLOCK_N + tl.arange(0, BLOCK_N)
        depth = tl.arange(0, BLOCK_K)
        there = (pair < pairs)[:, None]
        inputs = middle + pair.to(tl.int64)[:, None] * WIDTH + depth[None, :]
        maps = weight + expert * (HIDDEN * WIDTH) + column[None, :] * WIDTH + depth[:, None]
        total = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
        for start in range(0, WIDTH, BLOCK_K):
            inside = depth < WIDTH - start
            left = tl.load(inputs + start, mask=there & inside[None, :], other=0.0)
            right = tl.load(maps + start, mask=(column < HIDDEN)[None, :] & inside[:, None], other=0.0)
            total = multiplied(left, right, total, PRECISION)
        share = tl.load(shares + pair, mask=pair < pairs, other=0.0).to(tl.float32)[:, None]
        at = pair.to(tl.int64)[:, None] * HIDDEN + column[None, :]
        result = rounded(total, dtype).to(tl.float32) * share
        tl.store(mixed + at, rounded(result, dtype), mask=there & (column < HIDDEN)[None, :])


@jit
def combine_pairs(  # type: ignore[no-untyped-def]
    mixed: tl.tensor, out: tl.tensor, hidden: int, TOP_K: tl.constexpr, BLOCK: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < hidden
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for choice in tl.static_range(TOP_K):
        place = mixed + (token * TOP_K + choice) * hidden + column
        total += tl.load(place, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + token * hidden + column, rounded(total, out.dtype.element_ty), mask=inside)
