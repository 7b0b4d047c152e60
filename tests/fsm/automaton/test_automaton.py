"""The automaton admits what the constraint admits, every live state reaches an end, and nothing is built ahead."""

import itertools
import random

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from umbel.fsm.automaton.automaton import DEAD, UNKNOWN, Automaton
from umbel.fsm.automaton.places import ENDLESS
from umbel.fsm.errors import ConstraintRefused, LimitExceeded, Limits
from umbel.fsm.language import NOTHING, Call, Chars, Concat, Dfa, Grammar, Language, Literal, Repeat, Spelled, Union

from ..languages import CHARACTERS, FEW_LETTERS, LANGUAGES, recursive_grammars
from ..matcher import matches

ANY = Chars(((0, 0x10FFFF),))
DIGIT = Chars(((0x30, 0x39),))
BIT = Chars(((0x30, 0x31),))
TEXTS = st.lists(st.text(alphabet=CHARACTERS + "()[]u0", max_size=6).map(str.encode), max_size=4)
SOME = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))


def automaton(language: Language, **limits: int) -> Automaton:
    return Automaton(Grammar(language), Limits(**limits))


def admits(automaton: Automaton, text: bytes) -> bool:
    state = automaton.run(automaton.start, text)
    return state != DEAD and automaton.accepting(state)


def live_bytes(automaton: Automaton, state: int) -> list[int]:
    automaton.expand(state)
    return np.flatnonzero(automaton.table[state] >= 0).tolist()


def expand_all(automaton: Automaton) -> None:
    state = 0
    while state < automaton.states:
        automaton.expand(state)
        state += 1


def wander(automaton: Automaton, chance: random.Random, length: int = 10) -> tuple[bytes, list[int]]:
    """Random live bytes, and the states that they pass."""
    text, states = bytearray(), [automaton.start]
    while len(text) < length and (choices := live_bytes(automaton, states[-1])):
        text.append(chance.choice(choices))
        states.append(automaton.step(states[-1], text[-1]))
    return bytes(text), states


def assert_equal_to_the_oracle(grammar: Grammar, texts: list[bytes], chance: random.Random) -> None:
    """On the given texts, on texts that the automaton makes, and on these with one byte gone or one more."""
    made = Automaton(grammar)
    for _ in range(3):
        text, states = wander(made, chance)
        text += made.close(states[-1])
        at = chance.randrange(len(text) + 1)
        texts += [text, text[:at] + text[at + 1 :], text[:at] + chance.choice([b"a", b'"', b"\\", b"\xc3"]) + text[at:]]
    for text in texts:
        assert admits(made, text) == matches(grammar, text), text


@SOME
@given(LANGUAGES, TEXTS, st.randoms(use_true_random=False))
def test_the_language_is_that_of_the_oracle(language: Language, texts: list[bytes], chance: random.Random) -> None:
    assert_equal_to_the_oracle(Grammar(language), texts, chance)


@SOME
@given(recursive_grammars(), TEXTS, st.randoms(use_true_random=False))
def test_recursive_grammars_are_too(grammar: Grammar, texts: list[bytes], chance: random.Random) -> None:
    assert_equal_to_the_oracle(grammar, texts, chance)


@SOME
@given(st.one_of(LANGUAGES.map(Grammar), recursive_grammars()), st.randoms(use_true_random=False))
def test_every_live_state_reaches_an_end(grammar: Grammar, chance: random.Random) -> None:
    made = Automaton(grammar)
    _, states = wander(made, chance)
    for state in states:
        closing = made.close(state)
        end = made.run(state, closing)
        assert end != DEAD
        assert made.accepting(end)
        assert len(closing) == made.close_length(state)


@SOME
@given(FEW_LETTERS)
def test_the_close_is_a_shortest_one(language: Language) -> None:
    made = automaton(language)
    short = ("".join(letters).encode() for n in range(6) for letters in itertools.product("ab", repeat=n))
    shortest = next((text for text in short if matches(language, text)), None)
    if shortest is None:
        assert made.close_length(made.start) >= 6
    else:
        assert made.close_length(made.start) == len(shortest)


@SOME
@given(LANGUAGES, TEXTS, st.randoms(use_true_random=False))
def test_forced_bytes_begin_every_text_and_are_as_many_as_there_are(
    language: Language, texts: list[bytes], chance: random.Random
) -> None:
    made = automaton(language)
    _, states = wander(made, chance, 4)
    for state in states:
        forced = made.forced(state)
        passed = [made.run(state, forced[:n]) for n in range(len(forced) + 1)]
        assert not any(made.accepting(one) for one in passed[:-1])
        assert all(len(live_bytes(made, one)) == 1 for one in passed[:-1])
        assert made.accepting(passed[-1]) or len(live_bytes(made, passed[-1])) > 1


