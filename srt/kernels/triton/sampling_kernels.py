"""The first pass of sampling: over chunks of the vocabulary, and over what they found. See `sampling.py`."""

import triton.language as tl

from .jit import jit
from .pdl import wait_for_previous_kernels
from .sampling_noise import NO_TOKEN, ROUNDING, most_noise, noise, token_hash
from .sampling_tiles import LINE, LOG2_E, SCANNED, allowed, read_tiles, tokens_of


@jit
def scan(  # type: ignore[no-untyped-def]
    logits: tl.tensor,
    rows: tl.tensor,
    mask_rows: tl.tensor,
    masks: tl.tensor,
    inverse_temperatures: tl.tensor,
    keys: tl.tensor,
    top_k: tl.tensor,
    top_p: tl.tensor,
    log_min_p: tl.tensor,
    counters: tl.tensor,  # [n, LINE] 0 before and after
    maxima: tl.tensor,  # [n, TILES] of the logits of tiles
    scores: tl.tensor,  # [n, TILES] bounds of the scores of tiles, by `most_noise`, less their maximum; or their masses
    roots: tl.tensor,  # [n, TILES]
    chosen: tl.tensor,  # [n] written for draws without limits
    stride: int,
    vocab: int,
    words: int,
    span: int,  # tiles of a program, which reads READ_TILES at once
    TILES: tl.constexpr,
    READ_TILES: tl.constexpr,
    TILE_BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_previous_kernels(PDL)
    draw = tl.program_id(1).to(tl.int64)
    row = logits + tl.load(rows + draw) * stride
    mask_row = tl.load(mask_rows + draw)
    inverse = tl.load(inverse_temperatures + draw)
    key = tl.load(keys + draw)
    p = tl.load(top_p + draw)
    open_to_all = (tl.load(top_k + draw) == 0) & (p >= 1.0) & (tl.load(log_min_p + draw) == -float("inf"))
    scale = scale_of(inverse)

    first = tl.program_id(0) * span
    end = first + span
    ids = tokens_of(first + tl.arange(0, READ_TILES))
    coming = tl.load(row + ids, mask=ids < vocab, other=-float("inf"))
    while first < end:
        # The next logits are on their way while these are computed with.
        tile = first + tl.arange(0, READ_TILES)
        values = allowed(coming, tile, masks, mask_row, words)
        ids = tokens_of(tile)
        first += READ_TILES
        next_ids = tokens_of(first + tl.arange(0, READ_TILES))
        coming = tl.load(row + next_ids, mask=next_ids < tl.where(first < end, vocab, 0), other=-float("inf"))
        largest = tl.max(values, axis=1, keep_dims=True)
        at = draw * TILES + tile[:, None]
        there = tile[:, None] < TILES
        tl.store(maxima + at, largest, mask=there)
        if inverse > 0:
            gap = values - tl.where(largest > -float("inf"), largest, 0.0)
            if open_to_all:
                # One operation; the definition's rounding is that of the exact score.
                most = tl.fma(gap, scale + tl.zeros_like(gap), most_noise(ids, key))
                tl.store(scores + at, tl.max(most, axis=1, keep_dims=True), mask=there)
            elif p < 1.0:
                half = tl.exp2(gap * (scale * 0.5))
                tl.store(scores + at, tl.sum(half * half, axis=1, keep_dims=True), mask=there)
                tl.store(roots + at, tl.sum(half, axis=1, keep_dims=True), mask=there)

    if (inverse == 0) | open_to_all:
        tl.debug_barrier()
        done = tl.atomic_add(counters + draw * LINE + SCANNED, 1, sem="acq_rel")
        if done == tl.num_programs(0) - 1:
            tl.store(counters + draw * LINE + SCANNED, 0)
            every = tl.arange(0, TILE_BLOCK)
            inside = every < TILES
            best = tl.load(maxima + draw * TILES + every, mask=inside, other=-float("inf"))
            top = tl.max(best)
            token = tl.full([], NO_TOKEN, tl.int32)
            if (top < float("inf")) & (top > -float("inf")):
                most = best
                if inverse > 0:
                    most = tl.load(scores + draw * TILES + every, mask=inside, other=-float("inf"))
                    most += tl.where(best > -float("inf"), best - top, 0.0) * scale
                token = winner_of_tiles(
                    row, vocab, masks, mask_row, words, inverse, key, most, top, TILES, TILE_BLOCK
                )  # fmt: skip
            tl.store(chosen + draw, tl.where(token == NO_TOKEN, -1, token).to(tl.int64))


@jit
def scale_of(inverse: tl.tensor):  # type: ignore[no-untyped-def]
    """1 / temperature in units of log 2; above 0, however hot it is: −∞ · 0 is not a number."""
    return tl.maximum(inverse.to(tl.float32), 1e-37) * LOG2_E


@jit
def winner_of_tiles(  # type: ignore[no-untyped-def]
    row: tl.tensor,
    vocab: int,
    masks: tl.tensor,
    mask_row: int,
    words: int,
    inverse: tl.tensor,
    key: int,
    most: tl.tensor,  # [TILE_BLOCK] bounds of the scores of tiles; at temperature 0 their largest logits
    largest: tl.tensor,
    TILES: tl.constexpr,
    TILE_BLOCK: tl.constexpr,
):
    """The token with the best score of a row, the first of equal ones; at temperature 0 a logit is its score.

    Tiles are read from the highest bound down, until none can have a score as good as the best: one, as a rule.
    """
    tile = tl.arange(0, TILE_BLOCK)
    best = tl.full([], -float("inf"), tl.float64)
    token = tl.full([], NO_TOKEN, tl.int32)
    reached = tl.full([], -float("inf"), tl.float32)  # the best score in the units of the bounds
    highest = tl.max(most)
    while (highest >= reached) & (highest > -float("inf")):
        at = tl.min(tl.where(most == highest, tile, TILE_BLOCK))
        one = at + tl.zeros([1], tl.int32)
        values = read_tiles(row, one, one < TILES, vocab, masks, mask_row, words)
        ids = tokens_of(one)
        scores = values.to(tl.float64)
        if inverse > 0:
            scores = scores * inverse + noise(token_hash(ids, key))
        score = tl.max(scores)
        first = tl.min(tl.where(scores == score, ids, NO_TOKEN))
        better = (score > best) | ((score == best) & (first < token))
        token = tl.where(better, first, token)
        best = tl.maximum(score, best)
        reached = best.to(tl.float32)
        if inverse > 0:
            none = largest.to(tl.float64) * inverse  # of the largest logit without noise; a huge one swallows noise
            reached = ((best - none - tl.abs(none) * 1e-15) * LOG2_E).to(tl.float32) - (32.0 + ROUNDING)
        most = tl.where(tile == at, -float("inf"), most)
        highest = tl.max(most)
    return token
