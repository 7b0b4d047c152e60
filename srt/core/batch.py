"""Describes one forward pass: the scheduler plans it, the model runs it, the oracle checks it.

A step is a flat list of rows (query tokens). Each sequence contributes consecutive rows:

    sequence i:   slots[i] = [ ---- already in the pool ---- | --- rows of this step --- ]
                               prefix_lengths[i] keys           query_lengths[i] keys

Rows of a step may read keys that other rows of the same step write: every layer stores before it attends.

Most logit rows need only the token that is chosen from them; `RowRequests` says which. A runner that finds the token
without computing 262,144 logits may answer with it; any runner may return the logits instead.

A runner that does not wait for its steps is an `AsyncRunner`: the next step is launched while one still runs.
`Batch.token_sources` refers to the tokens that the running step will choose. See step.py.

Tokens of pictures have ids above every vocabulary. A VisionModel computes their embeddings, and the PictureStore of the
runner keeps them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeVar, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from ...lang.errors import EngineError

if TYPE_CHECKING:  # the gateway imports this file, and must start without torch
    import torch

    from ...fsm.tokens.masks import Walk
    from .messages import EnginePicture

DUMMY_SLOT = 0  # never allocated; rows whose key is already in the pool write here


class LogitsError(EngineError):
    """Raised when logits of a row are not numbers. The row's keys may be wrong too, and are not kept."""

    def __init__(self) -> None:
        super().__init__("the model's logits are not numbers: no token can be chosen")


class ShortOfMemory(EngineError):
    """Raised when there is no memory for a step. A smaller one may find some; this one's keys are not kept."""

    def __init__(self, rows: int) -> None:
        super().__init__(
            f"there is no memory for a step of {rows} rows; end other programs on the device, or write a smaller "
            "chunk_size, max_running or pool_memory"
        )


class RowNeed(IntEnum):
    """The answer that a step needs for a logit row."""

    LOGITS = 0  # the logits themselves
    ARGMAX = 1  # the most likely token, of equal ones the first
    SAMPLE = 2  # a draw (`sampling/sampler.py`), restricted by top_k and min_p at most
    LATER = 3  # a token that `LaunchedStep.choose` may ask for; in batches for an AsyncRunner only


class Allowed(NamedTuple):
    """The tokens that a row may choose, as a short list or as a bit mask."""

    few: NDArray[np.int32] | None  # ascending, when they are few
    bits: NDArray[np.uint32] | None  # packed: bit t % 32 of word t // 32; given when they are not few


class StepShape(NamedTuple):
    """The amounts of work in a step, from which its duration can be estimated."""

    rows: int
    keys: int  # attended to, summed over the rows
    prefill_rows: int  # rows of sequences with more than one
    sequences: int
    logits: int  # rows whose logits are computed


@dataclass(frozen=True, slots=True, eq=False)
class RowRequests:
    """The need of each logit row, and its sampling parameters. Those of a row that is not SAMPLE are unused."""

    kinds: NDArray[np.uint8]  # [L] RowNeed
    inverse_temperatures: NDArray[np.float64]  # [L]
    keys: NDArray[np.uint64]  # [L] sampler.draw_key(seed, position)
    top_k: NDArray[np.int32]  # [L] 0 = all; tokens that tie with the k-th stay
    # [L] 0 = none; tokens stay with (logit − largest) · inverse temperature ≥ log(min_p), in float64
    min_p: NDArray[np.float64]
    allowed: dict[int, Allowed] = field(default_factory=dict)  # row → its tokens; other rows: all
    # Only batches for an AsyncRunner have these two; there top_k may be any number.
    top_p: NDArray[np.float64] | None = None  # [L] 1 = all, as in Draws; None: all of every row
    described: NDArray[np.bool_] | None = None  # [L] rows that get their token and their logits; None: no row

    def take(self, rows: NDArray[np.integer]) -> RowRequests:
        """Returns the requests of some of the logit rows."""
        return RowRequests(
            self.kinds[rows],
            self.inverse_temperatures[rows],
            self.keys[rows],
            self.top_k[rows],
            self.min_p[rows],
            {index: self.allowed[row] for index, row in enumerate(rows.tolist()) if row in self.allowed},
            None if self.top_p is None else self.top_p[rows],
            None if self.described is None else self.described[rows],
        )


