"""Collects which rows of which requests run in one step, within the limits of a step."""

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..core.batch import DUMMY_SLOT, Batch, PictureRows, RowRequests
from ..multimodal.sequence import NO_PICTURES
from .request import NO_SOURCE, Path, Request


class PlannedRows(NamedTuple):  # a frozen dataclass takes four times as long to make, once per row of a decode step
    """Rows [start, end) of a request; logits of its rows [first_logit, last_logit).

    `known`: keys of rows before it are already in the pool; those rows write to no slot of a request.
    `first_index`: index of row first_logit among the step's logit rows.
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
        """Index of the last row, the one that chooses a token, among the step's logit rows."""
        return self.first_index + self.end - 1 - self.first_logit


@dataclass(slots=True)
class StepPlan:
    """Collects the rows of one step; the planner fills it, then `build` makes the frozen Batch.

    `rows_left`: rows that prompts may still take; None: no limit. `logits_left`: logit rows that are still free.
    """

    rows_left: int | None
    logits_left: int
    planned: list[PlannedRows] = field(default_factory=list)
    logit_rows: int = 0

    @property
    def full(self) -> bool:
        return self.rows_left == 0 or not self.logits_left

    def reachable(self, request: Request, last: int) -> int:
        """Returns the exclusive end of the rows that the limits on rows and logits allow now, at most `last`.

        A picture whose rows must run together may exceed the limit of rows, or it would never fit into a step. So a
        step exceeds its limit by less than one picture, and the plan is full then. Rows that need logits come after all
        pictures, except for the last row of a picture.
        """
        end = last
        if self.rows_left is not None:
            end = min(end, request.computed + self.rows_left)
        first, stop = request.logit_rows(request.computed, end)
        if stop - first > self.logits_left:
            end = first + self.logits_left
        return request.pictures.stop(request.computed, end, last) if request.pictures.both_ways else end

    def add(self, request: Request, end: int, known: int) -> None:
        start = request.computed
        assert start < end <= request.kv_length, "rows run after their slots are there"
        first, last = request.logit_rows(start, end)
        self.planned.append(PlannedRows(request, start, end, known, first, last, self.logit_rows))
        self.logit_rows += last - first
        self.logits_left -= last - first
        if self.rows_left is not None:
            self.rows_left = max(0, self.rows_left - (end - start))

    def add_next(self, request: Request) -> None:
        """Adds the one row of a decoding request, whose key is new."""
        row = request.computed
        self.planned.append(PlannedRows(request, row, row + 1, row, row, row + 1, self.logit_rows))
        self.logit_rows += 1
        self.logits_left -= 1

    def build(self, row_requests: RowRequests | None = None) -> Batch:
        """Builds the batch. It reads paths last: no node of the tree is split between now and the forward pass."""
        rows = self.planned
        starts = np.array([r.start for r in rows], dtype=np.int64)
        counts = np.array([r.end for r in rows], dtype=np.int64) - starts
        offsets = np.cumsum(counts) - counts  # of each request's first row among the step's
        token_ids = np.empty(int(counts.sum()), dtype=np.int64)
        write_slots = np.empty(len(token_ids), dtype=np.int64)
        for r, first, last in zip(rows, offsets.tolist(), (offsets + counts).tolist(), strict=True):
            token_ids[first:last] = r.request.tokens[r.start : r.end]
            write_slots[first:last] = r.request.slots(r.start, r.end)
            if r.known > r.start:
                write_slots[first : min(first + r.known - r.start, last)] = DUMMY_SLOT
        sources = _sources(rows, offsets + counts - 1, token_ids)
        seeing = any(r.request.pictures is not NO_PICTURES for r in rows)
        return Batch(
            token_ids=token_ids,
            positions=_ranges(starts, counts),
            write_slots=write_slots,
            query_lengths=counts.astype(np.int32),
            prefix_lengths=starts.astype(np.int32),
            slots=tuple(r.request.slots(0, r.end) for r in rows),
            logit_rows=_ranges(
                offsets - starts + np.array([r.first_logit for r in rows], dtype=np.int64),
                np.array([r.last_logit - r.first_logit for r in rows], dtype=np.int64),
            ),
            paths=tuple(_path(r.request, r.end) for r in rows),
            row_requests=row_requests,
            generated=_generated(rows, counts) if len(token_ids) > len(rows) else None,
            token_sources=sources,
            pictures=_pictures(rows, offsets) if seeing else (),
            spans=_spans(rows) if seeing else (),
        )


def _sources(
    planned: list[PlannedRows], last_rows: NDArray[np.int64], token_ids: NDArray[np.int64]
) -> NDArray[np.int64] | None:
    """Returns, for rows whose token the running step still chooses, its logit row there: [R]. Their ids become 0."""
    of_requests = np.array([rows.request.source for rows in planned], dtype=np.int64)
    coming = np.flatnonzero(of_requests != NO_SOURCE)
    if not len(coming):
        return None
    sources = np.full(len(token_ids), NO_SOURCE, dtype=np.int64)
    sources[last_rows[coming]] = of_requests[coming]
    token_ids[last_rows[coming]] = 0
    return sources


def _ranges(starts: NDArray[np.int64], counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Concatenates the intervals [start, start + count)."""
    offsets = np.cumsum(counts) - counts
    return np.repeat(starts - offsets, counts) + np.arange(int(counts.sum()), dtype=np.int64)


def _generated(planned: list[PlannedRows], counts: NDArray[np.int64]) -> NDArray[np.int32]:
    """Counts, for each request, its rows of tokens after its prompt: [B]"""
    ends = np.array([rows.end - rows.request.prompt_length for rows in planned], dtype=np.int64)
    return np.clip(ends, 0, counts).astype(np.int32)


def _pictures(planned: list[PlannedRows], offsets: NDArray[np.int64]) -> tuple[PictureRows, ...]:
    """Returns the step's rows of pictures."""
    return tuple(
        part
        for rows, first in zip(planned, offsets.tolist(), strict=True)
        for part in rows.request.pictures.rows(rows.start, rows.end, first)
    )


def _spans(planned: list[PlannedRows]) -> tuple[tuple[tuple[int, int], ...], ...]:
    """Returns, for each request, the spans of positions that its rows attend to in both directions."""
    spans = tuple(rows.request.pictures.seen_whole(rows.start, rows.end) for rows in planned)
    return spans if any(spans) else ()


def _path(request: Request, end: int) -> Path:
    """Returns the request's radix path up to `end`: rows of later chunks are not computed yet."""
    if request.tree_length <= end:
        return request.path
    return tuple((node, first, min(length, end - first)) for node, first, length in request.path if first < end)