@SOME
@given(LANGUAGES, st.randoms(use_true_random=False))
def test_a_plain_run_lets_every_plain_text_through(language: Language, chance: random.Random) -> None:
    made = automaton(language)
    _, states = wander(made, chance, 6)
    for state in states:
        for _ in range(3):
            length = min(made.plain_run(state), 6)
            text = "".join(chance.choice("a 0\x80é€\ud7ff😀") for _ in range(length)).encode()
            assert made.run(state, text) != DEAD


def test_a_row_is_unknown_until_it_is_asked_for() -> None:
    made = automaton(Concat((Union((DIGIT, Literal("é".encode()))), Literal(b"x"))))
    assert (made.table[made.start] == UNKNOWN).all()
    assert made.step(made.start, ord("b")) == DEAD
    assert (np.flatnonzero(made.table[made.start] != DEAD) == [*b"0123456789\xc3"]).all()
    assert made.steps == 0


def test_a_step_works_out_the_target_of_its_byte_only() -> None:
    made = automaton(Concat((Union((DIGIT, Literal("é".encode()))), Literal(b"x"))))
    assert made.step(made.start, ord("7")) == made.table[made.start, ord("0")] != UNKNOWN
    assert made.table[made.start, 0xC3] == UNKNOWN
    assert (made.steps, made.states) == (1, 2)
    assert not made.expanded(made.start)
    made.expand(made.start)
    assert made.expanded(made.start)
    assert made.table[made.start, 0xC3] >= 0
    assert (made.steps, made.states) == (2, 3)


def test_a_target_of_many_positions_is_much_work() -> None:
    """Whoever shares the processor by steps must not take a thousand positions for one."""
    made = automaton(Union(tuple(Concat((Repeat(ANY, n, n), Literal(b"x"))) for n in range(2, 42))))
    made.step(made.start, ord("0"))
    assert (made.states, made.steps) >= (2, 40)


def test_a_long_string_takes_a_state_for_each_character() -> None:
    made = automaton(Spelled(Repeat(ANY, 0, 65535)))
    made.run(made.start, b"a" * 1000)
    assert made.states == 1001


def test_dead_stays_dead() -> None:
    made = automaton(Literal(b"a"))
    assert made.step(DEAD, ord("a")) == DEAD
    assert made.run(made.start, b"xa") == DEAD


def test_counts_are_not_expanded_ahead() -> None:
    made = automaton(Concat((Repeat(Literal(b"x"), 0, 65535), Literal(b"y"))))
    assert made.states == 1
    assert made.run(made.start, b"x" * 200) != DEAD
    assert made.states <= 202


def test_a_count_ends_where_it_says() -> None:
    made = automaton(Repeat(DIGIT, 2, 300))
    assert [admits(made, b"1" * n) for n in (1, 2, 300, 301)] == [False, True, True, False]


def test_a_blow_up_is_built_as_far_as_it_is_walked() -> None:
    made = automaton(Concat((Repeat(BIT), Literal(b"1"), Repeat(BIT, 14, 14))))
    assert made.states == 1
    text = b"0110100110010110" * 4
    assert admits(made, text) == (text[-15:-14] == b"1")
    assert made.states <= len(text) + 2


def test_a_blow_up_that_is_explored_ends_at_the_limit() -> None:
    made = automaton(Concat((Repeat(BIT), Literal(b"1"), Repeat(BIT, 14, 14))), states=500)
    with pytest.raises(LimitExceeded, match="more than 500 states"):
        expand_all(made)
    assert made.states == 500


def test_ambiguous_counts_are_united() -> None:
    """Otherwise each of the 50 repeats would stand at each of 50 counts."""
    made = automaton(Repeat(Concat((Repeat(ANY, 0, 50), Literal(b","))), 0, 50), ambiguity=8)
    assert admits(made, b"a,b,,c" * 40 + b",")
    assert not admits(made, b"a,b,,c" * 40 + b"a" * 51 + b",")


def test_an_ambiguous_recursion_does_not_double_at_each_level() -> None:
    nested = Concat((Literal(b"("), Call("r"), Literal(b")")))
    rules: dict[str, Language] = {"r": Union((Literal(b""), nested, Repeat(nested)))}
    made = Automaton(Grammar(Call("r"), rules), Limits(ambiguity=16))
    assert admits(made, b"(" * 30 + b")" * 30)
    assert not admits(made, b"(" * 30 + b")" * 29)


