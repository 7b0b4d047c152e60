"""Defines a step: the rows that it runs, the answer that it needs for each row of logits, and its flight.

The planner fills a StepPlan, which builds the Batch. `build_row_requests` decides which rows return all logits and
which only the chosen token. An InFlightStep is launched and not complete.

Overlap. Without it a step completes at once. With it the next step is planned and launched while the step runs:

    the scheduler   plan 1, launch 1 ─ plan 2, launch 2 ─ done 1 ─ plan 3, launch 3 ─ done 2 ─ plan 4, launch 4 ─ …
    the runner                        [════════ step 1 ════════] [════════ step 2 ════════] [════════ step 3 ══ …

To complete a step (done) is to wait for it and to commit its result. So a step takes the longer of forward pass and
scheduling, not their sum. Plan 2 does not know these results of step 1:

    the new token of a text         its row is planned all the same. While step 2 is planned the sequence ends in
                                    PENDING_TOKEN, and the batch names the logit row of step 1 that chooses the token
    whether the text ends with it   at max_tokens: that is known, and no further row is planned. By a stop: it is not.
                                    The row in step 2 is wasted: it runs, and is left out when step 2 completes
    the mask of a constraint        it needs the token. The row runs without it, and chooses when step 1 is complete:
                                    `LaunchedStep.choose` (drawn below)
    a token that the runner does    penalties and biases need the logits. The next row waits until step 1 completes
    not choose by itself            (`delays_too_many`)
    the answers to a search, and    their next rows, if there are any, wait until step 1 completes
    scores

Rows that choose later. Only the choice of a constrained text's token needs its mask, not the forward pass:

    the scheduler   launch 2 ─ done 1, masks after its tokens ─ choose 2 ─ plan 3, launch 3 ─ done 2, masks ─ choose 3 ─
    the runner      ═ step 1 ══] [════════════════ step 2 ══════════] [choose] [═══════════ step 3 ═════════

Where step 1 ends the text, its row in step 2 is wasted, as after a stop. Where forced tokens follow, the row has
computed a key that they need, and chooses nothing. A row whose mask is not finished in time, and one that ran with a
token which the constraint then overruled, count as not computed: they run again.

Slots. A row's slot is assigned when it is planned, and `computed` counts the row when it is launched. Steps run
in the order of their launches, so the reads and writes of a slot happen in that order:

    plan 1      prompt P of A enters the tree: step 2, and requests admitted to it, may read P
    launch 2    A's row of step 2 writes slot s, after P
    done 1      A ends with the token of step 1. The tree takes the key of that token, in s, which step 2 computes: the
                token is part of A. Slots that only A held are free now, though step 2 may still read them
    plan 3      gives free slots to B, whose rows of step 3 write there after step 2 has read

So pool and tree are consistent between any two calls, with or without a running step. No request is retracted while a
step runs, because requests that end with that step may free slots. A plan that lacks slots leaves rows out instead, and
the step after it is planned with no step running (`Planner.short`).

A step that fails empties the tree. The step launched after it has read wrong keys, so its result is discarded: its
requests, unless they were in the failed step too, wait again with all their tokens. A row for which no token can be
chosen fails alone: its row in the next step reads an arbitrary token, and is left out when that step completes.

Texts, their ends, log-probabilities and scores are the same as without overlap. Cached lengths may differ: a request
admitted while step 1 runs does not find the tokens of a text that ends with it, and a later one finds its last token
too. The number of steps may differ as well, and which requests are retracted when slots are short.

Overlap pays where the forward pass leaves the CPU free. It is off on the CPU, where both use the same cores: there
scheduling is 0.3 to 1.5 ms of 36 to 44 ms (the default model, 1 to 32 texts), and steps in a thread took as long as
steps without overlap.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...fsm.tokens.vocabulary import pack
from ...lang.sampling import SamplingParams
from ..cache.window_slots import WindowSlots
from ..core.batch import (
    DUMMY_SLOT,
    Allowed,
    Batch,
    LaunchedStep,
    Logits,
    Pending,
    PictureRows,
    RowNeed,
    RowRequests,
    StateRun,
)
from ..core.messages import NO_ADAPTER
from ..multimodal.sequence import NO_PICTURES
from ..sampling.sampler import Limits, changes_logits, draw_keys
from .request import NO_SOURCE, Generation, Path, Phase, Request, SamplingNeeds


class Guessed(NamedTuple):
    """Guessed tokens, see guesses.py. `chance`: how likely each of them is right if those before it are.

    `assumed`: what the token before them was guessed to be, where the running step still chooses it.
    `allowed`: of a constrained text, the tokens that may come after each.
    `states`: their runs, for a model with recurrent states.
    """

    source: str
    tokens: list[int]
    kind: int
    chance: float
    assumed: int | None = None
    allowed: list[Allowed | None] | None = None
    states: tuple[StateRun, ...] = ()


class PlannedRows(NamedTuple):  # a frozen dataclass takes four times as long to make, once per row of a decode step
    """Rows [start, end) of a request; logits of its rows [first_logit, last_logit).

    `known`: keys of rows before it are already in the pool; those rows write to no slot of a request.
    `first_index`: index of row first_logit among the step's logit rows.
    `states`: the runs of the rows, for a model with recurrent states.
    `hidden`: the number of rows, the last ones, whose hidden states are needed; `hidden_index`: index of the first of
    them among the step's.
    `first_write`: rows before it write to no slot of window layers, where these have slots of their own.
    `guessed`: tokens whose rows follow, in spare slots of the request; each of these rows has logits.
    `plain`: it is the row of a text's newest token, and of the next one nothing but the token is asked.
    """

    request: Request
    start: int
    end: int
    known: int
    first_logit: int
    last_logit: int
    first_index: int
    states: tuple[StateRun, ...] = ()
    hidden: int = 0
    hidden_index: int = 0
    first_write: int = 0
    guessed: Guessed | None = None
    plain: bool = False

    @property
    def later(self) -> bool:
        """Whether its mask needs the token that the running step still chooses. Asked while tokens are pending."""
        return self.request.source != NO_SOURCE and self.request.constrained

    @property
    def guesses(self) -> list[int]:
        return [] if self.guessed is None else self.guessed.tokens

    @property
    def whole_end(self) -> int:
        """The exclusive end of its rows with those of guesses."""
        return self.end if self.guessed is None else self.end + len(self.guessed.tokens)

    @property
    def right_guesses(self) -> int:
        """The number of guesses that the text has repeated since, from the first one on."""
        guesses = self.guesses
        if not guesses:
            return 0
        said = self.request.tokens[self.end : self.end + len(guesses)].tolist()
        return next(
            (place for place, (one, other) in enumerate(zip(said, guesses, strict=False)) if one != other), len(said)
        )

    @property
    def logits_of_last(self) -> int:
        """Index of the last row, the one that chooses a token, among the step's logit rows."""
        return self.first_index + self.end - 1 - self.first_logit


