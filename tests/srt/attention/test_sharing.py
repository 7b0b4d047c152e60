"""Which keys are read once for several sequences: by example. `test_plan.py` has the properties."""

import dataclasses

import numpy as np
from umbel.srt.attention.plan import Cut, make_plan
from umbel.srt.attention.sharing import MERGE_KEYS, SharedRun, find_sharing
from umbel.srt.core.batch import Batch

from ..engine_harness import VOCABULARY, Engine
from .batches import Branch, make_tree_batch


def branch(parent: int, own: int, *, query: int = 1) -> Branch:
    return Branch(parent, 1.0, own, query, private=1)


def fork(prefix: int, ways: int, own: int = 10) -> Batch:
    """`ways` decode rows on one prefix; the first sequence is the prefix alone."""
    return make_tree_batch([branch(-1, prefix), *[branch(0, own)] * ways], seed=0)[0]


def runs(batch: Batch, block_rows: int = 32) -> list[tuple[int, int, tuple[int, ...]]]:
    nothing_hidden = np.zeros(len(batch.query_lengths), dtype=np.int32)
    sharing = find_sharing(batch, nothing_hidden, block_rows=block_rows)
    return [(run.first, run.end, run.sequences) for run in sharing.runs]


def test_a_prefix_is_read_once_for_all_branches() -> None:
    batch = fork(prefix=2001, ways=7)
    assert runs(batch) == [(0, 2000, tuple(range(8)))]
    plan = make_plan(batch, None, Cut(32))
    assert plan.keys_read == 2000 + 1 + 7 * 11
    assert plan.keys_saved == 7 * 2000


def test_a_run_that_saves_less_than_its_merge_is_left_alone() -> None:
    assert runs(fork(prefix=2 * MERGE_KEYS, ways=1)) == []
    assert runs(fork(prefix=2 * MERGE_KEYS + 1, ways=1)) == [(0, 2 * MERGE_KEYS, (0, 1))]


def test_nested_forks_give_nested_runs() -> None:
    parts = [branch(-1, 501), branch(0, 400), branch(1, 20), branch(1, 20), branch(0, 30)]
    assert runs(make_tree_batch(parts, seed=0)[0]) == [(0, 500, (0, 1, 2, 3, 4)), (500, 900, (1, 2, 3))]


def test_a_short_node_is_read_by_those_below_it() -> None:
    parts = [branch(-1, 6), branch(0, 600), branch(1, 20), branch(1, 20), branch(0, 30)]
    assert runs(make_tree_batch(parts, seed=0)[0]) == [(0, 605, (1, 2, 3))]


def test_extends_join_the_run_of_their_prefix_while_they_fit_into_one_item() -> None:
    prefix = branch(-1, 1000)
    few = make_tree_batch([prefix, *[branch(0, 4, query=4)] * 3], seed=0)[0]
    assert runs(few) == [(0, 999, (0, 1, 2, 3))]
    many = make_tree_batch([prefix, *[branch(0, 64, query=64)] * 3], seed=0)[0]
    assert runs(many) == [], "each of them has full items of its own"


def test_a_window_hides_the_prefix_from_those_who_have_gone_on() -> None:
    batch, _ = make_tree_batch([branch(-1, 1000), branch(0, 40), branch(0, 50), branch(0, 400)], seed=0)
    plan = make_plan(batch, 256, Cut(32))
    ends = batch.prefix_lengths + batch.query_lengths
    sharing = find_sharing(batch, (ends - 256).astype(np.int32), block_rows=32)
    assert [(run.first, run.end, run.sequences) for run in sharing.runs] == [(744, 999, (0, 1, 2))]
    assert plan.keys_read < 4 * 256


def test_sequences_of_which_one_is_still_being_computed_share_what_they_have_in_common() -> None:
    batch = fork(prefix=501, ways=3)
    cut_off = ((batch.paths[0][0][0], 0, 200),)
    batch = dataclasses.replace(batch, paths=(cut_off, *batch.paths[1:]))
    assert runs(batch) == [(0, 501, (1, 2, 3))]


def test_what_is_saved_is_what_the_plans_differ_by() -> None:
    batch = fork(prefix=1001, ways=5)
    shared, alone = (make_plan(batch, None, Cut(32, tree=tree)) for tree in (True, False))
    assert alone.keys_read - shared.keys_read == shared.keys_saved
    assert isinstance(find_sharing(batch, np.zeros(6, np.int32), block_rows=32).runs[0], SharedRun)


def test_what_the_scheduler_calls_shared_lies_in_the_same_slots() -> None:
    engine = Engine(pool=300, context=120)
    forward, shared = engine.runner.forward, []

    def watched(batch: Batch) -> object:
        slots_of: dict[tuple[int, int, int], list[int]] = {}
        for slots, path in zip(batch.slots, batch.paths, strict=True):
            for node, first, length in path:
                here = slots[first : first + length].tolist()
                assert len(here) == length, "a path ends where its sequence ends"
                assert slots_of.setdefault((node, first, length), here) == here
        shared.append(sum(map(len, batch.paths)) - len(slots_of))
        return forward(batch)

    engine.runner.forward = watched  # type: ignore[assignment, method-assign]
    rng = np.random.default_rng(0)
    stem = rng.integers(1, VOCABULARY, 30).tolist()
    for _ in range(3):
        for ways in range(5):
            engine.generate(stem[: 10 + 5 * ways] + rng.integers(1, VOCABULARY, 7).tolist())
        engine.run()
    assert sum(shared) > 20, "branches share nodes"
