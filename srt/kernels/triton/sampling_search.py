"""Where top_k and the nucleus of a row end, and who is left: passes over the tokens that can stay.

The entries of a row are the copy of those above a bound, or, where the copy has not the room, all of its tokens:

    copied       values[0 .. size), ids[0 .. size)           size = how many there are
    not copied   the row's logits, with its mask             size = vocab
"""

import triton.language as tl

from .jit import jit
from .sampling_noise import NO_TOKEN, read_logits, winner

_BOUNDS = tl.constexpr(8)  # logits between the largest and the bound that holds for every row


@jit
def key_of(value: float):  # type: ignore[no-untyped-def]
    """int32 in the order of float32s. Its own inverse, but for the types: `float_of`."""
    bits = tl.cast(value, tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@jit
def float_of(key: int):  # type: ignore[no-untyped-def]
    """The float32 that has this key."""
    return tl.where(key < 0, key ^ 0x7FFFFFFF, key).to(tl.int32).to(tl.float32, bitcast=True)


@jit
def best_of(best: tl.tensor, CHUNKS: tl.constexpr, CHUNK_BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """The best logit of a row's chunks, and whether something in it is not a number, or nothing may be chosen."""
    chunk = tl.arange(0, CHUNK_BLOCK)
    maxima = tl.load(best + chunk, mask=chunk < CHUNKS, other=-float("inf"))
    broken = tl.max((maxima != maxima).to(tl.int32))
    largest = tl.max(tl.where(maxima != maxima, -float("inf"), maxima))
    infinite = (largest == float("inf")) | (largest == -float("inf"))
    return largest, broken | infinite.to(tl.int32)


@jit
def kth_of(tiles: tl.tensor, k: int, TILES: tl.constexpr, TILE_BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """The k-th largest of the maxima of tiles: k tokens at least are as large. k ≤ TILES."""
    tile = tl.arange(0, TILE_BLOCK)
    maxima = tl.load(tiles + tile, mask=tile < TILES, other=-float("inf"))
    keys = key_of(maxima).to(tl.int64)
    low = tl.min(keys)
    high = tl.max(keys) + 1
    while high - low > 1:
        middle = low + ((high - low) >> 1)
        enough = tl.sum((keys >= middle).to(tl.int32)) >= k
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle)
    return float_of(low.to(tl.int32))


@jit
def nucleus_bound(  # type: ignore[no-untyped-def]
    row: tl.tensor,
    vocab: int,
    masks: tl.tensor,
    mask_row: int,
    words: int,
    tiles: tl.tensor,
    low: float,
    largest: float,
    scale: float,
    wanted: float,
    READ: tl.constexpr,
    TILE: tl.constexpr,
):
    """A logit above which the mass is `wanted`, closer to the nucleus than `low` where one pass can tell.

    `low` holds for every row, so in a flat one half of the vocabulary may lie above it.
    """
    numbers = tl.arange(0, _BOUNDS)
    bounds = largest - (largest - low) * ((numbers + 1).to(tl.float32) / (_BOUNDS + 1))
    masses = tl.zeros([_BOUNDS], dtype=tl.float64)
    tile = tl.arange(0, READ // TILE)
    first = 0
    while first < vocab:
        maxima = tl.load(tiles + first // TILE + tile, mask=first + tile * TILE < vocab, other=-float("inf"))
        if tl.max(maxima) >= low:
            found = read_logits(row, first + tl.arange(0, READ), vocab, masks, mask_row, words)
            weights = tl.exp((tl.where(found >= low, found, largest) - largest) * scale)
            above = found[:, None] >= bounds[None, :]
            masses += tl.sum(tl.where(above, weights[:, None], 0.0), axis=0).to(tl.float64)
        first += READ
    # Other sums than those of the search: what is enough here has to be enough there.
    return tl.max(tl.where(masses >= wanted * 1.00001, bounds, low))


@jit
def collect(  # type: ignore[no-untyped-def]
    row: tl.tensor,
    vocab: int,
    masks: tl.tensor,
    mask_row: int,
    words: int,
    tiles: tl.tensor,
    low: float,
    values: tl.tensor,
    ids: tl.tensor,
    CANDIDATES: tl.constexpr,
    READ: tl.constexpr,
    TILE: tl.constexpr,
):
    """Copy the tokens with logits of at least `low`, as many as there is room for. Returns how many there are."""
    count = 0
    first = 0
    tile = tl.arange(0, READ // TILE)
    while first < vocab:
        maxima = tl.load(tiles + first // TILE + tile, mask=first + tile * TILE < vocab, other=-float("inf"))
        if tl.max(maxima) >= low:
            at = first + tl.arange(0, READ)
            found = read_logits(row, at, vocab, masks, mask_row, words)
            above = (found >= low).to(tl.int32)
            place = count + tl.cumsum(above, axis=0) - 1
            fits = (above > 0) & (place < CANDIDATES)
            tl.store(values + place, found, mask=fits)
            tl.store(ids + place, at, mask=fits)
            count += tl.sum(above)
        first += READ
    tl.debug_barrier()  # what one thread has copied others are going to read
    return count


@jit
def _entries(  # type: ignore[no-untyped-def]
    row: tl.tensor,
    vocab: int,
    masks: tl.tensor,
    mask_row: int,
    words: int,
    values: tl.tensor,
    ids: tl.tensor,
    size: int,
    copied: tl.tensor,
    at: tl.tensor,
):
    """Values and tokens of a block of a row's entries; −∞ behind the last one."""
    if copied:
        found = tl.load(values + at, mask=at < size, other=-float("inf"))
        tokens = tl.load(ids + at, mask=at < size, other=NO_TOKEN)
    else:
        found = read_logits(row, at, vocab, masks, mask_row, words)
        tokens = at
    return found, tokens


@jit
def mass_above(  # type: ignore[no-untyped-def]
    row: tl.tensor,
    vocab: int,
    masks: tl.tensor,
    mask_row: int,
    words: int,
    values: tl.tensor,
    ids: tl.tensor,
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
        found, _ = _entries(row, vocab, masks, mask_row, words, values, ids, size, copied, at)
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
    values: tl.tensor,
    ids: tl.tensor,
    size: int,
    copied: tl.tensor,
    low: float,
    largest: float,
    scale: float,
    wanted: float,
    READ: tl.constexpr,
):
    """The largest logit at and above which the mass is `wanted`, between low and largest; low where it never is.

    Bisects the bits of float32s, which is at most 32 passes over the entries.
    """
    bottom = key_of(low).to(tl.int64)
    top = key_of(largest).to(tl.int64) + 1
    while top - bottom > 1:
        middle = bottom + ((top - bottom) >> 1)
        mass = mass_above(
            row, vocab, masks, mask_row, words, values, ids, size, copied,
            float_of(middle.to(tl.int32)), largest, scale, READ,
        )  # fmt: skip
        bottom = tl.where(mass >= wanted, middle, bottom)
        top = tl.where(mass >= wanted, top, middle)
    return float_of(bottom.to(tl.int32))


@jit
def race(  # type: ignore[no-untyped-def]
    row: tl.tensor,
    vocab: int,
    masks: tl.tensor,
    mask_row: int,
    words: int,
    values: tl.tensor,
    ids: tl.tensor,
    size: int,
    copied: tl.tensor,
    low: float,
    largest: float,
    inverse: float,
    log_min_p: float,
    key: int,
    READ: tl.constexpr,
):
    """The token with the best score among the entries that are at least `low` and stay by min_p."""
    best = tl.full([], -float("inf"), tl.float64)
    token = tl.full([], NO_TOKEN, tl.int32)
    first = 0
    while first < size:
        at = first + tl.arange(0, READ)
        found, tokens = _entries(row, vocab, masks, mask_row, words, values, ids, size, copied, at)
        above = (found >= low) & (found > -float("inf"))
        differences = tl.where(above, found, largest).to(tl.float64) - tl.cast(largest, tl.float64)
        score, candidate = winner(found, tokens, above & (differences * inverse >= log_min_p), largest, inverse, key)
        better = (score > best) | ((score == best) & (candidate < token))
        token = tl.where(better, candidate, token)
        best = tl.maximum(score, best)
        first += READ
    return token


@jit
def next_of(  # type: ignore[no-untyped-def]
    row: tl.tensor,
    vocab: int,
    values: tl.tensor,
    ids: tl.tensor,
    size: int,
    copied: tl.tensor,
    above: float,
    last: int,
    READ: tl.constexpr,
):
    """The entry that comes behind (above, last) when the largest come first, and of equal ones the smallest token."""
    best = tl.full([], -float("inf"), tl.float32)
    token = tl.full([], NO_TOKEN, tl.int32)
    first = 0
    while first < size:
        at = first + tl.arange(0, READ)
        found, tokens = _entries(row, vocab, row, -1, 0, values, ids, size, copied, at)
        behind = (found < above) | ((found == above) & (tokens > last))
        behind = behind & (found > -float("inf"))
        value = tl.max(tl.where(behind, found, -float("inf")))
        candidate = tl.min(tl.where(behind & (found == value), tokens, NO_TOKEN))
        better = (value > best) | ((value == best) & (candidate < token))
        token = tl.where(better, candidate, token)
        best = tl.maximum(value, best)
        first += READ
    return best, token