@dataclass(slots=True)
class StepPlan:
    """Collects the rows of one step; the planner fills it, then `build` makes the frozen Batch.

    `rows_left`: rows that prompts may still take; None: no limit. `logits_left`: logit rows that are still free.
    `whole_texts`: all rows of a text run together. `all_logits`: the token of some text is chosen from all logits of
    its row; noted by the guesser.
    """

    rows_left: int | None
    logits_left: int
    whole_texts: bool = False
    planned: list[PlannedRows] = field(default_factory=list)
    single_rows: int = 0  # that were added by `add_next`
    logit_rows: int = 0
    hidden_rows: int = 0
    guess_rows: int = 0
    all_logits: bool = False

    @property
    def row_count(self) -> int:
        """The number of its rows, those of guesses included."""
        if self.single_rows == len(self.planned):
            return self.single_rows + self.guess_rows
        return sum([rows.end - rows.start for rows in self.planned]) + self.guess_rows

    @property
    def full(self) -> bool:
        return self.rows_left == 0 or not self.logits_left

    def reachable(self, request: Request, last: int, most_rows: int | None = None) -> int:
        """Returns the exclusive end of the rows that the limits on rows and logits allow now, at most `last`.

        most_rows: of the request, in any step; None: it has no limit of its own.

        A picture whose rows must run together may exceed the limit of rows, or it would never fit into a step. So a
        step exceeds its limit by less than one picture, and the plan is full then. Rows that need logits come after all
        pictures, except for the last row of a picture.
        """
        if self.whole_texts:
            return last  # as with such a picture
        end = last
        if self.rows_left is not None:
            end = min(end, request.computed + self.rows_left)
        if most_rows is not None:
            end = min(end, request.computed + most_rows)
        first, stop = request.logit_rows(request.computed, end)
        if stop - first > self.logits_left:
            end = first + self.logits_left
        return request.pictures.stop(request.computed, end, last) if request.pictures.both_ways else end

    def add(
        self, request: Request, end: int, known: int, first_write: int = 0, states: tuple[StateRun, ...] = ()
    ) -> None:
        start = request.computed
        assert start < end <= request.kv_length, "rows run after their slots are there"
        first, last = request.logit_rows(start, end)
        hidden = request.hidden_rows(start, end)
        logits = (first, last, self.logit_rows)
        self.planned.append(
            PlannedRows(request, start, end, known, *logits, states, hidden, self.hidden_rows, first_write)
        )
        self.logit_rows += last - first
        self.hidden_rows += hidden
        self.logits_left -= last - first
        if self.rows_left is not None:
            self.rows_left = max(0, self.rows_left - (end - start))

    def add_next(self, requests: Sequence[Request], states: tuple[StateRun, ...] = (), *, plain: bool = False) -> None:
        """Adds the one row of each of some decoding requests, whose key is new."""
        for index, request in enumerate(requests, self.logit_rows):
            row = request.computed
            rows = (request, row, row + 1, row, row, row + 1, index, states, 0, 0, 0, None, plain)
            self.planned.append(tuple.__new__(PlannedRows, rows))  # a third of the time of a call with 13 arguments
        self.single_rows += len(requests)
        self.logit_rows += len(requests)
        self.logits_left -= len(requests)

    def guess(self, chosen: Mapping[int, Guessed]) -> None:
        """Adds rows of guesses after those of the texts with these indices, when all other rows are planned."""
        logit_rows = 0
        for index, rows in enumerate(self.planned):
            guessed = chosen.get(index)
            states = rows.states if guessed is None else (*rows.states, *guessed.states)
            plain = rows.plain and guessed is None
            self.planned[index] = rows._replace(first_index=logit_rows, guessed=guessed, states=states, plain=plain)
            logit_rows += rows.last_logit - rows.first_logit + (0 if guessed is None else len(guessed.tokens))
        self.logits_left -= logit_rows - self.logit_rows
        self.guess_rows = logit_rows - self.logit_rows
        self.logit_rows = logit_rows

    def build(self, row_requests: RowRequests | None = None, windows: WindowSlots | None = None) -> Batch:
        """Builds the batch. It reads paths last: no node of the tree is split between now and the forward pass.

        windows: the slots of window layers; None: these have none of their own.
        """
        rows = self.planned
        arrays = _single_rows(rows) if self.single_rows == self.row_count else _ranges_of_rows(rows)
        counts, ends = arrays.query_lengths, arrays.ends
        adapted = seeing = any(r.request.adapted_or_seeing for r in rows)
        if adapted:
            adapters = [r.request.schedule.adapter for r in rows]
            adapted = any(adapter != NO_ADAPTER for adapter in adapters)
            seeing = any(r.request.pictures is not NO_PICTURES for r in rows)
        return Batch(
            token_ids=arrays.token_ids,
            positions=arrays.positions,
            write_slots=arrays.write_slots,
            query_lengths=counts,
            prefix_lengths=arrays.prefix_lengths,
            slots=arrays.slots,
            logit_rows=arrays.logit_rows,
            paths=arrays.paths,
            row_requests=row_requests,
            generated=_generated(rows, counts) if len(arrays.token_ids) > len(rows) else None,
            token_sources=_sources(rows, ends, arrays.token_ids),
            pictures=_pictures(rows, ends - counts) if seeing else (),
            spans=_spans(rows) if seeing else (),
            rope_positions=_rope_positions(rows) if seeing else None,
            adapters=np.repeat(np.array(adapters, dtype=np.int32), counts) if adapted else None,
            states=tuple([run for r in rows for run in r.states]) if rows[0].states else (),
            hidden_rows=_hidden_rows(rows, ends) if self.hidden_rows else None,
            window_slots=None if windows is None else _window_slots(rows, windows),
            window_write_slots=None if windows is None else _window_write_slots(rows, windows),
            sequences=arrays.sequences,
            changed=arrays.changed,
        )


