"""Intervals and tests: against published values, against each other, and by how often they hold the truth."""

import itertools
import math
import random
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st
from umbel.interpreter.evaluation import intervals
from umbel.interpreter.evaluation.intervals import (
    interval_of,
    interval_of_differences,
    mcnemar,
    paired_test,
    wilson,
)


# Newcombe 1998, table I, method 3: score without continuity correction.
@pytest.mark.parametrize(
    ("successes", "count", "low", "high"),
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_wilson_gives_the_published_intervals(successes: int, count: int, low: float, high: float) -> None:
    found = wilson(successes, count)
    assert (round(found.low, 4), round(found.high, 4)) == (low, high)


@given(st.integers(1, 400), st.data())
def test_wilson_holds_its_share_and_mirrors(count: int, data: st.DataObject) -> None:
    successes = data.draw(st.integers(0, count))
    found, mirrored = wilson(successes, count), wilson(count - successes, count)
    assert 0 <= found.low <= successes / count <= found.high <= 1
    assert found.low == pytest.approx(1 - mirrored.high)


@given(st.integers(0, 40), st.integers(0, 40))
def test_mcnemar_is_the_exact_binomial_test(better: int, worse: int) -> None:
    pairs = better + worse
    tail = sum(math.comb(pairs, k) for k in range(min(better, worse) + 1))
    assert mcnemar(better, worse) == pytest.approx(float(min(Fraction(1), Fraction(2 * tail, 2**pairs))))


def test_mcnemar_takes_thousands_of_changed_pairs() -> None:
    assert mcnemar(10_000, 10_000) == 1.0
    assert mcnemar(10_000, 9_000) == pytest.approx(4.1e-13, rel=0.1)  # normal: z = 1000 / sqrt(19000) = 7.25


def test_the_permutation_test_of_few_pairs_tries_all_signs() -> None:
    differences = [0.3, 0.1, -0.05, 0.2, 0.15, 0.4]
    sums = [sum(map(float.__mul__, map(float, signs), differences)) for signs in itertools.product((1, -1), repeat=6)]
    wanted = sum(abs(total) >= sum(differences) - 1e-12 for total in sums) / 64
    found = paired_test(differences, seed=0, are_shares=False)
    assert (found.p_value, found.method) == (pytest.approx(wanted), "exact permutation test")


def test_the_permutation_test_of_zeros_and_ones_is_the_mcnemar_test() -> None:
    differences = [1.0] * 6 + [-1.0] * 2 + [0.0] * 5
    signs = intervals._sign_flips([value for value in differences if value], 0)
    assert signs.p_value == pytest.approx(mcnemar(6, 2))
    assert paired_test(differences, 0, are_shares=True).method == "exact McNemar test"


def test_numbers_whose_differences_are_zeros_and_ones_are_no_shares() -> None:
    differences = [1.0] * 6 + [-1.0] * 2 + [0.0] * 5
    assert paired_test(differences, 0, are_shares=False).method == "exact permutation test"
    assert interval_of_differences(differences, 0, are_shares=False).method.startswith("bootstrap")


def test_a_permutation_test_by_draws_is_near_the_exact_one(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(5)
    differences = [draw.gauss(0.3, 1) for _ in range(14)]
    exact = paired_test(differences, seed=0, are_shares=False)
    monkeypatch.setattr(intervals, "MOST_EXACT", 0)
    drawn = paired_test(differences, seed=0, are_shares=False)
    assert (exact.method, drawn.method) == ("exact permutation test", "permutation test, 10000 draws, seed 0")
    assert drawn.p_value == pytest.approx(exact.p_value, abs=0.02)
    assert drawn == paired_test(differences, seed=0, are_shares=False)
    assert drawn != paired_test(differences, seed=1, are_shares=False)


def test_a_difference_without_any_change_still_has_a_width() -> None:
    found = interval_of_differences([0.0] * 50, seed=0, are_shares=True)
    assert found.low == pytest.approx(-found.high)
    assert 0.03 < found.high < 0.06


def test_means_have_a_bootstrap_that_its_seed_fixes_and_many_values_the_normal_interval() -> None:
    draw = random.Random(3)
    few = [draw.gauss(10, 2) for _ in range(60)]
    found = interval_of(few, seed=4)
    assert found == interval_of(few, seed=4)
    assert found.method == "bootstrap, 2000 resamples, seed 4"
    assert found.low < sum(few) / 60 < found.high
    many = [draw.gauss(10, 2) for _ in range(5000)]
    wide = interval_of(many, seed=4)
    assert wide.method == "normal"
    assert wide.high - wide.low == pytest.approx(2 * 1.96 * 2 / math.sqrt(5000), rel=0.05)
    assert interval_of([0.5], seed=0).high == math.inf


@pytest.mark.parametrize("kind", ["shares", "paired shares", "means"])
def test_intervals_hold_the_truth_about_95_times_of_100(kind: str) -> None:
    draw, hits, trials = random.Random(8), 0, 40 if kind == "means" else 1000
    for trial in range(trials):
        if kind == "shares":
            found, truth = interval_of([float(draw.random() < 0.8) for _ in range(40)], trial), 0.8
        elif kind == "paired shares":
            changes = draw.choices([1.0, -1.0, 0.0], [0.15, 0.05, 0.8], k=50)
            found, truth = interval_of_differences(changes, trial, are_shares=True), 0.1
        else:
            found, truth = interval_of([draw.gauss(1, 3) for _ in range(40)], trial), 1.0
        hits += found.low <= truth <= found.high
    assert 0.9 <= hits / trials <= 0.985
