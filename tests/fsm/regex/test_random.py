"""Random expressions mean what they mean to `re`, assertions among them, or are refused."""

import itertools
import random
import re
import warnings

from hypothesis import given, settings
from hypothesis import strategies as st
from umbel.fsm.boolean.resolution import resolve
from umbel.fsm.errors import ConstraintRefused, LimitExceeded, Limits, Unsupported
from umbel.fsm.language import NOTHING, Grammar, Language
from umbel.fsm.regex.parser import parse_regex, search_regex

from ..matcher import matches

TEXTS = ["".join(letters) for length in range(5) for letters in itertools.product("ab\n", repeat=length)]
PLAIN = st.sampled_from(["", "a", "b", "ab", ".", "[ab]", "[^a]", r"\n", r"\w", r"[^\w]", "(?i:A)", "(?s:.)"])
ASSERTIONS = st.sampled_from(["^", "$", r"\A", r"\Z", "(?m:^)", "(?m:$)", "(?!^a)"])
PIECES = [
    *"ab1-^$.*+?{}[]()|\\,:=!<>#is &\n", "(?:", "(?i)", "(?s:", "(?m)", "(?a)", "[^", "[a-", "\\d", "\\W", "{2}",
    "(?P<n>", "{1,2}",
    "\\x61", "\\1", "(?=", "(?!", "\\Z", "\\b", "\\0", "\\12", "\\u0061", "é", "(?-i:", "(?is)", "(?#c)",
]  # fmt: skip
QUANTIFIERS = st.sampled_from(["*", "+", "?", "*?", "{2}", "{0,2}", "{1,3}", "{2,}"])


def trees(leaves: st.SearchStrategy[str], looking: bool) -> st.SearchStrategy[str]:
    def larger(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
        forms = [
            st.tuples(inner, inner).map("".join),
            st.tuples(inner, inner).map(lambda pair: f"(?:{pair[0]}|{pair[1]})"),
            st.tuples(inner, QUANTIFIERS).map(lambda pair: f"(?:{pair[0]}){pair[1]}"),
        ]
        if looking:
            forms.append(st.tuples(st.sampled_from("=!"), inner).map(lambda pair: f"(?{pair[0]}{pair[1]})"))
        return st.one_of(forms)

    return st.recursive(leaves, larger, max_leaves=7)


def resolved(language: Language) -> Language | None:
    """None: refused for what it is, not for admitting nothing."""
    try:
        return resolve(Grammar(language), Limits()).start
    except ConstraintRefused as refusal:
        return NOTHING if "admits nothing" in refusal.why else None


@settings(max_examples=150, deadline=None)
@given(trees(PLAIN, looking=False), st.randoms(use_true_random=False))
def test_without_assertions_nothing_is_refused(pattern: str, dice: random.Random) -> None:
    language = parse_regex(pattern)
    for text in dice.sample(TEXTS, 20):
        assert matches(language, text.encode()) == bool(re.fullmatch(pattern, text)), text


@settings(max_examples=200, deadline=None)
@given(trees(PLAIN | ASSERTIONS, looking=True), st.randoms(use_true_random=False))
def test_with_assertions_what_is_not_refused_is_right(pattern: str, dice: random.Random) -> None:
    try:
        language = resolved(parse_regex(pattern))
    except ConstraintRefused:
        return
    if language is None:
        return
    for text in dice.sample(TEXTS, 20):
        assert matches(language, text.encode()) == bool(re.fullmatch(pattern, text)), text


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from(PIECES), max_size=9).map("".join))
def test_what_re_does_not_read_is_refused_and_nothing_else_as_a_mistake(pattern: str) -> None:
    assert mistaken(pattern) in (not readable(pattern), None)


def readable(pattern: str) -> bool:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            re.compile(pattern)
    except re.error:
        return False
    return True


def mistaken(pattern: str) -> bool | None:
    """None: refused for something else than a mistake."""
    try:
        parse_regex(pattern)
    except (Unsupported, LimitExceeded):
        return None
    except ConstraintRefused:
        return True
    return False


@settings(max_examples=150, deadline=None)
@given(trees(PLAIN | ASSERTIONS, looking=True), st.randoms(use_true_random=False))
def test_a_search_is_right_too(pattern: str, dice: random.Random) -> None:
    try:
        language = resolved(search_regex(pattern, dialect="python"))
    except ConstraintRefused:
        return
    if language is None:
        return
    for text in dice.sample(TEXTS, 20):
        assert matches(language, text.encode()) == bool(re.search(pattern, text)), text
