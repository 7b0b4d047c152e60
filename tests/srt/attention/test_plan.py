"""The planner, checked against the definition of what each row may see."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from umbel.srt.attention.plan import AttentionPlan, make_plan
from umbel.srt.batch import Batch

from .batches import Sequence, make_batch, sequences

windows = st.one_of(st.none(), st.integers(1, 30))
splits = st.one_of(st.none(), st.integers(1, 17))


def seen_by_items(plan: AttentionPlan) -> list[list[tuple[int, int]]]:
    """Per row the (position, slot) pairs it sees, from the items alone."""
    seen: list[list[tuple[int, int]]] = [[] for _ in plan.row_lo]
    for item in range(plan.items):
        start, end = plan.item_kv[item]
        for row in plan.q_rows[plan.item_q[item] : plan.item_q[item + 1]]:
            for position, slot in enumerate(plan.kv_idx[start:end].tolist(), start=int(plan.item_pos[item])):
                if plan.row_lo[row] <= position < plan.row_hi[row]:
                    seen[row].append((position, slot))
    return seen


def seen_by_definition(batch: Batch, window: int | None) -> list[list[tuple[int, int]]]:
    seen = []
    for slots, prefix, count in zip(batch.slots, batch.prefix_lengths, batch.query_lengths, strict=True):
        for position in range(prefix, prefix + count):
            first = 0 if window is None else max(0, position - window + 1)
            seen.append([(index, int(slots[index])) for index in range(first, position + 1)])
    return seen


@settings(max_examples=150, deadline=None)
@given(sequences, windows, st.integers(1, 9), splits)
def test_items_show_each_row_each_visible_key_once(
    parts: list[Sequence], window: int | None, block_rows: int, split: int | None
) -> None:
    batch, _ = make_batch(parts, seed=1)
    plan = make_plan(batch, window, block_rows=block_rows, split=split)
    assert [sorted(row) for row in seen_by_items(plan)] == seen_by_definition(batch, window)


@settings(max_examples=150, deadline=None)
@given(sequences, windows, st.integers(1, 9), splits)
def test_items_respect_their_limits_and_say_rightly_when_no_mask_is_needed(
    parts: list[Sequence], window: int | None, block_rows: int, split: int | None
) -> None:
    batch, _ = make_batch(parts, seed=1)
    plan = make_plan(batch, window, block_rows=block_rows, split=split)
    for item in range(plan.items):
        rows = plan.q_rows[plan.item_q[item] : plan.item_q[item + 1]]
        length = plan.item_kv[item, 1] - plan.item_kv[item, 0]
        first, end = plan.item_pos[item], plan.item_pos[item] + length
        assert 1 <= len(rows) <= block_rows
        assert 1 <= length <= (split or length)
        assert all(plan.row_lo[row] < end and plan.row_hi[row] > first for row in rows), "a row that sees nothing"
        assert plan.item_full[item] == all(plan.row_lo[row] <= first and plan.row_hi[row] >= end for row in rows)


@given(sequences, windows, st.integers(1, 9), splits)
@settings(max_examples=100, deadline=None)
def test_merge_lists_the_partial_slots_of_each_row(
    parts: list[Sequence], window: int | None, block_rows: int, split: int | None
) -> None:
    batch, _ = make_batch(parts, seed=1)
    plan = make_plan(batch, window, block_rows=block_rows, split=split)
    for row in range(batch.rows):
        listed = plan.merge_slot[plan.merge_ptr[row] : plan.merge_ptr[row + 1]].tolist()
        assert listed == np.flatnonzero(plan.q_rows == row).tolist()
        assert listed, "every row sees at least itself"
    assert plan.needs_merge == (len(plan.q_rows) > batch.rows)


def test_a_window_leaves_the_keys_before_it_out_of_the_plan() -> None:
    batch, _ = make_batch([Sequence(prefix=1000, query=1)], seed=0)
    plan = make_plan(batch, 64, block_rows=16)
    assert len(plan.kv_idx) == 64
    assert plan.item_pos.tolist() == [937]
    assert plan.item_full.tolist() == [1]


def test_a_decode_row_with_a_long_past_is_split_into_equal_runs() -> None:
    batch, _ = make_batch([Sequence(prefix=1000, query=1)], seed=0)
    plan = make_plan(batch, None, block_rows=16, split=400)
    assert np.diff(plan.item_kv).ravel().tolist() == [334, 334, 333]
    assert plan.merge_ptr.tolist() == [0, 3]


def test_arrays_have_the_types_that_kernels_read() -> None:
    batch, _ = make_batch([Sequence(prefix=3, query=5), Sequence(prefix=9, query=1)], seed=0)
    plan = make_plan(batch, 4, block_rows=2, split=3)
    assert plan.item_full.dtype == np.uint8
    names = ("row_lo", "row_hi", "item_q", "q_rows", "item_kv", "item_pos", "kv_idx", "merge_ptr", "merge_slot")
    assert {name: getattr(plan, name).dtype for name in names} == dict.fromkeys(names, np.dtype(np.int32))
