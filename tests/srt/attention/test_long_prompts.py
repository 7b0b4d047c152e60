"""Long prompts by torch's kernel, on gathered keys, next to the oracle of attention. The CPU has such a kernel, too."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from umbel.srt.attention import long_prompts as rule
from umbel.srt.attention.backend import AttentionCounters, AttentionGeometry, TorchBackend
from umbel.srt.attention.long_prompts import SCRATCH_BYTES, GatheredPrompts, attend_long, long_prompts, scratch_bytes
from umbel.srt.attention.plan import BothWays, Chunk, Window
from umbel.srt.cache.kv_pool import FLOAT8, KVGeometry, LayerKV
from umbel.srt.core.batch import Batch

from .batches import Branch, Sequence, make_batch, make_tree_batch, random_pool

SCALE = 0.3
GROUPED = AttentionGeometry(heads=6, kv_heads=2, head_dim=8)
ragged = st.lists(st.builds(Sequence, prefix=st.integers(0, 60), query=st.integers(1, 40)), min_size=1, max_size=4)
trees = st.lists(
    st.builds(
        Branch,
        parent=st.integers(-1, 3),
        kept=st.sampled_from([1.0, 0.6]),
        own=st.integers(1, 60),
        query=st.integers(1, 40),
        private=st.integers(0, 3),
    ),
    min_size=1,
    max_size=4,
)


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def in_table(batch: Batch) -> tuple[Batch, torch.Tensor]:
    """The batch with places in a table, and the table, with slots of nothing between those of sequences."""
    lengths = [len(own) for own in batch.slots]
    places = np.cumsum([5, *(length + 2 for length in lengths[:-1])]).astype(np.int32)
    table = np.full(places[-1] + lengths[-1] + 1, 10_000, dtype=np.int32)
    for place, own in zip(places.tolist(), batch.slots, strict=True):
        table[place : place + len(own)] = own
    return replace(batch, places=places), torch.from_numpy(table)


def rows_of(batch: Batch, geometry: AttentionGeometry) -> torch.Tensor:
    return torch.randn(
        batch.rows, geometry.heads, geometry.head_dim, generator=torch.Generator().manual_seed(batch.rows)
    )


@settings(max_examples=40, deadline=None)
@given(
    made=st.one_of(
        st.builds(lambda parts, shared: make_batch(parts, seed=2, shared=shared), ragged, st.integers(0, 30)),
        st.builds(lambda parts: make_tree_batch(parts, seed=2), trees),
    ),
    geometry=st.sampled_from([GROUPED, AttentionGeometry(3, 3, 16), AttentionGeometry(8, 1, 24)]),
    scratch=st.sampled_from([SCRATCH_BYTES, 1]),
)
@example(make_batch([Sequence(0, 1)], seed=1), GROUPED, SCRATCH_BYTES)
@example(make_batch([Sequence(0, 30), Sequence(50, 30)], seed=1), GROUPED, 1)
def test_torch_on_gathered_keys_is_the_oracle(
    made: tuple[Batch, int], geometry: AttentionGeometry, scratch: int
) -> None:
    """With a scratch of one byte KV heads are gathered one by one."""
    batch, num_slots = made
    pool = random_pool(num_slots, geometry, torch.float32, 3)
    queries, oracle = rows_of(batch, geometry), TorchBackend(geometry, "cpu", tree_attention=False)
    placed, table = in_table(batch)
    out = torch.full_like(queries, torch.nan)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rule, "SCRATCH_BYTES", scratch)
        patch.setattr(rule, "LEAST_VECTORS", 1)
        prompts = long_prompts(placed, None, table, group=geometry.group, counters=AttentionCounters())
        assert prompts is not None
        prompts.attend(queries, pool.keys[0], pool.values[0], scale=SCALE, out=out)
    expected = oracle.attend(0, queries, pool, oracle.plan(batch, None), scale=SCALE)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)


def test_chunks_of_a_prompt_are_the_rows_of_the_whole() -> None:
    geometry, count = GROUPED, 90
    pool = random_pool(count + 1, geometry, torch.float32, 3)
    slots = torch.randperm(count, generator=torch.Generator().manual_seed(1)).int() + 1
    queries = torch.randn(count, 6, 8, generator=torch.Generator().manual_seed(2))
    whole, chunked = torch.empty_like(queries), torch.empty_like(queries)
    attend_long(queries, pool.keys[0], pool.values[0], slots, scale=SCALE, out=whole)
    for first, end in ((0, 40), (40, 41), (41, 90)):
        rows = slice(first, end)
        attend_long(queries[rows], pool.keys[0], pool.values[0], slots[:end], scale=SCALE, out=chunked[rows])
    torch.testing.assert_close(chunked, whole, rtol=1e-5, atol=1e-5)


# ------------------------------------------------------------------------------------------ the rule


def prompts_of(
    parts: list[Sequence], window: Window = None, *, group: int = 3, least: int = 30, **changes: object
) -> GatheredPrompts | None:
    batch, _ = make_batch(parts, seed=0)
    placed, table = in_table(batch)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rule, "LEAST_VECTORS", least)
        return long_prompts(
            replace(placed, **changes),  # type: ignore[arg-type]
            window,
            table,
            group=group,
            counters=AttentionCounters(),
        )


def test_steps_in_which_all_sequences_are_long_go_to_torch() -> None:
    assert prompts_of([Sequence(5, 10)]) is not None
    assert prompts_of([Sequence(5, 10), Sequence(0, 12)]) is not None
    assert prompts_of([Sequence(5, 9)]) is None
    assert prompts_of([Sequence(5, 200), Sequence(100, 1)]) is None, "one decodes"


@pytest.mark.parametrize("window", [7, Chunk(4), BothWays()], ids=str)
def test_windows_stay_with_our_kernel(window: Window) -> None:
    assert prompts_of([Sequence(0, 40)], window) is None


@pytest.mark.parametrize(
    "changes",
    [{"places": None}, {"spans": (((0, 3),),)}, {"generated": np.array([1], dtype=np.int32)}],
    ids=["slots in no table", "a picture", "rows that were generated"],
)
def test_steps_that_are_more_than_prompts_stay_with_our_kernel(changes: dict[str, object]) -> None:
    assert prompts_of([Sequence(0, 40)], spans=((),), generated=np.zeros(1, dtype=np.int32)) is not None
    assert prompts_of([Sequence(0, 40)], **changes) is None


@pytest.mark.parametrize(
    ("layer", "dtype", "kv_dtype", "taken"),
    [
        (LayerKV(2, 64, 64), torch.bfloat16, torch.bfloat16, True),
        (LayerKV(2, 256, 256), torch.float16, torch.float16, True),
        (LayerKV(2, 264, 264), torch.bfloat16, torch.bfloat16, False),
        (LayerKV(2, 60, 60), torch.bfloat16, torch.bfloat16, False),
        (LayerKV(2, 64, 32), torch.bfloat16, torch.bfloat16, False),
        (LayerKV(1, 64, 64, latent=True), torch.bfloat16, torch.bfloat16, False),
        (LayerKV(2, 64, 64), torch.bfloat16, FLOAT8, False),
        (LayerKV(2, 64, 64), torch.float32, torch.float32, False),
        (LayerKV(6, 64, 64), torch.bfloat16, torch.bfloat16, False),  # a group of one head: 15 vectors
    ],
    ids=str,
)
def test_layers_that_torch_takes(
    layer: LayerKV, dtype: torch.dtype, kv_dtype: torch.dtype, taken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = prompts_of([Sequence(5, 15)])
    assert prompts is not None
    monkeypatch.setattr(rule, "LEAST_VECTORS", 30)
    assert prompts.takes(torch.zeros(15, 6, layer.head_dim, dtype=dtype), layer, kv_dtype) is taken


def test_keys_of_one_head_fit_the_scratch(monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = prompts_of([Sequence(5, 15)])
    assert prompts is not None
    monkeypatch.setattr(rule, "LEAST_VECTORS", 30)
    taken = []
    for scratch in (20 * 64 * 2 * 2, 20 * 64 * 2 * 2 - 1):
        monkeypatch.setattr(rule, "SCRATCH_BYTES", scratch)
        queries = torch.zeros(15, 6, 64, dtype=torch.bfloat16)
        taken.append(prompts.takes(queries, LayerKV(2, 64, 64), torch.bfloat16))
    assert taken == [True, False]


def test_the_scratch_is_that_of_the_largest_layer_up_to_a_limit() -> None:
    layers = (LayerKV(2, 64, 64), LayerKV(4, 64, 64), LayerKV(1, 512, 512), LayerKV(8, 64, 64, windowed=True))
    geometry = KVGeometry(layers, torch.bfloat16)
    assert scratch_bytes(geometry, torch.bfloat16, 1000) == 1000 * 4 * (64 + 64) * 2
    assert scratch_bytes(geometry, torch.bfloat16, 1 << 20) == SCRATCH_BYTES
    assert scratch_bytes(KVGeometry(layers, FLOAT8), torch.bfloat16, 1000) == 0
    assert scratch_bytes(KVGeometry(layers, torch.float32), torch.float32, 1000) == 0


def test_prompts_are_counted_once_for_all_layers() -> None:
    counters = AttentionCounters()
    batch, num_slots = make_batch([Sequence(3, 20), Sequence(0, 9)], seed=0)
    placed, table = in_table(batch)
    pool = random_pool(num_slots, GROUPED, torch.float32, 3)
    queries = rows_of(batch, GROUPED)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rule, "LEAST_VECTORS", 1)
        prompts = long_prompts(placed, None, table, group=3, counters=counters)
    assert prompts is not None
    assert counters.torch_prompts == 0
    for _ in range(3):
        prompts.attend(queries, pool.keys[0], pool.values[0], scale=SCALE, out=torch.empty_like(queries))
    assert counters.torch_prompts == 2
