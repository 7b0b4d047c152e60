"""One token to choose, and the chance that chooses it."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..lang.sampling import SamplingParams

_MASK = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class Draw:
    """One token to choose.

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


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) that depends on seed and position only: two rounds of splitmix64, its top 53 bits."""
    return (_mix(_mix(seed) ^ (position & _MASK)) >> 11) * 2.0**-53


def _mix(value: int) -> int:
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)
