"""The cursor of a text: forced tokens, shortest ends, rollback; with jump-forward and without, the same text."""

import itertools
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from umbel.fsm.errors import ConstraintRefused, LimitExceeded, Limits
from umbel.fsm.language import Chars, Concat, Grammar, Language, Literal, Repeat, Spelled, Union
from umbel.fsm.tokens.constraint import LONGEST_REMEMBERED, Constraint, ConstraintState
from umbel.fsm.tokens.masks import Masks
from umbel.fsm.tokens.vocabulary import Vocabulary, unpack

from ..languages import ANY, LANGUAGES, recursive_grammars
from ..matcher import matches
from ..vocabularies import SINGLE, letters

FUEL = 1_000_000
DIGITS = Repeat(Chars(((48, 57),)), 1, 3)
PERSON = Concat(
    (Literal(b'{"name": "'), Spelled(Repeat(Chars(ANY))), Literal(b'", "age": '), DIGITS, Literal(b"}")),
)


class Pairs:
    """Byte-pair encoding: of the merges that apply, the earliest learned one goes first, the leftmost of its kind."""

    def __init__(self, merges: list[tuple[bytes, bytes]]) -> None:
        self.merges = {pair: rank for rank, pair in reversed(list(enumerate(merges)))}
        table = [*SINGLE, *(first + second for first, second in self.merges)]
        self.ids = {data: token for token, data in reversed(list(enumerate(table)))}
        self.eos = len(table)
        self.vocabulary = Vocabulary([*table, b"</s>"], [self.eos])

    def encode(self, text: str) -> list[int]:
        pieces = [bytes([byte]) for byte in text.encode()]
        while True:
            ranks = [self.merges.get(pair) for pair in itertools.pairwise(pieces)]
            best = min((rank for rank in ranks if rank is not None), default=None)
            if best is None:
                return [self.ids[piece] for piece in pieces]
            place = ranks.index(best)
            pieces[place : place + 2] = [pieces[place] + pieces[place + 1]]


@st.composite
def pair_encodings(draw: st.DrawFn, alphabet: bytes = 'ab"\\\né: ,'.encode()) -> Pairs:
    known = [bytes([byte]) for byte in set(alphabet)]
    merges = []
    for _ in range(draw(st.integers(0, 12))):
        pair = (draw(st.sampled_from(known)), draw(st.sampled_from(known)))
        if pair not in merges:
            merges.append(pair)
            known.append(pair[0] + pair[1])
    return Pairs(merges)


ENGLISH = Pairs(
    [
        *[(b" ", b"t"), (b"n", b"a"), (b"m", b"e"), (b"na", b"me"), (b"a", b"g"), (b"ag", b"e")],
        *[(b'"', b":"), (b" ", b'"'), (b'"', b","), (b"{", b'"')],
    ]
)


def cursor(language: Language, pairs: Pairs = ENGLISH, context: bytes = b"") -> ConstraintState:
    return Constraint(Grammar(language), Masks(pairs.vocabulary), encode=pairs.encode).begin(context)


def allowed(state: ConstraintState) -> list[int]:
    assert state.prepare(FUEL) is not None
    return unpack(state.mask).tolist()


def take(state: ConstraintState, tokens: list[int]) -> None:
    for token in tokens:
        state.advance(token)


def generate(state: ConstraintState, vocabulary: Vocabulary, *, jump: bool, most: int, seed: int) -> list[int]:
    """A model whose next token is a hash of the whole text; the shortest end when the budget is used up."""
    taken: list[int] = []
    known: list[int] = []
    while len(taken) < most and not state.finished:
        if jump and not known:
            known = state.forced_tokens()
        token = known.pop(0) if known else random.Random(f"{seed} {taken}").choice(allowed(state))
        state.advance(token)
        taken.append(token)
    closing = state.closing_tokens()
    assert len(closing) <= state.closing_bound
    take(state, closing)
    assert state.ended or state.accepting
    return taken + closing


@settings(max_examples=150, deadline=None)
@given(
    grammar=st.one_of(LANGUAGES.map(Grammar), recursive_grammars(), st.just(Grammar(PERSON))),
    pairs=pair_encodings(),
    context=st.sampled_from([b"", b"a", b" ", b'"', b"\xc3"]),
    most=st.integers(0, 30),
    seed=st.integers(0, 1_000),
)
def test_a_text_is_the_same_with_jump_forward_and_without(
    grammar: Grammar, pairs: Pairs, context: bytes, most: int, seed: int
) -> None:
    def text(*, jump: bool) -> list[int]:
        constraint = Constraint(grammar, Masks(pairs.vocabulary), encode=pairs.encode)
        return generate(constraint.begin(context), pairs.vocabulary, jump=jump, most=most, seed=seed)

    tokens = text(jump=True)
    assert tokens == text(jump=False)
    assert matches(grammar, pairs.vocabulary.spell(tokens))
    assert all(pairs.vocabulary.token_bytes(token) for token in tokens[:-1])


