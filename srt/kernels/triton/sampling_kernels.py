"""The first pass of sampling, over chunks of the vocabulary, and over what they found; see `sampling.py`.

    tile      128 tokens that lie side by side: 512 bytes in float32, which a warp reads in one instruction
    maximum   of a tile's logits. Tokens above a bound lie in tiles whose maximum is above it: the others are not read
    mass      Σ exp((logit − maximum) / temperature) of a tile
    root      Σ exp((logit − maximum) / temperature / 2)

The noise is that of gumbel.py: exactly, in float64, and roughly, where only a few tokens can win a race.
"""

import triton.language as tl
from triton.language.extra import libdevice

from .jit import INTERPRETED, jit, wait_for_previous_kernels

NO_TOKEN = tl.constexpr(2**31 - 1)  # larger than every token, so that the first of several is the smallest

# Of bounds of scores and sums with them, in units of log 2.
ROUNDING = tl.constexpr(1e-3)

TILE = tl.constexpr(128)
SMALLEST = tl.constexpr(-3.4028234663852886e38)  # of finite logits: −∞ is what may not be chosen
LOG2_E = tl.constexpr(1.4426950408889634)

LINE = tl.constexpr(32)  # counters of a draw: a line of the cache, so that draws do not wait for each other
SCANNED, SELECTED, COPIED = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)  # programs that are done; entries
_WAYS = tl.constexpr(8)  # bounds that are tried at once
_ROUNDS = tl.constexpr(2)  # each time between two of those before
_ROUNDING = tl.constexpr(2e-6)  # of sums in float32 of numbers that are not negative, as a part of them


@jit
def tokens_of(tile: tl.tensor):  # type: ignore[no-untyped-def]
    """[N, TILE] of tiles [N]."""
    return tile[:, None] * TILE + tl.arange(0, TILE)[None, :]


@jit
def read_tiles(  # type: ignore[no-untyped-def]
    row: tl.tensor,
    tile: tl.tensor,
    wanted: tl.tensor,
    vocab: int,
    masks: tl.tensor,
    mask_row: int,
    words: int,
):
    """Logits of tiles [N, TILE] in float32; −∞ for tokens that there are not, and those of tiles that are not wanted.

    A mask is applied as `allowed` does.
    """
    ids = tokens_of(tile)
    values = tl.load(row + ids, mask=wanted[:, None] & (ids < vocab), other=-float("inf"))
    return allowed(values, tile, masks, mask_row, words)