# Ids of picture tokens take the place of a picture in a token sequence. They lie from here on; no vocabulary reaches
# it, and int32 holds 2^30 numbers.
PICTURE_BASE = 1 << 30
PICTURE_END = 1 << 31


class PictureGrid(NamedTuple):
    """The grid of a picture's tokens, in models whose rotary positions have three axes.

    `time`: of a later part of a clip, which follows the part before it: its place on the axis of time, counted from the
    clip's first part; None: the picture stands alone, or begins a clip.
    """

    rows: int
    columns: int
    time: int | None = None


class PictureSpan(NamedTuple):
    """Tokens [start, end) of a sequence are the whole picture of this number.

    `grid`: None: one axis counts tokens.
    """

    start: int
    end: int
    number: int
    grid: PictureGrid | None = None


def picture_tokens(number: int, tokens: int) -> list[int]:
    """Returns the ids of a picture in a sequence."""
    assert 0 <= number < PICTURE_BASE, "numbers are not used twice, and int32 ends there"
    return [PICTURE_BASE + number] * tokens


def without_pictures(token_ids: NDArray[np.int64]) -> NDArray[np.int64]:
    """Replaces picture ids by 0, for an embedding table; their embeddings come from the vision tower."""
    return np.where(token_ids < PICTURE_BASE, token_ids, 0)


def picture_spans(
    token_ids: Sequence[int] | NDArray[np.integer],
    tokens_of: Callable[[int], int | None],
    grid_of: Callable[[int], PictureGrid | None] = lambda number: None,
) -> tuple[PictureSpan, ...]:
    """Finds the pictures of a sequence, in order.

    Args:
        tokens_of: a picture's number → its tokens; None when there is no such picture.
        grid_of: a known picture's number → the grid of its tokens, see PictureSpan.

    Raises:
        ValueError: a picture that is unknown, or not whole.
    """
    ids = np.asarray(token_ids)
    places = np.flatnonzero(ids >= PICTURE_BASE)
    spans: list[PictureSpan] = []
    done = 0
    while done < len(places):
        start = int(places[done])
        number = int(ids[start]) - PICTURE_BASE
        tokens = tokens_of(number)
        if tokens is None:
            raise ValueError(f"picture {number} is unknown")
        end = start + tokens
        if tokens < 1 or end > len(ids) or not (ids[start:end] == ids[start]).all():
            raise ValueError(f"picture {number} has {tokens} tokens, and not all of them are here")
        spans.append(PictureSpan(start, end, number, grid_of(number)))
        done += tokens
    return tuple(spans)


@dataclass(frozen=True, slots=True)
class WindowPool:
    """The pool of the layers that see a window of tokens only, where they have slots of their own."""

    num_slots: int  # including DUMMY_SLOT
    reach: int  # tokens that a row sees in such layers, its own included


class PictureRows(NamedTuple):
    """Rows [first, first + rows) of a step are tokens [offset, offset + rows) of a picture."""

    first: int
    rows: int
    number: int
    offset: int


class StateRun(NamedTuple):
    """Consecutive rows of a sequence, from the recurrent state in one slot to that in another.

    Before its first token every state is zero: slot 0 is never written. A run may read what an earlier run of the step
    wrote, and may overwrite what an earlier one has read.
    """

    rows: int  # at least 1
    source: int  # slot of the state before its first row
    target: int  # slot of the state after its last row