class _RowArrays(NamedTuple):
    """Arrays and paths of a batch, see `Batch`, and the end of each request's rows among the step's: int64 [B]."""

    token_ids: NDArray[np.int64]
    positions: NDArray[np.int64]
    write_slots: NDArray[np.int64]
    query_lengths: NDArray[np.int32]
    prefix_lengths: NDArray[np.int32]
    logit_rows: NDArray[np.int64]
    ends: NDArray[np.int64]
    slots: tuple[NDArray[np.int32], ...]
    paths: tuple[Path, ...]
    sequences: NDArray[np.int64]
    changed: NDArray[np.int32]


def _ranges_of_rows(planned: list[PlannedRows]) -> _RowArrays:
    """Returns the arrays of any rows."""
    starts = np.array([r.start for r in planned], dtype=np.int64)
    counts = np.array([r.whole_end for r in planned], dtype=np.int64) - starts
    ends = np.cumsum(counts)
    offsets = ends - counts  # of each request's first row among the step's
    token_ids = np.empty(int(counts.sum()), dtype=np.int64)
    write_slots = np.empty(len(token_ids), dtype=np.int64)
    for r, first, last in zip(planned, offsets.tolist(), ends.tolist(), strict=True):
        token_ids[first : first + r.end - r.start] = r.request.tokens[r.start : r.end]
        if r.guessed is not None:
            token_ids[first + r.end - r.start : last] = r.guessed.tokens
        write_slots[first:last] = r.request.slots(r.start, r.whole_end)
        if r.known > r.start:
            write_slots[first : min(first + r.known - r.start, last)] = DUMMY_SLOT
    logit_rows = _ranges(
        offsets - starts + np.array([r.first_logit for r in planned], dtype=np.int64),
        np.array([r.last_logit - r.first_logit + r.whole_end - r.end for r in planned], dtype=np.int64),
    )
    return _RowArrays(
        token_ids=token_ids,
        positions=_ranges(starts, counts),
        write_slots=write_slots,
        query_lengths=counts.astype(np.int32),
        prefix_lengths=starts.astype(np.int32),
        logit_rows=logit_rows,
        ends=ends,
        slots=tuple([r.request.slots(0, r.whole_end) for r in planned]),
        paths=tuple([r.request.path_to(r.end) for r in planned]),
        sequences=np.array([r.request.number for r in planned], dtype=np.int64),
        changed=np.array([r.request.take_changed(r.start, r.whole_end) for r in planned], dtype=np.int32),
    )


