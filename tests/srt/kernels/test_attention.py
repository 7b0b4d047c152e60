"""Attention in C++ against the torch backend, on every instruction set that this machine executes."""

import ctypes
import dataclasses
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from umbel.lang.errors import ParameterError
from umbel.srt.attention.backend import AttentionGeometry, AttentionStep, TorchBackend
from umbel.srt.attention.plan import Chunk, Window, make_plan
from umbel.srt.cache.kv_pool import KVGeometry, KVPool, LayerKV
from umbel.srt.core.batch import DUMMY_SLOT, Batch
from umbel.srt.kernels.cpu.attention import CpuBackend
from umbel.srt.kernels.cpu.library import Isa, load_library

from ..attention.batches import (
    Branch,
    Sequence,
    branches,
    make_batch,
    make_tree_batch,
    random_pool,
    sequences,
    with_pictures,
)
from .native import TEAMS, isa_cases, with_each_team

SCALE = 0.2
TILED = (Isa.AMX, Isa.AMX_EMULATED)  # with a bfloat16 pool, they round queries and weights to bfloat16 as well
GEOMETRIES = [
    *(AttentionGeometry(4, 1, 256), AttentionGeometry(6, 2, 64), AttentionGeometry(3, 3, 16)),
    *(AttentionGeometry(8, 2, 48), AttentionGeometry(14, 2, 128), AttentionGeometry(2, 1, 80)),
]
# Values of another size than their keys, and in them. Large heads are those of latents.
OTHER_VALUES = [
    LayerKV(2, 48, 32),
    LayerKV(1, 64, 96),
    LayerKV(1, 96, 64, latent=True),
    LayerKV(1, 576, 512, latent=True),
]
of_text = st.one_of(
    st.builds(lambda parts, shared: make_batch(parts, seed=2, shared=shared), sequences, st.integers(0, 15)),
    st.builds(lambda parts: make_tree_batch(parts, seed=2), branches),
)
batches = st.one_of(
    of_text,
    st.builds(lambda made, seed: (with_pictures(made[0], seed), made[1]), of_text, st.integers(0, 1000)),
)


@pytest.fixture(params=isa_cases())
def isa(request: pytest.FixtureRequest) -> Isa:
    instruction_set: Isa = request.param
    return instruction_set


@pytest.fixture
def library(isa: Isa) -> Iterator[ctypes.CDLL]:
    torch.set_num_threads(1)
    loaded = load_library(isa)
    loaded.umbel_set_threads(2)
    yield loaded
    loaded.umbel_set_threads(1)