@dataclass(frozen=True, slots=True)
class Batch:
    """One step: R rows, B sequences, L rows whose logits are needed. All arrays are on the host."""

    token_ids: NDArray[np.int64]  # [R]
    positions: NDArray[np.int64]  # [R] logical position in the sequence
    write_slots: NDArray[np.int64]  # [R] where each row's key and value go; DUMMY_SLOT = nowhere
    query_lengths: NDArray[np.int32]  # [B] rows of each sequence, at least 1
    prefix_lengths: NDArray[np.int32]  # [B] keys before its first row
    slots: tuple[NDArray[np.int32], ...]  # B arrays [prefix + query]: physical slots in logical order
    logit_rows: NDArray[np.int64]  # [L] ascending rows of which the logits are needed
    # Radix path of each sequence, root first: (node id, first position, length). Empty: no grouping.
    paths: tuple[tuple[tuple[int, int, int], ...], ...] = ()
    row_requests: RowRequests | None = None  # None: all logits of every logit row
    # [B] rows at the end of each sequence that were generated: their attention is computed row by row, so that a forced
    # token's keys are those that it would have in a step of its own. None: no row.
    generated: NDArray[np.int32] | None = None
    pictures: tuple[PictureRows, ...] = ()  # in row order; the token ids of these rows are picture ids
    # For each sequence the positions [start, end) whose rows attend to each other in both directions: pictures of some
    # models. Empty: none of any sequence.
    spans: tuple[tuple[tuple[int, int], ...], ...] = ()
    # [3, R] positions that rotary embeddings turn by: time, height and width. None: `positions` on all three.
    rope_positions: NDArray[np.int64] | None = None
    # [R] for a row whose token is still being computed: the logit row [L] of the step launched before this one that
    # chooses it, and token_ids has 0; −1: token_ids has the token. None: token_ids has all.
    token_sources: NDArray[np.int64] | None = None
    # [R] the adapter that each row uses (messages.Schedule.adapter); NO_ADAPTER: none. None: no row uses one.
    adapters: NDArray[np.int32] | None = None
    # The runs of all rows, in row order, for a model with recurrent states; such a model takes every token once.
    states: tuple[StateRun, ...] = ()
    # [H] ascending rows of which the hidden states are needed, none of them a logit row. None: none.
    hidden_rows: NDArray[np.int64] | None = None
    # As `slots` and `write_slots`, of window layers with a pool of their own: the slots that the rows see, 0 before
    # them. None: all layers have the same slots.
    window_slots: tuple[NDArray[np.int32], ...] | None = None
    window_write_slots: NDArray[np.int64] | None = None
    # [B] a number that a sequence keeps from step to step, and the first of its positions whose slot may be another
    # than in the step before with it; those of this step's rows may be, too. None: all slots may be.
    sequences: NDArray[np.int64] | None = None
    changed: NDArray[np.int32] | None = None
    # [B] where a runner that keeps a table of slots (slot_table.py) has those of each sequence, on all layers. None: it
    # has none of this step's.
    places: NDArray[np.int32] | None = None

    @property
    def rows(self) -> int:
        return len(self.token_ids)

    @property
    def shape(self) -> StepShape:
        """The amounts of work; what sequences share is counted for each of them."""
        counts = self.query_lengths.astype(np.int64)
        keys = int((counts * self.prefix_lengths + counts * (counts + 1) // 2).sum())
        return StepShape(self.rows, keys, int(counts[counts > 1].sum()), len(counts), len(self.logit_rows))

    @property
    def outputs(self) -> NDArray[np.int64]:
        """The rows that the last layer computes, ascending: those of logits and of hidden states."""
        if self.hidden_rows is None:
            return self.logit_rows
        return np.sort(np.concatenate([self.logit_rows, self.hidden_rows]))

    def slots_of(self, *, windowed: bool) -> tuple[NDArray[np.int32], ...]:
        """Returns the slots in layers that are `windowed`, or in the others."""
        return self.window_slots if windowed and self.window_slots is not None else self.slots

    def write_slots_of(self, *, windowed: bool) -> NDArray[np.int64]:
        """Returns the write slots in layers that are `windowed`, or in the others."""
        return self.window_write_slots if windowed and self.window_write_slots is not None else self.write_slots


@dataclass(frozen=True, slots=True, eq=False)
class Logits:
    """The result of a forward pass, valid until the next one; of a launched step it is valid longer (`Pending`).

    A row has its logits, its token, both, or the error for which no token could be chosen. Such an error ends the row's
    request and no other. Use `complete` to build it where all rows have their logits.
    """

    values: torch.Tensor  # float32 [F, vocab] of the rows that have logits; a sampler may write to it
    places: NDArray[np.int64]  # [L] index into `values`, −1 = none
    tokens: NDArray[np.int64]  # [L] the token that was chosen, −1 = none; never of a LOGITS row
    errors: Mapping[int, Exception] = field(default_factory=dict)  # logit row → why it has no token
    hidden: torch.Tensor | None = None  # float32 [H, hidden]: `Batch.hidden_rows` after the final norm

    @classmethod
    def complete(cls, values: torch.Tensor, hidden: torch.Tensor | None = None) -> Logits:
        rows = len(values)
        return cls(values, np.arange(rows, dtype=np.int64), np.full(rows, -1, dtype=np.int64), hidden=hidden)


class PictureStore(Protocol):
    """Keeps the pictures of requests, by number."""

    both_ways: bool  # rows of a picture see all of it; else only what is before them

    def put(self, picture: EnginePicture) -> None:
        """Adds a picture. Raises RequestError for one that does not fit the model."""

    def forget(self, number: int) -> None:
        """Removes a picture for new requests; ignores unknown numbers."""

    def tokens(self, number: int) -> int | None:
        """Returns the number of its tokens; None for an unknown picture."""

    def grid(self, number: int) -> PictureGrid | None:
        """Returns the grid of a known picture's tokens."""

    def digest(self, number: int) -> bytes | None:
        """Returns the digest of a known or held picture, the same in every process; None: it has none."""

    def hold(self, number: int) -> object:
        """Returns an object that keeps a known picture computable while it lives, even after `forget`."""


class PagePart(IntEnum):
    """The layers whose keys and values a payload holds."""

    TOKENS = 0  # all that have a slot for every token
    WINDOWS = 1  # those with a window, where these have slots of their own


class SavedPages(Protocol):
    """Pages that are being copied out of a pool."""

    def result(self) -> list[NDArray[np.uint8]]:
        """Waits for the copy → a contiguous payload for each page. Called once, from any thread.

        Raises:
            Exception: the device failed, maybe in the step that wrote the pages.
        """


class PagePort(Protocol):
    """Copies keys and values between a pool and payloads, for the tiers of the cache. Called between steps.

    Copies run in the order of steps: what a launched step writes is saved as it is after that step, and what is loaded
    is there for the next step.
    """

    layout: str  # what is in a payload, in which order: payloads of equal layouts can be exchanged

    def bytes_per_token(self, part: PagePart) -> int:
        """Returns the bytes of a token in a payload."""

    def save(self, slots: NDArray[np.int32], part: PagePart) -> SavedPages:
        """Begins to copy the tokens in `slots`, [pages, tokens of a page]: slots of the part's pool."""

    def load(self, slots: NDArray[np.int32], payloads: Sequence[NDArray[np.uint8]], part: PagePart) -> None:
        """Copies the last `len(slots)` tokens of the payloads to `slots`, of the part's pool."""


class Runner(Protocol):
    """Runs a model on its KV pool. The fake is `oracle.OracleRunner`."""

    vocab_size: int
    context_length: int
    num_slots: int  # including DUMMY_SLOT
    num_states: int  # slots of recurrent states, that of zeros included; 0: the model has none
    window_pool: WindowPool | None  # None: all layers have the same slots

    @property
    def pictures(self) -> PictureStore | None:
        """The store of its pictures; None for a model that reads text only."""

    @property
    def pages(self) -> PagePort | None:
        """Copies pages out of its pool and into it; None: no tier can keep what this model caches."""

    @property
    def chooser(self) -> Chooser | None:
        """Its chooser of tokens from logits; None leaves it to torch."""

    @property
    def trie_walk(self) -> Walk | None:
        """Its walk through token tries for masks; None leaves it to numpy."""

    def forward(self, batch: Batch) -> Logits:
        """Runs one step. Rows with RowNeed.LOGITS get their logits; each other row gets its token, its logits, or the
        error for which it has no token, such as LogitsError.

        Raises:
            Exception: the forward pass failed. The pool is not to be trusted then.
        """

    def facts(self) -> Mapping[str, str | int | float]:
        """Returns what it computes with, and cumulative counters of what its optimisations have saved."""

    def clear(self) -> None:
        """Forgets the KV pool's content (after a failed step or a flush)."""


class VectorHead(Protocol):
    """Turns pooled hidden states into vectors. Implemented by `weights.vector_head.LoadedHead`."""

    every_row: bool  # all hidden states of a text are pooled, else the last one is taken
    dimensions: int  # of a vector

    def vector(self, pooled: torch.Tensor, dimensions: int) -> bytes:
        """Computes [hidden] float64 → the first `dimensions` numbers (0: all), float32, little-endian."""


class Pending(Protocol):
    """The result of a step, which may still run."""

    def result(self) -> Logits:
        """Waits for the step → its logits; called once.

        They are valid until the second step after this one is launched: the scheduler reads them while the next runs.

        Raises:
            Exception: whatever made the step fail, as `Runner.forward`. The pool is not to be trusted then. A step that
                was launched after it is waited for as well, and its result is dropped.
        """


@runtime_checkable
class LaunchedStep(Pending, Protocol):
    """A step that an AsyncRunner has launched."""

    def choose(self, rows: NDArray[np.int64], row_requests: RowRequests) -> None:
        """Asks for the tokens of LATER rows, while the step may still run.

        Called at most once, before the next step is launched and before `result`. The step answers these rows with
        tokens, and the next batch may refer to them. LATER rows that nothing is asked of get no answer.

        Args:
            rows: [n] logit rows of the step, ascending.
            row_requests: of these rows, n entries; each needs a token.

        Raises:
            Exception: nothing can be chosen any more, as `Pending.result`.
        """


class StepTimes(NamedTuple):
    """Times of a step on its device, in seconds of the device's clock.

    Attributes:
        idle: since the step before it had ended; 0 of the first one.
        forward: of the forward pass, and of the tokens that were chosen with it.
        waited: from then until its late rows were chosen; 0 without such rows.
        chosen: of that choice.
    """

    idle: float
    forward: float
    waited: float
    chosen: float


@runtime_checkable
class TimedStep(Protocol):
    """A step that can tell when it ran."""

    def times(self) -> StepTimes:
        """Returns its times. Called after `result`, of a runner that was told by `time_steps`."""


@runtime_checkable
class TimedRunner(Protocol):
    """A runner whose steps are TimedSteps."""

    def time_steps(self) -> None:
        """Has all further steps keep what `TimedStep.times` needs."""


@runtime_checkable
class AsyncRunner(Runner, Protocol):
    """A runner that does not wait for its steps. The fake is `launched_oracle.LaunchedOracle`.

    Steps run one after the other in the order in which they were launched. So a step reads the keys of those before it,
    and a slot that a running step reads or writes may be freed: its next owner writes to it later.
    """

    def launch(self, batch: Batch) -> LaunchedStep:
        """Launches a step. When it returns, the arrays of the batch have been read or copied.

        Rows that need a token are answered with it, for the next batch may refer to it by `token_sources`.
        `RowRequests.described` rows get both. A row of the next batch that refers to a row with an error reads any
        token: its text ends when the error is read.

        Raises:
            Exception: the step cannot be computed; nothing of it runs any more.
        """


class Chooser(Protocol):
    """Computes tokens from logits: `TorchSampling` anywhere, `kernels.cpu.head.CpuSampling` on the CPU."""

    def choose(self, logits: torch.Tensor, draws: Draws) -> NDArray[np.int64]:
        """Chooses one token for each draw. logits: float32 [_, vocab].

        Raises:
            LogitsError: the logits of a row are not numbers, or none of those that may come is finite.
        """

    def summarise(self, logits: torch.Tensor, rows: NDArray[np.int64], top: int) -> Summary:
        """Computes the log-normalisers of rows and their `top` largest logits.

        Raises:
            LogitsError: the logits of a row are not numbers.
        """


@dataclass(frozen=True, slots=True, eq=False)
class Summary:
    """For n rows the log of the sum of exponentials, and the largest logits, best first, ties by token."""

    normalisers: NDArray[np.float64]  # [n]
    top_tokens: NDArray[np.int32]  # [n, top]
    top_logits: NDArray[np.float32]  # [n, top]


@dataclass(frozen=True, slots=True, eq=False)
class Draws:
    """Tokens to choose together, column by column: SampleRequests after the logit processors.

    top_k first, then top_p (mass among what top_k kept), then min_p (relative to the best token). What ties with the
    last one kept is kept too. A token stays by min_p with (logit − best) / temperature ≥ log(min_p), in float64; a
    nucleus is full when its mass reaches top_p up to the rounding of float32 sums, a millionth.
    """

    rows: NDArray[np.int64]  # [n] of the logits
    inverse_temperatures: NDArray[np.float64]  # [n] 0 = the most likely token, and no other number counts
    keys: NDArray[np.uint64]  # [n] draw_key
    top_k: NDArray[np.int32]  # [n] 0 = all
    top_p: NDArray[np.float64]  # [n] 1 = all
    min_p: NDArray[np.float64]  # [n] 0 = all
    # [n] packed bits: bit t % 32 of word t // 32 says that token t may be chosen; None = all may
    masks: Sequence[NDArray[np.uint32] | None] | None = None

    def __len__(self) -> int:
        return len(self.rows)


@dataclass(frozen=True, slots=True)
class Given:
    """G rows whose embeddings come from a vision tower. The decoder takes them as they are and does not scale them."""

    rows: torch.Tensor  # int64 [G] ascending
    values: torch.Tensor  # [G, hidden] in the model's dtype
    added: tuple[torch.Tensor, ...] = ()  # [G, hidden] each: what the first layers add to the rows, after all else


class VisionModel(Protocol):
    """Encodes pictures. Implemented by `models.vision.sight.Sight` for pictures in tiles, by
    `models.vision.grid_sight.GridSight` for those of any size."""

    both_ways: bool  # rows of a picture see all of it; else only what is before them
    on_axes: bool  # rotary positions have three axes, on which every picture has a grid
    added_layers: int  # of the decoder, the first ones, which add features of their own to a picture's rows

    def tokens(self, picture: EnginePicture) -> int:
        """Returns the number of rows of `encode`. Raises RequestError for a picture cut for another model."""

    def grid(self, picture: EnginePicture) -> PictureGrid | None:
        """Returns the grid of a picture's tokens."""

    def largest(self) -> EnginePicture:
        """Returns a picture of as many tiles, or tokens, as there can be."""

    def encode(self, picture: EnginePicture) -> torch.Tensor:
        """Returns [tokens, (1 + added_layers) · hidden] in the model's dtype.

        The first `hidden` numbers are put in place of embeddings without scaling, the next ones are added by layers.
        """


P = TypeVar("P")
R = TypeVar("R")


def isolate(items: Sequence[P], together: Callable[[Sequence[P]], Sequence[R]]) -> list[R | Exception]:
    """Returns the answer of `together` for each item, or the exception that it raises for that item alone.

        together([a, b, c, d]) raises ─┬─ together([a, b]) → its answers
                                       └─ together([c, d]) raises ─┬─ together([c]) → its answer
                                                                   └─ together([d]) raises: the error is d's answer

    A failing item costs a number of calls that is logarithmic in the number of items. Without a failure there is one
    call.

    Args:
        together: gives one answer for each item; an answer depends on its own item only. When it raises, it must leave
            all state as it was, because it is called again with a part of the items.
    """
    if not items:
        return []
    try:
        answers = together(items)
    except Exception as error:
        if len(items) == 1:
            return [error]
        middle = len(items) // 2
        return isolate(items[:middle], together) + isolate(items[middle:], together)
    assert len(answers) == len(items), "one answer for each item"
    return list(answers)
