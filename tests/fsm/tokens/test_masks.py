"""Masks against every token tried one after the other."""

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from umbel.fsm.automaton.automaton import DEAD, Automaton
from umbel.fsm.errors import LimitExceeded, Limits
from umbel.fsm.language import Chars, Concat, Grammar, Language, Literal, Repeat, Spelled
from umbel.fsm.tokens.masks import FEW, Mask, Masks
from umbel.fsm.tokens.vocabulary import Vocabulary, unpack

from ..languages import ANY, LANGUAGES, recursive_grammars
from ..vocabularies import ALPHABET, SINGLE, allowed_slowly, vocabularies

GRAMMARS = st.one_of(LANGUAGES.map(Grammar), recursive_grammars())
PATHS = st.lists(st.sampled_from(ALPHABET), max_size=6).map(b"".join)
STRING = Concat((Literal(b'"'), Spelled(Repeat(Chars(ANY))), Literal(b'"')))
STRINGS = st.builds(
    lambda least, more, after: Grammar(Concat((Spelled(Repeat(Chars(ANY), least, least + more)), after))),
    st.integers(0, 3),
    st.integers(0, 6),
    st.sampled_from([Literal(b'"'), Literal(b'a"'), Literal(b"")]),
)


def finished(masks: Masks, automaton: Automaton, state: int, *, fuel: int = 1_000_000) -> Mask:
    serial = masks.register()
    for _ in range(100_000):
        mask, left = masks.prepare(serial, automaton, state, fuel)
        if mask is not None:
            assert 0 <= left <= fuel
            return mask
    raise AssertionError("the mask is never finished")


def passed(automaton: Automaton, path: bytes) -> Iterator[int]:
    """The live states on a path."""
    state = automaton.start
    yield state
    for byte in path:
        state = automaton.step(state, byte)
        if state == DEAD:
            return
        yield state


@settings(max_examples=200, deadline=None)
@given(grammar=st.one_of(GRAMMARS, STRINGS), vocabulary=vocabularies(), path=PATHS)
def test_a_mask_holds_the_tokens_that_the_automaton_takes(
    grammar: Grammar, vocabulary: Vocabulary, path: bytes
) -> None:
    automaton, masks = Automaton(grammar), Masks(vocabulary)
    for state in passed(automaton, path):
        mask = finished(masks, automaton, state)
        expected = allowed_slowly(automaton, state, vocabulary)
        assert unpack(mask.bits).tolist() == expected
        assert (mask.few is None) == (len(expected) > FEW)
        assert mask.few is None or mask.few.tolist() == expected


@settings(max_examples=100, deadline=None)
@given(grammar=st.one_of(GRAMMARS, STRINGS), vocabulary=vocabularies(), path=PATHS, fuel=st.sampled_from([1, 2, 7]))
def test_a_mask_made_in_small_steps_is_the_same(
    grammar: Grammar, vocabulary: Vocabulary, path: bytes, fuel: int
) -> None:
    masks = Masks(vocabulary)
    one, other = Automaton(grammar), Automaton(grammar)
    state, same = one.run(one.start, path), other.run(other.start, path)
    assume(state != DEAD)
    at_once, in_steps = finished(masks, one, state), finished(masks, other, same, fuel=fuel)
    assert at_once.bits.tolist() == in_steps.bits.tolist()


def test_eos_ids_are_allowed_exactly_where_a_text_may_end() -> None:
    vocabulary = Vocabulary([*SINGLE, b"</s>", b"<end>", b""], [256, 257])
    automaton, masks = Automaton(Grammar(Repeat(Literal(b"ab"), 1))), Masks(vocabulary)
    allowed = [unpack(finished(masks, automaton, state).bits).tolist() for state in passed(automaton, b"abab")]
    assert allowed == [[ord("a")], [ord("b")], [ord("a"), 256, 257], [ord("b")], [ord("a"), 256, 257]]


def test_all_tokens_of_the_same_bytes_are_allowed() -> None:
    vocabulary = Vocabulary([b"a", b"\n", b"a", b"\n", b"b", b""], [5])
    masks = Masks(vocabulary)
    for language, expected in ((Literal(b"ab"), [0, 2]), (Literal(b"\n"), [1, 3])):
        automaton = Automaton(Grammar(language))
        assert unpack(finished(masks, automaton, automaton.start).bits).tolist() == expected


def test_half_a_character_is_allowed_where_the_character_is() -> None:
    vocabulary = Vocabulary([*SINGLE, "é".encode(), b""], [257])
    automaton, masks = Automaton(Grammar(Literal("é".encode()))), Masks(vocabulary)
    allowed = [finished(masks, automaton, state).few for state in passed(automaton, "é".encode())]
    assert [None if few is None else few.tolist() for few in allowed] == [[0xC3, 256], [0xA9], [257]]