def normal(*shape: int, seed: int = 4) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def attend(backend: CpuBackend, batch: Batch, pool: KVPool, queries: torch.Tensor, window: int | None) -> torch.Tensor:
    return backend.attend(0, queries, pool, backend.plan(batch, window), scale=SCALE)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    made=batches,
    geometry=st.sampled_from(GEOMETRIES),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    layer=st.sampled_from([None, None, *OTHER_VALUES]),
    window=st.one_of(st.none(), st.integers(1, 100), st.builds(Chunk, st.integers(1, 100))),
    softcap=st.sampled_from([0.0, 5.0]),
    sunk=st.booleans(),
    block_rows=st.sampled_from([None, 1, 5]),
    split=st.sampled_from([None, 37, 100]),
    tree=st.booleans(),
)
def test_attention_is_that_of_torch_whatever_the_number_of_threads(
    isa: Isa,
    library: ctypes.CDLL,
    made: tuple[Batch, int],
    geometry: AttentionGeometry,
    dtype: torch.dtype,
    layer: LayerKV | None,
    window: Window,
    softcap: float,
    sunk: bool,
    block_rows: int | None,
    split: int | None,
    tree: bool,
) -> None:
    batch, num_slots = made
    if layer is not None:
        geometry = AttentionGeometry(6, layer.kv_heads, max(layer.head_dim, layer.value_dim))
    pool = random_pool(num_slots, geometry, dtype, seed=3, layer=layer)
    queries = normal(batch.rows, geometry.heads, pool.keys[0].shape[2])
    sinks = torch.linspace(-9.0, 9.0, geometry.heads) if sunk else None
    reference = TorchBackend(geometry, "cpu", tree_attention=False)
    cut = reference.plan(batch, window)
    expected = reference.attend(0, queries, pool, cut, scale=SCALE, softcap=softcap, sinks=sinks)

    backend = CpuBackend(geometry, library=library, block_rows=block_rows, split=split, tree_attention=tree)
    backend.cut = dataclasses.replace(backend.cut, merge_keys=4)
    plan = backend.plan(batch, window)

    def attended() -> torch.Tensor:
        return backend.attend(0, queries, pool, plan, scale=SCALE, softcap=softcap, sinks=sinks)

    one_thread, *others = with_each_team(library, attended)
    tolerance = 3e-2 if isa in TILED and dtype is torch.bfloat16 else 2e-5
    torch.testing.assert_close(one_thread, expected, rtol=tolerance, atol=tolerance)
    assert all(torch.equal(other, one_thread) for other in others)


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    made=batches,
    window=st.one_of(st.none(), st.integers(1, 100), st.builds(Chunk, st.integers(1, 100))),
    block_rows=st.integers(1, 9),
    split=st.one_of(st.none(), st.integers(1, 50)),
    tree=st.booleans(),
    workers=st.sampled_from(TEAMS),
)
def test_plans_are_those_of_numpy(
    library: ctypes.CDLL,
    made: tuple[Batch, int],
    window: Window,
    block_rows: int,
    split: int | None,
    tree: bool,
    workers: int,
) -> None:
    batch, _ = made
    library.umbel_set_threads(workers)
    backend = CpuBackend(GEOMETRIES[0], library=library, block_rows=block_rows, split=split, tree_attention=tree)
    backend.cut = dataclasses.replace(backend.cut, merge_keys=4)
    plan = backend.plan(batch, window)
    ours, reference = plan.copy(), make_plan(batch, window, dataclasses.replace(backend.cut, workers=workers))
    for field in dataclasses.fields(reference):
        np.testing.assert_array_equal(getattr(ours, field.name), getattr(reference, field.name), err_msg=field.name)
    assert plan.keys_read == reference.keys_read


def test_a_plan_outlives_its_batch(library: ctypes.CDLL) -> None:
    backend = CpuBackend(GEOMETRIES[0], library=library)
    plan = backend.plan(make_batch([Sequence(prefix=30, query=2)], seed=0)[0], None)
    expected = plan.copy().kv_idx.tolist()
    for seed in range(20):
        backend.plan(make_batch([Sequence(prefix=30, query=2)], seed=seed)[0], None)
    assert plan.copy().kv_idx.tolist() == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 333])
@pytest.mark.parametrize("rows", [1, 2, 3, 5, 9, 33, 70])
@pytest.mark.sampled(5)
def test_long_runs_are_right_for_any_number_of_rows(
    isa: Isa, library: ctypes.CDLL, rows: int, window: int | None, dtype: torch.dtype
) -> None:
    geometry = AttentionGeometry(4, 1, 64)
    batch, num_slots = make_batch([Sequence(prefix=900, query=rows)], seed=0)
    pool = random_pool(num_slots, geometry, dtype, seed=1)
    queries = normal(rows, 4, 64)
    reference = TorchBackend(geometry, "cpu")
    expected = reference.attend(0, queries, pool, reference.plan(batch, window), scale=SCALE)
    tolerance = 3e-2 if isa in TILED and dtype is torch.bfloat16 else 2e-5
    torch.testing.assert_close(
        attend(CpuBackend(geometry, library=library), batch, pool, queries, window),
        expected,
        rtol=tolerance,
        atol=tolerance,
    )


def test_items_that_share_keys_give_what_each_gives_alone(library: ctypes.CDLL) -> None:
    """Rows of a prompt are several items over the same keys, which are laid out once for all of them."""
    geometry = AttentionGeometry(8, 2, 64)
    (sequence,), queries = make_batch([Sequence(prefix=77, query=90)], seed=0)[0].slots, normal(90, 8, 64)
    pool = random_pool(len(sequence) + 1, geometry, torch.bfloat16, seed=1)
    backend = CpuBackend(geometry, library=library, block_rows=30)
    together = attend(backend, _extend(sequence, 77, 90), pool, queries, 50)
    for first in (0, 30, 60):
        alone = _extend(sequence[: 77 + first + 30], 77 + first, 30)
        assert torch.equal(attend(backend, alone, pool, queries[first : first + 30], 50), together[first : first + 30])


