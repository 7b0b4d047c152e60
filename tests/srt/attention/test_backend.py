"""The torch backend against a dense float32 loop."""

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from umbel.lang.errors import ParameterError
from umbel.srt.attention.backend import AttentionGeometry, AttentionStep, TorchBackend
from umbel.srt.attention.plan import Window
from umbel.srt.cache.kv_pool import LayerKV

from .batches import (
    HEADS,
    Branch,
    Sequence,
    branches,
    dense_attention,
    make_batch,
    make_tree_batch,
    random_pool,
    sequences,
    windows,
    with_pictures,
)

SCALE = 0.3
backends = st.builds(
    lambda block_rows, split, workspace, slices: TorchBackend(
        HEADS, "cpu", block_rows=block_rows, split=split, workspace_bytes=workspace, slices=slices
    ),
    st.sampled_from([1, 3, 128]),
    st.one_of(st.none(), st.integers(1, 20)),
    st.sampled_from([1, 4096, 16 << 20]),  # one item per group, a few, all
    st.booleans(),
)
# Values like their keys, of another size, or in them.
layers = st.sampled_from([LayerKV(2, 8, 8), LayerKV(2, 8, 4), LayerKV(3, 4, 8), LayerKV(1, 8, 6, latent=True)])
pictures = st.one_of(st.none(), st.integers(0, 1000))  # seed of those that rows see both ways


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@settings(max_examples=40, deadline=None)
@given(
    *(sequences, backends, windows, st.sampled_from([0.0, 5.0]), st.integers(0, 15), pictures),
    *(layers, st.booleans()),
)
def test_attention_equals_the_dense_loop(
    parts: list[Sequence],
    backend: TorchBackend,
    window: Window,
    softcap: float,
    shared: int,
    seed: int | None,
    layer: LayerKV,
    sunk: bool,
) -> None:
    batch, num_slots = make_batch(parts, seed=2, shared=shared)
    if seed is not None:
        batch = with_pictures(batch, seed)
    pool = random_pool(num_slots, HEADS, torch.float32, seed=3, layer=layer)
    queries = torch.randn((batch.rows, HEADS.heads, layer.head_dim), generator=torch.Generator().manual_seed(4))
    sinks = torch.linspace(-3.0, 3.0, HEADS.heads) if sunk else None
    expected = dense_attention(batch, pool, queries, window=window, scale=SCALE, softcap=softcap, sinks=sinks)
    plan = backend.plan(batch, window)
    actual = backend.attend(0, queries, pool, plan, scale=SCALE, softcap=softcap, sinks=sinks)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


@settings(max_examples=100, deadline=None)
@given(branches, windows, st.sampled_from([0.0, 5.0]), st.sampled_from([2, 128]), pictures)
def test_tree_attention_equals_the_dense_loop(
    parts: list[Branch], window: Window, softcap: float, block_rows: int, seed: int | None
) -> None:
    batch, num_slots = make_tree_batch(parts, seed=2)
    if seed is not None:
        batch = with_pictures(batch, seed)
    pool = random_pool(num_slots, HEADS, torch.float32, seed=3)
    queries = torch.randn((batch.rows, HEADS.heads, HEADS.head_dim), generator=torch.Generator().manual_seed(4))
    expected = dense_attention(batch, pool, queries, window=window, scale=SCALE, softcap=softcap)
    for tree in (True, False):
        backend = TorchBackend(HEADS, "cpu", block_rows=block_rows, tree_attention=tree)
        backend.cut = dataclasses.replace(backend.cut, merge_keys=4)
        actual = backend.attend(0, queries, pool, backend.plan(batch, window), scale=SCALE, softcap=softcap)
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


