"""The matcher that decides about names and constants, against Python's."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from umbel.fsm.boolean.character_automata import determinised
from umbel.fsm.errors import LimitExceeded, Limits
from umbel.fsm.regex.parser import parse_regex
from umbel.fsm.schema.expressions import none_of, one_of
from umbel.fsm.schema.strings import admits

PATTERNS = [
    "a*b",
    "(a|ab)(c|bcd)?",
    "(a?){2,4}",
    "(ab?){3}",
    "(a*)*b?",
    "[^a]{2,}",
    "",
    "(a|b){0,3}c|d+",
    "((a|)b?){2}",
]


@settings(max_examples=200, deadline=None)
@given(pattern=st.sampled_from(PATTERNS), text=st.text("abcd", max_size=7))
def test_it_agrees_with_re(pattern: str, text: str) -> None:
    language = parse_regex(pattern)
    expected = re.fullmatch(pattern, text) is not None
    assert admits(language, text) == expected
    assert admits(determinised(language, Limits()), text) == expected


@settings(max_examples=100, deadline=None)
@given(names=st.lists(st.text("abé", max_size=4), max_size=8), text=st.text("abéx", max_size=5))
def test_one_of_and_none_of_are_complements(names: list[str], text: str) -> None:
    assert admits(one_of(names), text) == (text in names)
    assert admits(none_of(names), text) == (text not in names)


def test_long_texts_are_refused() -> None:
    with pytest.raises(LimitExceeded, match="5000 characters"):
        admits(parse_regex("(a*)*"), "a" * 5_000)