def _single_rows(planned: list[PlannedRows]) -> _RowArrays:
    """Returns the same arrays for one row of each request, whose key is new and whose logits are needed.

    Made of lists: after a forward pass the caches hold no code, and numpy's functions in `_ranges_of_rows` take 0.1 ms.
    """
    columns = zip(*[r.request.row(r.start) for r in planned], strict=True)
    token_ids, write_slots, slots, paths, sequences, changed = columns
    positions = np.array([r.start for r in planned], dtype=np.int64)
    rows = np.arange(len(planned), dtype=np.int64)
    return _RowArrays(
        token_ids=np.array(token_ids, dtype=np.int64),
        positions=positions,
        write_slots=np.array(write_slots, dtype=np.int64),
        query_lengths=np.ones(len(planned), dtype=np.int32),
        prefix_lengths=positions.astype(np.int32),
        logit_rows=rows,
        ends=rows + 1,
        slots=slots,
        paths=paths,
        sequences=np.array(sequences, dtype=np.int64),
        changed=np.array(changed, dtype=np.int32),
    )


def _window_slots(planned: list[PlannedRows], windows: WindowSlots) -> tuple[NDArray[np.int32], ...]:
    """Returns the slots of each sequence in window layers.

    Those before the window of every row of the step are left at 0. Sequences that share keys may read each other's
    slots, so they all begin at one position.
    """
    seen = [start for rows in planned for start, _ in rows.request.pictures.seen_whole(rows.start, rows.end)]
    first = max(0, min([rows.start - windows.reach + 1 for rows in planned] + seen))
    found = []
    for rows in planned:
        slots = np.zeros(rows.whole_end, dtype=np.int32)
        slots[first:] = windows.of(rows.request.slots(first, rows.whole_end))
        found.append(slots)
    return tuple(found)