@settings(max_examples=60, deadline=None)
@given(pairs=pair_encodings(), text=st.text(alphabet='ab"\\\né: ,', min_size=1, max_size=12))
def test_a_text_that_is_forced_as_a_whole_has_its_canonical_tokens(pairs: Pairs, text: str) -> None:
    state = cursor(Literal(text.encode()), pairs)
    assert state.forced_tokens() == pairs.encode(text)
    take(state, state.forced_tokens())
    assert state.finished
    assert state.forced_tokens() == []


def spelled(tokens: list[int]) -> list[bytes]:
    return [ENGLISH.vocabulary.token_bytes(token) for token in tokens]


def test_the_frame_of_an_object_is_forced_and_its_values_are_not() -> None:
    state = cursor(PERSON)
    assert spelled(state.forced_tokens()) == [b'{"', b"name", b'":', b' "']
    take(state, state.forced_tokens())
    assert state.forced_tokens() == []
    take(state, ENGLISH.encode('Jo",'))
    assert spelled(state.forced_tokens()) == [b' "', b"age", b'":', b" "]
    take(state, [*state.forced_tokens(), *ENGLISH.encode("7")])
    assert state.forced_tokens() == []
    assert spelled(allowed(state)) == [*(b"%d" % n for n in range(10)), b"}"]


def test_a_token_that_may_become_a_longer_one_is_left_to_the_model() -> None:
    """`"x` is a token: behind `"name":` nobody knows yet which token the quote will be in."""
    pairs = Pairs([(b'"', b"x")])
    forced = cursor(Concat((Literal(b'a: "'), Spelled(Repeat(Chars(ANY))), Literal(b'"'))), pairs).forced_tokens()
    assert pairs.vocabulary.spell(forced) == b"a: "
    digits = Concat((Literal(b'a: "'), DIGITS, Literal(b'"')))
    assert pairs.vocabulary.spell(cursor(digits, pairs).forced_tokens()) == b'a: "'


def test_a_jump_is_cut_where_the_canonical_tokens_would_change_the_past() -> None:
    """The prompt ends in `{`; with the forced quote behind it the tokenizer would have written `{"`."""
    constraint = Constraint(Grammar(Literal(b'"a"}')), Masks(ENGLISH.vocabulary), encode=ENGLISH.encode)
    state = constraint.begin(b"{")
    assert state.forced_tokens() == []
    assert constraint.counters.cut == 1
    assert spelled(allowed(state)) == [b'"']
    assert spelled(constraint.begin(b"x").forced_tokens()) == [b'"', b"a", b'"', b"}"]


def test_forced_text_ends_before_half_a_character() -> None:
    accents = Union((Literal("né".encode()), Literal("nè".encode())))
    assert spelled(cursor(accents).forced_tokens()) == [b"n"]


def test_a_character_that_was_begun_is_finished() -> None:
    """The last token is half a character: what it began is looked at from its first byte."""
    state = cursor(Concat((Chars(((97, 122),)), Union((Literal("é!".encode()), Literal(b"x"))))))
    take(state, [ord("a"), 0xC3])
    assert spelled(state.forced_tokens()) == [b"\xa9", b"!"]


def test_the_rest_of_a_character_is_no_further_part() -> None:
    """Otherwise free text would end before such a character when few tokens are left."""
    state = cursor(Repeat(Chars(ANY)))
    for byte in "日🎉".encode():
        state.advance(byte)
        assert not state.begins_more
    members = cursor(Concat((Literal(b"{"), Repeat(Literal("é=1;".encode())), Literal(b"}"))))
    take(members, [ord("{"), 0xC3])
    assert not members.begins_more
    optional = cursor(Concat((Literal(b"{"), Repeat(Concat((Chars(ANY), Literal(b"=1;")))), Literal(b"}"))))
    take(optional, [ord("{"), ord("e")])
    assert optional.begins_more


def test_without_a_tokenizer_nothing_is_forced_and_ends_are_short() -> None:
    state = Constraint(Grammar(PERSON), Masks(ENGLISH.vocabulary)).begin()
    assert state.forced_tokens() == []
    assert spelled(allowed(state)) == [b"{", b'{"']
    assert ENGLISH.vocabulary.spell(state.closing_tokens()) == b'{"name": "", "age": 0}'


def test_the_minimum_is_the_shortest_text_in_tokens() -> None:
    constraint = Constraint(Grammar(PERSON), Masks(ENGLISH.vocabulary), encode=ENGLISH.encode)
    assert constraint.minimum_tokens == len(ENGLISH.encode('{"name": "", "age": 0}'))


