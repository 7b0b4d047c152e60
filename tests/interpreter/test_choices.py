"""The three methods of `select`, and a table on which they disagree."""

import pytest
from umbel.interpreter.selecting import decide
from umbel.lang.errors import BackendError
from umbel.lang.protocol import ScoredChoice

# Tokens are shared where texts are: organ|ism, ant|idis|est|ablishment|arian|ism.
CHOICES = ["organ", "organism", "antidisestablishmentarianism"]
SCORED = [
    ScoredChoice((1, 2), (-1.0, -0.2), (-4.0, -0.2)),
    ScoredChoice((1, 3, 4), (-1.0, -0.5, -0.9), (-6.0, -2.0, -3.0)),
    ScoredChoice((5, 6, 7, 8), (-2.0, -0.02, -0.02, -0.02), (-5.0, -0.3, -0.2, -0.1)),
]


@pytest.mark.parametrize(
    ("method", "winner"),
    [
        ("token_length_normalized", "antidisestablishmentarianism"),
        ("greedy_token_selection", "organ"),
        ("unconditional_likelihood_normalized", "organism"),
    ],
)
def test_the_methods_disagree_where_they_should(method: str, winner: str) -> None:
    assert CHOICES[decide(method, SCORED).index] == winner


def test_length_normalised_scores_are_means() -> None:
    scores = decide("token_length_normalized", SCORED).scores
    assert scores == pytest.approx((-0.6, -0.8, -0.515))


def test_unconditional_scores_are_mean_gains() -> None:
    scores = decide("unconditional_likelihood_normalized", SCORED).scores
    assert scores == pytest.approx((1.5, (5.0 + 1.5 + 2.1) / 3, (3.0 + 0.28 + 0.18 + 0.08) / 4))


def test_greedy_keeps_the_best_token_at_each_place() -> None:
    assert decide("greedy_token_selection", SCORED).scores == (2.0, 1.0, 0.0)


def test_greedy_pads_a_short_choice_with_its_own_mean() -> None:
    short = ScoredChoice((1,), (-1.0,))
    good = ScoredChoice((1, 2), (-1.0, -0.5))
    bad = ScoredChoice((1, 3), (-1.0, -4.0))
    assert decide("greedy_token_selection", [short, good]).index == 1
    assert decide("greedy_token_selection", [short, bad]).index == 0


def test_greedy_goes_by_the_token_where_rounding_differs() -> None:
    choices = [ScoredChoice((1, 2), (-1.0, -0.5)), ScoredChoice((1, 3), (-1.0000001, -0.1))]
    assert decide("greedy_token_selection", choices).index == 1


@pytest.mark.parametrize("method", ["token_length_normalized", "greedy_token_selection"])
def test_of_equal_choices_the_first_is_taken(method: str) -> None:
    assert decide(method, [ScoredChoice((1,), (-1.0,)), ScoredChoice((2,), (-1.0,))]).index == 0


def test_a_choice_without_numbers_is_an_error() -> None:
    with pytest.raises(BackendError, match="choice 1 came back with 0 tokens"):
        decide("token_length_normalized", [SCORED[0], ScoredChoice((), ())])
    with pytest.raises(BackendError, match="cannot serve unconditional"):
        decide("unconditional_likelihood_normalized", [ScoredChoice((1,), (-1.0,))])
