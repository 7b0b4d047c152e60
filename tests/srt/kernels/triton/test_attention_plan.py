"""Plans in the buffers of a device: packed, padded, filled again, and read by launches that know no counts."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from umbel.srt.attention.backend import AttentionGeometry
from umbel.srt.attention.plan import Chunk, Cut, Window, make_plan
from umbel.srt.core.batch import Batch
from umbel.srt.kernels.cpu.attention import PackingPlanner
from umbel.srt.kernels.cpu.library import NoKernels
from umbel.srt.kernels.triton import attention_backend
from umbel.srt.kernels.triton.attention_backend import TritonBackend, pack
from umbel.srt.runners.cuda.device import accelerator_for
from umbel.srt.runners.cuda.slot_table import SlotTable

from ...attention.batches import Branch, Sequence, branches, make_batch, make_tree_batch, sequences
from .attention_cases import SCALE, attend_reference, normal, pool_for, tiny_backend

SMALL = AttentionGeometry(heads=4, kv_heads=2, head_dim=16)


@settings(max_examples=100, deadline=None)
@given(
    batch=st.one_of(
        st.builds(lambda parts: make_batch(parts, seed=1)[0], sequences),
        st.builds(lambda parts: make_tree_batch(parts, seed=1)[0], branches),
    ),
    window=st.one_of(st.none(), st.integers(1, 30)),
    block_rows=st.integers(1, 9),
    few_rows=st.integers(1, 9),
)
def test_a_packed_plan_says_what_the_plan_says(
    batch: Batch, window: int | None, block_rows: int, few_rows: int
) -> None:
    plan = make_plan(batch, window, Cut(block_rows, 17, merge_keys=4))
    packed = pack(plan, few_rows)
    kinds = packed.items[:, 1] > few_rows
    assert kinds.tolist() == sorted(kinds.tolist()), "few first"
    assert packed.few == int((~kinds).sum())

    ours = [
        (packed.slots[slot : slot + rows, 0].tolist(), packed.kv_idx[first : first + length].tolist(), position)
        for slot, rows, first, length, position in packed.items.tolist()
    ]
    theirs = [
        (plan.q_rows[plan.item_q[i] : plan.item_q[i + 1]].tolist(), plan.kv_idx[first:end].tolist(), position)
        for i, ((first, end), position) in enumerate(zip(plan.item_kv.tolist(), plan.item_pos.tolist(), strict=True))
    ]
    descending = theirs[::-1]
    assert ours == sorted(descending, key=lambda item: len(item[0]) > few_rows), "the last ones to run are short"
    assert np.array_equal(packed.slots[:, 2], plan.row_lo[plan.q_rows])
    assert np.array_equal(packed.slots[:, 3], plan.row_hi[plan.q_rows])

    places = {row: packed.slots[packed.slots[:, 0] == row, 1].tolist() for row in range(batch.rows)}
    merged = {row: list(range(first, first + parts)) for row, first, parts in packed.merges.tolist()}
    numbers = {row: number for number, row in enumerate(packed.merges[:, 0].tolist())}
    assert packed.slots[:, 4].tolist() == [numbers.get(row, -1) for row in packed.slots[:, 0].tolist()]
    for row, of_row in places.items():
        assert sorted(of_row) == merged.get(row, [-1])
    assert [place for of_row in merged.values() for place in of_row] == list(range(packed.size.places)), "side by side"


cuts = st.builds(
    lambda block_rows, split, **others: Cut(block_rows, None if others["queues"] else split, **others),
    st.integers(1, 9),
    st.sampled_from([None, 17, 400]),
    tree=st.booleans(),
    workers=st.integers(1, 40),
    merge_keys=st.sampled_from([4, 128]),
    load_cost=st.integers(1, 128),
    shortest_run=st.sampled_from([1, 8, 128]),
    run_per_row=st.sampled_from([0, 3, 16]),
    single_run=st.sampled_from([None, 20]),
    queues=st.sampled_from([0, 1, 3, 16]),
    start_keys=st.sampled_from([0, 5, 64]),
    part_keys=st.sampled_from([0, 1, 4]),
)


@settings(max_examples=200, deadline=None)
@given(
    batch=st.one_of(
        st.builds(lambda parts: make_batch(parts, seed=1)[0], sequences),
        st.builds(lambda parts: make_tree_batch(parts, seed=1)[0], branches),
    ),
    window=st.one_of(st.none(), st.integers(1, 30), st.builds(Chunk, st.integers(1, 30))),
    cut=cuts,
    few_rows=st.integers(1, 9),
    apart=st.booleans(),
)
def test_the_native_planner_packs_the_same_plan(
    batch: Batch, window: Window, cut: Cut, few_rows: int, apart: bool
) -> None:
    """Twice: the second time the planner knows the paths."""
    places = np.cumsum([1, *[len(slots) + 5 for slots in batch.slots[:-1]]]).astype(np.int32)
    generated = np.maximum(batch.query_lengths - 1, 0).astype(np.int32) if apart else None
    batch = replace(batch, places=places, generated=generated)
    plan = make_plan(batch, window, cut)
    packed, planner = pack(plan, few_rows, cut.queues), PackingPlanner()
    for same in (batch, replace(batch)):
        native = planner.plan(same, window, cut, few_rows)
        size = packed.size
        expected = (packed.few, size.items, size.slots, size.merged, size.places)
        assert tuple(getattr(native.size, name) for name in ("few", "items", "slots", "merged", "places")) == expected
        assert (native.keys_read, native.keys_saved) == (plan.keys_read, plan.keys_saved)
        assert native.queues == (cut.queues if len(plan.item_queue) else 0) == size.queues
        truths = (packed.items, packed.slots, packed.merges, packed.ends)
        arrays = [np.zeros_like(array).ravel() for array in truths]
        native.write(*arrays)
        for array, truth in zip(arrays, truths, strict=True):
            np.testing.assert_array_equal(array, truth.ravel())


def test_numpy_plans_where_nothing_can_be_compiled(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    def refuse() -> None:
        raise NoKernels("there is no C++ compiler")

    monkeypatch.setattr(attention_backend, "PackingPlanner", refuse)
    batch, num_slots = decode_batch([40, 3, 90], seed=0)
    pool, queries = pool_for(num_slots, SMALL, torch.float32, device), normal(3, 4, 16).to(device)
    backend = tiny_backend(SMALL, device)
    table = with_table(backend)
    plan = backend.reserve(None, rows=3)
    assert backend.plan_into(plan, placed(batch, table), None)
    result = backend.attend(0, queries, pool, plan, scale=SCALE)
    torch.testing.assert_close(result, attend_reference(batch, pool, queries, None), rtol=1e-5, atol=1e-5)


def test_only_the_keys_that_items_read_are_sent() -> None:
    tree, _ = make_tree_batch([Branch(-1, 1.0, 90, 1, 1), *[Branch(0, 1.0, 9, 1, 1)] * 7], seed=0)
    packed = pack(make_plan(tree, None, Cut(16, merge_keys=4)), 1)
    assert len(packed.kv_idx) == 90 + 7 * 10, "the shared run once"
    windowed, _ = make_batch([Sequence(200, 1), Sequence(100, 3)], seed=0)
    assert len(pack(make_plan(windowed, 30, Cut(16)), 1).kv_idx) == 30 + 32


def decode_batch(prefixes: list[int], *, seed: int) -> tuple[Batch, int]:
    return make_batch([Sequence(prefix, 1) for prefix in prefixes], seed=seed)


def with_table(backend: TritonBackend) -> SlotTable:
    """The table that plans of the backend read, with room for every batch here."""
    table = SlotTable(accelerator_for(backend.device), 40_000, windows=False)
    backend.use_table(table)
    return table


def placed(batch: Batch, table: SlotTable) -> Batch:
    """The batch with its slots in the table, all sent."""
    return replace(batch, places=table.place(batch))


def test_a_reserved_plan_is_filled_again_and_again(device: torch.device) -> None:
    backend = tiny_backend(SMALL, device, multiprocessors=3)
    table = with_table(backend)
    plan = backend.reserve(None, rows=8)
    addresses = [array.data_ptr() for array in (plan.bounds, plan.items, plan.slots, plan.kv_idx, plan.part_out)]
    for seed, prefixes in enumerate([[40, 3, 90], [1], [100, 100, 7, 9, 11, 2, 0, 60], [90]]):
        batch, num_slots = decode_batch(prefixes, seed=seed)
        pool = pool_for(num_slots, SMALL, torch.float32, device)
        queries = normal(8, 4, 16, seed=seed).to(device)  # padded: a captured step has always 8 rows
        out = torch.full_like(queries, 7.0)
        backend.plan_into(plan, placed(batch, table), None)
        backend.attend(0, queries, pool, plan, scale=SCALE, out=out)
        expected = attend_reference(batch, pool, queries[: batch.rows], None)
        torch.testing.assert_close(out[: batch.rows], expected, rtol=1e-5, atol=1e-5)
        assert bool((out[batch.rows :] == 7.0).all()), "rows that pad the step are not written"
    assert addresses == [a.data_ptr() for a in (plan.bounds, plan.items, plan.slots, plan.kv_idx, plan.part_out)]


def test_an_empty_reserved_plan_computes_nothing(device: torch.device) -> None:
    backend = tiny_backend(SMALL, device)
    with_table(backend)
    queries = normal(2, 4, 16).to(device)
    out = torch.full_like(queries, 7.0)
    pool = pool_for(3, SMALL, torch.float32, device)
    backend.attend(0, queries, pool, backend.reserve(None, rows=2), scale=SCALE, out=out)
    assert bool((out == 7.0).all())


@pytest.mark.nightly
def test_a_reserved_plan_shares_as_any_other_does(device: torch.device) -> None:
    batch, num_slots = make_tree_batch([Branch(-1, 1.0, 60, 1, 1), *[Branch(0, 1.0, 9, 1, 1)] * 11], seed=0)
    pool = pool_for(num_slots, SMALL, torch.float32, device)
    queries = normal(batch.rows, 4, 16).to(device)
    captured, eager = tiny_backend(SMALL, device), tiny_backend(SMALL, device)
    table = with_table(captured)
    plan = captured.reserve(None, rows=batch.rows)
    captured.plan_into(plan, placed(batch, table), 50)
    result = captured.attend(0, queries, pool, plan, scale=SCALE)
    expected = eager.attend(0, queries, pool, eager.plan(batch, 50), scale=SCALE)
    torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5)
    assert captured.counters.keys_saved == eager.counters.keys_saved > 0


def test_a_step_whose_sharing_does_not_fit_is_planned_without(device: torch.device) -> None:
    batch, num_slots = make_tree_batch([Branch(-1, 1.0, 60, 1, 1), *[Branch(0, 1.0, 9, 1, 1)] * 11], seed=0)
    pool = pool_for(num_slots, SMALL, torch.float32, device)
    queries = normal(batch.rows, 4, 16).to(device)
    backend = tiny_backend(SMALL, device)
    table = with_table(backend)
    plan = backend.reserve(None, rows=batch.rows)
    plan.capacity = replace(plan.capacity, slots=batch.rows + 2)
    backend.plan_into(plan, placed(batch, table), None)
    result = backend.attend(0, queries, pool, plan, scale=SCALE)
    torch.testing.assert_close(result, attend_reference(batch, pool, queries, None), rtol=1e-5, atol=1e-5)
    assert backend.counters.keys_saved == 0


@pytest.mark.parametrize("wide", [False, True])
def test_a_reserved_plan_holds_prompts_beside_rows_that_decode(wide: bool, device: torch.device) -> None:
    backend = tiny_backend(SMALL, device, multiprocessors=3)
    table = with_table(backend)
    plan = backend.reserve(None, rows=24, wide=wide)
    batch, num_slots = make_batch([Sequence(90, 1), Sequence(40, 17), Sequence(0, 4), Sequence(3, 1)], seed=0)
    pool = pool_for(num_slots, SMALL, torch.float32, device)
    queries = normal(24, 4, 16).to(device)
    assert backend.plan_into(plan, placed(batch, table), None)
    result = backend.attend(0, queries, pool, plan, scale=SCALE)
    torch.testing.assert_close(
        result[: batch.rows], attend_reference(batch, pool, queries[: batch.rows], None), rtol=1e-5, atol=1e-5
    )


def test_a_step_that_does_not_fit_leaves_the_plan_as_it_was(device: torch.device) -> None:
    backend = tiny_backend(SMALL, device)
    table = with_table(backend)
    plan = backend.reserve(None, rows=4)
    assert backend.plan_into(plan, placed(decode_batch([30], seed=0)[0], table), None)
    counts = plan.counts
    plan.capacity = replace(plan.capacity, slots=3)
    assert not backend.plan_into(plan, placed(make_batch([Sequence(60, 4)], seed=0)[0], table), None)
    assert plan.counts == counts


@settings(max_examples=100, deadline=None)
@given(
    prefixes=st.lists(st.one_of(st.integers(0, 40), st.integers(0, 6000)), min_size=1, max_size=12),
    multiprocessors=st.integers(1, 140),
    kv_heads=st.sampled_from([1, 2, 8]),
    window=st.one_of(st.none(), st.integers(1, 300)),
)
def test_a_decode_step_without_sharing_always_fits(
    prefixes: list[int], multiprocessors: int, kv_heads: int, window: int | None
) -> None:
    batch, _ = decode_batch(prefixes, seed=0)
    geometry = AttentionGeometry(kv_heads, kv_heads, 16)
    backend = tiny_backend(geometry, torch.device("cpu"), multiprocessors=multiprocessors, shortest_run=256)
    table = with_table(backend)
    plan = backend.reserve(None, rows=len(prefixes))
    assert backend.plan_into(plan, placed(batch, table), window)


@pytest.mark.gpu
def test_a_captured_step_attends_to_what_the_plan_says_when_it_is_replayed(device: torch.device) -> None:
    geometry = AttentionGeometry(32, 8, 128)
    backend = tiny_backend(geometry, device, dtype=torch.bfloat16, multiprocessors=132, shortest_run=256)
    table = with_table(backend)
    plan = backend.reserve(None, rows=8)
    pool = pool_for(9000, geometry, torch.bfloat16, device)
    queries, out = (torch.zeros(8, 32, 128, device=device, dtype=torch.bfloat16) for _ in range(2))
    backend.plan_into(plan, placed(decode_batch([5], seed=0)[0], table), None)
    backend.attend(0, queries, pool, plan, scale=SCALE, out=out)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        backend.attend(0, queries, pool, plan, scale=SCALE, out=out)
    for seed, prefixes in enumerate([[4000, 30, 600], [1], [1000] * 8]):
        batch, _ = decode_batch(prefixes, seed=seed)
        queries.copy_(normal(8, 32, 128, seed=seed))
        backend.plan_into(plan, placed(batch, table), None)
        graph.replay()
        expected = attend_reference(batch, pool, queries[: batch.rows], None)
        assert (out[: batch.rows].float() - expected).norm() / expected.norm() < 1e-2