def test_long_ends_are_remembered_one_at_a_time() -> None:
    """A text of many tokens goes through as many states, and the ends of all of them together grow with the square."""
    state = cursor(Repeat(Chars(((120, 122),)), 2_000, 2_000))
    explored = state._explored
    for place in range(1_900):
        assert len(state.closing_tokens()) == 2_000 - place
        assert state.closing_tokens() == state.closing_tokens()
        state.advance(ord("x"))
    assert sum(map(len, explored._closings.values())) <= LONGEST_REMEMBERED**2


def test_what_the_vocabulary_cannot_spell_is_refused_at_once() -> None:
    with pytest.raises(ConstraintRefused, match="no tokens that spell"):
        Constraint(Grammar(Literal("é".encode())), Masks(letters()))


def test_a_text_ends_with_eos_or_when_nothing_can_follow() -> None:
    state = cursor(Repeat(Literal(b"ab"), 1, 2))
    assert not state.accepting
    take(state, ENGLISH.encode("ab"))
    assert state.accepting
    assert not state.finished
    assert ENGLISH.eos in allowed(state)
    ended = state.copy()
    ended.advance(ENGLISH.eos)
    assert ended.finished
    assert ended.closing_tokens() == ended.forced_tokens() == []
    take(state, ENGLISH.encode("ab"))
    assert state.finished
    assert allowed(state) == [ENGLISH.eos]


@pytest.mark.parametrize("token", [ord("b"), ENGLISH.eos])
def test_a_token_that_is_not_allowed_is_refused(token: int) -> None:
    state = cursor(Literal(b"ab"))
    with pytest.raises(ConstraintRefused):
        state.advance(token)
    assert allowed(state) == [ord("a")]


def test_nothing_follows_the_end() -> None:
    state = cursor(Repeat(Literal(b"a")))
    state.advance(ENGLISH.eos)
    with pytest.raises(ConstraintRefused):
        state.advance(ord("a"))
    with pytest.raises(ConstraintRefused):
        state.advance(ENGLISH.eos)


@settings(max_examples=60, deadline=None)
@given(grammar=LANGUAGES.map(Grammar), pairs=pair_encodings(), seed=st.integers(0, 100), data=st.data())
def test_rolling_back_is_never_having_been_there(
    grammar: Grammar, pairs: Pairs, seed: int, data: st.DataObject
) -> None:
    state = Constraint(grammar, Masks(pairs.vocabulary), encode=pairs.encode).begin()

    def look() -> tuple[list[int], list[int], list[int], bool, bool]:
        mask = [] if state.ended else allowed(state)
        return mask, state.forced_tokens(), state.closing_tokens(), state.accepting, state.finished

    looked, tokens = [look()], []
    while not state.finished and len(tokens) < 12:
        tokens.append(random.Random(f"{seed} {tokens}").choice(looked[-1][0]))
        state.advance(tokens[-1])
        looked.append(look())
    back = data.draw(st.integers(0, len(tokens)))
    state.rollback(back)
    for place in range(len(tokens) - back, len(tokens)):
        assert look() == looked[place]
        state.advance(tokens[place])
    assert look() == looked[-1]


def test_copies_go_their_own_ways() -> None:
    state = cursor(PERSON)
    take(state, ENGLISH.encode('{"name": "A'))
    other = state.copy()
    take(other, ENGLISH.encode('nna", "age": 3}'))
    assert other.finished
    assert not state.accepting
    take(state, ENGLISH.encode('da", "age": 3}'))
    assert state.finished


def test_new_texts_get_a_fresh_automaton_before_the_old_one_is_full() -> None:
    limits = Limits(states=300)
    constraint = Constraint(Grammar(Repeat(Chars(((97, 122),)), 0, 1000)), Masks(ENGLISH.vocabulary), limits=limits)
    for letter in b"ab":
        state = constraint.begin()
        take(state, [letter] * 200)
        assert state.accepting
    with pytest.raises(LimitExceeded):
        take(state, [97] * 200)


def test_what_is_forced_and_what_was_cut_is_counted() -> None:
    constraint = Constraint(Grammar(PERSON), Masks(ENGLISH.vocabulary), encode=ENGLISH.encode)
    state = constraint.begin()
    take(state, state.forced_tokens())
    assert constraint.counters.forced == 4
    assert constraint.counters.cut == 0


def test_no_control_token_is_ever_allowed() -> None:
    table = [*SINGLE, b"<control>", b"</s>", b""]
    vocabulary = Vocabulary(table, [257], control=[256])
    state = Constraint(Grammar(Repeat(Chars(ANY))), Masks(vocabulary)).begin()
    for letter in b"abc":
        assert state.prepare(FUEL) is not None
        tokens = unpack(state.mask)
        assert 256 not in tokens
        assert 258 not in tokens
        assert np.isin(257, tokens)
        state.advance(letter)