@jit
def allowed(values: tl.tensor, tile: tl.tensor, masks: tl.tensor, mask_row: int, words: int):  # type: ignore[no-untyped-def]
    """Logits as they were read in float32, −∞ for those that a mask forbids, if there is one.

    What is not a number becomes +∞, which no sound row has.
    """
    values = values.to(tl.float32)
    if mask_row >= 0:
        # A word for 32 tokens: a load for each token would decide how all tokens lie in the registers.
        word = tile[:, None] * (TILE // 32) + tl.arange(0, TILE // 32)[None, :]
        bits = tl.load(masks + mask_row * words + word, mask=word < words, other=0)
        bits = (bits[:, :, None] >> tl.arange(0, 32)[None, None, :]) & 1
        values = tl.where(tl.reshape(bits, values.shape) == 1, values, -float("inf"))
    return tl.where(values != values, float("inf"), values)


@jit
def key_of(value: float):  # type: ignore[no-untyped-def]
    """int32 in the order of float32s. Its own inverse, but for the types: `float_of`."""
    bits = tl.cast(value, tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@jit
def float_of(key: int):  # type: ignore[no-untyped-def]
    """Returns the float32 that has this key."""
    return tl.where(key < 0, key ^ 0x7FFFFFFF, key).to(tl.int32).to(tl.float32, bitcast=True)


@jit
def kth_bound(maxima: tl.tensor, largest: float, k: int):  # type: ignore[no-untyped-def]
    """A logit that k tokens at least reach, since the maxima of k tiles do; SMALLEST where so many have none."""
    bottom = tl.min(tl.where(maxima > -float("inf"), maxima, float("inf")))
    width = (largest - bottom) / _WAYS
    low = tl.full([], SMALLEST, tl.float32)
    for _ in range(_ROUNDS):
        bounds = bottom + width * tl.arange(0, _WAYS).to(tl.float32)
        counts = tl.sum((maxima[None, :] >= bounds[:, None]).to(tl.int32), axis=1)
        low = tl.max(tl.where(counts >= k, bounds, low))
        bottom = tl.maximum(bottom, low)
        width = width / _WAYS
    return low


@jit
def nucleus_bound(  # type: ignore[no-untyped-def]
    maxima: tl.tensor,
    masses: tl.tensor,
    roots: tl.tensor,
    total: float,
    rest: float,
    reach: float,
):
    """Bounds the distance from the best logit to the end of a nucleus, in units of the temperature.

    With a token's x = (logit − best) / temperature, the tokens of a tile below y have at most the mass of all of them,
    if its maximum is below y; otherwise that of the others, and each of those less than exp(y), and all together less
    than Σ exp(x / 2) · exp(y / 2). The largest y is looked for below which all tiles have at most `rest`.

    Args:
        maxima: x of the best token of each tile.
        masses, roots: of tiles, as parts of the best token's.
        total: mass of all.
        rest: the mass that the nucleus need not have.
        reach: distance that is far enough in any case.
    """
    others = masses - tl.exp(maxima)
    root_others = roots - tl.exp(maxima * 0.5)
    bottom = -reach
    width = reach / _WAYS
    for _ in range(_ROUNDS):
        bounds = bottom + width * tl.arange(0, _WAYS).to(tl.float32)
        halves = tl.exp(bounds * 0.5)
        most = tl.minimum(others[None, :], (halves * halves)[:, None] * (TILE - 1))
        most = tl.minimum(most, root_others[None, :] * halves[:, None])
        below = tl.sum(tl.where(maxima[None, :] < bounds[:, None], masses[None, :], most), axis=1)
        enough = below * 1.0001 + total * _ROUNDING <= rest
        bottom = tl.max(tl.where(enough, bounds, bottom))
        width = width / _WAYS
    return -bottom + 1e-4  # exponentials round, too


@jit
def token_hash(ids: tl.tensor, key: int):  # type: ignore[no-untyped-def]
    """`gumbel.token_hash`: uint32. key: int64, the bits of draw_key."""
    h = _unfinished_hash(ids, key)
    return h ^ (h >> 14)


@jit
def _unfinished_hash(ids: tl.tensor, key: int):  # type: ignore[no-untyped-def]
    bits = tl.cast(key, tl.uint64, bitcast=True)
    h = ids.to(tl.uint32) ^ bits.to(tl.uint32)
    h = (h ^ (h >> 17)) * 0xED5AD4BB
    # (h ^ h >> 11 + high half) · factor: the half's product is one number for all tokens, and added for nothing.
    h = (h ^ (h >> 11)) * 0xAC4C1B51 + (bits >> 32).to(tl.uint32) * 0xAC4C1B51
    return (h ^ (h >> 15)) * 0x31848BAB


@jit
def noise(hashes: tl.tensor):  # type: ignore[no-untyped-def]
    """`gumbel.gumbel`, float64. 1 − (h + ½) · 2⁻³² is a float64, so its logarithm is log1p's: nothing is lost."""
    return -tl.log(-tl.log((4294967295.5 - hashes.to(tl.float64)) * 2.3283064365386963e-10))


@jit
def most_noise(ids: tl.tensor, key: int):  # type: ignore[no-untyped-def]
    """Bounds the noise of tokens from above, in units of log 2, less 32, up to `ROUNDING`: one hardware logarithm.

    −log(1 − u) is u at least, and hardly more for the small u of tokens that win among many. The last step of the hash
    changes it by a part of 2⁻¹⁴, and is left out.
    """
    return -_log2(_unfinished_hash(ids, key).to(tl.float32))


@jit
def rough_noise(hashes: tl.tensor):  # type: ignore[no-untyped-def]
    """The noise in units of log 2, less log₂(log 2), in float32: two logarithms of the hardware.

    Wrong by 0.0003 at most where it is above −2.8, and by 0.5 below: there 1 − u has few bits left. With u = h · 2⁻³²
    it is −log₂(−log₂(1 − u)), and for small u, where 1 − u would lose it, the inner logarithm is its series.
    """
    number = hashes.to(tl.float32)
    first = tl.fma(number, 3.3591075e-10, 1.6795538e-10)  # u · log₂ e, of the middle of u's interval
    series = tl.fma(first * 0.34657359, first, first)
    inner = -_log2(tl.fma(number, -2.3283063e-10, 1.0))  # the factor is less than 2⁻³²: the result is above 0
    return -_log2(tl.where(number < 33554432.0, series, inner))  # u < 2⁻⁷


@jit
def _log2(x: tl.tensor):  # type: ignore[no-untyped-def]
    """Of the hardware: wrong by 2⁻²², where tl.log2 is exact and takes twenty instructions."""
    if INTERPRETED:  # the interpreter knows no functions of the device
        return tl.log2(x)
    else:
        return libdevice.fast_log2f(x)


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