def _window_write_slots(planned: list[PlannedRows], windows: WindowSlots) -> NDArray[np.int64]:
    """Returns where each row's key goes in window layers: [R]"""
    found = []
    for rows in planned:
        slots = windows.of(rows.request.slots(rows.start, rows.whole_end)).astype(np.int64)
        slots[: max(0, rows.first_write - rows.start)] = DUMMY_SLOT
        found.append(slots)
    return np.concatenate(found)


def _sources(
    planned: list[PlannedRows], ends: NDArray[np.int64], token_ids: NDArray[np.int64]
) -> NDArray[np.int64] | None:
    """Returns, for rows whose token the running step still chooses, its logit row there: [R]. Their ids become 0.

    ends: of each request's rows among the step's.
    """
    of_requests = [rows.request.source for rows in planned]
    if max(of_requests) == NO_SOURCE:
        return None
    if len(token_ids) == len(planned):
        sources = np.array(of_requests, dtype=np.int64)
        token_ids[sources != NO_SOURCE] = 0
        return sources
    coming = [index for index, source in enumerate(of_requests) if source != NO_SOURCE]
    sources = np.full(len(token_ids), NO_SOURCE, dtype=np.int64)
    last_rows = ends[coming] - 1 - np.array([len(planned[index].guesses) for index in coming])
    sources[last_rows] = [of_requests[index] for index in coming]
    token_ids[last_rows] = 0
    return sources


