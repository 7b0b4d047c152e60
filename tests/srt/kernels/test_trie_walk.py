"""The native walk against its numpy twin: the same bits, and the same work left in the end."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from umbel.fsm.automaton.automaton import DEAD, UNKNOWN
from umbel.fsm.tokens.trie import Trie, build_trie
from umbel.fsm.tokens.trie_walk import NumpyWalk, Walk, work_of
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


@st.composite
def tables(draw: st.DrawFn) -> NDArray[np.int32]:
    """Rows are known whole or not at all."""
    table = np.full((STATES, 256), DEAD, np.int32)
    table[:, 97:101] = np.array(draw(st.lists(st.integers(DEAD, STATES - 1), min_size=16, max_size=16))).reshape(4, 4)
    for state in draw(st.sets(st.integers(0, STATES - 1))):
        table[state] = UNKNOWN
    return table


def reachable(walk: Walk, trie: Trie, table: NDArray[np.int32], words: int, limit: int) -> tuple[list[int], set[int]]:
    """Walks on until nothing but unknown rows is left → the mask, and those rows."""
    bits = np.zeros(words, np.uint32)
    work = work_of([trie.everything] if trie.everything.end else [], 0)
    stuck: set[int] = set()
    while len(work):
        work, visited = walk(trie, table, work, bits, limit)
        assert visited > 0
        unknown = table[work[:, 2], 97] == UNKNOWN
        stuck |= set(work[unknown, 2].tolist())
        work = np.ascontiguousarray(work[~unknown])
    return bits.tolist(), stuck


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(made=tries(), table=tables(), limit=st.sampled_from([1, 3, 20, 10_000]))
def test_it_lets_the_same_tokens_through(
    native: CpuTrieWalk, made: tuple[Trie, int], table: NDArray[np.int32], limit: int
) -> None:
    trie, words = made
    expected = reachable(NumpyWalk(), trie, table, words, 1_000_000)
    assert reachable(native, trie, table, words, limit) == expected
    assert reachable(NumpyWalk(), trie, table, words, limit) == expected


def test_more_work_than_fits_is_handed_back(native: CpuTrieWalk) -> None:
    """Ten thousand pieces at once, none of which is lost."""
    tokens = [bytes((first, second)) for first in range(256) for second in range(64)]
    vocabulary = Vocabulary([*tokens, b""], [len(tokens)])
    trie = build_trie(vocabulary)
    table = np.full((2, 256), UNKNOWN, np.int32)
    table[0] = 1
    bits = np.zeros(vocabulary.words, np.uint32)
    left, _ = native(trie, table, work_of([trie.everything], 0), bits, 1 << 20)
    assert not bits.any()
    table[1] = 0
    pieces = np.ascontiguousarray(np.repeat(left, 40, axis=0))
    while len(pieces):
        pieces, _ = native(trie, table, pieces, bits, 1 << 20)
    assert unpack(bits).tolist() == list(range(len(tokens)))
