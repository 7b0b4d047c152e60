"""Intersections and differences are set algebra, blow-ups end, and grammars keep only what admits something."""

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from umbel.fsm.algebra import ANY_CHARACTER, ANY_TEXT, children
from umbel.fsm.boolean.resolution import lengths, resolve
from umbel.fsm.errors import ConstraintRefused, LimitExceeded, Limits, Unsupported
from umbel.fsm.language import (
    EMPTY_TEXT,
    NOTHING,
    Call,
    Chars,
    Concat,
    Dfa,
    Difference,
    Grammar,
    Intersection,
    Language,
    Literal,
    Repeat,
    Spelled,
    Union,
)
from umbel.fsm.regex.parser import parse_regex, search_regex

from ..matcher import matches

A, B = Literal(b"a"), Literal(b"b")
TEXTS = ["".join(letters) for length in range(6) for letters in itertools.product("abé", repeat=length)]

LEAVES = st.sampled_from(
    [A, B, Literal("éa".encode()), EMPTY_TEXT, NOTHING, Chars(((97, 98),)), ANY_CHARACTER, ANY_TEXT]
)
COUNTS = st.sampled_from([(0, None), (1, None), (0, 1), (2, 2), (1, 3), (0, 0), (2, None)])


def larger(inner: st.SearchStrategy[Language]) -> st.SearchStrategy[Language]:
    pairs = st.tuples(inner, inner)
    return st.one_of(
        pairs.map(Concat),
        pairs.map(Union),
        st.tuples(inner, COUNTS).map(lambda pair: Repeat(pair[0], *pair[1])),
        pairs.map(lambda pair: Intersection(*pair)),
        pairs.map(lambda pair: Difference(*pair)),
    )


LANGUAGES = st.recursive(LEAVES, larger, max_leaves=8)


def resolved(language: Language, limits: Limits = Limits()) -> Language:  # noqa: B008
    """NOTHING where nothing is admitted."""
    try:
        return resolve(Grammar(language), limits).start
    except LimitExceeded:
        raise
    except ConstraintRefused:
        return NOTHING


def nodes(language: Language) -> list[Language]:
    return [language, *(inner for child in children(language) for inner in nodes(child))]


@settings(max_examples=300, deadline=None)
@given(LANGUAGES, st.randoms(use_true_random=False))
def test_the_language_stays_and_every_node_admits_something(language: Language, dice: random.Random) -> None:
    found = resolved(language)
    for text in dice.sample(TEXTS, 25):
        assert matches(found, text.encode()) == matches(language, text.encode()), text
    for node in nodes(found):
        assert not isinstance(node, Intersection | Difference)
        assert node != NOTHING or node is found
        if isinstance(node, Dfa):
            assert is_trimmed(node)


def is_trimmed(node: Dfa) -> bool:
    """Every state is reached and reaches acceptance; edges are disjoint."""
    reached, pending = {0}, [0]
    while pending:
        following = {target for _, target in node.edges[pending.pop()]} - reached
        reached |= following
        pending += following
    live = {state for state, accepting in enumerate(node.accepting) if accepting}
    while grown := {s for s, edges in enumerate(node.edges) if any(t in live for _, t in edges)} - live:
        live |= grown
    ranges = [sorted(range_ for found, _ in edges for range_ in found) for edges in node.edges]
    disjoint = all(before[1] < after[0] for found in ranges for before, after in itertools.pairwise(found))
    return len(reached) == len(live) == len(node.accepting) and disjoint


@settings(max_examples=150, deadline=None)
@given(LANGUAGES)
def test_lengths_are_bounds_that_no_text_leaves(language: Language) -> None:
    found = resolved(language)
    bounds = lengths(found)
    assert (bounds is None) == (found == NOTHING)
    for text in TEXTS[:130]:
        if matches(found, text.encode()):
            assert bounds[0] <= len(text)
            assert bounds[1] is None or len(text) <= bounds[1]