def test_a_mask_is_made_once_and_belongs_to_nobody() -> None:
    vocabulary = Vocabulary([*SINGLE, *(bytes((a, b)) for a in range(97, 123) for b in range(97, 123)), b""], [932])
    automaton, masks = Automaton(Grammar(STRING)), Masks(vocabulary)
    serial, state = masks.register(), automaton.step(automaton.start, ord('"'))
    first, _ = masks.prepare(serial, automaton, state, 10_000)
    again, left = masks.prepare(serial, automaton, state, 10_000)
    assert first is again
    assert left == 10_000
    assert first is not None
    with pytest.raises(ValueError, match="read-only"):
        first.bits[0] = 0


def test_what_is_kept_is_bounded() -> None:
    vocabulary = Vocabulary([*SINGLE, b""], [256])
    automaton = Automaton(Grammar(Repeat(Chars(((97, 122),)), 0, 500)))
    masks = Masks(vocabulary, cache_bytes=20_000)
    serial = masks.register()
    for state in passed(automaton, b"a" * 300):
        assert masks.prepare(serial, automaton, state, 100_000)[0] is not None
    assert len(masks._kept) < 20


def test_a_state_that_is_too_costly_fails_alone() -> None:
    """(0|1)*1(0|1){14} has 2^15 states; the limit is reported, and other constraints go on."""
    bit = Chars(((48, 49),))
    hostile = Automaton(Grammar(Concat((Repeat(bit), Literal(b"1"), Repeat(bit, 14, 14)))), Limits(states=40))
    vocabulary = Vocabulary([*SINGLE, *(format(n, "08b").encode() for n in range(256)), b""], [512])
    masks = Masks(vocabulary)
    serial = masks.register()
    with pytest.raises(LimitExceeded, match="states"):
        masks.prepare(serial, hostile, hostile.start, 1_000_000)
    other = Automaton(Grammar(Literal(b"01")))
    assert unpack(finished(masks, other, other.start).bits).tolist() == [48]


def test_little_fuel_is_spent_at_a_time() -> None:
    bit = Chars(((48, 49),))
    hostile = Automaton(Grammar(Concat((Repeat(bit), Literal(b"1"), Repeat(bit, 14, 14)))))
    vocabulary = Vocabulary([*SINGLE, *(format(n, "010b").encode() for n in range(1024)), b""], [1280])
    masks, calls = Masks(vocabulary), 0
    serial, mask = masks.register(), None
    while mask is None:
        before, calls = hostile.steps, calls + 1
        mask, _ = masks.prepare(serial, hostile, hostile.start, 50)
        assert hostile.steps - before <= 75  # the row that the fuel runs out in is finished
    assert calls > 10
    assert len(unpack(mask.bits)) == 2 + 1024


def test_masks_of_a_long_vocabulary_agree_with_the_slow_way() -> None:
    """Plain tokens of 1 to 80 characters inside strings of at most so many."""
    table = [*SINGLE, *(b"x" * n for n in range(1, 81)), *("é".encode() * n + b'"' for n in range(20)), b""]
    vocabulary = Vocabulary(table, [len(table) - 1])
    masks = Masks(vocabulary)
    for most in (1, 2, 7, 17, 40, 47, 48, 49, 70, 79, 80, 81):
        grammar: Language = Concat((Spelled(Repeat(Chars(ANY), 0, most)), Literal(b'"')))
        automaton = Automaton(Grammar(grammar))
        bits = finished(masks, automaton, automaton.start).bits
        assert unpack(bits).tolist() == allowed_slowly(automaton, automaton.start, vocabulary)


def test_few_tokens_are_kept_as_ids() -> None:
    bits = np.zeros(100, np.uint32)
    bits[::50] = 5
    mask = Mask.of(bits.copy())
    assert mask.few is not None
    assert mask.few.tolist() == [0, 2, 1600, 1602]
    assert mask.bits.tolist() == bits.tolist()


WORDS = [b"ab", b"A1", b"1a", b"a-b", b"-", b"a b", b"word", b"9", b"a\xc3\xa9", b"Z"]
LETTER, WORD = Chars(((65, 90), (97, 122))), Chars(((45, 45), (48, 57), (65, 90), (97, 122)))


@pytest.mark.parametrize(
    "language",
    [
        Repeat(WORD),
        Concat((LETTER, Repeat(WORD), Literal(b"!"))),
        Concat((Repeat(WORD, 3), Literal(b"a"))),
        Concat((Repeat(WORD, 0, 3), Literal(b" "))),
    ],
)
def test_words_are_allowed_at_once_where_they_go_on(language: Language) -> None:
    vocabulary = Vocabulary([*SINGLE, *WORDS, b""], [256 + len(WORDS)])
    automaton, masks = Automaton(Grammar(language)), Masks(vocabulary)
    for state in passed(automaton, b"ab1a"):
        bits = finished(masks, automaton, state).bits
        assert unpack(bits).tolist() == allowed_slowly(automaton, state, vocabulary)
