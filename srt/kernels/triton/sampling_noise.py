"""Reads of logits, and the race of a block of tokens: the noise of srt/draw.py in Triton."""

import triton.language as tl

from .jit import jit

NO_TOKEN = tl.constexpr(2**31 - 1)  # larger than every token, so that the first of several is the smallest

# Scores of a race in float32 are wrong by 10⁻⁴ at most, where they are near the best one: logarithms of the hardware
# are, with the noise of the hashes that they are worst for. What is this close is compared in float64.
_CLOSE = tl.constexpr(1e-3)
_LEAST = tl.constexpr(-3.2)  # below the score of the largest value, whose noise is draw.SMALLEST_NOISE at least


@jit
def read_logits(row: tl.tensor, ids: tl.tensor, vocab: int, masks: tl.tensor, mask_row: int, words: int):  # type: ignore[no-untyped-def]
    """The logits of tokens in float32; −∞ for those that are none, and those whose bit is not set."""
    there = ids < vocab
    values = tl.load(row + ids, mask=there, other=-float("inf")).to(tl.float32)
    if mask_row >= 0:
        bits = tl.load(masks + mask_row * words + ids // 32, mask=there, other=0)
        values = tl.where(((bits >> (ids % 32)) & 1) == 1, values, -float("inf"))
    return values


@jit
def winner(values: tl.tensor, ids: tl.tensor, kept: tl.tensor, largest: float, inverse: float, key: int):  # type: ignore[no-untyped-def]
    """Of a block's tokens that are kept: the best score, in float64, and the first token that has it.

    Args:
        values, ids, kept: blocks of one shape; ids are distinct where they are kept.
        largest: a value of the race, and none is above it.
        inverse: float64, 1 / temperature.
        key: int64, the bits of draw_key.

    Returns:
        (−∞, NO_TOKEN) where nothing can win.
    """
    hashes = _token_hash(ids, key)
    scores = tl.where(kept, (values - largest) * tl.cast(inverse, tl.float32) + _rough_noise(hashes), -float("inf"))
    close = scores >= tl.maximum(tl.max(scores) - _CLOSE, _LEAST)
    best = tl.full([], -float("inf"), tl.float64)
    token = tl.full([], NO_TOKEN, tl.int32)
    left = tl.sum(close.to(tl.int32))
    while left > 0:
        candidate = tl.min(tl.where(close, ids, NO_TOKEN))
        here = close & (ids == candidate)
        value = tl.max(tl.where(here, values, -float("inf")))
        number = tl.sum(tl.where(here, hashes, 0).to(tl.int64))
        score = value.to(tl.float64) * inverse + _noise(number)
        token = tl.where(score > best, candidate, token)
        best = tl.maximum(score, best)
        close = close & (ids != candidate)
        left -= 1
    return best, token


@jit
def _token_hash(ids: tl.tensor, key: int):  # type: ignore[no-untyped-def]
    """`draw.token_hash`: uint32."""
    bits = tl.cast(key, tl.uint64, bitcast=True)
    low = bits.to(tl.uint32)
    high = (bits >> 32).to(tl.uint32)
    h = ids.to(tl.uint32) ^ low
    h = (h ^ (h >> 17)) * 0xED5AD4BB
    h = (h ^ (h >> 11)) + high
    h = h * 0xAC4C1B51
    h = (h ^ (h >> 15)) * 0x31848BAB
    return h ^ (h >> 14)


@jit
def _noise(number: int):  # type: ignore[no-untyped-def]
    """`draw.gumbel` of one hash. 1 − (h + ½) · 2⁻³² is a float64, so its logarithm is log1p's: nothing is lost."""
    return -tl.log(-tl.log((4294967295.5 - tl.cast(number, tl.float64)) * 2.3283064365386963e-10))


@jit
def _rough_noise(hashes: tl.tensor):  # type: ignore[no-untyped-def]
    """The same in float32. −log(1 − u) is its series where u is so small that 1 − u would lose it."""
    u = (hashes.to(tl.float32) + 0.5) * 2.3283064365386963e-10
    rest = ((hashes ^ 0xFFFFFFFF).to(tl.float32) + 0.5) * 2.3283064365386963e-10  # 1 − u
    series = u * (1.0 + u * (0.5 + u * (0.3333333333333333 + u * 0.25)))
    return -tl.log(tl.where(u < 0.015625, series, -tl.log(tl.minimum(rest, 0.99))))
