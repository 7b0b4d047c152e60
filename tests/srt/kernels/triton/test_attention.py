"""Attention in Triton against the torch backend, on ragged batches."""

import importlib.util
import sys
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from umbel.lang.errors import MissingExtraError, ParameterError
from umbel.srt.attention import long_prompts
from umbel.srt.attention.backend import AttentionGeometry, AttentionStep, TorchBackend
from umbel.srt.cache.kv_pool import FLOAT8, KVGeometry, KVPool, LayerKV
from umbel.srt.core.batch import DUMMY_SLOT, Batch
from umbel.srt.kernels.triton import attention_backend
from umbel.srt.kernels.triton.attention import tiles_for
from umbel.srt.kernels.triton.attention_backend import TritonBackend
from umbel.srt.kernels.triton.tuning import read_tuning
from umbel.srt.runners.cuda.device import accelerator_for
from umbel.srt.runners.cuda.slot_table import SlotTable

from ...attention.batches import Branch, Sequence, branches, make_batch, make_tree_batch, sequences, with_pictures
from .attention_cases import SCALE, attend_reference, normal, pool_for, tiny_backend

SMALL = AttentionGeometry(heads=4, kv_heads=2, head_dim=16)
of_text = st.one_of(
    st.builds(lambda parts, shared: make_batch(parts[:4], seed=2, shared=shared), sequences, st.integers(0, 15)),
    st.builds(lambda parts: make_tree_batch(parts[:5], seed=2), branches),
)
batches = st.one_of(
    of_text,
    st.builds(lambda made, seed: (with_pictures(made[0], seed), made[1]), of_text, st.integers(0, 1000)),
)
windows = st.one_of(st.none(), st.integers(1, 60))


def attend(
    backend: TritonBackend, batch: Batch, pool: KVPool, queries: torch.Tensor, window: int | None, softcap: float = 0.0
) -> torch.Tensor:
    return backend.attend(0, queries, pool, backend.plan(batch, window), scale=SCALE, softcap=softcap)


@settings(max_examples=5, deadline=None)
@given(
    made=batches,
    geometry=st.sampled_from([SMALL, AttentionGeometry(3, 3, 16), AttentionGeometry(3, 1, 48)]),
    window=windows,
    softcap=st.sampled_from([0.0, 5.0]),
    pictures=st.booleans(),
    tree=st.booleans(),
    multiprocessors=st.sampled_from([2, 40]),  # of 40, runs are cut for as many as there are
)
def test_attention_is_that_of_torch(
    device: torch.device,
    made: tuple[Batch, int],
    geometry: AttentionGeometry,
    window: int | None,
    softcap: float,
    pictures: bool,
    tree: bool,
    multiprocessors: int,
) -> None:
    batch, num_slots = made
    if pictures:
        batch = with_pictures(batch, seed=6)
    pool = pool_for(num_slots, geometry, torch.float32, device)
    queries = normal(batch.rows, geometry.heads, geometry.head_dim).to(device)
    backend = tiny_backend(geometry, device, tree=tree, multiprocessors=multiprocessors)
    result = attend(backend, batch, pool, queries, window, softcap)
    torch.testing.assert_close(
        result, attend_reference(batch, pool, queries, window, softcap=softcap), rtol=1e-5, atol=1e-5
    )


SPLIT = [Sequence(90, 1), Sequence(20, 4), Sequence(3, 1)]
PLAIN = LayerKV(2, 16, 16)
SHAPES = {  # query heads, and a layer
    "sinks alone": (4, PLAIN),
    "longer keys than values": (4, LayerKV(2, 48, 32)),
    "latents": (6, LayerKV(1, 64, 48, latent=True)),
    "a group that is divided unevenly": (21, LayerKV(1, 160, 144, latent=True)),
}


@pytest.mark.parametrize(("shape", "window"), [(shape, None) for shape in SHAPES] + [("sinks alone", 40)])
@pytest.mark.sampled(4)
def test_layers_of_other_shapes_and_sinks_are_those_of_torch(
    device: torch.device, shape: str, window: int | None
) -> None:
    """Runs of 24 keys are parts, so that sinks come in with the only part of a row, and in the merge of several."""
    heads, layer = SHAPES[shape]
    batch, num_slots = make_batch(SPLIT, seed=0, shared=8)
    geometry = AttentionGeometry.covering(heads, [layer])
    pool = pool_for(num_slots, geometry, torch.float32, device, layer=layer)
    queries = normal(batch.rows, heads, layer.head_dim).to(device)
    sinks = torch.linspace(-4.0, 6.0, heads, device=device)
    backend = tiny_backend(geometry, device, multiprocessors=40)
    plan = backend.plan(batch, window)
    assert plan.counts[2] > 0, "a row has several parts"
    result = backend.attend(0, queries, pool, plan, scale=SCALE, sinks=sinks)
    expected = attend_reference(batch, pool, queries, window, sinks=sinks)
    assert result.shape == (batch.rows, heads, layer.value_dim)
    torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5)


