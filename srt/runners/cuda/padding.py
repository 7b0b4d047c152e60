"""Steps, padded to a number of rows for which there is a graph.

A row of padding is a sequence of one token at position 0. Its key lies in the dummy slot, which it writes itself: so
every row of a padded step is one like the others, and reads numbers.
"""

from dataclasses import replace

import numpy as np

from ...core.batch import DUMMY_SLOT, Batch

_OWN_KEY = np.array([DUMMY_SLOT], dtype=np.int32)


def padded(batch: Batch, rows: int) -> Batch:
    """The same step with rows of padding behind its own, which want no logits; picks are not padded."""
    more = rows - batch.rows
    assert more >= 0, "a step is padded to more rows than it has"
    if not more:
        return batch
    nothing: tuple[()] = ()
    return replace(
        batch,
        token_ids=np.pad(batch.token_ids, (0, more)),
        positions=np.pad(batch.positions, (0, more)),
        write_slots=np.pad(batch.write_slots, (0, more), constant_values=DUMMY_SLOT),
        query_lengths=np.pad(batch.query_lengths, (0, more), constant_values=1),
        prefix_lengths=np.pad(batch.prefix_lengths, (0, more)),
        slots=batch.slots + (_OWN_KEY,) * more,
        paths=batch.paths and batch.paths + (nothing,) * more,
        generated=None if batch.generated is None else np.pad(batch.generated, (0, more)),
        spans=batch.spans and batch.spans + (nothing,) * more,
        token_sources=None
        if batch.token_sources is None
        else np.pad(batch.token_sources, (0, more), constant_values=-1),
    )


def idle(rows: int) -> Batch:
    """A step of padding only, to capture a graph with."""
    return Batch(
        token_ids=np.zeros(rows, dtype=np.int64),
        positions=np.zeros(rows, dtype=np.int64),
        write_slots=np.full(rows, DUMMY_SLOT, dtype=np.int64),
        query_lengths=np.ones(rows, dtype=np.int32),
        prefix_lengths=np.zeros(rows, dtype=np.int32),
        slots=(_OWN_KEY,) * rows,
        logit_rows=np.zeros(0, dtype=np.int64),
    )
