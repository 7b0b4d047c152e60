"""Finds the runs of keys that tree attention reads once for several sequences of a step.

Sequences whose paths contain the same radix nodes read the same keys. Their paths diverge, so the sharers of a run are
a subset of those of the previous run:

    node       1 (40 tokens)      2 (900)            4 (3)   own
    seq 0   [= 0 1 2 3 ===|===== 0 1 2 =======|== 0 1 ==|------]
    seq 1   [             |                   |         |---]
    seq 2   [             |                   |---------]
    seq 3   [             |-------]

A run gets an item of its own when the saved reads pay for merging one more partial result per row. A run that does not
pay (node 1 here, for all four) is added to the runs below it: the run of 0, 1, 2 starts at position 0, and the rest of
each sequence is always one run to its end. So nested nodes give nested items, and short nodes cost nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..core.batch import Batch

# Merging a further part of one row costs as much as reading this many keys. Measured on Zen 3 in float32, where a
# shared prefix is in the L3 cache and sharing saves little: with a lower value sharing costs 5 to 15 percent.
MERGE_KEYS = 64

Int32 = NDArray[np.int32]
Step = tuple[int, int, int]  # of a path: node id, first position, length


@dataclass(frozen=True, slots=True)
class SharedRun:
    """A run of positions [first, end) whose keys all of `sequences` have in the same slots."""

    first: int
    end: int
    sequences: tuple[int, ...]  # ascending
    saved: int  # key reads that are saved


@dataclass(frozen=True, slots=True)
class Sharing:
    """The shared runs of a step, and the position from which each sequence is alone."""

    runs: tuple[SharedRun, ...]
    alone_from: Int32  # [B]


def no_sharing(batch: Batch) -> Sharing:
    return Sharing((), np.zeros(len(batch.query_lengths), dtype=np.int32))


def find_sharing(batch: Batch, first_visible: Int32, *, block_rows: int, merge_keys: int = MERGE_KEYS) -> Sharing:
    """Finds shared runs by walking the paths from the root down.

    Args:
        first_visible: [B] lowest position that any row of the sequence sees: what its first row sees (plan.py).
        block_rows: rows that read a run of keys together when it is not shared.
        merge_keys: cost of merging a further part of one row, in keys that are read.
    """
    paths, queries, visible = batch.paths, batch.query_lengths.tolist(), first_visible.tolist()
    alone_from = [0] * len(queries)
    runs: list[SharedRun] = []
    todo = [(list(range(len(paths))), 0, 0)] if paths else []  # sequences, depth, positions that are covered
    while todo:
        group, depth, covered = todo.pop()
        for sequences in _by_step(paths, group, depth):
            end, below = _common_end(paths, sequences, depth)
            saved = _saved(sequences, covered, end, queries, visible, block_rows, merge_keys)
            start = covered
            if saved is not None:
                first = max(covered, min(visible[i] for i in sequences))
                sharers = tuple(i for i in sequences if visible[i] < end)
                runs.append(SharedRun(first, end, sharers, saved))
                start = end
                for i in sequences:
                    alone_from[i] = end
            todo.append((sequences, below, start))
    return Sharing(tuple(runs), np.array(alone_from, dtype=np.int32))


def _by_step(paths: Sequence[Sequence[Step]], group: list[int], depth: int) -> list[list[int]]:
    """Groups sequences that take the same next step, two or more each, in the order of their first sequence."""
    takers: dict[Step, list[int]] = {}
    for i in group:
        if depth < len(paths[i]):
            takers.setdefault(paths[i][depth], []).append(i)
    return [sequences for sequences in takers.values() if len(sequences) > 1]


def _common_end(paths: Sequence[Sequence[Step]], sequences: list[int], depth: int) -> tuple[int, int]:
    """Returns the end of the steps that all of them take from `depth` on, and the depth of the first they do not."""
    leader = paths[sequences[0]]
    below = depth + 1
    while below < len(leader) and all(
        below < len(paths[i]) and paths[i][below] == leader[below] for i in sequences[1:]
    ):
        below += 1
    _, first, length = leader[below - 1]
    return first + length, below


def _saved(
    sequences: list[int],
    covered: int,
    end: int,
    queries: list[int],
    visible: list[int],
    block_rows: int,
    merge_keys: int,
) -> int | None:
    """Returns the key reads saved by one run [covered, end) for all of them; None when it does not pay."""
    rows = apart = 0
    lowest = end
    for i in sequences:
        if visible[i] < end:
            rows += queries[i]
            apart += -(-queries[i] // block_rows) * (end - max(covered, visible[i]))
            lowest = min(lowest, max(covered, visible[i]))
    saved = apart - -(-rows // block_rows) * (end - lowest)
    return saved if saved > 0 and saved >= merge_keys * rows else None