@settings(max_examples=150, deadline=None)
@given(LANGUAGES, st.integers(0, 3), st.one_of(st.none(), st.integers(0, 4)), st.randoms(use_true_random=False))
def test_lengths_beside_an_expression(language: Language, least: int, most: int | None, dice: random.Random) -> None:
    found = resolved(Intersection(language, Repeat(ANY_CHARACTER, least, most)))
    for text in dice.sample(TEXTS, 25):
        expected = matches(language, text.encode()) and least <= len(text) and (most is None or len(text) <= most)
        assert matches(found, text.encode()) == expected, text


@pytest.mark.parametrize(
    ("pattern", "least", "most", "expected"),
    [
        ("^[a-z]+$", 0, 5000, "[a-z]{1,5000}"),
        ("^[a-z]+$", 3, None, "[a-z]{3,}"),
        ("^[a-z]+$", 0, 0, None),
        ("^[A-Z]{3}-[0-9]*$", 6, 60_000, "[A-Z]{3}-[0-9]{2,59996}"),
        ("^([a-f0-9]{2})*$", 3, 9, "([a-f0-9]{2}){2,4}"),
        ("^([a-f0-9]{2})*$", 3, 3, None),
        ("^(a|b.*)?$", 2, 4, "b[^\\n\\r\\u2028\\u2029]{1,3}"),
        ("^abc$", 0, 3, "abc"),
        ("^https?://[a-z]+$", 0, 1024, "http://[a-z]{1,1017}|https://[a-z]{1,1016}"),
        ("^a?[0-9]*b?$", 60, 62, "[0-9]{60,62}|[0-9]{59,61}b|a[0-9]{59,61}|a[0-9]{58,60}b"),
        ("", 2, 8, "(?s:.{2,8})"),
    ],
)
def test_counters_take_lengths_over(pattern: str, least: int, most: int | None, expected: str | None) -> None:
    limited = Intersection(search_regex(pattern), Repeat(ANY_CHARACTER, least, most))
    assert resolved(limited) == (NOTHING if expected is None else parse_regex(expected))


def test_automata_are_minimal() -> None:
    ends_in_ab = Intersection(parse_regex("[ab]*ab"), parse_regex("[ab]*"))
    found = resolved(ends_in_ab)
    assert isinstance(found, Dfa)
    assert found == Dfa(
        (False, False, True),
        (
            ((((97, 97),), 1), (((98, 98),), 0)),
            ((((97, 97),), 1), (((98, 98),), 2)),
            ((((97, 97),), 1), (((98, 98),), 0)),
        ),
    )
    again = Intersection(parse_regex("(a|b)*?a?ab"), ANY_TEXT)
    assert resolved(Intersection(again, parse_regex("[ab]+"))) == found


def test_a_spelling_stays_around_what_is_resolved() -> None:
    found = resolved(Spelled(Difference(parse_regex("(?s:.)"), parse_regex('[^"\\n]'))))
    assert isinstance(found, Spelled)
    assert [text for text in (b'\\"', b"\\n", b'"', b"a", b"n") if matches(found, text)] == [b'\\"', b"\\n"]


def test_what_is_spelled_can_be_intersected() -> None:
    spelled = Spelled(Concat((Repeat(ANY_CHARACTER), resolved(Difference(ANY_CHARACTER, B)))))
    language = Intersection(spelled, parse_regex(r"[a-c\\nu0-9]{2,6}"))
    found = resolved(language)
    for text in (b"\\n", b"a\\n", b"ab", b"ba", b"\\u0001", b"\\u0041", b"\\", b"n\\\\", b"a\n"):
        assert matches(found, text) == matches(language, text), text


@pytest.mark.parametrize(
    "pattern",
    [
        "(?=[ab]*a[ab]{16}$)(?=.*bb).*",
        "(?=(0|1)*1(0|1){14}$)(?=.*00).*",
        "(?=(.{0,50},){0,50}$)(?=.*;).*",
        r"(?=(\w{0,50},){0,50}$)(?=.*a).*",
        "(?=(a?b?c?){1500}$)(?=.*a).*",
        '(?=[^"]{0,15000}$)(?=.*a).*',
        "(?=.*a.{20}b)(?=.*b.{20}a).*",
        "(?!.*a.{30}b).*",
        "(?=((a{0,100}b){0,100}c){0,100}$).*a",
        "(?:(?!.*a.{30}b).)*",
        "(?:(?=a.{20}b|b)[ab])*",
        "((?!(.{0,50},){0,50};).){0,1000}",
        r"(?:(?!a|b)\w){1,5000}",
    ],
)
@pytest.mark.sampled(4)
def test_what_blows_up_ends(pattern: str) -> None:
    with pytest.raises(LimitExceeded, match="intersect") as refusal:
        resolve(Grammar(parse_regex(pattern)), Limits())
    assert refusal.value.keyword == "intersection"