def _ranges(starts: NDArray[np.int64], counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Concatenates the intervals [start, start + count)."""
    offsets = np.cumsum(counts) - counts
    return np.repeat(starts - offsets, counts) + np.arange(int(counts.sum()), dtype=np.int64)


def _hidden_rows(planned: list[PlannedRows], ends: NDArray[np.int64]) -> NDArray[np.int64]:
    """Returns the step's rows whose hidden states are needed: [H]. ends: of each request's rows."""
    asked = np.array([rows.hidden for rows in planned], dtype=np.int64)
    return _ranges(ends - asked, asked)


def _generated(planned: list[PlannedRows], counts: NDArray[np.int32]) -> NDArray[np.int32]:
    """Counts, for each request, its rows of tokens after its prompt: [B]"""
    ends = np.array([rows.whole_end - rows.request.prompt_length for rows in planned], dtype=np.int64)
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


def _rope_positions(planned: list[PlannedRows]) -> NDArray[np.int64] | None:
    """Returns the step's positions on three axes, [3, R]; None: all of them are those in the sequences."""
    if not any(rows.request.pictures.on_axes for rows in planned):
        return None
    return np.concatenate(
        [rows.request.pictures.rope_positions(rows.start, rows.whole_end) for rows in planned], axis=1
    )


# ---------------------------------------------------------------------------------------- row requests

_LOGITS, _ARGMAX, _SAMPLE, _LATER = map(int, RowNeed)
MAX_SAMPLED_TOP_K = 256  # the largest top_k of a SAMPLE row, but for an AsyncRunner's


class LateRow(NamedTuple):
    """A row that chooses later. `source`: the logit row of the step before that chooses the row's own token."""

    rows: PlannedRows
    source: int


class StepRequests(NamedTuple):
    """Row requests of a step, and errors.

    `errors`: request number → why its row request could not be built. The row then returns its logits, and its request
    ends after the step. `late`: rows whose request is built when the step before is complete. `coming`: texts of plain
    rows that continue, with the logit rows that choose their next tokens.
    """

    row_requests: RowRequests | None  # None: all logits of every row
    errors: Mapping[int, Exception]
    late: Sequence[LateRow] = ()
    coming: Sequence[tuple[Request, int]] = ()


NO_REQUESTS = StepRequests(None, {})


class _Choice(NamedTuple):
    """Parameters of a row whose token the runner chooses."""

    described: bool
    allowed: Allowed | None
    limits: Limits | None  # None: the most likely token


def build_row_requests(planned: Sequence[PlannedRows], logit_rows: int, *, launched: bool = False) -> StepRequests:
    """Builds the requests of the step's `logit_rows` rows of logits. launched: they are for an AsyncRunner.

    The token is enough when nothing reads the other logits: no log-probabilities, no penalties, biases or forbidden
    tokens, no top_p (its mass is a sum over the whole vocabulary) and no top_k larger than the output head searches.

    An AsyncRunner chooses more tokens itself, because the next step can run ahead only of rows that the runner samples:
    with top_p, with any top_k, and, where log-probabilities are wanted, it returns the logits as well.
    """
    errors: dict[int, Exception] = {}
    late: list[LateRow] = []
    kinds = [_LOGITS] * logit_rows
    row_requests = RowRequests(
        kinds=np.empty(logit_rows, dtype=np.uint8),
        inverse_temperatures=np.zeros(logit_rows),
        keys=np.zeros(logit_rows, dtype=np.uint64),
        top_k=np.zeros(logit_rows, dtype=np.int32),
        min_p=np.zeros(logit_rows),
        top_p=np.ones(logit_rows) if launched else None,
        described=np.zeros(logit_rows, dtype=np.bool_) if launched else None,
    )
    draws: list[tuple[int, Limits, int, int]] = []  # row, limits, seed, position
    coming: list[tuple[Request, int]] = []
    for rows in planned:
        request = rows.request
        generation = request.job
        if rows.plain and isinstance(generation, Generation) and generation.needs is not None:
            row, limits = rows.first_index, generation.needs.limits
            kinds[row] = _ARGMAX if limits is None else _SAMPLE
            if limits is not None:
                draws.append((row, limits, generation.seed, request.length))
            if request.length + 1 < generation.length_limit:
                coming.append((request, row))
            continue
        if rows.end < request.length or not request.samples:
            continue
        assert isinstance(generation, Generation), "only generations sample"
        last = rows.logits_of_last
        if rows.later:
            kinds[last] = _LATER
            late.append(LateRow(rows, request.source))
            continue
        try:
            choice = _choice_of(request, generation, launched=launched)
        except Exception as error:
            errors[request.number] = error
            continue
        if choice is None:
            continue
        if choice.allowed is not None:
            row_requests.allowed[last] = choice.allowed
        for ahead in range(1 if rows.guessed is None else len(rows.guessed.tokens) + 1):
            row = last + ahead
            if ahead and forbidden_ends(request, generation, ahead):
                continue
            if ahead and (after := _allowed_after(rows, ahead)) is not None:
                row_requests.allowed[row] = after
            if row_requests.described is not None and choice.described:
                row_requests.described[row] = True
            if choice.limits is None:
                kinds[row] = _ARGMAX
                continue
            kinds[row] = _SAMPLE
            draws.append((row, choice.limits, generation.seed, request.length + ahead))
    row_requests.kinds[:] = kinds
    if draws:
        _write_draws(row_requests, draws)
    return StepRequests(row_requests, errors, late, coming)


def _write_draws(row_requests: RowRequests, draws: list[tuple[int, Limits, int, int]]) -> None:
    """Writes how rows draw their tokens. draws: row, limits, seed, position."""
    rows, limits, seeds, positions = zip(*draws, strict=True)
    sampled = list(rows)
    inverse_temperatures, top_k, top_p, min_p = zip(*limits, strict=True)
    row_requests.inverse_temperatures[sampled] = inverse_temperatures
    row_requests.keys[sampled] = draw_keys(seeds, positions)
    row_requests.top_k[sampled] = top_k
    row_requests.min_p[sampled] = min_p
    if row_requests.top_p is not None:
        row_requests.top_p[sampled] = top_p


def _allowed_after(rows: PlannedRows, ahead: int) -> Allowed | None:
    """Returns the tokens that may come after so many guesses; None: all."""
    return None if rows.guessed is None or rows.guessed.allowed is None else rows.guessed.allowed[ahead - 1]


def _choice_of(request: Request, generation: Generation, *, launched: bool) -> _Choice | None:
    """Returns how the runner chooses the row's token; None: the row returns its logits."""
    needs = generation.needs or _needs_of(generation, launched=launched)
    if forbidden_ends(request, generation) or not needs.alone:
        return None
    described = launched and generation.wants_logprobs
    if generation.cursor is None:
        return _Choice(described, None, needs.limits)
    if described:
        return None  # a constraint may overrule a token, so its log-probabilities are taken when it is settled
    return _Choice(False, allowed_of(request, generation), needs.limits)


def _needs_of(generation: Generation, *, launched: bool) -> SamplingNeeds:
    """Reads the sampling parameters of a text, once. Raises ParameterError where nothing can be drawn."""
    sampling = generation.sampling
    changed = changes_logits(sampling)
    only_token = needs_only_token(sampling)
    alone = not changed if launched else only_token
    limits = Limits.of(sampling) if alone and sampling.temperature != 0.0 else None
    plain = alone and generation.cursor is None and not (sampling.min_tokens or generation.wants_logprobs)
    generation.needs = SamplingNeeds(alone, limits, plain, changed, only_token)
    return generation.needs


def allowed_of(request: Request, generation: Generation, ahead: int = 0) -> Allowed | None:
    """Returns the tokens that may come next; None: all, or the next token is already known.

    ahead: the matcher is as it would be after so many more tokens.

    Before min_tokens, and when end-of-sequence is ignored, a constrained text ends only where no other token is
    allowed. Otherwise the tokens that end the text without being part of it are allowed, too.
    """
    cursor = generation.cursor
    if cursor is None or cursor.pending:
        return None
    early = request.generated + ahead < generation.sampling.min_tokens
    withheld = generation.ends if early else frozenset()
    if early or generation.sampling.ignore_eos:
        withheld |= cursor.eos_ids
    endings = None if early or generation.sampling.ignore_eos else cursor.endings
    if endings is not None:
        return Allowed(None, cursor.mask | endings)
    few = cursor.few
    if few is not None:
        others = few[~np.isin(few, list(withheld))] if withheld else few
        return Allowed(others if len(others) else few, None)
    bits = cursor.mask
    clear = [token for token in withheld if bits[token >> 5] >> np.uint32(token & 31) & np.uint32(1)]
    if clear:
        bits = bits & ~pack(np.array(clear, dtype=np.int32), len(bits))
    return Allowed(None, bits)


def forbidden_ends(request: Request, generation: Generation, ahead: int = 0) -> frozenset[int]:
    """Returns the end tokens that are forbidden before min_tokens, for a row `ahead` of the last one.

    For constrained texts see `allowed_of`.
    """
    early = request.generated + ahead < generation.sampling.min_tokens
    return generation.ends if early and generation.cursor is None else frozenset()


def needs_only_token(sampling: SamplingParams) -> bool:
    """Returns whether a row sampled with these parameters needs only its token."""
    narrow = sampling.temperature == 0.0 or (sampling.top_p == 1.0 and sampling.top_k <= MAX_SAMPLED_TOP_K)
    return narrow and not sampling.logprobs and sampling.top_logprobs == 0 and not changes_logits(sampling)


def takes_all_logits(request: Request) -> bool:
    """Returns whether the request's next token is chosen from all logits of its row."""
    generation = request.job
    assert isinstance(generation, Generation), "only generations sample"
    needs = generation.needs
    only_token = needs_only_token(generation.sampling) if needs is None else needs.only_token
    return not only_token or bool(generation.sampling.min_tokens and forbidden_ends(request, generation))


# ---------------------------------------------------------------------------------------- in flight

_HINDRANCE = 4  # other texts for each waiting one: see `InFlightStep.delays_too_many`


def delays_too_many(blocked: int, others: int) -> bool:
    """See `InFlightStep.delays_too_many`."""
    return blocked * _HINDRANCE >= others and blocked > 0


def _taken_as_chosen(request: Request) -> bool:
    """Returns whether a text takes the token that the runner chooses next, or ends."""
    generation = request.job
    return not (isinstance(generation, Generation) and generation.cursor is not None and generation.cursor.overrules)


class FinishedStep:
    """A step that ran when it was launched. A `batch.Pending`."""

    def __init__(self, logits: Logits) -> None:
        self._logits = logits

    def result(self) -> Logits:
        return self._logits


class FailedStep:
    """A step that could not be launched. A `batch.Pending`."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def result(self) -> Logits:
        raise self._error


@dataclass(frozen=True, slots=True, eq=False)
class InFlightStep:
    """A step that was launched and is not complete.

    `coming`: texts that continue, with the logit rows from which the runner chooses their next tokens. `blocked`: the
    number of texts that continue and whose token the runner does not choose, or that have guesses. Both are empty
    without overlap, and say nothing of rows that choose later, until `chosen_late`. `dropped`: numbers of the requests
    whose row counts as not computed. `begun_at`, `launched_at`: on the clock.
    """

    plan: StepPlan
    asked: StepRequests
    pending: Pending
    coming: tuple[tuple[Request, int], ...] = ()
    blocked: int = 0
    dropped: frozenset[int] = frozenset()
    begun_at: float = 0.0
    launched_at: float = 0.0

    @classmethod
    def launched(cls, plan: StepPlan, asked: StepRequests, pending: LaunchedStep) -> "InFlightStep":
        """Makes the step. Called while the plan's sequences are as they were when it was made."""
        row_requests = asked.row_requests
        coming = list(asked.coming)
        blocked = 0
        picked = (
            [] if row_requests is None else (row_requests.kinds != RowNeed.LOGITS).tolist()
        )  # asking numpy row by row is slow
        for rows in plan.planned:
            if rows.plain and picked:
                continue
            request, row = rows.request, rows.logits_of_last
            if rows.end < request.length or not request.goes_on or (not rows.plain and rows.later):
                continue
            if rows.guessed is None and picked and picked[row] and _taken_as_chosen(request):
                coming.append((request, row))
            else:
                blocked += 1
        return cls(plan, asked, pending, tuple(coming), blocked)

    def chosen_late(self, chosen: Sequence[PlannedRows], dropped: Collection[int]) -> "InFlightStep":
        """Returns the step when its late rows are settled. chosen: rows that choose a token; dropped: see above."""
        coming, blocked = list(self.coming), self.blocked
        for rows in chosen:
            if rows.request.goes_on and _taken_as_chosen(rows.request):
                coming.append((rows.request, rows.logits_of_last))
            else:
                blocked += rows.request.goes_on
        return replace(self, coming=tuple(coming), blocked=blocked, dropped=frozenset(dropped))

    @classmethod
    def crashed(cls, plan: StepPlan, error: Exception) -> "InFlightStep":
        return cls(plan, NO_REQUESTS, FailedStep(error))

    @property
    def failed(self) -> bool:
        return isinstance(self.pending, FailedStep)

    @property
    def delays_too_many(self) -> bool:
        """Returns whether so many texts are blocked that the next step is better planned after this one completes.

        A blocked text runs in every other step only. The other texts gain the time of scheduling, a tenth to a quarter
        of a step. With a fifth of the texts blocked both ways give about as many tokens, and waiting is fair.
        """
        return delays_too_many(self.blocked, len(self.coming))

    def drop(self) -> None:
        """Waits and discards the result or the exception: the previous step has failed, and with it this one."""
        with suppress(Exception):
            self.pending.result()


@contextmanager
def pending_tokens(step: InFlightStep | None) -> Iterator[None]:
    """Appends PENDING_TOKEN to the sequences whose next token the step chooses, and removes it at exit."""
    ended = Phase.ENDED
    expecting = [] if step is None else [entry for entry in step.coming if entry[0].phase is not ended]
    Request.expect(expecting)
    try:
        yield
    finally:
        Request.remove_pending(request for request, _ in expecting)
