"""Steps that nobody asked for: they compile the kernels of the usual shapes before the first request comes.

Triton compiles a kernel when it is first launched with numbers of a kind: one, a multiple of 16, or any other; and
there are kernels for few rows and for many, for rows with limits and for rows without. Each takes a second or two,
which would be a request's. All keys of these steps go to the dummy slot.
"""

from dataclasses import replace

import numpy as np

from ...core.batch import DUMMY_SLOT, Allowed, Batch, RowNeed, RowRequests
from .captured import graph_rows
from .memory import StepLimits

ROWS = (1, 7, 16, 100)  # of a prompt: one, few, a multiple of 16, more than few
UNIT = 16  # a kernel is compiled for multiples of it, and for other numbers
SUMMARISED = (0, 1, 5)  # largest logits that a summary gives: none for scores, one, several


def warming_steps(limits: StepLimits, *, context_length: int, vocab_size: int) -> list[Batch]:
    """Prompts of several lengths, the longest last. Of each a token is chosen: from all, with limits, under a mask.

    Where steps run as graphs, those of more rows than the graphs have are launched kernel by kernel. Behind their last
    attention only rows with logits go on: the products of so few rows are compiled with them, for one, some, and 16.
    """
    above = (graph_rows(limits) // UNIT + 1) * UNIT
    lengths = [min(rows, limits.rows, context_length) for rows in (*ROWS, above, above + 1, limits.rows)]
    logits = [min(count, rows) for rows, count in zip(lengths, (1, 1, 1, 1, UNIT, 7, 1), strict=True)]
    steps = list(map(_prompt, lengths, logits))
    kinds = (
        RowNeed.ARGMAX,
        RowNeed.SAMPLE,
        RowNeed.SAMPLE,
        RowNeed.SAMPLE,
        RowNeed.ARGMAX,
        RowNeed.ARGMAX,
        RowNeed.ARGMAX,
    )
    mask = Allowed(None, np.full(-(-vocab_size // 32), 0xFFFFFFFF, dtype=np.uint32))
    row_requests = [
        _picks(kind, count, limited=number in (2, 3), allowed=mask if number in (3, 4) else None)
        for number, (kind, count) in enumerate(zip(kinds, logits, strict=True))
    ]
    return [replace(step, row_requests=asked) for step, asked in zip(steps, row_requests, strict=True)]


def _prompt(rows: int, logits: int) -> Batch:
    """logits: of so many last rows they are asked for."""
    return Batch(
        token_ids=np.zeros(rows, dtype=np.int64),
        positions=np.arange(rows, dtype=np.int64),
        write_slots=np.full(rows, DUMMY_SLOT, dtype=np.int64),
        query_lengths=np.array([rows], dtype=np.int32),
        prefix_lengths=np.zeros(1, dtype=np.int32),
        slots=(np.full(rows, DUMMY_SLOT, dtype=np.int32),),
        logit_rows=np.arange(rows - logits, rows),
    )


def _picks(kind: RowNeed, count: int, *, limited: bool, allowed: Allowed | None) -> RowRequests:
    """limited: by top_k, top_p and min_p."""
    return RowRequests(
        kinds=np.full(count, kind, dtype=np.uint8),
        inverse_temperatures=np.ones(count),
        keys=np.zeros(count, dtype=np.uint64),
        top_k=np.full(count, 50 if limited else 0, dtype=np.int32),
        min_p=np.full(count, 0.01 if limited else 0.0),
        allowed={} if allowed is None else dict.fromkeys(range(count), allowed),
        top_p=np.full(count, 0.9 if limited else 1.0),
    )
