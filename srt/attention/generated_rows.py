"""Plans each generated row of a step as a sequence of its own.

Tokens that jump-forward appends are computed together in one step. Attention of many rows rounds differently from that
of one row, and a text must not depend on jumps. So attention of each of these rows is computed as in a step of its own.

    prompt and generated rows of one step:      | p p p p | g | g | g |
    planned as                                  [--- 4 ---]
                                                         [1]   and all keys before it
                                                             [1]
                                                                 [1]
"""

from dataclasses import replace

import numpy as np

from ..core.batch import Batch

# More rows are a text that is recomputed (after a retraction), or a long forced text: they are computed like prompts.
MOST_ROWS = 64


def generated_apart(batch: Batch) -> Batch:
    """Returns the same rows, with generated rows of a sequence as separate sequences if there are several.

    Only the last row keeps the radix path: rows of one request do not share keys by tree attention, and would not in
    steps of their own. Pictures are in prompts, so rows that see them whole are among the first rows.
    """
    if batch.generated is None:
        return batch
    apart = (batch.generated > 0) & (batch.query_lengths > 1) & (batch.generated <= MOST_ROWS)
    if not apart.any():
        return batch
    query: list[int] = []
    prefix: list[int] = []
    slots = []
    paths = []
    spans: list[tuple[tuple[int, int], ...]] = []
    for index, split in enumerate(apart.tolist()):
        rows, before = int(batch.query_lengths[index]), int(batch.prefix_lengths[index])
        path = batch.paths[index] if batch.paths else ()
        first = rows - int(batch.generated[index]) if split else rows
        for start, count in [(0, first)] * (first > 0) + [(row, 1) for row in range(first, rows)]:
            end = start + count
            query.append(count)
            prefix.append(before + start)
            slots.append(batch.slots[index][: before + end])
            paths.append(path if end == rows else ())
            spans.append(batch.spans[index] if batch.spans and start < first else ())
    return replace(
        batch,
        query_lengths=np.array(query, dtype=np.int32),
        prefix_lengths=np.array(prefix, dtype=np.int32),
        slots=tuple(slots),
        paths=tuple(paths) if batch.paths else (),
        spans=tuple(spans) if batch.spans else (),
        generated=None,
    )
