"""Branches of a tree in captured steps: each way of computing against the torch backend, and steps without it."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from umbel.srt.attention.backend import AttentionGeometry
from umbel.srt.cache.kv_pool import KVPool, LayerKV
from umbel.srt.core.batch import Batch
from umbel.srt.kernels.triton import attention_backend
from umbel.srt.kernels.triton.attention import tiles_for
from umbel.srt.kernels.triton.attention_backend import TritonBackend, TritonPlan, Ways
from umbel.srt.runners.cuda.device import accelerator_for
from umbel.srt.runners.cuda.slot_table import SlotTable

from ...attention.batches import Branch, Sequence, make_batch, make_tree_batch
from .attention_cases import SCALE, attend_reference, normal, pool_for, tiny_backend

SMALL = AttentionGeometry(heads=4, kv_heads=2, head_dim=16)
WITHOUT = {
    "none": Ways(),
    "fused": Ways(fused=False),
    "wide": Ways(wide=False),
    "balanced": Ways(balanced=False),
    "all": Ways(fused=False, wide=False, balanced=False),
}


def fork(shared: int, ways: int, own: int) -> tuple[Batch, int]:
    return make_tree_batch([Branch(-1, 1.0, shared, 1, 1), *[Branch(0, 1.0, own, 1, 1)] * ways], seed=0)


def three_levels(root: int, nodes: int, node: int, leaves: int, leaf: int) -> tuple[Batch, int]:
    """A root that all share, nodes that some do, and leaves: each node's first branch is the first of its leaves."""
    parts = []
    for number in range(nodes):
        first = len(parts)
        parts.append(Branch(0 if number else -1, root / (root + node + leaf) if number else 1.0, 0, 1, 0))
        parts[first] = replace(parts[first], own=node + leaf + (0 if number else root))
        kept = (root + node) / (root + node + leaf)
        parts += [Branch(first, kept, leaf, 1, 0)] * (leaves // nodes - 1)
    return make_tree_batch(parts, seed=0)


def reserved(backend: TritonBackend, batch: Batch, rows: int | None = None) -> TritonPlan:
    """A plan as captured graphs read it, filled with a step."""
    table = SlotTable(accelerator_for(backend.device), 40_000, windows=False)
    backend.use_table(table)
    plan = backend.reserve(None, rows=rows or batch.rows)
    assert backend.plan_into(plan, replace(batch, places=table.place(batch)), None)
    return plan


def attend(
    backend: TritonBackend, batch: Batch, pool: KVPool, queries: torch.Tensor, sinks: torch.Tensor | None = None
) -> torch.Tensor:
    """Twice by one plan, as two layers do: the second finds what the first has left."""
    plan = reserved(backend, batch)
    results = [backend.attend(0, queries, pool, plan, scale=SCALE, sinks=sinks) for _ in range(2)]
    assert torch.equal(*results)
    assert not plan.counters.any(), "merging programs set their counters back"
    return results[0]


@pytest.mark.sampled(6)
@pytest.mark.parametrize("without", WITHOUT)
@pytest.mark.parametrize("geometry", [SMALL, AttentionGeometry(3, 1, 48)], ids=["group 2", "group 3"])
def test_each_way_gives_what_torch_does(device: torch.device, without: str, geometry: AttentionGeometry) -> None:
    batch, num_slots = fork(60, 20, 5)
    pool = pool_for(num_slots, geometry, torch.float32, device)
    queries = normal(batch.rows, geometry.heads, geometry.head_dim).to(device)
    backend = tiny_backend(geometry, device, ways=WITHOUT[without])
    result = attend(backend, batch, pool, queries)
    assert backend.counters.keys_saved > 0
    torch.testing.assert_close(result, attend_reference(batch, pool, queries, None), rtol=1e-5, atol=1e-5)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("heads", "layer"),
    [(4, LayerKV(2, 16, 16)), (21, LayerKV(1, 160, 144, latent=True))],
    ids=["sinks", "latents, an uneven group"],
)
@pytest.mark.nightly
def test_sinks_and_divided_groups_are_merged_where_the_last_part_is_done(
    device: torch.device, heads: int, layer: LayerKV
) -> None:
    batch, num_slots = fork(90, 5, 4)
    geometry = AttentionGeometry.covering(heads, [layer])
    pool = pool_for(num_slots, geometry, torch.float32, device, layer=layer)
    queries = normal(batch.rows, heads, layer.head_dim).to(device)
    sinks = torch.linspace(-4.0, 6.0, heads, device=device)
    results = [
        attend(tiny_backend(geometry, device, ways=Ways(fused=fused)), batch, pool, queries, sinks)
        for fused in (True, False)
    ]
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-5)
    expected = attend_reference(batch, pool, queries, None, sinks=sinks)
    torch.testing.assert_close(results[0], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.nightly
def test_rows_of_many_parts_are_merged_block_by_block(device: torch.device) -> None:
    batch, num_slots = make_batch([Sequence(600, 1), Sequence(40, 1)], seed=0)
    geometry = AttentionGeometry(4, 1, 512)  # parts of four heads are loaded two at a time
    pool = pool_for(num_slots, geometry, torch.float32, device)
    queries = normal(batch.rows, 4, 512).to(device)
    backend = tiny_backend(geometry, device, multiprocessors=100, shortest_run=60)
    assert int(backend.plan(batch, None).merges[2]) > 4
    result = attend(backend, batch, pool, queries)
    torch.testing.assert_close(result, attend_reference(batch, pool, queries, None), rtol=1e-5, atol=1e-5)


@pytest.mark.nightly
def test_a_fused_merge_is_no_launch(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[str] = []

    class Counted:
        def __init__(self, name: str) -> None:
            self.name, self.kernel = name, getattr(attention_backend, name)

        def __getitem__(self, grid: tuple[int]) -> object:
            launched.append(self.name)
            return self.kernel[grid]

    for name in ("attend_items", "merge_parts"):
        monkeypatch.setattr(attention_backend, name, Counted(name))
    batch, num_slots = fork(60, 20, 5)
    pool, queries = pool_for(num_slots, SMALL, torch.float32, device), normal(batch.rows, 4, 16).to(device)
    for fused, expected in ((True, ["attend_items"]), (False, ["attend_items", "merge_parts"])):
        backend = tiny_backend(SMALL, device, ways=Ways(fused=fused))
        plan = reserved(backend, batch)
        launched.clear()
        backend.attend(0, queries, pool, plan, scale=SCALE)
        assert launched == expected


@pytest.mark.nightly
def test_a_plan_is_filled_again_while_its_counters_stand_at_zero(device: torch.device) -> None:
    backend = tiny_backend(SMALL, device)
    table = SlotTable(accelerator_for(device), 40_000, windows=False)
    backend.use_table(table)
    plan = backend.reserve(None, rows=24)
    steps = [fork(60, 20, 5), make_batch([Sequence(90, 1), Sequence(3, 1)], seed=1), fork(40, 5, 30)]
    for batch, num_slots in steps:
        assert backend.plan_into(plan, replace(batch, places=table.place(batch)), None)
        pool, queries = pool_for(num_slots, SMALL, torch.float32, device), normal(batch.rows, 4, 16).to(device)
        result = backend.attend(0, queries, pool, plan, scale=SCALE)
        torch.testing.assert_close(result, attend_reference(batch, pool, queries, None), rtol=1e-5, atol=1e-5)
        assert not plan.counters.any()


def test_wide_tiles_read_a_shared_run_half_as_often() -> None:
    geometry = AttentionGeometry(32, 8, 128)
    wide = tiles_for(geometry, torch.bfloat16, torch.bfloat16).some
    assert (wide.vectors, wide.keys) == (64, 32)
    batch, _ = fork(301, 31, 9)
    read = {}
    for ways in (Ways(), Ways(wide=False)):
        backend = TritonBackend(geometry, torch.device("cpu"), dtype=torch.bfloat16, multiprocessors=132, ways=ways)
        reserved(backend, batch)
        read[ways.wide] = backend.counters.keys_read - 31 * 10 - 1
    assert read == {True: 2 * 300, False: 4 * 300}, "32 rows of 4 heads, in tiles of 64 and of 32"


def test_steps_that_share_nothing_are_packed_as_without_queues() -> None:
    batch, _ = make_batch([Sequence(length, 1) for length in (4000, 30, 600, 1000, 77)], seed=0)
    geometry = AttentionGeometry(32, 8, 128)
    plans = []
    for ways in (Ways(), Ways(balanced=False)):
        backend = TritonBackend(geometry, torch.device("cpu"), dtype=torch.bfloat16, multiprocessors=132, ways=ways)
        plan = reserved(backend, batch)
        assert plan.bounds[:4].tolist()[3] == 0, "no queues"
        few, more, merged = plan.counts
        plans.append((plan.counts, plan.items[: 5 * (few + more)].tolist(), plan.merges[: 3 * merged].tolist()))
    assert plans[0] == plans[1]


@pytest.mark.nightly
def test_three_levels_are_read_once_each(device: torch.device) -> None:
    batch, num_slots = three_levels(root=64, nodes=3, node=40, leaves=12, leaf=8)
    pool = pool_for(num_slots, SMALL, torch.float32, device)
    queries = normal(batch.rows, 4, 16).to(device)
    backend = tiny_backend(SMALL, device)
    result = attend(backend, batch, pool, queries)
    assert backend.counters.keys_read == 64 + 3 * 40 + 12 * 8
    assert backend.counters.keys_saved == 11 * 64 + 3 * 3 * 40
    torch.testing.assert_close(result, attend_reference(batch, pool, queries, None), rtol=1e-5, atol=1e-5)
    alone = tiny_backend(SMALL, device, tree=False)
    torch.testing.assert_close(result, attend(alone, batch, pool, queries), rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
def test_a_captured_step_shares_what_the_plan_says_when_it_is_replayed(device: torch.device) -> None:
    geometry = AttentionGeometry(32, 8, 128)
    backend = TritonBackend(geometry, device, dtype=torch.bfloat16)
    table = SlotTable(accelerator_for(device), 80_000, windows=False)
    backend.use_table(table)
    plan = backend.reserve(None, rows=32)
    queries, out = (torch.zeros(32, 32, 128, device=device, dtype=torch.bfloat16) for _ in range(2))
    steps = [fork(1025, 31, 100), three_levels(1024, 4, 512, 32, 100), make_batch([Sequence(900, 1)] * 32, seed=0)]
    pool = pool_for(max(num_slots for _, num_slots in steps), geometry, torch.bfloat16, device)

    def attend_now() -> None:
        backend.attend(0, queries, pool, plan, scale=SCALE, out=out)

    attend_now()  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        attend_now()
        attend_now()  # the next layer finds the counters at 0
    for seed, (batch, _) in enumerate(steps * 3):
        queries.copy_(normal(32, 32, 128, seed=seed))
        assert backend.plan_into(plan, replace(batch, places=table.place(batch)), None)
        graph.replay()
        expected = attend_reference(batch, pool, queries, None)
        assert (out.float() - expected).norm() / expected.norm() < 1e-2
        assert not plan.counters.any()


@pytest.mark.nightly
def test_each_program_finds_its_queue(device: torch.device) -> None:
    """Queues of items of few rows and of more, and programs without any."""
    batch, num_slots = fork(120, 20, 5)
    geometry = AttentionGeometry(6, 3, 16)
    pool, queries = pool_for(num_slots, geometry, torch.float32, device), normal(batch.rows, 6, 16).to(device)
    backend = tiny_backend(geometry, device, multiprocessors=8)
    plan = reserved(backend, batch)
    queues = int(plan.bounds[3])
    assert queues > 1, "there are some"
    assert queues * 3 < 8 * backend.sizes.tiles.some.resident, "some programs have none"
    few, more = plan.ends[: 2 * (queues + 1)].view(2, -1).tolist()
    assert (few[-1], more[-1]) == plan.counts[:2]
    assert np.diff(few).min() == 0 < np.diff(more).max(), "queues of one kind"
    result = backend.attend(0, queries, pool, plan, scale=SCALE)
    torch.testing.assert_close(result, attend_reference(batch, pool, queries, None), rtol=1e-5, atol=1e-5)