def test_fewer_states_may_be_allowed() -> None:
    language = parse_regex("(?=.*a).{0,30}")
    assert isinstance(resolved(language), Dfa)
    with pytest.raises(LimitExceeded, match="more than 20 states"):
        resolved(language, Limits(dfa_states=20))


@pytest.mark.parametrize(
    "language",
    [
        NOTHING,
        Intersection(A, B),
        Difference(A, ANY_TEXT),
        Concat((A, Intersection(A, B))),
        Repeat(NOTHING, 1),
        Spelled(Intersection(A, B)),
        Intersection(A, Repeat(ANY_CHARACTER, 2)),
    ],
)
def test_nothing_is_refused(language: Language) -> None:
    with pytest.raises(ConstraintRefused, match="admits nothing"):
        resolve(Grammar(language), Limits())


def test_options_that_admit_nothing_go() -> None:
    assert resolved(Union((A, Intersection(A, B)))) == A
    assert resolved(Concat((A, Repeat(Intersection(A, B), 0, 5), B))) == Literal(b"ab")
    assert resolved(Intersection(A, Union((A, B)))) == Dfa((False, True), (((((97, 97),), 1),), ()))


def test_rules_that_admit_nothing_go_and_take_their_callers_along() -> None:
    grammar = Grammar(
        Union((Call("list"), Call("endless"), Concat((A, Call("barren"))))),
        {
            "list": Concat((Literal(b"["), Repeat(Call("list"), 0, 3), Repeat(Call("caller")), Literal(b"]"))),
            "endless": Concat((A, Call("endless"))),
            "barren": Intersection(A, B),
            "caller": Union((Call("barren"), Call("endless"))),
            "unreached": B,
        },
    )
    found = resolve(grammar, Limits())
    assert found == Grammar(Call("list"), {"list": Concat((Literal(b"["), Repeat(Call("list"), 0, 3), Literal(b"]")))})
    assert matches(found, b"[[][[]]]")


def test_grammars_that_admit_nothing_are_refused() -> None:
    with pytest.raises(ConstraintRefused, match="admits nothing"):
        resolve(Grammar(Call("a"), {"a": Concat((A, Call("b"))), "b": Concat((B, Call("a")))}), Limits())


def test_a_rule_must_exist() -> None:
    with pytest.raises(ConstraintRefused, match="'gone'"):
        resolve(Grammar(Union((A, Call("gone"))), {}), Limits())


@pytest.mark.parametrize(
    "rules",
    [
        {"a": Union((A, Concat((Call("a"), B))))},
        {"a": Union((A, Concat((Call("b"), B)))), "b": Concat((Repeat(A, 0, 1), Call("a")))},
        {"a": Union((A, Repeat(Call("a"), 1)))},
        {"a": Union((A, Concat((Call("empty"), Call("a"))))), "empty": Union((EMPTY_TEXT, Concat((B, Call("empty")))))},
    ],
)
def test_rules_that_begin_with_themselves_are_refused(rules: dict[str, Language]) -> None:
    with pytest.raises(Unsupported, match="begins with itself") as refusal:
        resolve(Grammar(Call("a"), rules), Limits())
    assert refusal.value.keyword == "left recursion"


def test_rules_that_take_a_byte_first_may_call_themselves() -> None:
    grammar = Grammar(
        Call("a"), {"a": Union((EMPTY_TEXT, Concat((Literal(b"("), Call("a"), Literal(b")"), Call("a")))))}
    )
    assert matches(resolve(grammar, Limits()), b"(()())()")