def test_layers_of_one_window_may_differ(device: torch.device) -> None:
    """A plan is cut for the largest heads and groups of its layers, and each is computed in its own shape."""
    layers = (LayerKV(1, 32, 32), LayerKV(4, 16, 16))
    batch, num_slots = make_batch(SPLIT, seed=0)
    geometry = AttentionGeometry.covering(4, layers)
    pool = KVPool(KVGeometry(layers, torch.float32), num_slots, device)
    for part in (*pool.keys, *pool.values):
        part.copy_(normal(*part.shape, seed=part.shape[2]))
    backend, truth = tiny_backend(geometry, device, multiprocessors=40), TorchBackend(geometry, device)
    ours, theirs = backend.plan(batch, None), truth.plan(batch, None)
    for layer, shape in enumerate(layers):
        queries = normal(batch.rows, 4, shape.head_dim).to(device)
        results = [
            some.attend(layer, queries, pool, plan, scale=SCALE) for some, plan in ((backend, ours), (truth, theirs))
        ]
        torch.testing.assert_close(*results, rtol=1e-5, atol=1e-5)


def test_steps_are_cut_for_the_layers_of_their_window(device: torch.device) -> None:
    wide = AttentionGeometry(16, 1, 512)
    backend = TritonBackend(
        wide, device, dtype=torch.bfloat16, windows={None: wide, 512: AttentionGeometry(16, 8, 256)}
    )
    batch, _ = make_batch([Sequence(0, 200)], seed=0)
    assert [backend.plan(batch, window).tiles[1].vectors for window in (None, 512)] == [64, 128]
    plans = [backend.plan(batch, window) for window in (None, 512)]
    assert [int(plan.items[1 : 5 * sum(plan.counts[:2]) : 5].max()) for plan in plans] == [4, 64]


