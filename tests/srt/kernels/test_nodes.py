"""Nodes of memory (NUMA), as fake trees of /sys list them: where threads run, and who touches weights first."""

import ctypes
import itertools
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from umbel.srt.kernels.cpu.library import load_library
from umbel.srt.kernels.cpu.linear import Format, PackedMatrix
from umbel.srt.layers.checkpoint import BlockTensor

from .test_blocks import blocks

CORES = sorted(os.sched_getaffinity(0))[:2] if hasattr(os, "sched_getaffinity") else []
two_cores = pytest.mark.skipif(len(CORES) < 2, reason="a thread cannot be on one of two cores")


@pytest.fixture
def library() -> Iterator[ctypes.CDLL]:
    loaded = load_library()
    yield loaded
    loaded.umbel_set_sysfs(b"/sys")
    loaded.umbel_set_threads(1)


def tree(root: Path, **cpus: str) -> bytes:
    """A tree of /sys with these nodes and the CPUs of each."""
    nodes = root / "devices/system/node"
    nodes.mkdir(parents=True)
    (nodes / "online").write_text(",".join(name.removeprefix("node") for name in cpus) + "\n")
    for name, listed in cpus.items():
        (nodes / name).mkdir()
        (nodes / name / "cpulist").write_text(listed + "\n")
    return os.fsencode(root)


def cpus_by_node(library: ctypes.CDLL, sysfs: bytes, allowed: list[int]) -> list[tuple[int, int]]:
    given, nodes, cpus = (np.array(allowed, np.int32) for _ in range(3))
    at = [ctypes.c_void_p(array.ctypes.data) for array in (given, nodes, cpus)]
    count = library.umbel_cpus_by_node(sysfs, at[0], ctypes.c_long(len(allowed)), at[1], at[2])
    return list(zip(nodes[:count].tolist(), cpus[:count].tolist(), strict=True))


@pytest.mark.parametrize(
    ("listed", "allowed", "expected"),
    [
        ({"node0": "0-1", "node1": "2-3"}, range(4), [(0, 0), (0, 1), (1, 2), (1, 3)]),
        (
            {"node0": "0-1,4,6-7", "node2": "2-3,5"},
            range(8),
            [*((0, c) for c in (0, 1, 4, 6, 7)), (2, 2), (2, 3), (2, 5)],
        ),
        ({"node0": "0-1", "node1": "2-3"}, [0, 3], [(0, 0), (1, 3)]),  # others are offline, or not for this process
        ({"node0": "0-1", "node1": "2-3", "node2": ""}, range(4), [(0, 0), (0, 1), (1, 2), (1, 3)]),  # memory alone
        ({"node0": "0-1", "node1": "2-3"}, [2, 3], []),  # confined to one node
        ({"node0": "0-3"}, range(4), []),
        ({"node0": "0-3", "node1": ""}, range(4), []),
        ({"node0": "x", "node1": "-"}, range(4), []),
    ],
)
def test_cpus_of_a_process_are_listed_node_by_node_where_there_are_several(
    library: ctypes.CDLL, tmp_path: Path, listed: dict[str, str], allowed: list[int], expected: list[tuple[int, int]]
) -> None:
    assert cpus_by_node(library, tree(tmp_path, **listed), list(allowed)) == expected


def test_a_system_that_lists_no_nodes_has_one(library: ctypes.CDLL, tmp_path: Path) -> None:
    assert cpus_by_node(library, os.fsencode(tmp_path), [0, 1]) == []


def team(library: ctypes.CDLL, size: int) -> list[int]:
    """Makes a team → the numbers of its threads by rank, but for the caller's, which is rank 0."""
    library.umbel_set_threads(1)
    before = set(os.listdir("/proc/self/task"))
    library.umbel_set_threads(size)
    return sorted(int(name) for name in set(os.listdir("/proc/self/task")) - before)


def affinities(threads: list[int]) -> list[set[int]]:
    return [os.sched_getaffinity(thread) for thread in threads]


