"""Native masks beside their numpy reference: the same tokens, for no more fuel."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from umbel.fsm.automaton.automaton import DEAD, UNKNOWN, LazyAutomaton
from umbel.fsm.boolean.resolution import resolve
from umbel.fsm.errors import LimitExceeded, Limits
from umbel.fsm.language import Chars, Concat, Grammar, Literal, Repeat, Spelled
from umbel.fsm.tokens.constraint import Constraint
from umbel.fsm.tokens.masks import FEW, Fuelled, Mask, Masks, NumpyWalk, work_of
from umbel.fsm.tokens.trie import Trie, build_trie
from umbel.fsm.tokens.vocabulary import Vocabulary, unpack
from umbel.srt.kernels.cpu.library import load_host_library
from umbel.srt.kernels.cpu.trie_walk import CpuTrieWalk

from ...fsm.languages import ANY, LANGUAGES, any_orders, recursive_grammars
from ...fsm.vocabularies import ALPHABET, SINGLE, vocabularies

WORD = Chars(((45, 45), (48, 57), (65, 90), (97, 122)))
STRINGS = st.builds(
    lambda least, more, after: Grammar(Concat((Spelled(Repeat(Chars(ANY), least, least + more)), after))),
    st.integers(0, 3),
    st.integers(0, 60),
    st.sampled_from([Literal(b'"'), Literal(b'a"'), Literal(b""), Repeat(WORD)]),
)
WORDS = st.builds(
    lambda body, least, after: Grammar(Concat((Repeat(body, least), after))),
    st.sampled_from([WORD, Chars(((48, 57), (65, 90), (97, 122))), Chars(((97, 122),))]),
    st.integers(0, 3),
    st.sampled_from([Literal(b"!"), Literal(b"a"), Literal(b"")]),
)
GRAMMARS = st.one_of(
    LANGUAGES.map(Grammar),
    any_orders().map(lambda order: resolve(Grammar(order), Limits())),
    recursive_grammars(),
    STRINGS,
    WORDS,
)
PATHS = st.lists(st.sampled_from([*ALPHABET, b"word", "漢字".encode() * 30]), max_size=6).map(b"".join)


@pytest.fixture(scope="module")
def native() -> CpuTrieWalk:
    return CpuTrieWalk(load_host_library())


def finished(masks: Masks, automaton: LazyAutomaton, state: int, fuel: int) -> tuple[Mask, int]:
    """A mask, and the fuel that it has taken."""
    serial, used = masks.register(), 0
    for _ in range(100_000):
        mask, left = masks.prepare(serial, automaton, state, fuel)
        assert 0 <= left <= fuel
        used += fuel - left
        if mask is not None:
            return mask, used
    raise AssertionError("the mask is never finished")


def tokens_of(mask: Mask) -> list[int]:
    tokens = unpack(mask.bits).tolist()
    assert (mask.few is None) == (len(tokens) > FEW)
    assert mask.few is None or mask.few.tolist() == tokens
    return tokens


@settings(max_examples=300, deadline=None)
@given(grammar=GRAMMARS, vocabulary=vocabularies(), path=PATHS, fuel=st.sampled_from([1, 2, 7, 1_000_000]))
def test_masks_are_those_of_the_reference(
    native: CpuTrieWalk, grammar: Grammar, vocabulary: Vocabulary, path: bytes, fuel: int
) -> None:
    trie = build_trie(vocabulary)
    ours, theirs = Masks(vocabulary, trie, walk=native), Masks(vocabulary, trie)
    automaton, reference = ours.automaton(grammar, Limits()), theirs.automaton(grammar, Limits())
    state, same = automaton.start, reference.start
    for byte in [*path, None]:
        mask, _ = finished(ours, automaton, state, fuel)
        expected, _ = finished(theirs, reference, same, 1_000_000)
        assert tokens_of(mask) == tokens_of(expected)
        state, same = automaton.step(state, byte or 0), reference.step(same, byte or 0)
        assert (state == DEAD) == (same == DEAD)
        if state == DEAD:
            break


@settings(max_examples=100, deadline=None)
@given(grammar=GRAMMARS, vocabulary=vocabularies(), path=PATHS, begun=PATHS)
def test_longer_tokens_are_found_as_by_the_reference(
    native: CpuTrieWalk, grammar: Grammar, vocabulary: Vocabulary, path: bytes, begun: bytes
) -> None:
    trie, reference_walk = build_trie(vocabulary), NumpyWalk()
    automaton, reference = native.automaton(grammar, Limits()), reference_walk.automaton(grammar, Limits())
    state, same = automaton.run(automaton.start, path), reference.run(reference.start, path)
    for prefix in (path[-2:], begun):
        if state != DEAD and prefix:
            found = native.goes_on(trie, automaton, prefix, state)
            assert found == reference_walk.goes_on(trie, reference, prefix, same)


def test_the_search_for_a_longer_token_ends(native: CpuTrieWalk) -> None:
    """A thousand tokens below the beginning, none of which is over within the first states."""
    table = [b"a" + bytes([first, second]) * 40 for first in range(97, 123) for second in range(97, 123)]
    vocabulary = Vocabulary([*table, b"a", b""], [len(table) + 1])
    trie, grammar = build_trie(vocabulary), Grammar(Repeat(Chars(((97, 122),)), 0, 60))
    for walk in (native, NumpyWalk()):
        automaton = walk.automaton(grammar, Limits())
        assert walk.goes_on(trie, automaton, b"a", automaton.step(automaton.start, 97))
        assert automaton.states < 300


def walked(walk: CpuTrieWalk | NumpyWalk, trie: Trie, grammar: Grammar, words: int, limit: int, fuel: int) -> list[int]:
    """Walks on until nothing is left, with so much fuel for each walk."""
    automaton = walk.automaton(grammar, Limits())
    bits = np.zeros(words, np.uint32)
    work = work_of([trie.everything] if trie.everything.end else [], automaton.start)
    while len(work):
        rows = Fuelled(automaton, fuel)
        work, visited = walk(trie, rows, work, bits, limit)
        assert visited > 0 or rows.fuel < fuel
    return bits.tolist()


@settings(max_examples=150, deadline=None)
@given(
    grammar=GRAMMARS,
    vocabulary=vocabularies(),
    limit=st.sampled_from([1, 3, 20, 10_000]),
    fuel=st.sampled_from([1, 2, 1_000_000]),
)
def test_a_walk_that_is_interrupted_lets_the_same_tokens_through(
    native: CpuTrieWalk, grammar: Grammar, vocabulary: Vocabulary, limit: int, fuel: int
) -> None:
    trie = build_trie(vocabulary)
    expected = walked(NumpyWalk(), trie, grammar, vocabulary.words, 1_000_000, 1_000_000)
    assert walked(native, trie, grammar, vocabulary.words, limit, fuel) == expected
    assert walked(NumpyWalk(), trie, grammar, vocabulary.words, limit, fuel) == expected


class Answers:
    """Rows that are known when they have been asked for, in an array that moves each time."""

    def __init__(self, known: NDArray[np.int32], hidden: set[int]) -> None:
        self._known = known
        self.table = known.copy()
        self.table[list(hidden)] = UNKNOWN
        self.asked: list[int] = []

    def find(self, state: int, byte: int) -> bool:
        assert self.table[state, byte] == UNKNOWN
        self.asked.append(state)
        self.table = self.table.copy()
        self.table[state] = self._known[state]
        return True


def test_only_what_a_token_needs_is_asked_for() -> None:
    vocabulary = Vocabulary([b"ab", b"ac", b"b", b""], [3])
    trie = build_trie(vocabulary)
    table = np.full((4, 256), DEAD, np.int32)
    table[0, 97], table[1, 98], table[2, 97], table[3, 97] = 1, 2, 3, 3
    answers, bits = Answers(table, {0, 1, 2, 3}), np.zeros(vocabulary.words, np.uint32)
    left, _ = NumpyWalk()(trie, answers, work_of([trie.everything], 0), bits, 1000)
    assert not len(left)
    assert bits.tolist() == [0b1]
    assert answers.asked == [0, 1]


def test_an_error_of_the_automaton_is_raised_and_the_next_mask_begins_afresh(native: CpuTrieWalk) -> None:
    bit = Chars(((48, 49),))
    hostile = Grammar(Concat((Repeat(bit), Literal(b"1"), Repeat(bit, 14, 14))))
    table = [*SINGLE, *(format(n, "08b").encode() for n in range(256)), b""]
    masks = Masks(Vocabulary(table, [512]), walk=native)
    automaton = masks.automaton(hostile, Limits(states=40))
    with pytest.raises(LimitExceeded, match="states"):
        finished(masks, automaton, automaton.start, 1_000_000)
    other = masks.automaton(Grammar(Literal(b"01")), Limits())
    assert tokens_of(finished(masks, other, other.start, 1)[0]) == [48]


def test_little_fuel_is_spent_at_a_time(native: CpuTrieWalk) -> None:
    bit = Chars(((48, 49),))
    table = [*SINGLE, *(format(n, "010b").encode() for n in range(1024)), b""]
    masks = Masks(Vocabulary(table, [1280]), walk=native)
    grammar = Grammar(Concat((Repeat(bit), Literal(b"1"), Repeat(bit, 14, 14))))
    automaton = masks.automaton(grammar, Limits())
    serial, mask, calls = masks.register(), None, 0
    while mask is None:
        before, calls = automaton.steps, calls + 1
        mask, _ = masks.prepare(serial, automaton, automaton.start, 50)
        assert automaton.steps - before <= 8 * 50 + 100  # the row that the fuel runs out in is finished
    assert calls > 10
    assert len(tokens_of(mask)) == 2 + 1024


def test_the_same_mask_takes_an_eighth_of_the_fuel(native: CpuTrieWalk) -> None:
    bit = Chars(((48, 49),))
    grammar = Grammar(Concat((Repeat(bit), Literal(b"1"), Repeat(bit, 14, 14))))
    vocabulary = Vocabulary([*SINGLE, *(format(n, "010b").encode() for n in range(1024)), b""], [1280])
    used = []
    for masks in (Masks(vocabulary, walk=native), Masks(vocabulary)):
        automaton = masks.automaton(grammar, Limits())
        used.append(finished(masks, automaton, automaton.start, 1_000_000)[1])
    assert used[1] / 9 < used[0] < used[1] / 7


def test_more_work_than_fits_is_handed_back(native: CpuTrieWalk) -> None:
    """A hundred thousand pieces, none of which is lost."""
    tokens = [bytes((first, second)) for first in range(256) for second in range(64, 128)]
    vocabulary = Vocabulary([*tokens, b""], [len(tokens)])
    trie = build_trie(vocabulary)
    automaton = native.automaton(Grammar(Repeat(Literal(b"a"))), Limits())
    automaton.expand(automaton.start)
    bits = np.zeros(vocabulary.words, np.uint32)
    pieces = np.repeat(work_of([trie.everything], automaton.start), 100_000, axis=0)
    before = len(pieces)
    left, visited = native(trie, Fuelled(automaton, 1), pieces, bits, 300)
    assert visited >= 300
    assert before - 3 <= len(left) <= before + 1
    rest = np.ascontiguousarray(left[-1:])
    while len(rest):
        rest, _ = native(trie, Fuelled(automaton, 10), rest, bits, 1 << 24)
    assert unpack(bits).tolist() == [tokens.index(b"aa")]


def test_a_mask_with_few_tokens_gives_its_room_back(native: CpuTrieWalk) -> None:
    """Bits are written to what the last small mask gave back, and never to those of a mask that is kept."""
    vocabulary = Vocabulary([*SINGLE, b""], [256])
    masks = Masks(vocabulary, walk=native)
    many = masks.automaton(Grammar(Repeat(Chars(((0, 0x10FFFF),)))), Limits())
    few = masks.automaton(Grammar(Literal(b"xyz")), Limits())
    kept, _ = finished(masks, many, many.start, 1_000)
    before = kept.bits.tolist()
    assert tokens_of(finished(masks, few, few.start, 1_000)[0]) == [ord("x")]
    assert tokens_of(finished(masks, few, few.step(few.start, ord("x")), 1_000)[0]) == [ord("y")]
    again, _ = finished(masks, many, many.start, 1_000)
    assert again.bits.tolist() == before == kept.bits.tolist()
    with pytest.raises(ValueError, match="read-only"):
        kept.bits[0] = 0


def test_a_constraint_is_the_same_with_both(native: CpuTrieWalk) -> None:
    vocabulary = Vocabulary([*SINGLE, b"ab", b"abab", b""], [258])
    grammar = Grammar(Concat((Literal(b"ab"), Repeat(Chars(((97, 98),)), 2, 9), Literal(b"!"))))
    taken = []
    for walk in (native, NumpyWalk()):
        state = Constraint(grammar, Masks(vocabulary, walk=walk)).begin()
        tokens = []
        while not state.finished:
            while state.prepare(3) is None:
                pass
            allowed = unpack(state.mask)
            tokens.append(int(allowed[len(tokens) * 7 % len(allowed)]))
            state.advance(tokens[-1])
        taken.append((tokens, state.closing_tokens()))
    assert taken[0] == taken[1]
