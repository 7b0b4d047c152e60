"""One step being planned: which rows of which requests run, within the limits of a step."""

from dataclasses import dataclass, field

import numpy as np

from .batch import DUMMY_SLOT, Batch, Picks
from .request import Request


@dataclass(frozen=True, slots=True)
class PlannedRows:
    """Rows [start, end) of a request; logits of its rows [first_logit, last_logit).

    `known`: keys of rows before it are in the pool already; those rows write nowhere.
    `first_index`: which of the step's logits is the one of row first_logit.
    """

    request: Request
    start: int
    end: int
    known: int
    first_logit: int
    last_logit: int
    first_index: int

    @property
    def logits_of_last(self) -> int:
        """Which of the step's rows of logits is that of the last row, the one that chooses a token."""
        return self.first_index + self.end - 1 - self.first_logit


@dataclass(slots=True)
class StepPlan:
    """Filled by the scheduler's plan, then built into the frozen Batch.

    `rows_left`: rows that prompts may still take; None: as many as they like. `logits_left`: rows with logits.
    """

    rows_left: int | None
    logits_left: int
    planned: list[PlannedRows] = field(default_factory=list)
    logit_rows: int = 0

    @property
    def full(self) -> bool:
        return self.rows_left == 0 or not self.logits_left

    def reachable(self, request: Request) -> int:
        """The row before which this step must stop for the request, by the limits of rows and of logits."""
        end = request.length
        if self.rows_left is not None:
            end = min(end, request.computed + self.rows_left)
        first, last = request.logit_rows(request.computed, end)
        return first + self.logits_left if last - first > self.logits_left else end

    def add(self, request: Request, end: int, known: int) -> None:
        start = request.computed
        assert start < end <= request.kv_length, "rows run after their slots are there"
        first, last = request.logit_rows(start, end)
        self.planned.append(PlannedRows(request, start, end, known, first, last, self.logit_rows))
        self.logit_rows += last - first
        self.logits_left -= last - first
        if self.rows_left is not None:
            self.rows_left = max(0, self.rows_left - (end - start))

    def build(self, picks: Picks | None = None) -> Batch:
        """Paths are taken now, when no node of the tree is split any more before the step runs."""
        writes, logits = [], []
        offset = 0
        for rows in self.planned:
            slots = rows.request.slots(rows.start, rows.end).astype(np.int64)
            slots[: max(0, rows.known - rows.start)] = DUMMY_SLOT
            writes.append(slots)
            logits.append(np.arange(rows.first_logit, rows.last_logit, dtype=np.int64) + (offset - rows.start))
            offset += rows.end - rows.start
        return Batch(
            token_ids=np.concatenate([r.request.tokens[r.start : r.end] for r in self.planned]).astype(np.int64),
            positions=np.concatenate([np.arange(r.start, r.end, dtype=np.int64) for r in self.planned]),
            write_slots=np.concatenate(writes),
            query_lengths=np.array([r.end - r.start for r in self.planned], dtype=np.int32),
            prefix_lengths=np.array([r.start for r in self.planned], dtype=np.int32),
            slots=tuple(r.request.slots(0, r.end) for r in self.planned),
            logit_rows=np.concatenate(logits),
            paths=tuple(_path(r.request, r.end) for r in self.planned),
            picks=picks,
        )


def _path(request: Request, end: int) -> tuple[tuple[int, int, int], ...]:
    """The part of the request's radix path that lies before `end`: rows of later chunks are not computed yet."""
    if request.match is None:
        return ()
    return tuple((node, first, min(length, end - first)) for node, first, length in request.match.path if first < end)