def test_a_fork_is_counted_as_keys_saved() -> None:
    batch, _ = make_tree_batch([Branch(-1, 1.0, 301, 1, 1), *[Branch(0, 1.0, 10, 1, 1)] * 3], seed=0)
    on, off = (TorchBackend(HEADS, "cpu", tree_attention=tree) for tree in (True, False))
    for backend in (on, off):
        backend.plan(batch, None)
    assert (off.counters.keys_read, off.counters.keys_saved) == (301 + 3 * 311, 0)
    assert (on.counters.keys_read, on.counters.keys_saved) == (300 + 1 + 3 * 11, 3 * 300)


@settings(max_examples=30, deadline=None)
@given(sequences, windows, st.one_of(st.none(), st.integers(1, 20)))
def test_bfloat16_is_summed_in_float32(parts: list[Sequence], window: Window, split: int | None) -> None:
    batch, num_slots = make_batch(parts, seed=2)
    pool = random_pool(num_slots, HEADS, torch.bfloat16, seed=3)
    queries = torch.randn((batch.rows, HEADS.heads, HEADS.head_dim)).bfloat16()
    backend = TorchBackend(HEADS, "cpu", split=split)
    expected = dense_attention(batch, pool, queries, window=window, scale=SCALE, softcap=0.0)
    actual = backend.attend(0, queries, pool, backend.plan(batch, window), scale=SCALE)
    assert actual.dtype is torch.bfloat16
    torch.testing.assert_close(actual.float(), expected, rtol=2**-8, atol=1e-6)  # one rounding, of the result


def test_rows_read_keys_that_other_rows_of_the_step_write() -> None:
    first, num_slots = make_batch([Sequence(prefix=0, query=6), Sequence(prefix=4, query=3)], seed=0, shared=4)
    assert set(first.slots[1][:4]) <= set(first.write_slots[:6].tolist()), "the second reads what the first writes"
    pool = random_pool(num_slots, HEADS, torch.float32, seed=1)
    backend = TorchBackend(HEADS, "cpu")
    queries, keys, values = (torch.randn(9, heads, HEADS.head_dim) for heads in (6, 2, 2))
    step = AttentionStep(backend, pool, {None: backend.plan(first, None)}, torch.from_numpy(first.write_slots))
    actual = step.attend(0, queries, keys, values, window=None, scale=SCALE)
    torch.testing.assert_close(pool.keys[0][first.write_slots], keys)
    expected = dense_attention(first, pool, queries, window=None, scale=SCALE, softcap=0.0)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


def test_a_row_whose_key_is_in_the_pool_changes_no_slot_but_the_dummy() -> None:
    batch, num_slots = make_batch([Sequence(prefix=5, query=1, cached=True), Sequence(prefix=2, query=2)], seed=0)
    pool = random_pool(num_slots, HEADS, torch.float32, seed=1)
    before = pool.keys[0].clone()
    backend = TorchBackend(HEADS, "cpu")
    keys = torch.randn(3, HEADS.kv_heads, HEADS.head_dim)
    backend.store(0, keys, keys, pool, torch.from_numpy(batch.write_slots))
    written = set(batch.write_slots.tolist())
    for slot in range(1, num_slots):
        changed = not torch.equal(pool.keys[0][slot], before[slot])
        assert changed == (slot in written)


def test_a_broken_value_of_one_sequence_reaches_no_other() -> None:
    batch, num_slots = make_batch([Sequence(prefix=9, query=1), Sequence(prefix=4, query=1)], seed=0)
    pool = random_pool(num_slots, HEADS, torch.float32, seed=1)
    for part in (pool.keys[0], pool.values[0]):
        part[batch.slots[0][3]] = float("nan")
    backend = TorchBackend(HEADS, "cpu")
    plan = backend.plan(batch, None)
    assert len(plan.groups) == 1, "both are computed by one padded call"
    result = backend.attend(0, torch.randn(2, HEADS.heads, HEADS.head_dim), pool, plan, scale=SCALE)
    assert result[0].isnan().all()
    assert result[1].isfinite().all()


