"""Computes confidence intervals and paired tests, without numpy: the language alone has these figures, too.

    proportions          Wilson's score interval
    means                percentile bootstrap; from MOST_RESAMPLED values on the normal interval, which is as good there
    paired proportions   Agresti and Min's adjusted Wald interval of the difference; exact McNemar test
    paired means         bootstrap of the differences; sign-flip permutation test, exact for few differences

All draws come from the seed that the caller gives, so a report says the same at every reading.
"""

import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean, stdev

LEVEL = 0.95  # of all intervals
RESAMPLES = 2000  # of a bootstrap
FLIPS = 10_000  # of a permutation test that does not try all
MOST_RESAMPLED = 2000  # values: 0.5 s of a bootstrap
MOST_EXACT = 14  # differences whose signs are all tried
Z = NormalDist().inv_cdf(0.5 + LEVEL / 2)


@dataclass(frozen=True, slots=True)
class Interval:
    """A confidence interval of 95%, and the method that computed it."""

    low: float
    high: float
    method: str


@dataclass(frozen=True, slots=True)
class PairedTest:
    """The probability of a difference at least as large if both sides were equal, and the test that computed it."""

    p_value: float
    method: str


def is_proportion(values: Sequence[float]) -> bool:
    """Returns whether all values are 0 or 1."""
    return all(value in (0, 1) for value in values)


def interval_of(values: Sequence[float], seed: int) -> Interval:
    """Returns the interval of the mean of values: Wilson's where all are 0 or 1, else the bootstrap's."""
    if is_proportion(values):
        return wilson(round(sum(values)), len(values))
    return _of_mean(values, seed)


def wilson(successes: int, count: int) -> Interval:
    """Returns Wilson's score interval of a proportion. Without any value it is 0 to 1.

    wilson(8, 10)    # 0.490 to 0.943
    """
    if count == 0:
        return Interval(0.0, 1.0, "Wilson")
    share, square = successes / count, Z * Z / count
    centre = (share + square / 2) / (1 + square)
    half = Z * math.sqrt(share * (1 - share) / count + square / (4 * count)) / (1 + square)
    low = 0.0 if successes == 0 else max(0.0, centre - half)  # exact at the ends, where rounding is not
    high = 1.0 if successes == count else min(1.0, centre + half)
    return Interval(low, high, "Wilson")


def interval_of_differences(differences: Sequence[float], seed: int, *, are_shares: bool) -> Interval:
    """Returns the interval of a mean difference of pairs.

    Args:
        differences: of each pair.
        seed: of the bootstrap.
        are_shares: both sides are 0 or 1, so the differences are -1, 0 and 1; those of numbers may be so by chance.
    """
    if are_shares:
        return _agresti_min(differences.count(1), differences.count(-1), len(differences))
    return _of_mean(differences, seed)


def paired_test(differences: Sequence[float], seed: int, *, are_shares: bool) -> PairedTest:
    """Tests whether the mean difference of pairs is 0; two-sided. Takes what `interval_of_differences` takes."""
    if are_shares:
        return PairedTest(mcnemar(differences.count(1), differences.count(-1)), "exact McNemar test")
    return _sign_flips([value for value in differences if value], seed)


def mcnemar(better: int, worse: int) -> float:
    """Returns the two-sided p-value of the exact McNemar test: the binomial test of the pairs that differ.

    mcnemar(7, 1)    # 0.0703
    """
    pairs, fewer = better + worse, min(better, worse)
    if better == worse:
        return 1.0
    # Logarithms, as the coefficients of some thousand pairs are beyond a float.
    logs = (math.lgamma(pairs + 1) - math.lgamma(k + 1) - math.lgamma(pairs - k + 1) for k in range(fewer + 1))
    return min(1.0, 2 * math.fsum(math.exp(log - pairs * math.log(2)) for log in logs))


# -------------------------------------------------------------------------------- how


def _of_mean(values: Sequence[float], seed: int) -> Interval:
    count = len(values)
    if count < 2:
        return Interval(-math.inf, math.inf, "none: fewer than 2 values")
    if count > MOST_RESAMPLED:
        half = Z * stdev(values) / math.sqrt(count)
        return Interval(fmean(values) - half, fmean(values) + half, "normal")
    draw = random.Random(seed)
    means = sorted(sum(draw.choices(values, k=count)) / count for _ in range(RESAMPLES))
    tail = round(RESAMPLES * (1 - LEVEL) / 2)
    return Interval(means[tail], means[-tail - 1], f"bootstrap, {RESAMPLES} resamples, seed {seed}")


def _agresti_min(better: int, worse: int, count: int) -> Interval:
    """Adds half a pair to each cell of the table (Agresti and Min 2005): without it no difference has no width."""
    total, ups, downs = count + 2, better + 0.5, worse + 0.5
    centre = (ups - downs) / total
    half = Z * math.sqrt(ups + downs - (ups - downs) ** 2 / total) / total
    return Interval(max(-1.0, centre - half), min(1.0, centre + half), "Agresti-Min")


def _sign_flips(differences: Sequence[float], seed: int) -> PairedTest:
    """Compares the sum of differences with the sums under other signs: each sign is as probable as the other if both
    sides are equal."""
    count, total = len(differences), math.fsum(differences)
    if count == 0:
        return PairedTest(1.0, "permutation test")
    reached = abs(total) * (1 - 1e-9)  # sums of other orders differ in the last digits
    if count <= MOST_EXACT:
        signs = itertools.product((1, -1), repeat=count)
        sums = (math.fsum(map(float.__mul__, map(float, sign), map(float, differences))) for sign in signs)
        hits = sum(abs(value) >= reached for value in sums)
        return PairedTest(hits / 2**count, "exact permutation test")
    draw, bits = random.Random(seed), bytes.maketrans(b"01", b"\0\1")
    hits = 0
    for _ in range(FLIPS):
        kept = format(draw.getrandbits(count), f"0{count}b").encode().translate(bits)
        hits += abs(2 * sum(itertools.compress(differences, kept)) - total) >= reached
    return PairedTest((hits + 1) / (FLIPS + 1), f"permutation test, {FLIPS} draws, seed {seed}")
