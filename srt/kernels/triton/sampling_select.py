"""The second pass of sampling, for draws with limits: copies of what can stay, and who wins among it."""

import triton.language as tl

from .jit import jit
from .pdl import wait_for_previous_kernels
from .sampling_noise import NO_TOKEN, noise, rough_noise, token_hash
from .sampling_search import best_of, packed_entries, winner
from .sampling_tiles import (
    COPIED,
    LINE,
    LOG2_E,
    SELECTED,
    SMALLEST,
    allowed,
    float_of,
    key_of,
    kth_bound,
    nucleus_bound,
    tokens_of,
)

_FEW = tl.constexpr(256)  # entries that are compared in pairs
_STEP = tl.constexpr(16)  # of them at once


@jit
def select(  # type: ignore[no-untyped-def]
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
    maxima: tl.tensor,  # [n, TILES]
    masses: tl.tensor,  # [n, TILES] of draws with top_p
    roots: tl.tensor,  # [n, TILES]
    packed: tl.tensor,  # [n, ROOM] scratch
    held: tl.tensor,  # [n, TILES] scratch
    chosen: tl.tensor,  # [n] written for draws with limits
    stride: int,
    vocab: int,
    words: int,
    part: int,  # tiles of a program, PART at most
    TILES: tl.constexpr,
    TILE_BLOCK: tl.constexpr,
    PART: tl.constexpr,
    READ_TILES: tl.constexpr,
    ROOM: tl.constexpr,
    READ: tl.constexpr,
    SOME: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_previous_kernels(PDL)
    draw = tl.program_id(1).to(tl.int64)
    inverse = tl.load(inverse_temperatures + draw)
    k = tl.load(top_k + draw)
    p = tl.load(top_p + draw)
    least = tl.load(log_min_p + draw)
    if (inverse > 0) & ((k > 0) | (p < 1.0) | (least > -float("inf"))):
        row = logits + tl.load(rows + draw) * stride
        mask_row = tl.load(mask_rows + draw)
        key = tl.load(keys + draw)
        own = packed + draw * ROOM
        first = draw * TILES
        low, largest, wanted = bounds_of(
            maxima + first, masses + first, roots + first, vocab, inverse, k, p, least, TILES, TILE_BLOCK
        )
        copy(
            row, vocab, masks, mask_row, words, maxima + first, tl.program_id(0) * part, part, low,
            counters + draw * LINE + COPIED, own, held + first, TILES, PART, READ_TILES, ROOM,
        )  # fmt: skip
        done = tl.atomic_add(counters + draw * LINE + SELECTED, 1, sem="acq_rel")
        if done == tl.num_programs(0) - 1:
            count = tl.load(counters + draw * LINE + COPIED)
            token = tl.full([], NO_TOKEN, tl.int32)  # of a row that is not sound: nothing is copied
            if (count <= _FEW) & (count <= ROOM):
                token = winner_of_few(own, count, low, largest, wanted, k, p, least, inverse, key)
            elif (count <= SOME) & (count <= ROOM) & ((k == 0) | (p >= 1.0)):
                token = winner_of_some(own, count, largest, wanted, k, p, least, inverse, key, SOME)
            else:
                copied = count <= ROOM
                size = tl.where(copied, count, vocab)
                token = winner(
                    row, vocab, masks, mask_row, words, own, size, copied,
                    low, largest, wanted, k, p, least, inverse, key, READ,
                )  # fmt: skip
            tl.store(chosen + draw, tl.where(token == NO_TOKEN, -1, token).to(tl.int64))
            tl.store(counters + draw * LINE + SELECTED, 0)
            tl.store(counters + draw * LINE + COPIED, 0)


@jit
def bounds_of(  # type: ignore[no-untyped-def]
    maxima: tl.tensor,
    masses: tl.tensor,
    roots: tl.tensor,
    vocab: int,
    inverse: tl.tensor,
    k: tl.tensor,
    p: float,
    log_min_p: float,
    TILES: tl.constexpr,
    TILE_BLOCK: tl.constexpr,
):
    """Of a row: a logit that all reach that stay, the largest, and the mass of a nucleus where there is no top_k.

    The first is no number where the row is not sound: nothing reaches it.
    """
    tile = tl.arange(0, TILE_BLOCK)
    best = tl.load(maxima + tile, mask=tile < TILES, other=-float("inf"))
    largest = tl.max(best)
    low = tl.full([], SMALLEST, tl.float32)
    wanted = tl.full([], 0.0, tl.float64)
    if k > 0:
        low = kth_bound(best, largest, k)
    # The mass of a nucleus is that of all top_k: where there is one, neither bounds the other.
    if (k == 0) | (p >= 1.0):
        reach = -log_min_p
        if p < 1.0:
            distances = (best - largest) * inverse.to(tl.float32)
            shares = tl.exp2(distances * LOG2_E) * tl.load(masses + tile, mask=tile < TILES, other=0.0)
            root_shares = tl.exp2(distances * (LOG2_E * 0.5)) * tl.load(roots + tile, mask=tile < TILES, other=0.0)
            total = tl.sum(shares.to(tl.float64))
            wanted = total * (p * (1.0 - 1e-6))
            # Below this, all tokens together have less than 1 − p of the best token's mass.
            far = tl.log(tl.cast(vocab, tl.float64)) - tl.log(1.0 - p)
            nucleus = nucleus_bound(
                distances, shares, root_shares,
                total.to(tl.float32), (total * (1.0 - p)).to(tl.float32), far.to(tl.float32),
            )  # fmt: skip
            reach = tl.minimum(reach, nucleus.to(tl.float64))
        end = (largest.to(tl.float64) - (reach * 1.000001 + 1e-6) / inverse).to(tl.float32)
        end = float_of(key_of(tl.maximum(end, SMALLEST)) - 1)  # the conversion may have rounded it upwards
        low = tl.maximum(low, tl.maximum(end, SMALLEST))
    sound = (largest < float("inf")) & (largest > -float("inf"))
    return tl.where(sound, low, float("nan")), largest, wanted


@jit
def copy(  # type: ignore[no-untyped-def]
    row: tl.tensor,
    vocab: int,
    masks: tl.tensor,
    mask_row: int,
    words: int,
    maxima: tl.tensor,
    first: int,
    part: int,
    low: float,
    copied: tl.tensor,  # how many entries there are
    packed: tl.tensor,
    held: tl.tensor,  # [TILES] scratch: those of each part that have what is copied
    TILES: tl.constexpr,
    PART: tl.constexpr,
    READ_TILES: tl.constexpr,
    ROOM: tl.constexpr,
):
    """Copy the tokens of `part` tiles whose logits are `low` at least, as many as there is room for, and count all."""
    tile = first + tl.arange(0, PART)
    end = tl.minimum(first + part, TILES)
    holds = tl.load(maxima + tile, mask=tile < end, other=-float("inf")) >= low
    tl.store(held + first + tl.cumsum(holds.to(tl.int32), axis=0) - 1, tile, mask=holds)
    number = tl.sum(holds.to(tl.int32))
    tl.debug_barrier()  # what one thread has written others are going to read, here and below
    begin = 0
    some = tl.load(held + first + tl.arange(0, READ_TILES), mask=tl.arange(0, READ_TILES) < number, other=TILES)
    ids = tokens_of(some)
    coming = tl.load(row + ids, mask=ids < vocab, other=-float("inf"))
    while begin < number:
        # The next logits are on their way while these look for places.
        values = allowed(coming, some, masks, mask_row, words)
        begin += READ_TILES
        place = begin + tl.arange(0, READ_TILES)
        some = tl.load(held + first + place, mask=place < number, other=TILES)
        next_ids = tokens_of(some)
        coming = tl.load(row + next_ids, mask=next_ids < vocab, other=-float("inf"))
        above = (values >= low).to(tl.int32)
        # One counter for the row: a program asks for places for all that it has read, not each thread for its own.
        numbers = tl.sum(above, axis=1)
        after = tl.cumsum(above, axis=1) + (tl.cumsum(numbers, axis=0) - numbers)[:, None]
        slots = tl.atomic_add(copied, tl.sum(numbers), sem="relaxed") + after - 1
        entry = (ids.to(tl.int64) << 32) | (values.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF)
        tl.store(packed + slots, entry, mask=(above > 0) & (slots < ROOM))
        ids = next_ids
    tl.debug_barrier()


@jit
def winner_of_few(  # type: ignore[no-untyped-def]
    packed: tl.tensor,
    count: int,
    low: float,
    largest: float,
    wanted: float,
    k: tl.tensor,
    p: float,
    log_min_p: float,
    inverse: tl.tensor,
    key: int,
):
    """`winner` where there are few entries: each is compared with each, and no pass waits for another."""
    scale = inverse.to(tl.float32)
    values, ids = packed_entries(packed, count, tl.arange(0, _FEW))
    floor = low
    if (k > 0) | (p < 1.0):
        numbers = tl.zeros([_FEW], tl.int32)  # of entries that are as large
        masses = tl.zeros([_FEW], tl.float64)  # of them
        begin = 0
        while begin < count:
            found, _ = packed_entries(packed, count, begin + tl.arange(0, _STEP))
            weights = tl.exp((found - largest) * scale).to(tl.float64)
            ahead = found[:, None] >= values[None, :]
            numbers += tl.sum(ahead.to(tl.int32), axis=0)
            masses += tl.sum(tl.where(ahead, weights[:, None], 0.0), axis=0)
            begin += _STEP
        if k > 0:
            floor = tl.max(tl.where(numbers >= k, values, low))
            wanted = tl.max(tl.where(values >= floor, masses, 0.0)) * (p * (1.0 - 1e-6))
        if p < 1.0:
            floor = tl.maximum(floor, tl.max(tl.where(masses >= wanted, values, low)))
    kept = (values >= floor) & (values > -float("inf"))
    kept = kept & ((values.to(tl.float64) - tl.cast(largest, tl.float64)) * inverse >= log_min_p)
    score = tl.where(kept, values.to(tl.float64) * inverse + noise(token_hash(ids, key)), -float("inf"))
    return tl.min(tl.where(score == tl.max(score), ids, NO_TOKEN))


@jit
def winner_of_some(  # type: ignore[no-untyped-def]
    packed: tl.tensor,
    count: int,
    largest: float,
    wanted: float,
    k: tl.tensor,
    p: float,
    log_min_p: float,
    inverse: tl.tensor,
    key: int,
    SOME: tl.constexpr,
):
    """`winner` where one read holds all entries, and not both top_k and top_p limit them: they stay in registers."""
    values, ids = packed_entries(packed, count, tl.arange(0, SOME))
    apart = values - largest
    stay = values > -float("inf")
    stay = stay & ((values.to(tl.float64) - tl.cast(largest, tl.float64)) * inverse >= log_min_p)
    scores = apart * (inverse.to(tl.float32) * LOG2_E) + rough_noise(token_hash(ids, key))
    scores = tl.where(stay, scores, -float("inf"))
    weights = tl.exp(apart * inverse.to(tl.float32))
    weights = tl.where(p < 1.0, weights, 1.0)
    full = tl.where(p < 1.0, wanted, k.to(tl.float64))
    token = tl.full([], NO_TOKEN, tl.int32)
    racing = True
    while racing:
        token, logit = best_of(values, ids, scores, inverse, key)
        above = tl.sum(tl.where(values > logit, weights, 0.0).to(tl.float64))
        # What does not stay takes those below it along.
        racing = ((k > 0) | (p < 1.0)) & (above >= full) & (above > 0.0)
        scores = tl.where(values > logit, scores, -float("inf"))
    return token
