"""The planner, checked against the definition of what each row may see."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from umbel.srt.attention.plan import (
    MERGE_KEYS,
    AttentionPlan,
    BothWays,
    Cut,
    SharedRun,
    Window,
    find_sharing,
    make_plan,
)
from umbel.srt.core.batch import Batch

from ..engine_harness import VOCABULARY, Engine
from .batches import Branch, Sequence, branches, make_batch, make_tree_batch, seen, sequences, with_pictures

windows = st.one_of(st.none(), st.integers(1, 30))
splits = st.one_of(st.none(), st.integers(1, 17))


def seen_by_items(plan: AttentionPlan) -> list[list[tuple[int, int]]]:
    """Per row the (position, slot) pairs it sees, from the items alone."""
    found: list[list[tuple[int, int]]] = [[] for _ in plan.row_lo]
    for item in range(plan.items):
        start, end = plan.item_kv[item]
        for row in plan.q_rows[plan.item_q[item] : plan.item_q[item + 1]]:
            for position, slot in enumerate(plan.kv_idx[start:end].tolist(), start=int(plan.item_pos[item])):
                if plan.row_lo[row] <= position < plan.row_hi[row]:
                    found[row].append((position, slot))
    return found


def seen_by_definition(batch: Batch, window: Window) -> list[list[tuple[int, int]]]:
    owners = np.repeat(np.arange(len(batch.slots)), batch.query_lengths)
    return [
        [(position, int(batch.slots[owner][position])) for position in positions.tolist()]
        for owner, positions in zip(owners, seen(batch, window), strict=True)
    ]


of_text = st.one_of(
    st.builds(lambda parts: make_batch(parts, seed=1)[0], sequences),
    st.builds(lambda parts: make_tree_batch(parts, seed=1)[0], branches),
)
batches = st.one_of(of_text, st.builds(with_pictures, of_text, st.integers(0, 1000)))
cuts = st.one_of(
    st.builds(
        Cut, st.integers(1, 9), splits, tree=st.booleans(), workers=st.sampled_from([1, 2, 8]), merge_keys=st.just(4)
    ),
    st.builds(
        Cut,
        st.integers(1, 9),
        merge_keys=st.just(4),
        shortest_run=st.sampled_from([1, 128]),
        queues=st.sampled_from([1, 3, 20]),
        start_keys=st.sampled_from([0, 8]),
        part_keys=st.sampled_from([0, 1]),
    ),
)


@settings(max_examples=300, deadline=None)
@given(batches, windows, cuts)
def test_items_show_each_row_each_visible_key_once(batch: Batch, window: int | None, cut: Cut) -> None:
    plan = make_plan(batch, window, cut)
    assert [sorted(row) for row in seen_by_items(plan)] == seen_by_definition(batch, window)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=4), st.builds(BothWays, windows), cuts)
def test_a_text_that_is_seen_both_ways_is_whole(lengths: list[int], window: BothWays, cut: Cut) -> None:
    batch, _ = make_batch([Sequence(0, length) for length in lengths], seed=1)
    assert [sorted(row) for row in seen_by_items(make_plan(batch, window, cut))] == seen_by_definition(batch, window)
    later, _ = make_batch([Sequence(3, 2)], seed=1)
    with pytest.raises(AssertionError, match="runs whole"):
        make_plan(later, window, cut)


@settings(max_examples=200, deadline=None)
@given(batches, windows, cuts)
def test_items_respect_their_limits_and_say_rightly_when_no_mask_is_needed(
    batch: Batch, window: int | None, cut: Cut
) -> None:
    plan = make_plan(batch, window, cut)
    for item in range(plan.items):
        rows = plan.q_rows[plan.item_q[item] : plan.item_q[item + 1]]
        length = plan.item_kv[item, 1] - plan.item_kv[item, 0]
        first, end = plan.item_pos[item], plan.item_pos[item] + length
        assert 1 <= len(rows) <= cut.block_rows
        assert 1 <= length <= (cut.split or length)
        assert all(plan.row_lo[row] < end and plan.row_hi[row] > first for row in rows), "a row that sees nothing"
        assert plan.item_full[item] == all(plan.row_lo[row] <= first and plan.row_hi[row] >= end for row in rows)


@given(batches, windows, cuts)
@settings(max_examples=100, deadline=None)
def test_merge_lists_the_partial_slots_of_each_row(batch: Batch, window: int | None, cut: Cut) -> None:
    plan = make_plan(batch, window, cut)
    for row in range(batch.rows):
        listed = plan.merge_slot[plan.merge_ptr[row] : plan.merge_ptr[row + 1]].tolist()
        assert listed == np.flatnonzero(plan.q_rows == row).tolist()
        assert listed, "every row sees at least itself"


@given(batches, windows, cuts)
@settings(max_examples=100, deadline=None)
def test_sharing_never_reads_more_keys(batch: Batch, window: int | None, cut: Cut) -> None:
    with_tree = make_plan(batch, window, dataclasses.replace(cut, tree=True))
    without = make_plan(batch, window, dataclasses.replace(cut, tree=False))
    assert with_tree.keys_read <= without.keys_read
    assert without.keys_saved == 0


def test_a_window_leaves_the_keys_before_it_out_of_the_plan() -> None:
    batch, _ = make_batch([Sequence(prefix=1000, query=1)], seed=0)
    plan = make_plan(batch, 64, Cut(16))
    assert plan.keys_read == 64
    assert plan.item_pos.tolist() == [937]
    assert plan.item_full.tolist() == [1]


def test_a_decode_row_with_a_long_past_is_split_into_equal_runs() -> None:
    batch, _ = make_batch([Sequence(prefix=1000, query=1)], seed=0)
    plan = make_plan(batch, None, Cut(16, 400))
    assert np.diff(plan.item_kv).ravel().tolist() == [333, 334, 334], "the last is claimed first"
    assert plan.merge_ptr.tolist() == [0, 3]


def test_arrays_have_the_types_that_kernels_read() -> None:
    batch, _ = make_batch([Sequence(prefix=3, query=5), Sequence(prefix=9, query=1)], seed=0)
    plan = make_plan(batch, 4, Cut(2, 3))
    assert plan.item_full.dtype == np.uint8
    names = ("row_lo", "row_hi", "item_q", "q_rows", "item_kv", "item_pos", "kv_idx", "merge_ptr", "merge_slot")
    assert {name: getattr(plan, name).dtype for name in names} == dict.fromkeys(names, np.dtype(np.int32))


def test_workers_get_equal_shares_of_one_long_run() -> None:
    batch, _ = make_batch([Sequence(prefix=4094, query=2)], seed=0)
    plan = make_plan(batch, None, Cut(16, workers=2))
    assert np.diff(plan.item_kv).ravel().tolist() == [512] * 8
    assert make_plan(batch, None, Cut(16, workers=1)).items == 1


def test_the_costliest_item_is_the_last() -> None:
    batch, _ = make_batch([Sequence(prefix=p, query=1) for p in (50, 900, 300)], seed=0)
    plan = make_plan(batch, None, Cut(16))
    assert np.diff(plan.item_kv).ravel().tolist() == [51, 301, 901]


def test_generated_rows_are_cut_as_in_steps_of_their_own() -> None:
    batch, _ = make_batch([Sequence(prefix=700, query=5), Sequence(prefix=0, query=40)], seed=0)
    together = make_plan(dataclasses.replace(batch, generated=np.array([3, 0])), None, Cut(16, workers=2))
    for row in (2, 3, 4):
        end = 700 + row + 1
        alone = dataclasses.replace(
            batch,
            query_lengths=np.array([1], dtype=np.int32),
            prefix_lengths=np.array([end - 1], dtype=np.int32),
            slots=(batch.slots[0][:end],),
        )
        items = [parts_of(plan, at) for plan, at in ((together, row), (make_plan_of_row(alone), 0))]
        assert items[0] == items[1]
        assert all(rows == 1 for rows, _, _ in items[0])


def test_generated_rows_behind_a_picture_see_what_they_see_alone() -> None:
    batch, _ = make_batch([Sequence(prefix=10, query=20)], seed=0)
    batch = dataclasses.replace(batch, spans=(((4, 9), (12, 25)),))
    apart = dataclasses.replace(batch, generated=np.array([4]))
    for window in (None, 6):
        assert seen_by_items(make_plan(apart, window, Cut(16))) == seen_by_definition(batch, window)
    alone = make_plan(apart, None, Cut(16))
    assert [rows for row in range(16, 20) for rows, _, _ in parts_of(alone, row)] == [1] * 4


def test_a_step_that_cuts_a_picture_is_a_mistake_of_ours() -> None:
    batch, _ = make_batch([Sequence(prefix=0, query=8)], seed=0)
    with pytest.raises(AssertionError, match="run in one step"):
        make_plan(dataclasses.replace(batch, spans=(((4, 9),),)), None, Cut(16))


def make_plan_of_row(batch: Batch) -> AttentionPlan:
    return make_plan(
        dataclasses.replace(batch, token_ids=batch.token_ids[:1], positions=batch.positions[:1]),
        None,
        Cut(16, workers=2),
    )


def parts_of(plan: AttentionPlan, row: int) -> list[tuple[int, int, list[int]]]:
    """Of every item of a row, in the order of merging: its rows, its first position, its slots."""
    found = []
    for slot in plan.merge_slot[plan.merge_ptr[row] : plan.merge_ptr[row + 1]].tolist():
        item = int(np.searchsorted(plan.item_q, slot, side="right")) - 1
        first, end = plan.item_kv[item].tolist()
        rows = int(plan.item_q[item + 1] - plan.item_q[item])
        found.append((rows, int(plan.item_pos[item]), plan.kv_idx[first:end].tolist()))
    return found


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