def _extend(slots: np.ndarray, prefix: int, rows: int) -> Batch:
    """The last rows of one sequence."""
    return Batch(
        token_ids=np.zeros(rows, dtype=np.int64),
        positions=np.arange(prefix, prefix + rows),
        write_slots=slots[prefix:].astype(np.int64),
        query_lengths=np.array([rows], dtype=np.int32),
        prefix_lengths=np.array([prefix], dtype=np.int32),
        slots=(slots,),
        logit_rows=np.arange(rows),
    )


def test_tiles_round_to_bfloat16_and_no_more(isa: Isa, library: ctypes.CDLL) -> None:
    """One item of many rows, ragged in rows and keys, of which every result is known."""
    geometry = AttentionGeometry(3, 1, 96)
    batch, num_slots = make_batch([Sequence(prefix=150, query=15)], seed=0)
    pool = random_pool(num_slots, geometry, torch.bfloat16, seed=1)
    pool.values[0][1:] = 1.0  # weights sum to 1, rounded or not: each to one part in 512
    backend = CpuBackend(geometry, library=library)
    ones = attend(backend, batch, pool, normal(15, 3, 96), None)
    torch.testing.assert_close(ones, torch.ones_like(ones), rtol=2**-9 if isa in TILED else 1e-5, atol=0.0)


def test_tree_attention_reads_less_and_gives_the_same(library: ctypes.CDLL) -> None:
    geometry = AttentionGeometry(4, 1, 64)
    batch, num_slots = make_tree_batch([Branch(-1, 1.0, 600, 1, 1), *[Branch(0, 1.0, 20, 1, 1)] * 7], seed=0)
    pool = random_pool(num_slots, geometry, torch.float32, seed=1)
    queries = normal(8, 4, 64)
    on, off = (CpuBackend(geometry, library=library, tree_attention=tree) for tree in (True, False))
    torch.testing.assert_close(
        attend(on, batch, pool, queries, None), attend(off, batch, pool, queries, None), rtol=2e-5, atol=2e-5
    )
    assert on.counters.keys_saved == off.counters.keys_read - on.counters.keys_read == 7 * 599
    assert off.counters.keys_saved == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_store_writes_what_torch_writes_and_leaves_the_dummy_slot_alone(
    library: ctypes.CDLL, dtype: torch.dtype
) -> None:
    geometry = AttentionGeometry(6, 2, 48)
    backend = CpuBackend(geometry, library=library)
    ours = random_pool(40, geometry, dtype, seed=0)
    theirs = random_pool(40, geometry, dtype, seed=0)
    keys, values = normal(19, 2, 48, seed=1), normal(19, 2, 48, seed=2)
    slots = torch.randperm(40, generator=torch.Generator().manual_seed(0))[:19]
    slots[5] = slots[11] = DUMMY_SLOT
    backend.store(0, keys, values, ours, slots)
    TorchBackend(geometry, "cpu").store(0, keys.to(dtype), values.to(dtype), theirs, slots)
    assert torch.equal(ours.keys[0][1:], theirs.keys[0][1:])
    assert torch.equal(ours.values[0][1:], theirs.values[0][1:])
    assert bool(ours.keys[0][DUMMY_SLOT].isnan().all())


def test_rows_may_lie_apart(library: ctypes.CDLL) -> None:
    """Queries, keys and values of a fused projection are views of one matrix."""
    geometry = AttentionGeometry(4, 2, 32)
    batch, num_slots = make_batch([Sequence(prefix=3, query=9)], seed=0)
    fused = normal(9, 8 * 32)
    queries, keys, values = (part.view(9, -1, 32) for part in fused.split((4 * 32, 2 * 32, 2 * 32), dim=1))
    out = torch.zeros(9, 200)[:, :128].view(9, 4, 32)
    results = []
    for backend, buffer in ((CpuBackend(geometry, library=library), out), (TorchBackend(geometry, "cpu"), None)):
        pool = random_pool(num_slots, geometry, torch.float32, seed=1)
        backend.store(0, keys, values, pool, torch.from_numpy(batch.write_slots))
        plan = backend.plan(batch, None)
        results.append(backend.attend(0, queries, pool, plan, scale=SCALE, out=buffer))
    assert results[0] is out
    torch.testing.assert_close(*results, rtol=2e-5, atol=2e-5)