def test_decode_rows_of_like_length_share_one_call() -> None:
    batch, _ = make_batch([Sequence(prefix=100 + i, query=1) for i in range(32)], seed=0)
    plan = TorchBackend(HEADS, "cpu").plan(batch, None)
    assert len(plan.groups) == 1
    assert plan.partials == 0


def test_no_temporary_exceeds_the_workspace() -> None:
    geometry = AttentionGeometry(heads=8, kv_heads=4, head_dim=16)
    batch, num_slots = make_batch([Sequence(prefix=3000, query=300), Sequence(prefix=5000, query=1)], seed=0)
    backend = TorchBackend(geometry, "cpu", workspace_bytes=1 << 20, slices=False)
    pool = random_pool(num_slots, geometry, torch.float32, seed=0)
    queries = torch.randn(batch.rows, geometry.heads, geometry.head_dim)
    plan = backend.plan(batch, None)
    for group in plan.groups:
        rows, keys = len(group.rows) // group.items, len(group.keys) // group.items
        assert len(group.keys) * geometry.kv_heads * geometry.head_dim * 4 <= 1 << 20
        assert group.items * geometry.heads * rows * keys * 4 <= 1 << 20
    actual = backend.attend(0, queries, pool, plan, scale=SCALE)
    whole = TorchBackend(geometry, "cpu", split=10_000, workspace_bytes=1 << 30)
    expected = whole.attend(0, queries, pool, whole.plan(batch, None), scale=SCALE)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


def test_results_go_to_the_given_buffer() -> None:
    batch, num_slots = make_batch([Sequence(prefix=3, query=4)], seed=0)
    pool = random_pool(num_slots, HEADS, torch.float32, seed=0)
    backend = TorchBackend(HEADS, "cpu", split=2)
    queries = torch.randn(4, HEADS.heads, HEADS.head_dim)
    out = torch.full_like(queries, float("nan"))
    assert backend.attend(0, queries, pool, backend.plan(batch, None), scale=SCALE, out=out) is out
    assert out.isfinite().all()


def test_positions_of_rows_follow_from_the_slots_not_from_rotary_positions() -> None:
    batch, num_slots = make_batch([Sequence(prefix=6, query=3)], seed=0)
    moved = dataclasses.replace(batch, positions=batch.positions + np.int64(1000))
    pool = random_pool(num_slots, HEADS, torch.float32, seed=0)
    backend = TorchBackend(HEADS, "cpu")
    queries = torch.randn(3, HEADS.heads, HEADS.head_dim)
    first, second = (backend.attend(0, queries, pool, backend.plan(b, 4), scale=SCALE) for b in (batch, moved))
    assert torch.equal(first, second)


@pytest.mark.parametrize("parts", [[Sequence(prefix=6, query=1)], [Sequence(prefix=0, query=5)] * 2])
def test_consecutive_slots_read_in_place_give_the_same(parts: list[Sequence]) -> None:
    batch, num_slots = make_batch(parts, seed=0)
    ends = np.cumsum([len(slots) for slots in batch.slots])
    every = np.arange(1, ends[-1] + 1, dtype=np.int32)
    batch = dataclasses.replace(batch, slots=tuple(np.split(every, ends[:-1])))
    pool = random_pool(max(num_slots, len(every) + 1), HEADS, torch.float32, seed=1)
    queries = torch.randn(batch.rows, HEADS.heads, HEADS.head_dim)
    in_place, gathered = TorchBackend(HEADS, "cpu"), TorchBackend(HEADS, "cpu", slices=False)
    plan = in_place.plan(batch, None)
    assert all(isinstance(group.keys, slice) for group in plan.groups)
    actual = in_place.attend(0, queries, pool, plan, scale=SCALE)
    expected = gathered.attend(0, queries, pool, gathered.plan(batch, None), scale=SCALE)
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("limits", [{"block_rows": 0}, {"split": 0}])
def test_limits_below_one_are_refused(limits: dict[str, int]) -> None:
    with pytest.raises(ParameterError, match="at least 1"):
        TorchBackend(HEADS, "cpu", **limits)
