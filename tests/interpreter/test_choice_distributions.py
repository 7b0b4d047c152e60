"""The distribution of `select`: what is reported, what is drawn at a temperature, and what a backend has to know."""

import math
from collections import Counter

import pytest
import umbel as ul
from umbel import Echo
from umbel.interpreter.selecting import chance, decide
from umbel.lang.errors import BackendError, CapabilityError, ParameterError, RequestError
from umbel.lang.ops import CHOICES_METHODS
from umbel.lang.protocol import Capabilities, ScoredChoice, ScoreRequest

PATIENCE = 10.0
SCORED = [
    ScoredChoice((1, 2), (-1.0, -0.2), (-4.0, -0.2), math.log(0.2), math.log(0.4)),
    ScoredChoice((1, 3, 4), (-1.0, -0.5, -0.9), (-6.0, -2.0, -3.0), math.log(0.25), math.log(0.27)),
    ScoredChoice((5, 6), (-2.0, -0.02), (-5.0, -0.3), math.log(0.1), math.log(0.1)),
]


@pytest.mark.parametrize("method", CHOICES_METHODS)
def test_every_method_has_a_distribution_and_draws_from_it(method: str) -> None:
    probabilities = decide(method, SCORED).probabilities
    assert sum(probabilities) == pytest.approx(1.0)
    draws = Counter(decide(method, SCORED, 1.0, (i + 0.5) / 1000).index for i in range(1000))
    assert [draws[index] / 1000 for index in range(3)] == pytest.approx(probabilities, abs=0.002)


@pytest.mark.parametrize("method", CHOICES_METHODS)
def test_a_low_temperature_takes_the_best_and_a_high_one_takes_all(method: str) -> None:
    best = decide(method, SCORED).index
    cold = Counter(decide(method, SCORED, 0.001, (i + 0.5) / 50).index for i in range(50))
    assert cold == {best: 50}
    hot = Counter(decide(method, SCORED, 100.0, (i + 0.5) / 300).index for i in range(300))
    assert set(hot) == {0, 1, 2}


def test_token_by_token_the_distribution_is_a_product() -> None:
    first = math.exp(-1.0) / (math.exp(-1.0) + math.exp(-2.0))
    second = math.exp(-0.2) / (math.exp(-0.2) + math.exp(-0.5))
    probabilities = decide("greedy_token_selection", SCORED).probabilities
    assert probabilities == pytest.approx((first * second, first * (1 - second), 1 - first))


def test_exact_compares_the_middles_and_bounds_the_shares() -> None:
    decision = decide("exact", SCORED)
    assert decision.index == 0
    assert decision.scores == pytest.approx((math.log(0.3), math.log(0.26), math.log(0.1)))
    assert decision.probabilities == pytest.approx((0.3 / 0.66, 0.26 / 0.66, 0.1 / 0.66))
    assert decision.bounds[0] == pytest.approx((0.2 / 0.57, 0.4 / 0.75))
    assert decision.mass[1] == pytest.approx((0.25, 0.27))
    for share, (low, high) in zip(decision.probabilities, decision.bounds, strict=True):
        assert low <= share <= high


def test_overshoot_compares_what_was_found() -> None:
    assert decide("overshoot", SCORED).index == 1


def test_choices_without_any_probability_are_equal() -> None:
    nothing = [ScoredChoice((1,), (-1.0,), (), -math.inf, -math.inf)] * 2
    for method in ("overshoot", "exact"):
        decision = decide(method, nothing, 1.0, 0.7)
        assert (decision.index, decision.probabilities) == (1, (0.5, 0.5))


def test_what_is_missing_is_said() -> None:
    with pytest.raises(BackendError, match="choice 0 came back without its probability"):
        decide("overshoot", [ScoredChoice((1,), (-1.0,))])
    with pytest.raises(BackendError, match="upper bound"):
        decide("exact", [ScoredChoice((1,), (-1.0,), (), -1.0)])


def test_chance_is_even_and_follows_the_seed() -> None:
    drawn = [chance(seed, "a prompt") for seed in range(2000)]
    tenths = Counter(int(value * 10) for value in drawn)
    assert set(tenths) == set(range(10))
    assert all(140 < count < 260 for count in tenths.values())
    assert drawn[7] == chance(7, "a prompt")
    assert chance(7, "a", "b") != chance(7, "ab")
    assert chance(None) != chance(None)


# ------------------------------------------------------------------------------------------ programs


@ul.function
def grade(s, method="exact", draw=0.0):
    s += "The grade is" + ul.select("grade", [" A", " A+", " B"], draw, method=method)


def test_a_program_reads_the_whole_distribution() -> None:
    echo = Echo(probabilities={" A": (0.1, 0.2), " A+": 0.4, " B": 0.2})
    state = grade.run(backend=echo, timeout=PATIENCE)
    assert state["grade"] == " A+"
    facts = state.get_meta_info("grade")
    assert facts["choices_method"] == "exact"
    assert facts["probabilities"][" A+"] == pytest.approx(0.4 / 0.75)
    assert facts["bounds"][" A+"] == pytest.approx((0.5, 0.4 / 0.7))
    assert facts["mass"][" A"] == pytest.approx((0.1, 0.2))
    request = echo.requests[-1]
    assert isinstance(request, ScoreRequest)
    assert request.probability == "exact"


def test_the_seed_of_a_run_decides_what_is_drawn() -> None:
    echo = Echo(probabilities={" A": 0.5, " A+": 0.3, " B": 0.2})

    def draw(seed: int) -> str:
        return grade.run(method="overshoot", draw=1.0, backend=echo, timeout=PATIENCE, seed=seed)["grade"]

    counts, again = (Counter(map(draw, range(200))) for _ in range(2))
    assert counts == again
    assert [counts[choice] / 200 for choice in (" A", " A+", " B")] == pytest.approx([0.5, 0.3, 0.2], abs=0.1)


def test_gen_with_choices_takes_the_same_methods() -> None:
    echo = Echo(probabilities={"yes": 0.9, "no": 0.01})

    @ul.function
    def program(s):
        s += "Well? " + ul.gen("x", choices=["no", "yes"], choices_method=ul.overshoot)

    assert program.run(backend=echo, timeout=PATIENCE)["x"] == "yes"


def test_a_backend_without_probabilities_is_refused_by_name() -> None:
    state = grade.run(backend=Echo(), timeout=PATIENCE)
    with pytest.raises(CapabilityError, match=r"Echo cannot say .* method='exact' needs; write method="):
        state["grade"]
    hosted = Echo(capabilities=Capabilities("hosted"))
    with pytest.raises(CapabilityError, match="hosted cannot score choices"):
        grade.run(backend=hosted, timeout=PATIENCE)["grade"]


def test_echo_wants_a_probability_of_each_choice() -> None:
    with pytest.raises(RequestError, match=r"no probability of ' A\+'"):
        grade.run(backend=Echo(probabilities={" A": 0.5}), timeout=PATIENCE)["grade"]
    for wrong in (1.5, -0.1, (0.5, 0.4)):
        with pytest.raises(ParameterError, match="Echo's probability of 'a'"):
            Echo(probabilities={"a": wrong})
