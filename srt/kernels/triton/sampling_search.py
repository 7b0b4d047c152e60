"""Finds where top_k and the nucleus of a row end, and the winner among the remaining tokens, in several passes.

The entries of a row are the copy of those above a bound, or, where the copy has not the room, all of its tokens:

    copied       packed[0 .. size): token · 2³² + the bits of its logit      size = how many there are
    not copied   the row's logits, with its mask                             size = vocab
"""

import triton.language as tl

from .jit import jit
from .sampling_noise import NO_TOKEN, noise, rough_noise, token_hash
from .sampling_tiles import LOG2_E, float_of, key_of

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
