"""The second pass of sampling, for draws with limits: copies what can stay, and finds the winner in several passes.

It finds where top_k and the nucleus of a row end. The entries of a row are the copy of those above a bound, or, where
the copy has not the room, all of its tokens:

    copied       packed[0 .. size): token · 2³² + the bits of its logit      size = how many there are
    not copied   the row's logits, with its mask                             size = vocab
"""

import triton.language as tl

from .jit import jit, wait_for_previous_kernels
from .sampling_kernels import (
    COPIED,
    LINE,
    LOG2_E,
    NO_TOKEN,
    SELECTED,
    SMALLEST,
    allowed,
    float_of,
    key_of,
    kth_bound,
    noise,
    nucleus_bound,
    rough_noise,
    token_hash,
    tokens_of,
)

_FEW = tl.constexpr(256)  # entries that are compared in pairs
_STEP = tl.constexpr(16)  # of them at once

# Rough scores are wrong by half of this at most, in units of log 2: where the best has little noise, by more.
_CLOSE = tl.constexpr(1.4e-3)
_FAR = tl.constexpr(1.4)
_LITTLE_NOISE = tl.constexpr(-2.2)


@jit
def margin_of(best: float):  # type: ignore[no-untyped-def]
    """Bounds the distance from the best rough score to the winner's. The largest logit has the score of its noise."""
    return tl.where(best < _LITTLE_NOISE, _FAR, _CLOSE)


@jit
def packed_entries(packed: tl.tensor, size: int, at: tl.tensor):  # type: ignore[no-untyped-def]
    """Logits and tokens of entries that are copied; −∞ and NO_TOKEN after the last one."""
    entry = tl.load(packed + at, mask=at < size, other=0)
    values = tl.where(at < size, entry.to(tl.int32).to(tl.float32, bitcast=True), -float("inf"))
    return values, tl.where(at < size, (entry >> 32).to(tl.int32), NO_TOKEN)