def test_too_many_readings_end_at_the_limit() -> None:
    options = tuple(Concat((Repeat(ANY, n, n), Literal(b"x"))) for n in range(2, 40, 2))
    with pytest.raises(LimitExceeded, match="more than 10 ways"):
        automaton(Union(options), ambiguity=10)


def test_recursion_ends_at_the_depth_and_what_is_open_can_be_closed() -> None:
    body = Union((Literal(b"1"), Concat((Literal(b"["), Call("list"), Literal(b"]")))))
    made = Automaton(Grammar(Call("list"), {"list": body}), Limits(depth=5))
    state = made.run(made.start, b"[" * 5)
    assert made.run(made.start, b"[" * 6) == DEAD
    assert made.close(state) == b"1]]]]]"


def test_a_call_at_the_end_of_a_rule_needs_no_depth() -> None:
    body = Union((Literal(b"."), Concat((DIGIT, Call("digits")))))
    made = Automaton(Grammar(Call("digits"), {"digits": body}), Limits(depth=3))
    assert admits(made, b"0" * 100 + b".")
    assert made.states <= 3


def test_a_rule_that_needs_more_depth_than_there_is_is_not_offered() -> None:
    rules: dict[str, Language] = {
        "a": Union((Literal(b"."), Concat((Literal(b"x"), Call("b"), Literal(b"x"))))),
        "b": Concat((Literal(b"("), Call("c"), Literal(b")"))),
        "c": Concat((Literal(b"["), Call("a"), Literal(b"]"))),
    }
    made = Automaton(Grammar(Call("a"), rules), Limits(depth=1))
    deepest = made.run(made.start, b"x([")
    assert made.close(deepest) == b".])x"
    assert made.step(deepest, ord("x")) == DEAD


def test_turns_that_may_be_empty_end() -> None:
    """Loops of loops, of options and of recursive rules, each with the empty text among its turns."""
    rules: dict[str, Language] = {
        "r": Union((Literal(b""), Concat((Literal(b"("), Repeat(Call("r"), 2, None), Literal(b")"))))),
    }
    nullable = Repeat(Concat((Repeat(DIGIT), Repeat(Call("r"), 0, 3), Union((Literal(b""), Literal(b"x"))))), 3, 5)
    made = Automaton(Grammar(Repeat(nullable), rules))
    for text in (b"", b"1x2(())x", b"()()()()", b"((x))", b"(", b"x(()()(()))"):
        assert admits(made, text) == matches(Grammar(Repeat(nullable), rules), text)


def test_rules_that_begin_with_themselves_end() -> None:
    """They are refused before an automaton is made; a guard, should one come through."""
    doubled = (Literal(b"y"), Concat((Call("a"), Call("a"))), Concat((Call("a"), Literal(b"x"))))
    made = Automaton(Grammar(Call("a"), {"a": Union(doubled)}))
    assert admits(made, b"yxyx")
    assert not admits(made, b"xy")


def test_equal_parts_are_one_part() -> None:
    """Two options that begin with equal parts are read in one way until they differ."""
    word = Repeat(Chars(((0x61, 0x7A),)))
    options = tuple(
        Concat((Repeat(word.body), Literal(b":"), DIGIT, Literal(ending))) for ending in (b"x", b"y", b"yz")
    )
    made = automaton(Union(options), ambiguity=2)
    assert [admits(made, text) for text in (b"ab:1x", b":2y", b"c:3yz", b"c:3z")] == [True, True, True, False]


def test_thousands_of_options_are_one_trie() -> None:
    words = [f"option {n}".encode() for n in range(5000)]
    made = automaton(Union(tuple(map(Literal, words))), ambiguity=4)
    assert made.forced(made.start) == b"option "
    assert admits(made, words[4321])
    assert not admits(made, b"option 5000")


def test_options_that_go_on_differently_part_where_they_differ() -> None:
    made = automaton(
        Union((Concat((Literal(b"ab1"), DIGIT)), Concat((Literal(b"ab2"), BIT)), Literal(b"ab"))), ambiguity=1
    )
    assert made.forced(made.start) == b"ab"
    assert [admits(made, text) for text in (b"ab", b"ab19", b"ab29", b"ab20")] == [True, True, False, True]


def test_spelled_text_is_escaped_in_one_way() -> None:
    made = automaton(Spelled(Union((Literal(b'a"\n'), Repeat(Chars(((0, 0x1F),)), 1, 1)))))
    assert admits(made, rb"a\"\n")
    assert not admits(made, rb"a\u0022\n")
    assert admits(made, rb"\u001f")
    assert not admits(made, rb"\u001F")
    assert not admits(made, rb"\u000a")


