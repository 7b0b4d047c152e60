"""Where two texts of a hosted model part, and how near their tokens were there."""

import math

import pytest

from benchmarks.hosted.__main__ import parting


def test_the_margin_is_that_of_the_token_at_which_the_texts_part() -> None:
    tokens = [(-0.1, 1, " the"), (-1.0, 2, " sea")]
    tops = [[(-0.1, 1, " the"), (-3.0, 3, " a")], [(-1.0, 2, " sea"), (-1.25, 4, " lake")]]
    assert parting(tokens, tops, " the lake") == pytest.approx(0.25)


def test_a_token_may_end_inside_one_of_the_other_text() -> None:
    tokens = [(-0.5, 1, ","), (-1.0, 2, " "), (-0.1, 3, "1")]
    tops = [[(-0.5, 1, ",")], [(-1.0, 2, " "), (-1.125, 4, " England")], [(-0.1, 3, "1"), (-3.0, 5, "2")]]
    assert parting(tokens, tops, ", England") == pytest.approx(0.125)


def test_where_no_likely_token_leads_to_the_other_text_there_is_no_margin() -> None:
    assert math.isnan(parting([(-0.5, 1, "a")], [[(-0.5, 1, "a"), (-0.6, 2, "b")]], "c"))
