"""Captured steps whose sequences share keys, cut for the programs of an H100: how evenly they end, in a simulation."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from umbel.srt.attention.backend import AttentionGeometry
from umbel.srt.attention.plan import AttentionPlan, Cut, make_plan
from umbel.srt.core.batch import Batch
from umbel.srt.kernels.triton.attention_backend import TritonBackend, Ways, pack

H100 = 132  # multiprocessors
ALIKE = AttentionGeometry(32, 32, 128)
GROUPED = AttentionGeometry(32, 8, 128)
Path = tuple[tuple[int, int, int], ...]


def branches(paths: list[Path], own: list[int]) -> Batch:
    """One row for each path, which sees the path's keys and then `own` keys."""
    ends = np.array([path[-1][1] + path[-1][2] + more for path, more in zip(paths, own, strict=True)], dtype=np.int32)
    rows = len(paths)
    return Batch(
        token_ids=np.zeros(rows, dtype=np.int64),
        positions=ends.astype(np.int64) - 1,
        write_slots=np.ones(rows, dtype=np.int64),
        query_lengths=np.ones(rows, dtype=np.int32),
        prefix_lengths=ends - 1,
        slots=tuple(np.arange(end, dtype=np.int32) for end in ends.tolist()),
        logit_rows=np.arange(rows),
        paths=tuple(paths),
    )


def fork(ways: int, shared: int, own: int | list[int]) -> Batch:
    return branches([((1, 0, shared),)] * ways, [own] * ways if isinstance(own, int) else own)


MIXED = np.random.default_rng(0).integers(10, 1500, 32).tolist()
THREE_LEVELS = branches([((1, 0, 1024), (2 + leaf // 8, 1024, 512)) for leaf in range(32)], [100] * 32)
STEPS = {
    "32 behind 1k": (fork(32, 1024, 128), ALIKE),
    "32 behind 2k": (fork(32, 2048, 228), ALIKE),
    "32 behind 4k": (fork(32, 4096, 228), GROUPED),
    "128 behind 2k": (fork(128, 2048, 128), ALIKE),
    "128 behind 2k, groups": (fork(128, 2048, 128), GROUPED),
    "mixed lengths": (fork(32, 1024, MIXED), ALIKE),
    "mixed lengths, groups": (fork(32, 1024, MIXED), GROUPED),
    "three levels": (THREE_LEVELS, ALIKE),
}


def planned(batch: Batch, geometry: AttentionGeometry, ways: Ways) -> tuple[AttentionPlan, Cut, int, int]:
    """The plan of a captured step, how it is cut, the most rows of a small item, and programs that run at once."""
    backend = TritonBackend(geometry, "cpu", dtype=torch.bfloat16, multiprocessors=H100, ways=ways)
    sizes = backend.sizes
    cut = replace(sizes.cut, block_rows=sizes.tiles.some.rows(sizes.heads))
    few, programs = sizes.tiles.few.rows(sizes.heads), sizes.tiles.some.resident * H100
    return make_plan(batch, None, cut), cut, few, programs


def imbalance(batch: Batch, geometry: AttentionGeometry, ways: Ways) -> float:
    """Cost of the program that ends last, in those of the mean; programs take items as the kernel does."""
    plan, cut, few, programs = planned(batch, geometry, ways)
    packed = pack(plan, few, cut.queues)
    once = cut.load_cost * (cut.start_keys + packed.items[:, 1] * cut.part_keys)
    costs = (once + packed.items[:, 3] * (cut.load_cost + packed.items[:, 1])).tolist()
    work = np.zeros(programs)
    if len(packed.ends):
        for starts, first in zip(packed.ends.tolist(), (0, packed.few), strict=True):
            for queue in range(cut.queues):
                of_queue = sum(costs[first + starts[queue] : first + starts[queue + 1]])
                work[queue * geometry.kv_heads : (queue + 1) * geometry.kv_heads] += of_queue
    else:
        turns = [cost for cost in costs[packed.few :] + costs[: packed.few] for _ in range(geometry.kv_heads)]
        for unit, cost in enumerate(turns):
            work[unit % programs] += cost
    return float(work.max() / work.mean())


@pytest.mark.parametrize("step", STEPS)
def test_programs_end_together(step: str) -> None:
    batch, geometry = STEPS[step]
    balanced = imbalance(batch, geometry, Ways())
    assert balanced <= 1.15
    assert balanced < imbalance(batch, geometry, Ways(balanced=False))


def test_small_steps_leave_programs_idle_rather_than_cut_short_runs() -> None:
    """With groups, the three levels have 170 keys for each program: their items are as long as runs may be short."""
    plan, cut, _, _ = planned(THREE_LEVELS, GROUPED, Ways())
    rows, keys = np.diff(plan.item_q), np.diff(plan.item_kv, axis=1)[:, 0]
    assert keys[rows > 1].min() >= cut.shortest_run
    assert len(set(plan.item_queue.tolist())) < cut.queues
    assert imbalance(THREE_LEVELS, GROUPED, Ways()) < 1.5 < imbalance(THREE_LEVELS, GROUPED, Ways(balanced=False))


def test_three_levels_read_each_key_once() -> None:
    plan, _, _, _ = planned(THREE_LEVELS, ALIKE, Ways())
    assert plan.keys_read == 1024 + 4 * 512 + 32 * 100