@jit
def entries(  # type: ignore[no-untyped-def]
    row: tl.tensor,
    vocab: int,
    masks: tl.tensor,
    mask_row: int,
    words: int,
    packed: tl.tensor,
    size: int,
    copied: tl.tensor,
    at: tl.tensor,
):
    """Logits and tokens of a block of a row's entries; −∞ after the last one."""
    if copied:
        values, ids = packed_entries(packed, size, at)
    else:
        there = at < vocab
        values = tl.load(row + at, mask=there, other=-float("inf")).to(tl.float32)
        if mask_row >= 0:
            bits = tl.load(masks + mask_row * words + at // 32, mask=there, other=0)
            values = tl.where(((bits >> (at % 32)) & 1) == 1, values, -float("inf"))
        ids = at
    return values, ids


@jit
def mass_above(  # type: ignore[no-untyped-def]
    row: tl.tensor,
    vocab: int,
    masks: tl.tensor,
    mask_row: int,
    words: int,
    packed: tl.tensor,
    size: int,
    copied: tl.tensor,
    low: float,
    largest: float,
    scale: float,
    READ: tl.constexpr,
):
    """Σ exp((value − largest) · scale) of the entries that are at least `low`, in float64; scale 0 counts them."""
    mass = tl.full([], 0.0, tl.float64)
    first = 0
    while first < size:
        at = first + tl.arange(0, READ)
        found, _ = entries(row, vocab, masks, mask_row, words, packed, size, copied, at)
        above = found >= low
        weights = tl.exp((tl.where(above, found, largest) - largest) * scale)
        mass += tl.sum(tl.where(above, weights, 0.0).to(tl.float64))
        first += READ
    return mass


@jit
def floor_of(  # type: ignore[no-untyped-def]
    row: tl.tensor,
    vocab: int,
    masks: tl.tensor,
    mask_row: int,
    words: int,
    packed: tl.tensor,
    size: int,
    copied: tl.tensor,
    low: float,
    largest: float,
    count: float,
    READ: tl.constexpr,
):
    """The largest logit that `count` entries reach, between low and largest; low where fewer do.

    Bisects the bits of float32s, which is at most 32 passes over the entries.
    """
    bottom = key_of(low).to(tl.int64)
    top = key_of(largest).to(tl.int64) + 1
    while top - bottom > 1:
        middle = bottom + ((top - bottom) >> 1)
        reached = mass_above(
            row, vocab, masks, mask_row, words, packed, size, copied, float_of(middle.to(tl.int32)), largest, 0.0, READ
        )
        bottom = tl.where(reached >= count, middle, bottom)
        top = tl.where(reached >= count, top, middle)
    return float_of(bottom.to(tl.int32))


@jit
def best_of(values: tl.tensor, ids: tl.tensor, scores: tl.tensor, inverse: tl.tensor, key: int):  # type: ignore[no-untyped-def]
    """The token with the best score of a block, and its logit: exactly, of those whose rough scores are close to best.

    NO_TOKEN and −∞ where no score is above −∞.
    """
    highest = tl.max(scores)
    close = (scores >= highest - margin_of(highest)) & (scores > -float("inf"))
    best = tl.full([], -float("inf"), tl.float64)
    token = tl.full([], NO_TOKEN, tl.int32)
    logit = tl.full([], -float("inf"), tl.float32)
    candidate = tl.min(tl.where(close, ids, NO_TOKEN))
    while candidate < NO_TOKEN:  # one, as a rule
        value = tl.max(tl.where(ids == candidate, values, -float("inf")))
        score = value.to(tl.float64) * inverse + noise(token_hash(candidate, key))
        better = score > best
        token = tl.where(better, candidate, token)
        logit = tl.where(better, value, logit)
        best = tl.maximum(score, best)
        candidate = tl.min(tl.where(close & (ids > candidate), ids, NO_TOKEN))
    return token, logit


@jit
def race(  # type: ignore[no-untyped-def]
    row: tl.tensor,
    vocab: int,
    masks: tl.tensor,
    mask_row: int,
    words: int,
    packed: tl.tensor,
    size: int,
    copied: tl.tensor,
    low: float,
    largest: float,
    inverse: tl.tensor,
    log_min_p: float,
    key: int,
    READ: tl.constexpr,
):
    """The token with the best score among the entries that are at least `low` and stay by min_p, and its logit."""
    best = tl.full([], -float("inf"), tl.float64)
    token = tl.full([], NO_TOKEN, tl.int32)
    logit = tl.full([], -float("inf"), tl.float32)
    first = 0
    while first < size:
        at = first + tl.arange(0, READ)
        found, ids = entries(row, vocab, masks, mask_row, words, packed, size, copied, at)
        kept = (found >= low) & (found > -float("inf"))
        apart = tl.where(kept, found, largest).to(tl.float64) - tl.cast(largest, tl.float64)
        kept = kept & (apart * inverse >= log_min_p)
        scores = apart.to(tl.float32) * (inverse.to(tl.float32) * LOG2_E) + rough_noise(token_hash(ids, key))
        scores = tl.where(kept, scores, -float("inf"))
        candidate, value = best_of(found, ids, scores, inverse, key)
        score = value.to(tl.float64) * inverse + noise(token_hash(candidate, key))
        better = (score > best) | ((score == best) & (candidate < token))
        token = tl.where(better, candidate, token)
        logit = tl.where(better, value, logit)
        best = tl.maximum(score, best)
        first += READ
    return token, logit


@jit
def winner(  # type: ignore[no-untyped-def]
    row: tl.tensor,
    vocab: int,
    masks: tl.tensor,
    mask_row: int,
    words: int,
    packed: tl.tensor,
    size: int,
    copied: tl.tensor,
    low: float,
    largest: float,
    wanted: float,
    k: tl.tensor,
    p: float,
    log_min_p: float,
    inverse: tl.tensor,
    key: int,
    READ: tl.constexpr,
):
    """The token with the best score of those that stay.

    The winner of a race stays if few enough, or little enough mass, lie above it. If it does not, neither do those
    below it, and the rest race again: that is rare, since a nucleus has most of the mass.

    Args:
        low: nothing below it stays.
        wanted: mass of the nucleus, if k is 0.
    """
    scale = inverse.to(tl.float32)
    if (k > 0) & (p < 1.0):
        low = floor_of(
            row, vocab, masks, mask_row, words, packed, size, copied, low, largest, k.to(tl.float64), READ
        )  # fmt: skip
        mass = mass_above(row, vocab, masks, mask_row, words, packed, size, copied, low, largest, scale, READ)
        wanted = mass * (p * (1.0 - 1e-6))
    token = tl.full([], NO_TOKEN, tl.int32)
    racing = True
    while racing:
        token, logit = race(
            row, vocab, masks, mask_row, words, packed, size, copied, low, largest, inverse, log_min_p, key, READ
        )
        low = float_of(key_of(tl.where(logit == 0.0, 0.0, logit)) + 1)  # the next float; what is after −0 is 0 again
        racing = False
        if (p < 1.0) | (k > 0):
            weighed = tl.where(p < 1.0, scale, 0.0)
            above = mass_above(row, vocab, masks, mask_row, words, packed, size, copied, low, largest, weighed, READ)
            racing = (above >= tl.where(p < 1.0, wanted, k.to(tl.float64))) & (above > 0.0)
    return token


@jit
def next_of(  # type: ignore[no-untyped-def]
    row: tl.tensor,
    vocab: int,
    packed: tl.tensor,
    size: int,
    copied: tl.tensor,
    above: float,
    last: int,
    READ: tl.constexpr,
):
    """The entry that comes after (above, last) when the largest come first, and of equal ones the smallest token."""
    best = tl.full([], -float("inf"), tl.float32)
    token = tl.full([], NO_TOKEN, tl.int32)
    first = 0
    while first < size:
        at = first + tl.arange(0, READ)
        found, tokens = entries(row, vocab, row, -1, 0, packed, size, copied, at)
        after = (found < above) | ((found == above) & (tokens > last))
        after = after & (found > -float("inf"))
        value = tl.max(tl.where(after, found, -float("inf")))
        candidate = tl.min(tl.where(after & (found == value), tokens, NO_TOKEN))
        better = (value > best) | ((value == best) & (candidate < token))
        token = tl.where(better, candidate, token)
        best = tl.maximum(value, best)
        first += READ
    return best, token


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
