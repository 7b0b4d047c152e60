"""Draws tokens with the Gumbel-max method: defines a request to sample, and the noise.

The score of a token is

    score(token) = logit · (1 / temperature) + g(seed, position, token)        in float64

and the token with the largest score is chosen, of equal ones the first. With independent standard Gumbel noise g this
gives every token the probability softmax(logits / temperature)[token]. top_k, top_p and min_p remove tokens before the
draw. The noise of the remaining ones is the same, so they win in proportion to their probabilities.

The noise is a function of (seed, position, token) only. So a text is the same alone, in a batch, and after a
retraction. And a kernel can compute logits in pieces: a token whose scaled logit plus `LARGEST_NOISE` stays below the
best score so far cannot win, and needs neither its noise nor its exact logit.

    key   = mix(mix(seed) ^ position)              64 bits, one for a draw; mix is splitmix64
    h     = token ^ low half of key                32 bits from here on, all arithmetic wraps around
    h     = (h ^ h >> 17) · 0xed5ad4bb
    h     = (h ^ h >> 11) + high half of key
    h     = h · 0xac4c1b51
    h     = (h ^ h >> 15) · 0x31848bab
    h     = h ^ h >> 14                            Wellons's triple32, with the other half of the key inside
    g     = −log(−log1p(−(h + ½) · 2⁻³²))          float64: small h is large noise

Two libraries may round a logarithm differently in its last bit. Scores are compared in float64, where that decides
nothing but ties closer than 10⁻¹⁵. `kernels/cpu/source/noise.h` is the same in C++.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...lang.errors import ParameterError
from ...lang.sampling import SamplingParams
from ..core.batch import Draws

_MASK = (1 << 64) - 1
_LARGEST_INT32 = 2**31 - 1

LARGEST_NOISE = 22.8739  # of h = 0, rounded up: −log(−log1p(−2⁻³³)) = 22.87385…
SMALLEST_NOISE = -3.13  # of the largest h, rounded down: −log(33 · log 2) = −3.12999…


class Limits(NamedTuple):
    """The sampling parameters that a draw uses, as numbers that fit the columns of Draws."""

    inverse_temperature: float
    top_k: int  # 0 = all
    top_p: float
    min_p: float

    @classmethod
    def of(cls, sampling: SamplingParams) -> "Limits":
        """Reads the sampling parameters. A top_k larger than any vocabulary keeps all tokens.

        Raises:
            ParameterError: a number with which nothing can be drawn.
        """
        temperature, top_p, min_p, top_k = sampling.temperature, sampling.top_p, sampling.min_p, sampling.top_k
        if not (0.0 <= temperature < math.inf and 0.0 < top_p <= 1.0 and 0.0 <= min_p <= 1.0):
            raise ParameterError(
                f"temperature={temperature}, top_p={top_p}, min_p={min_p}: no token can be drawn; write a temperature "
                "of at least 0, a top_p above 0 and up to 1, a min_p from 0 to 1"
            )
        if not isinstance(top_k, int):
            raise ParameterError(f"top_k={top_k!r} is no number of tokens; write an integer, -1 for all tokens")
        kept = 0 if top_k > _LARGEST_INT32 else max(top_k, 0)
        return cls(inverse_temperature(temperature), kept, top_p, min_p)


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """Requests one token from a row of logits.

    `counts` are the generated tokens with their occurrences, `prompt` the prompt's tokens (for the repetition
    penalty), `forbidden` the tokens that may not be chosen now. `position` is that of the new token.
    """

    row: int  # of the logits
    sampling: SamplingParams
    seed: int
    position: int
    counts: Mapping[int, int]
    prompt: NDArray[np.int32]
    forbidden: frozenset[int] = frozenset()
    mask: NDArray[np.uint32] | None = None  # as in Draws


def stack_draws(draws: Sequence[SampleRequest]) -> Draws:
    """Returns the draws column by column. Raises ParameterError for parameters with which nothing can be drawn."""
    limits = [Limits.of(draw.sampling) for draw in draws]
    return Draws(
        rows=np.array([draw.row for draw in draws], dtype=np.int64),
        inverse_temperatures=np.array([limit.inverse_temperature for limit in limits], dtype=np.float64),
        keys=draw_keys([draw.seed for draw in draws], [draw.position for draw in draws]),
        top_k=np.array([limit.top_k for limit in limits], dtype=np.int32),
        top_p=np.array([limit.top_p for limit in limits], dtype=np.float64),
        min_p=np.array([limit.min_p for limit in limits], dtype=np.float64),
        masks=[draw.mask for draw in draws] if any(draw.mask is not None for draw in draws) else None,
    )


def draw_key(seed: int, position: int) -> int:
    """Hashes (seed, position) to 64 bits."""
    return _mix(_mix(seed) ^ (position & _MASK))


def draw_keys(seeds: Sequence[int], positions: Sequence[int]) -> NDArray[np.uint64]:
    """Returns `draw_key` of each seed and position."""
    bits = np.array([seed & _MASK for seed in seeds], dtype=np.uint64)
    return _mix_all(_mix_all(bits) ^ np.array(positions, dtype=np.uint64))


def gumbel(keys: NDArray[np.uint64], tokens: NDArray[np.integer]) -> NDArray[np.float64]:
    """Returns the noise of each token under its key. keys and tokens: shapes that broadcast."""
    hashed = token_hash(keys, tokens).astype(np.float64)
    return -np.log(-np.log1p((hashed + 0.5) * -(2.0**-32)))


def token_hash(keys: NDArray[np.uint64], tokens: NDArray[np.integer]) -> NDArray[np.uint32]:
    """Returns h of the definition above. Under one key it differs for any two tokens."""
    low, high = keys.astype(np.uint32), (keys >> np.uint64(32)).astype(np.uint32)
    h = np.bitwise_xor(tokens.astype(np.uint32), low)
    with np.errstate(over="ignore"):
        h = (h ^ (h >> np.uint32(17))) * np.uint32(0xED5AD4BB)
        h = (h ^ (h >> np.uint32(11))) + high
        h = h * np.uint32(0xAC4C1B51)
        h = (h ^ (h >> np.uint32(15))) * np.uint32(0x31848BAB)
    hashed: NDArray[np.uint32] = h ^ (h >> np.uint32(14))
    return hashed


def inverse_temperature(temperature: float) -> float:
    """Returns 1 / temperature; 0 for temperature 0; finite for the smallest ones, where the best token wins anyway."""
    return 1.0 / max(temperature, 1e-30) if temperature else 0.0


def _mix(value: int) -> int:
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def _mix_all(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: NDArray[np.uint64] = values ^ (values >> np.uint64(31))
    return mixed
