"""Tiles of logits: the part of a row that is read at once, and bounds for what can stay by what is known of tiles.

tile      128 tokens that lie side by side: 512 bytes in float32, which a warp reads in one instruction
maximum   of a tile's logits. Tokens above a bound lie in tiles whose maximum is above it: the others are not read
mass      Σ exp((logit − maximum) / temperature) of a tile
root      Σ exp((logit − maximum) / temperature / 2)
"""

import triton.language as tl

from .jit import jit

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