def test_a_model_in_bfloat16_is_computed_in_float32_and_rounded_once(library: ctypes.CDLL) -> None:
    geometry = AttentionGeometry(4, 1, 64)
    batch, num_slots = make_batch([Sequence(prefix=50, query=3)], seed=0)
    pool = random_pool(num_slots, geometry, torch.bfloat16, seed=1)
    queries = normal(3, 4, 64).bfloat16()
    backend = CpuBackend(geometry, library=library)
    rounded = attend(backend, batch, pool, queries, None)
    assert rounded.dtype is torch.bfloat16
    assert torch.equal(rounded, attend(backend, batch, pool, queries.float(), None).bfloat16())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("broken", ["keys", "values"])
@pytest.mark.parametrize("rows", [1, 9])
def test_a_nan_reaches_the_rows_that_see_it_and_no_others(
    library: ctypes.CDLL, broken: str, rows: int, dtype: torch.dtype
) -> None:
    geometry = AttentionGeometry(4, 1, 32)
    batch, num_slots = make_batch([Sequence(prefix=9, query=rows), Sequence(prefix=4, query=rows)], seed=0)
    pool = random_pool(num_slots, geometry, dtype, seed=1)
    getattr(pool, broken)[0][batch.slots[0][3]] = float("nan")
    backend = CpuBackend(geometry, library=library)
    result = attend(backend, batch, pool, normal(2 * rows, 4, 32), None)
    assert bool(result[:rows].isnan().all())
    assert bool(result[rows:].isfinite().all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_nan_behind_a_shared_prefix_stays_in_its_branch(library: ctypes.CDLL, dtype: torch.dtype) -> None:
    """What tiles multiply together with the end of the prefix are keys of the first sequence alone."""
    geometry = AttentionGeometry(4, 1, 32)
    batch, num_slots = make_tree_batch([Branch(-1, 1.0, 645, 9, 40), *[Branch(0, 600.5 / 645, 40, 9, 9)] * 5], seed=0)
    pool = random_pool(num_slots, geometry, dtype, seed=1)
    pool.values[0][batch.slots[0][602]] = float("nan")
    backend = CpuBackend(geometry, library=library)
    backend.cut = dataclasses.replace(backend.cut, merge_keys=4)
    result = attend(backend, batch, pool, normal(batch.rows, 4, 32), None)
    assert backend.counters.keys_saved > 0
    assert bool(result[:9].isnan().all())
    assert bool(result[9:].isfinite().all())


def test_a_step_reads_what_it_writes(library: ctypes.CDLL) -> None:
    geometry = AttentionGeometry(2, 2, 16)
    batch, num_slots = make_batch([Sequence(prefix=0, query=6), Sequence(prefix=4, query=3)], seed=0, shared=4)
    queries, keys, values = normal(9, 2, 16), normal(9, 2, 16, seed=5), normal(9, 2, 16, seed=6)
    results = []
    for backend in (CpuBackend(geometry, library=library), TorchBackend(geometry, "cpu")):
        pool = random_pool(num_slots, geometry, torch.float32, seed=1)
        step = AttentionStep(backend, pool, {None: backend.plan(batch, None)}, torch.from_numpy(batch.write_slots))
        results.append(step.attend(0, queries, keys, values, window=None, scale=SCALE))
    torch.testing.assert_close(*results, rtol=2e-5, atol=2e-5)


def test_the_pool_lies_in_whole_pages_and_is_zero_when_cleared(library: ctypes.CDLL) -> None:
    pool = KVPool(KVGeometry.uniform(2, 1, 16, torch.bfloat16), 100, "cpu", library=library)
    assert all(part.data_ptr() % (2 << 20) == 0 for part in (*pool.keys, *pool.values))
    pool.keys[1].fill_(3.0)
    pool.clear()
    assert all(not part.any() for part in (*pool.keys, *pool.values))
    assert pool.keys[1].shape == (100, 1, 16)


def test_a_pool_that_memory_cannot_hold_is_refused(library: ctypes.CDLL) -> None:
    with pytest.raises(ParameterError, match="write a smaller pool_tokens"):
        KVPool(KVGeometry.uniform(1, 1, 64, torch.float32), 1 << 45, "cpu", library=library)


def test_a_head_dim_that_kernels_do_not_take_is_refused(library: ctypes.CDLL) -> None:
    with pytest.raises(ParameterError, match=r"head_dim=24.*multiples of 16"):
        CpuBackend(AttentionGeometry(2, 1, 24), library=library)