@two_cores
def test_threads_stay_on_the_nodes_in_order_and_the_caller_where_it_was(library: ctypes.CDLL, tmp_path: Path) -> None:
    before = os.sched_getaffinity(0)
    library.umbel_set_sysfs(tree(tmp_path, node0=str(CORES[0]), node1=str(CORES[1])))
    for size in (2, 3, 4, 8):
        assert affinities(team(library, size)) == [{CORES[rank * 2 // size]} for rank in range(1, size)]
        assert os.sched_getaffinity(0) == before


@two_cores
def test_with_one_node_threads_run_on_all_cpus(library: ctypes.CDLL, tmp_path: Path) -> None:
    library.umbel_set_sysfs(tree(tmp_path, node0=",".join(map(str, CORES)), node1=""))
    assert affinities(team(library, 4)) == [os.sched_getaffinity(0)] * 3


def mixed() -> list[torch.Tensor | BlockTensor]:
    return [blocks("Q4_K", 400, 512), blocks("Q6_K", 170, 512), torch.ones(99, 512), blocks("Q8_0", 330, 512)]


@pytest.mark.parametrize("size", [2, 3, 8])
def test_every_panel_belongs_to_the_rank_that_begins_with_it(library: ctypes.CDLL, size: int) -> None:
    """Those of blocks along all parts in blocks, those of others along their part."""
    library.umbel_set_threads(size)
    matrix = PackedMatrix(library, mixed())
    panels = [25, 11, 7, 21]
    owners: list[list[int]] = [[-1] * count for count in panels]
    for part, rank in itertools.product(range(4), range(size)):
        span = (ctypes.c_long * 2)()
        library.umbel_matrix_panels_of(ctypes.c_void_p(matrix.handle), ctypes.c_long(part), rank, rank + 1, span)
        for panel in range(*span):
            assert owners[part][panel] == -1, "no panel belongs to two ranks"
            owners[part][panel] = rank
    assert owners[2] == runs(panels[2], size)
    assert owners[0] + owners[1] + owners[3] == runs(sum(panels) - panels[2], size)


def runs(chunks: int, size: int) -> list[int]:
    """The rank that claims each chunk of a loop if all threads go on together."""
    return [rank for rank in range(size) for _ in range(chunks * rank // size, chunks * (rank + 1) // size)]


def resident() -> int:
    """Bytes of this process that are in memory."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(1024 * int(line.split()[1]) for line in lines if line.startswith("Rss:"))


@two_cores
def test_threads_of_the_nodes_touch_weights_before_they_are_filled(library: ctypes.CDLL, tmp_path: Path) -> None:
    """With one node, filling them does."""
    PackedMatrix(library, [torch.ones(16, 64)])  # declares the functions
    taken = []
    for name, cpus in (("one", {"node0": "0-1"}), ("two", {"node0": str(CORES[0]), "node1": str(CORES[1])})):
        library.umbel_set_sysfs(tree(tmp_path / name, **cpus))
        library.umbel_set_threads(4)
        matrix = library.umbel_matrix_create(1024, 1, None)
        assert library.umbel_matrix_add(matrix, Format.F32.value, 16_384, 0, 0)
        before = resident()
        library.umbel_matrix_place(matrix)
        taken.append((resident() - before) / (64 << 20))
        library.umbel_matrix_free(matrix)
    assert taken == pytest.approx([0, 1], abs=0.05)


@two_cores
@pytest.mark.parametrize("rows", [1, 70])
def test_nodes_change_no_bit(library: ctypes.CDLL, tmp_path: Path, rows: int) -> None:
    library.umbel_set_threads(4)
    x = torch.randn(rows, 512, generator=torch.Generator().manual_seed(0))
    expected = PackedMatrix(library, mixed())(x)
    library.umbel_set_sysfs(tree(tmp_path, node0=str(CORES[0]), node1=str(CORES[1])))
    library.umbel_set_threads(4)
    assert torch.equal(PackedMatrix(library, mixed())(x), expected)
