"""The ablation "a table without a tree": the same answers, and hits only where a whole sequence was left."""

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from umbel.lang.sampling import SamplingParams
from umbel.srt.cache.radix_cache import RadixCache
from umbel.srt.cache.slot_allocator import SlotPool

from ..engine_harness import Engine

ONE = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
STEM = (3, 1, 4, 1, 5, 9, 2, 6)


def cached(engine: Engine, tokens: tuple[int, ...]) -> float:
    """Prompt tokens that the engine found for this request."""
    before = engine.count("cached_tokens")
    engine.generate(tokens, ONE)
    engine.run()
    return engine.count("cached_tokens") - before


def test_a_shared_beginning_is_found_by_the_tree_and_not_by_the_table() -> None:
    found = {}
    for partial in (True, False):
        engine = Engine(partial_match=partial)
        cached(engine, (*STEM, 7, 7))
        found[partial] = cached(engine, (*STEM, 8, 8))
    assert found == {True: len(STEM), False: 0}


def test_a_sequence_that_was_left_whole_is_found_by_both() -> None:
    for partial in (True, False):
        engine = Engine(partial_match=partial)
        cached(engine, STEM)
        assert cached(engine, (*STEM, 7, 7)) == len(STEM)
        assert cached(engine, (*STEM, 7, 7, 7)) == len(STEM) + 2


def test_a_hinted_prefix_is_an_entry_of_the_table() -> None:
    engine = Engine(partial_match=False)
    engine.hint(STEM)
    engine.run()
    assert cached(engine, (*STEM, 7)) == len(STEM)


def test_nothing_is_shared_inside_a_step() -> None:
    engine = Engine(partial_match=False)
    for last in (7, 8):
        engine.generate((*STEM, last), ONE)
    engine.run()
    assert engine.count("cached_tokens") == engine.count("in_step_tokens") == 0


sequences = st.lists(st.lists(st.integers(1, 2), min_size=1, max_size=6).map(tuple), min_size=1, max_size=8)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(batch=sequences, pool=st.integers(12, 60), chunk=st.sampled_from([None, 1, 3]))
def test_answers_are_those_of_the_tree(batch: list[tuple[int, ...]], pool: int, chunk: int | None) -> None:
    """The oracle fails when a key is reused wrongly; the pool is checked after every step."""
    answers = []
    for partial in (True, False):
        engine = Engine(pool=pool, headroom=0, partial_match=partial, max_step_tokens=chunk)
        ids = [engine.generate(tokens) for tokens in batch]
        engine.run()
        answers.append([engine.endings[number] for number in ids])
    assert [ending.token_ids for ending in answers[0]] == [ending.token_ids for ending in answers[1]]


@settings(max_examples=100, deadline=None)
@given(left=sequences, asked=st.lists(st.integers(1, 2), min_size=1, max_size=6))
def test_the_table_finds_the_longest_whole_sequence(left: list[tuple[int, ...]], asked: list[int]) -> None:
    pool = SlotPool(200)
    cache = RadixCache(pool)
    for sequence in left:
        tokens = np.array(sequence, dtype=np.int32)
        match = cache.match(tokens, "")
        cache.lock(match)
        if match.length < len(tokens):
            match = cache.extend(match, tokens[match.length :], pool.allocate(len(tokens) - match.length))
        cache.mark_whole(match)
        cache.unlock(match)
    wanted = np.array(asked, dtype=np.int32)
    longest = max((len(one) for one in left if one == tuple(asked[: len(one)])), default=0)
    assert cache.peek_whole(wanted, "") == longest
    assert cache.whole(cache.match(wanted, "")).length == longest