def test_surrogates_and_overlong_sequences_are_dead() -> None:
    made = automaton(ANY)
    for data in (b"\xed\xa0\x80", b"\xc0\x80", b"\xe0\x80\x80", b"\xf0\x80\x80\x80", b"\xf4\x90\x80\x80", b"\xff"):
        assert made.run(made.start, data) == DEAD
    for character in (
        "\0",
        "\x7f",
        "\x80",
        "\u07ff",
        "\u0800",
        "\ud7ff",
        "\ue000",
        "\uffff",
        "\U00010000",
        "\U0010ffff",
    ):
        assert admits(made, character.encode())


@given(st.lists(st.integers(0, 0x10FFFF), min_size=1, max_size=6), st.characters(exclude_categories=["Cs"]))
@settings(max_examples=200, deadline=None)
def test_ranges_of_characters_are_those_of_utf_8(bounds: list[int], other: str) -> None:
    bounds = sorted(set(bounds))
    ranges = tuple((first, first + (last - first) // 2) for first, last in itertools.pairwise([*bounds, 0x110000]))
    made = automaton(Chars(ranges))
    for code in {ord(other), *(bound for pair in ranges for bound in (pair[0], pair[1], min(pair[1] + 1, 0x10FFFF)))}:
        if not 0xD800 <= code <= 0xDFFF:
            assert admits(made, chr(code).encode()) == any(first <= code <= last for first, last in ranges)


@pytest.mark.parametrize(
    ("language", "prefix", "run"),
    [
        (Concat((Literal(b'"'), Spelled(Repeat(ANY, 0, 65535)), Literal(b'"'))), b'"', 65535),
        (Concat((Literal(b'"'), Spelled(Repeat(ANY, 0, 65535)), Literal(b'"'))), b'"abc', 65532),
        (Concat((Literal(b'"'), Spelled(Repeat(ANY)), Literal(b'"'))), b'"abc', ENDLESS),
        (Concat((Literal(b'"'), Spelled(Repeat(ANY)), Literal(b'"'))), b'"\xc3', 0),
        (Concat((Literal(b'"'), Spelled(Repeat(ANY)), Literal(b'"'))), b'"\\', 0),
        (Concat((Repeat(ANY, 2, 2), Repeat(ANY, 3, 5))), b"", 7),
        (Repeat(DIGIT), b"", 0),
        (ANY, b"", 1),
        (Dfa((False, True), (((((0, 0x10FFFF),), 1),), ())), b"", 1),
        (Dfa((True, True), (((((0, 0x60),), 0), (((0x61, 0x10FFFF),), 1)), ((((0, 0x10FFFF),), 0),))), b"", ENDLESS),
    ],
)
def test_plain_runs_are_read_off_the_counters(language: Language, prefix: bytes, run: int) -> None:
    made = automaton(language)
    assert made.plain_run(made.run(made.start, prefix)) == run


def test_nothing_is_refused() -> None:
    with pytest.raises(ConstraintRefused, match="no text satisfies"):
        automaton(NOTHING)
    with pytest.raises(ConstraintRefused, match="no text satisfies"):
        Automaton(Grammar(Call("r"), {"r": Concat((Literal(b"("), Call("r")))}))


def test_a_rule_that_nobody_defined_is_refused() -> None:
    with pytest.raises(ConstraintRefused, match="'missing' is called and is not defined"):
        automaton(Call("missing"))


def test_the_empty_text_is_a_text() -> None:
    made = automaton(Literal(b""))
    assert made.accepting(made.start)
    assert made.close(made.start) == b""
    assert live_bytes(made, made.start) == []


def test_deep_expressions_need_no_recursion() -> None:
    language: Language = DIGIT
    for _ in range(5000):
        language = Concat((Literal(b"("), Repeat(language, 0, 1), Literal(b")")))
    made = automaton(language)
    assert made.run(made.start, b"(" * 100 + b")") != DEAD


def test_closes_are_printable_where_they_can_be() -> None:
    letters = Concat((Literal(b'"'), Spelled(Repeat(ANY, 3, 9)), Literal(b'", '), Repeat(DIGIT, 2, 4)))
    made = automaton(letters)
    assert made.close(made.start) == b'"aaa", 00'


def test_forced_runs_end_at_the_limit() -> None:
    made = automaton(Repeat(Literal(b"ab"), 500, 500), forced_bytes=64)
    assert made.forced(made.start) == b"ab" * 32


def test_the_size_grows_with_what_is_explored() -> None:
    made = automaton(Repeat(DIGIT, 0, 5000))
    before = made.nbytes
    made.run(made.start, b"1" * 2000)
    assert made.nbytes > before + 2000 * 1024
