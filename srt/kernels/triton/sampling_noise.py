"""The noise of gumbel.py in Triton: exactly, in float64, and roughly, where only a few tokens can win a race."""

import triton.language as tl
from triton import knobs
from triton.language.extra import libdevice

from .jit import jit

NO_TOKEN = tl.constexpr(2**31 - 1)  # larger than every token, so that the first of several is the smallest

# Of bounds of scores and sums with them, in units of log 2.
ROUNDING = tl.constexpr(1e-3)

# The interpreter knows no functions of the device.
_INTERPRETED = tl.constexpr(knobs.runtime.interpret)


@jit
def token_hash(ids: tl.tensor, key: int):  # type: ignore[no-untyped-def]
    """`draw.token_hash`: uint32. key: int64, the bits of draw_key."""
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
    """`draw.gumbel`, float64. 1 − (h + ½) · 2⁻³² is a float64, so its logarithm is log1p's: nothing is lost."""
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
    if _INTERPRETED:
        return tl.log2(x)
    else:
        return libdevice.fast_log2f(x)
