"""The native walk against its numpy reference: the same bits, and the same work left in the end."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from umbel.fsm.automaton.automaton import DEAD, UNKNOWN
from umbel.fsm.tokens.masks import NumpyWalk, Walk, work_of
from umbel.fsm.tokens.trie import Trie, build_trie
from umbel.fsm.tokens.vocabulary import Vocabulary, unpack
from umbel.srt.kernels.cpu.library import load_walk
from umbel.srt.kernels.cpu.trie_walk import CpuTrieWalk

STATES = 4


@pytest.fixture(scope="module")
def native() -> CpuTrieWalk:
    return CpuTrieWalk(load_walk())


@st.composite
def tries(draw: st.DrawFn) -> tuple[Trie, int]:
    letters = draw(st.integers(1, 4))
    token = st.lists(st.integers(97, 96 + letters), max_size=6).map(bytes)
    table = draw(st.lists(token, min_size=1, max_size=200))
    vocabulary = Vocabulary([*table, b""], [len(table)])
    return build_trie(vocabulary), vocabulary.words


class Answers:
    """Rows that are known when they have been asked for, in an array that moves each time; `answers` of them."""

    def __init__(self, known: NDArray[np.int32], hidden: set[int], answers: int = 1_000_000) -> None:
        self._known = known
        self.table = known.copy()
        self.table[list(hidden)] = UNKNOWN
        self.asked: list[int] = []
        self.answers = answers

    def find(self, state: int, byte: int) -> bool:
        assert self.table[state, byte] == UNKNOWN
        if self.answers == 0:
            return False
        self.answers -= 1
        self.asked.append(state)
        self.table = self.table.copy()
        self.table[state] = self._known[state]
        return True


class Refusal(Exception):
    pass


@st.composite
def tables(draw: st.DrawFn) -> NDArray[np.int32]:
    table = np.full((STATES, 256), DEAD, np.int32)
    table[:, 97:101] = np.array(draw(st.lists(st.integers(DEAD, STATES - 1), min_size=16, max_size=16))).reshape(4, 4)
    return table


HIDDEN = st.sets(st.integers(0, STATES - 1))


def allowed(walk: Walk, trie: Trie, answers: Answers, words: int, limit: int) -> list[int]:
    """Walks on until nothing is left, one more answer for each walk that ended for want of one."""
    bits = np.zeros(words, np.uint32)
    work = work_of([trie.everything] if trie.everything.end else [], 0)
    while len(work):
        before = len(answers.asked)
        work, visited = walk(trie, answers, work, bits, limit)
        assert visited > 0 or answers.answers == 0 or len(answers.asked) > before
        if answers.answers == 0:
            answers.answers = 1
    return bits.tolist()


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    made=tries(),
    table=tables(),
    hidden=HIDDEN,
    limit=st.sampled_from([1, 3, 20, 10_000]),
    answers=st.sampled_from([0, 1, 2, 1_000_000]),
)
def test_it_lets_the_same_tokens_through(
    native: CpuTrieWalk,
    made: tuple[Trie, int],
    table: NDArray[np.int32],
    hidden: set[int],
    limit: int,
    answers: int,
) -> None:
    trie, words = made
    expected = allowed(NumpyWalk(), trie, Answers(table, set()), words, 1_000_000)
    for walk in (native, NumpyWalk()):
        asking = Answers(table, hidden, answers)
        assert allowed(walk, trie, asking, words, limit) == expected
        assert len(asking.asked) == len(set(asking.asked)), "a row is asked for once"


@pytest.fixture(params=["native", "numpy"])
def walk(request: pytest.FixtureRequest, native: CpuTrieWalk) -> Walk:
    return native if request.param == "native" else NumpyWalk()


def test_only_what_a_token_needs_is_asked_for(walk: Walk) -> None:
    vocabulary = Vocabulary([b"ab", b"ac", b"b", b""], [3])
    table = np.full((4, 256), DEAD, np.int32)
    table[0, 97], table[1, 98], table[2, 97], table[3, 97] = 1, 2, 3, 3
    answers = Answers(table, {0, 1, 2, 3})
    assert allowed(walk, build_trie(vocabulary), answers, vocabulary.words, 1000) == [0b1]
    assert answers.asked == [0, 1]


def test_an_error_of_the_automaton_is_raised_and_the_next_walk_begins_afresh(walk: Walk) -> None:
    class Refusing(Answers):
        def find(self, state: int, byte: int) -> bool:
            raise Refusal(f"state {state}")

    vocabulary = Vocabulary([b"ab", b"b", b""], [2])
    trie = build_trie(vocabulary)
    table = np.full((2, 256), DEAD, np.int32)
    table[0, 97], table[1, 98] = 1, 0
    bits = np.zeros(vocabulary.words, np.uint32)
    with pytest.raises(Refusal, match="state 1"):
        walk(trie, Refusing(table, {1}), work_of([trie.everything], 0), bits, 1000)
    assert allowed(walk, trie, Answers(table, {1}), vocabulary.words, 1000) == [0b1]


def test_more_work_than_fits_is_handed_back(native: CpuTrieWalk) -> None:
    """Ten thousand pieces at once, none of which is lost."""
    tokens = [bytes((first, second)) for first in range(256) for second in range(64)]
    vocabulary = Vocabulary([*tokens, b""], [len(tokens)])
    trie = build_trie(vocabulary)
    table = np.zeros((2, 256), np.int32)
    answers = Answers(table, {0, 1}, answers=0)
    bits = np.zeros(vocabulary.words, np.uint32)
    left, visited = native(trie, answers, work_of([trie.everything], 0), bits, 1 << 20)
    assert visited == 0
    assert not bits.any()
    pieces = np.ascontiguousarray(np.repeat(left, 10_000, axis=0))
    pieces, _ = native(trie, answers, pieces, bits, 1 << 20)
    assert len(pieces) == 10_000 * len(left)
    answers.answers = 2
    while len(pieces):
        pieces, _ = native(trie, answers, pieces, bits, 1 << 24)
    assert unpack(bits).tolist() == list(range(len(tokens)))