PROMPTS = [Sequence(17, 24), Sequence(0, 20)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_steps_of_long_prompts_attend_by_torch_and_give_the_same(
    device: torch.device, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(long_prompts, "LEAST_VECTORS", 40)
    batch, num_slots = make_batch(PROMPTS, seed=0, shared=8)
    pool = pool_for(num_slots, SMALL, dtype, device)
    queries = normal(batch.rows, SMALL.heads, SMALL.head_dim).to(device, dtype)
    expected = attend_reference(batch, pool, queries, None)
    counts = []
    for torch_prompts in (True, False):
        backend = TritonBackend(SMALL, device, dtype=dtype, torch_prompts=torch_prompts)
        table = SlotTable(accelerator_for(device), 200, windows=False)
        backend.use_table(table)
        plan = backend.plan(replace(batch, places=table.place(batch)), None)
        results = [backend.attend(0, queries, pool, plan, scale=SCALE), torch.empty_like(queries)]
        assert backend.attend(0, queries, pool, plan, scale=SCALE, out=results[1]) is results[1]
        for result in results:
            assert result.dtype is dtype
            assert (result.float() - expected).norm() / expected.norm() < 1e-2
        capped = backend.attend(0, queries, pool, plan, scale=SCALE, softcap=5.0)
        of_ours = attend_reference(batch, pool, queries, None, softcap=5.0)
        assert (capped.float() - of_ours).norm() / of_ours.norm() < 1e-2
        counts.append(backend.counters.torch_prompts)
    assert counts == [2, 0]


def test_captured_steps_of_long_prompts_attend_by_our_kernel(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(long_prompts, "LEAST_VECTORS", 40)
    batch, _ = make_batch(PROMPTS, seed=0)
    backend = TritonBackend(SMALL, device, dtype=torch.bfloat16)
    table = SlotTable(accelerator_for(device), 200, windows=False)
    backend.use_table(table)
    plan = backend.reserve(None, rows=64, wide=True)
    assert backend.plan_into(plan, replace(batch, places=table.place(batch)), None)
    assert plan.long is None


MIXED = [Sequence(40, 1), Sequence(9, 1), Sequence(30, 21), Sequence(0, 5), Sequence(60, 1, cached=True)]


@pytest.mark.sampled(6)
@pytest.mark.parametrize(("dtype", "kv_dtype"), [
    (torch.bfloat16, torch.bfloat16),
    (torch.float16, torch.float16),
    (torch.bfloat16, FLOAT8),
    (torch.float16, FLOAT8),
    (torch.float32, FLOAT8),
], ids=str)  # fmt: skip
@pytest.mark.parametrize("softcap", [0.0, 5.0])
def test_narrow_dtypes_round_what_is_multiplied_and_no_more(
    device: torch.device, dtype: torch.dtype, kv_dtype: torch.dtype, softcap: float
) -> None:
    batch, num_slots = make_batch(MIXED, seed=0, shared=8)
    pool = pool_for(num_slots, SMALL, kv_dtype, device)
    queries = normal(batch.rows, SMALL.heads, SMALL.head_dim).to(device, dtype)
    backend = tiny_backend(SMALL, device, dtype=dtype, kv_dtype=kv_dtype)
    result = attend(backend, batch, pool, queries, 33, softcap)
    assert result.dtype is dtype
    expected = attend_reference(batch, pool, queries, 33, softcap=softcap)
    error = (result.float() - expected).norm() / expected.norm()
    assert error < (1e-5 if dtype is torch.float32 else 1e-2)


@pytest.mark.parametrize("head_dim", [32, 64, 80, 96, 128, 256])
def test_head_dims(device: torch.device, head_dim: int) -> None:
    geometry = AttentionGeometry(4, 1, head_dim)
    batch, num_slots = make_batch([Sequence(20, 1), Sequence(5, 14)], seed=0)
    pool = pool_for(num_slots, geometry, torch.float32, device)
    queries = normal(batch.rows, 4, head_dim).to(device)
    result = attend(TritonBackend(geometry, device, dtype=torch.float32), batch, pool, queries, None)
    torch.testing.assert_close(result, attend_reference(batch, pool, queries, None), rtol=1e-5, atol=1e-5)


def test_a_device_with_little_shared_memory_has_one_pair_of_tiles_less_on_its_way() -> None:
    stages = {}
    for name in ("ada", "ampere", "hopper", "default"):
        tiles = tiles_for(AttentionGeometry(8, 4, 128), torch.bfloat16, FLOAT8, tuning=read_tuning(name))
        stages[name] = {tile.stages for tile in (tiles.few, tiles.some, tiles.many)}
    assert stages == {"ada": {2}, "ampere": {3}, "hopper": {3}, "default": {3}}


def test_where_keys_are_streamed_four_programs_share_a_multiprocessor_if_registers_allow() -> None:
    shares = {}
    for name, head_dim, kv_dtype in (
        ("common", 128, torch.bfloat16),
        ("large", 256, torch.bfloat16),
        ("narrow", 128, FLOAT8),
    ):
        tiles = tiles_for(AttentionGeometry(8, 4, head_dim), torch.bfloat16, kv_dtype)
        shares[name] = {(tile.resident, tile.stages, tile.registers) for tile in (tiles.few, tiles.some)}
    assert shares == {"common": {(4, 2, 128)}, "large": {(2, 3, None)}, "narrow": {(2, 3, None)}}


def test_many_large_vectors_are_computed_where_they_fit() -> None:
    vectors = []
    for name in ("ada", "ampere", "hopper", "default"):
        tiles = tiles_for(AttentionGeometry(8, 4, 256), torch.bfloat16, torch.bfloat16, tuning=read_tuning(name))
        vectors.append(tiles.many.vectors)
    assert vectors == [64, 64, 128, 128]


@pytest.mark.parametrize("group", [1, 5, 7, 16, 71, 130])
@pytest.mark.sampled(4)
def test_groups_of_any_size_are_packed_into_a_tile(device: torch.device, group: int) -> None:
    geometry = AttentionGeometry(group, 1, 16)
    batch, num_slots = make_batch([Sequence(20, 1), Sequence(3, 1), Sequence(5, 9)], seed=0)
    pool = pool_for(num_slots, geometry, torch.float32, device)
    queries = normal(batch.rows, group, 16).to(device)
    result = attend(tiny_backend(geometry, device), batch, pool, queries, None)
    torch.testing.assert_close(result, attend_reference(batch, pool, queries, None), rtol=1e-5, atol=1e-5)


@pytest.mark.nightly
def test_a_row_of_many_parts_is_merged_in_several_blocks(device: torch.device) -> None:
    batch, num_slots = make_batch([Sequence(600, 1), Sequence(40, 1)], seed=0)
    pool = pool_for(num_slots, SMALL, torch.float32, device)
    queries = normal(batch.rows, SMALL.heads, SMALL.head_dim).to(device)
    backend = tiny_backend(SMALL, device, multiprocessors=100, shortest_run=16)
    plan = backend.plan(batch, None)
    assert plan.merges[2] > 2 * read_tuning().attention_merge.parts
    result = backend.attend(0, queries, pool, plan, scale=SCALE)
    torch.testing.assert_close(result, attend_reference(batch, pool, queries, None), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("window", [None, 9])
def test_rows_of_a_picture_see_the_rest_of_it(device: torch.device, window: int | None) -> None:
    batch, num_slots = make_batch([Sequence(12, 30), Sequence(20, 1)], seed=0)
    batch = replace(batch, spans=(((5, 16), (20, 39)), ((3, 12),)))
    pool = pool_for(num_slots, SMALL, torch.float32, device)
    queries = normal(batch.rows, SMALL.heads, SMALL.head_dim).to(device)
    result = attend(tiny_backend(SMALL, device), batch, pool, queries, window)
    torch.testing.assert_close(result, attend_reference(batch, pool, queries, window), rtol=1e-5, atol=1e-5)


@pytest.mark.nightly
def test_tree_attention_reads_less_and_gives_the_same(device: torch.device) -> None:
    batch, num_slots = make_tree_batch([Branch(-1, 1.0, 100, 1, 1), *[Branch(0, 1.0, 9, 1, 1)] * 11], seed=0)
    pool = pool_for(num_slots, SMALL, torch.float32, device)
    queries = normal(batch.rows, SMALL.heads, SMALL.head_dim).to(device)
    on, off = (tiny_backend(SMALL, device, tree=tree) for tree in (True, False))
    results = [attend(backend, batch, pool, queries, None) for backend in (on, off)]
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-5)
    assert on.counters.keys_saved == off.counters.keys_read - on.counters.keys_read == 11 * 99
    assert off.counters.keys_saved == 0
    assert on.plan(batch, None).counts[1] > 0, "a run of 12 rows with 2 heads each is in the large tile"


def test_a_run_that_two_sequences_share_is_an_item_from_256_keys_on(device: torch.device) -> None:
    for length, saved in ((255, 0), (256, 256)):
        batch, _ = make_tree_batch([Branch(-1, 1.0, length + 1, 1, 1), Branch(0, length / (length + 1), 9, 1, 1)], 0)
        backend = TritonBackend(SMALL, device, dtype=torch.float32)
        backend.plan(batch, None)
        assert backend.counters.keys_saved == saved


@pytest.mark.parametrize("broken", ["keys", "values"])
@pytest.mark.parametrize("rows", [1, 9])
def test_a_nan_reaches_the_rows_that_see_it_and_no_others(device: torch.device, broken: str, rows: int) -> None:
    batch, num_slots = make_batch([Sequence(9, rows), Sequence(4, rows), Sequence(17, 1)], seed=0)
    pool = pool_for(num_slots, SMALL, torch.float32, device)
    getattr(pool, broken)[0][int(batch.slots[0][3])] = float("nan")
    queries = normal(batch.rows, SMALL.heads, SMALL.head_dim).to(device)
    result = attend(tiny_backend(SMALL, device), batch, pool, queries, None)
    assert bool(result[:rows].isnan().all())
    assert bool(result[rows:].isfinite().all())


def test_a_nan_behind_a_shared_prefix_stays_in_its_branch(device: torch.device) -> None:
    batch, num_slots = make_tree_batch([Branch(-1, 1.0, 50, 1, 10), *[Branch(0, 0.8, 10, 1, 5)] * 4], seed=0)
    pool = pool_for(num_slots, SMALL, torch.float32, device)
    pool.values[0][int(batch.slots[0][42])] = float("nan")
    backend = tiny_backend(SMALL, device)
    result = attend(backend, batch, pool, normal(batch.rows, 4, 16).to(device), None)
    assert backend.counters.keys_saved > 0
    assert bool(result[:1].isnan().all())
    assert bool(result[1:].isfinite().all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, FLOAT8], ids=str)
def test_store_writes_what_torch_writes_and_leaves_the_dummy_slot_alone(
    device: torch.device, dtype: torch.dtype
) -> None:
    geometry = AttentionGeometry(6, 2, 48)
    model_dtype = torch.float32 if dtype is FLOAT8 else dtype
    backend = TritonBackend(geometry, device, dtype=model_dtype, kv_dtype=dtype)
    ours, theirs = (pool_for(40, geometry, dtype, device, seed=0) for _ in range(2))
    # Quarters are numbers of all dtypes, so that nothing is rounded, and 1000 is one that float8 has not.
    keys, values = ((normal(19, 2, 48, seed=seed) * 4).round() / 4 for seed in (1, 2))
    keys[7, 0, 3], values[8, 1, 5] = 1000.0, -1000.0
    keys, values = keys.to(device, model_dtype), values.to(device, model_dtype)
    slots = torch.randperm(40, generator=torch.Generator().manual_seed(0))[:19].to(device)
    slots[5] = slots[11] = DUMMY_SLOT
    backend.store(0, keys, values, ours, slots)
    TorchBackend(geometry, device).store(0, keys, values, theirs, slots)
    assert torch.equal(ours.keys[0][1:].float(), theirs.keys[0][1:].float())
    assert torch.equal(ours.values[0][1:].float(), theirs.values[0][1:].float())
    assert bool(ours.keys[0][DUMMY_SLOT].float().isnan().all())


def test_a_step_reads_what_it_writes_and_rows_may_lie_apart(device: torch.device) -> None:
    """Queries, keys and values of a fused projection are views of one matrix."""
    batch, num_slots = make_batch([Sequence(0, 6), Sequence(4, 3)], seed=0, shared=4)
    fused = normal(9, 8 * 16).to(device)
    queries, keys, values = (part.view(9, -1, 16) for part in fused.split((4 * 16, 2 * 16, 2 * 16), dim=1))
    results = []
    for backend in (tiny_backend(SMALL, device), TorchBackend(SMALL, device)):
        pool = pool_for(num_slots, SMALL, torch.float32, device)
        slots = torch.from_numpy(batch.write_slots).to(device)
        step = AttentionStep(backend, pool, {None: backend.plan(batch, None)}, slots)
        results.append(step.attend(0, queries, keys, values, window=None, scale=SCALE))
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("side_by_side", [True, False])
def test_results_go_where_the_caller_wants_them(device: torch.device, side_by_side: bool) -> None:
    batch, num_slots = make_batch([Sequence(9, 3)], seed=0)
    pool, queries = pool_for(num_slots, SMALL, torch.float32, device), normal(3, 4, 16).to(device)
    wide = torch.zeros(3, 4, 40, device=device)
    out = wide.view(3, 160)[:, :64].view(3, 4, 16) if side_by_side else wide[:, :, :16]
    backend = tiny_backend(SMALL, device)
    result = backend.attend(0, queries, pool, backend.plan(batch, None), scale=SCALE, out=out)
    assert result is out
    torch.testing.assert_close(out, attend_reference(batch, pool, queries, None), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("geometry", "dtypes", "message"),
    [
        (
            AttentionGeometry(2, 1, 24),
            (torch.float32, None),
            r'head_dim=24.*multiples of 16.*kernels="torch"',
        ),
        (
            AttentionGeometry(2, 1, 528),
            (torch.float32, None),
            r'head_dim=528.*up to 512, of latents 640.*kernels="torch"',
        ),
        (SMALL, (torch.float64, None), r'dtype=float64.*bfloat16, float16, float32.*kernels="torch"'),
        (SMALL, (torch.float16, torch.bfloat16), r'bfloat16 for queries in float16.*kv_dtype="auto"'),
    ],
)
def test_what_the_kernels_do_not_take_is_refused_with_a_remedy(
    device: torch.device, geometry: AttentionGeometry, dtypes: tuple[torch.dtype, torch.dtype | None], message: str
) -> None:
    with pytest.raises(ParameterError, match=message):
        TritonBackend(geometry, device, dtype=dtypes[0], kv_dtype=dtypes[1])


def test_without_triton_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    spec = importlib.util.spec_from_file_location(f"{attention_backend.__package__}.again", attention_backend.__file__)
    assert spec is not None
    assert spec.loader is not None
    with pytest.raises(MissingExtraError, match=r"'triton' is not installed; run: pip install 'umbel\[runtime\]'"):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, FLOAT8], ids=str)
def test_long_runs_on_a_device(device: torch.device, head_dim: int, kv_dtype: torch.dtype) -> None:
    geometry = AttentionGeometry(32, 8, head_dim)
    parts = [Sequence(5000, 1), *[Sequence(300, 1)] * 30, Sequence(900, 700), Sequence(0, 129)]
    batch, num_slots = make_batch(parts, seed=0)
    pool = pool_for(num_slots, geometry, kv_dtype, device)
    queries = normal(batch.rows, 32, head_dim).to(device, torch.bfloat16)
    for window in (None, 512):
        result = attend(
            TritonBackend(geometry, device, dtype=torch.bfloat16, kv_dtype=kv_dtype), batch, pool, queries, window
        )
        expected = attend_reference(batch, pool, queries, window)
        assert (result.float() - expected).norm() / expected.norm() < 1e-2
