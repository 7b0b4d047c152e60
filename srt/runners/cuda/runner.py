"""Runs steps on a CUDA device, as a `batch.AsyncRunner`.

The host packs a step; the device fills in tokens, runs the forward pass and chooses tokens.

    host    plan, pack ─┐                        plan, pack ─┐                       read the tokens of step 1
    device              └ copy │ step 1 │ choose │ copy ──►   └ copy │ step 2 │ choose │ copy ──►
                                     '── chosen tokens ────────────────►'  for rows whose token step 1 chose

Rows whose mask is not known at the launch are chosen for by a later call, which enqueues that after the forward pass.

Steps are padded to one of a few sizes and run as captured graphs. The largest steps and those with pictures are
launched kernel by kernel. All work goes through one stream, so a step reads what earlier steps have written, and the
host may enqueue copies to a step's buffers while the previous step still runs.

Of several ranks each has such a runner, with graphs in which the layers' exchanges are captured. All launch the same
steps in the same order, and choose the same graph for each: what decides is the step, and what was sent before. Rank 0
chooses tokens, so where a step reads tokens that the previous one has chosen, it broadcasts the step's token ids before
the graph is replayed; no host waits for that.
"""

import logging
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from ....fsm.tokens.masks import Walk
from ...attention.backend import AttentionStep
from ...cache.kv_pool import KVPool, PoolSize
from ...cache.state_pool import StatePool, StateStep
from ...core.batch import (
    Batch,
    Chooser,
    Draws,
    Given,
    Logits,
    LogitsError,
    RowNeed,
    RowRequests,
    StepTimes,
    isolate,
    without_pictures,
)
from ...distributed.communicator import SINGLE_RANK, Communicator, alike, first_failed
from ...kernels.triton.fitting import replaced_tiles
from ...multimodal.store import VisionStore
from ...sampling.sampler import draws_of
from ..memory import room_for_step
from .decoder import DeviceModel, DeviceRows, dtype_name
from .device import Accelerator, CaptureFailed, Mark, Staging, StepLimits
from .graphs import CapturedSteps, GraphBackend, StepInputs, adapters_of
from .pages import DevicePages
from .slot_table import NO_ENTRIES, RowEntries, SlotTable, table_entries

_log = logging.getLogger(__name__)


class DeviceChooser(Chooser, Protocol):
    """Chooses tokens without waiting. Implemented by `kernels.triton.sampling.TritonSampling`."""

    def choose_async(self, logits: torch.Tensor, draws: Draws) -> torch.Tensor:
        """Chooses one token for each draw, int64 [n] on the device; −1 where the logits of a row are not numbers.

        logits: float32 [_, vocab].
        """


@dataclass(frozen=True, slots=True, eq=False)
class ChosenTokens:
    """The tokens that a step has chosen, on the device. `places`: index of each logit row's token, −1 = none."""

    tokens: torch.Tensor  # int64 [n]; −1: the logits were not numbers, or no token could be chosen
    places: NDArray[np.int64]  # [L]


@dataclass(slots=True, eq=False)
class Answer:
    """Implements `batch.LaunchedStep`: tokens that are being copied to the host, and logits that stay on the device."""

    answers: "Answers" = field(repr=False)  # that began it
    before: Mark | None  # after the step before it
    began: Mark
    mark: Mark
    values: torch.Tensor  # float32 [F, vocab] on the device
    value_places: NDArray[np.int64]  # [L] index into values, −1 = none
    chosen: ChosenTokens
    errors: dict[int, Exception]  # logit row → why no token could be chosen
    host_tokens: list[torch.Tensor] = field(repr=False)  # int64, together [n], in pinned memory, full after the mark
    hidden: torch.Tensor | None = None  # float32 [H, hidden] on the device
    logits: torch.Tensor | None = field(default=None, repr=False)  # [L, vocab] of the step, while rows may choose later
    late: tuple[Mark, Mark] | None = None  # after the forward pass, and before the choice of late rows

    def choose(self, rows: NDArray[np.int64], row_requests: RowRequests) -> None:
        """Enqueues the choice of these rows' tokens after what was launched. See `LaunchedStep.choose`."""
        assert self.logits is not None, "called once, of a step with rows that choose later"
        if self.answers.timed:
            self.late = self.mark, self.answers.marked()
        tokens, errors = self.answers.choose(self.logits, row_requests, np.arange(len(rows)), rows)
        self.logits = None
        self.errors |= errors
        places = self.chosen.places.copy()
        places[rows] = len(self.chosen.tokens) + np.arange(len(rows))
        self.chosen = ChosenTokens(torch.cat([self.chosen.tokens, tokens]), places)
        copied, self.mark = self.answers.copied(tokens)
        self.host_tokens.append(copied)

    def result(self) -> Logits:
        """Waits for the step and returns its result."""
        self.mark.wait()
        self.answers.device_seconds += self.mark.seconds_since(self.began)
        tokens = np.full(len(self.value_places), -1, dtype=np.int64)
        has_token = self.chosen.places >= 0
        told = np.concatenate([copied.numpy() for copied in self.host_tokens])
        tokens[has_token] = told[self.chosen.places[has_token]]
        without = np.flatnonzero(has_token & (tokens < 0)).tolist()
        errors = {row: self.errors.get(row) or LogitsError() for row in without}
        return Logits(self.values, self.value_places, tokens, errors, self.hidden)

    def times(self) -> StepTimes:
        """Returns what the step took. See `TimedStep.times`."""
        idle = 0.0 if self.before is None else self.began.seconds_since(self.before)
        if self.late is None:
            return StepTimes(idle, self.mark.seconds_since(self.began), 0.0, 0.0)
        forward, choosing = self.late
        spans = forward.seconds_since(self.began), choosing.seconds_since(forward), self.mark.seconds_since(choosing)
        return StepTimes(idle, *spans)


class Answers:
    """Chooses tokens on the device and starts their copies to the host.

    Chosen tokens stay on the device for the rows of the next step, and are copied, eight bytes each, after the step.
    Only `Answer.result` waits for that copy.

    A row that chooses later does so before the next step is launched, so its logits are read where they are.
    """

    def __init__(self, accelerator: Accelerator, chooser: DeviceChooser) -> None:
        self._accelerator = accelerator
        self._chooser = chooser
        self._staging = Staging(accelerator, 1 << 12)
        self.device_seconds = 0.0  # run time of the steps whose results were read
        self.timed = False  # steps tell their times
        self._ended: Mark | None = None  # after all that was enqueued for the last step

    def begin(
        self,
        logits: torch.Tensor,
        row_requests: RowRequests | None,
        *,
        began: Mark,
        kept: bool,
        hidden: torch.Tensor | None = None,
    ) -> Answer:
        """Enqueues the choice of tokens and their copies, and returns the pending answer.

        Args:
            logits: float32 [L, vocab] on the device.
            began: the mark before the step's work.
            kept: the logits' memory belongs to this step alone; otherwise rows that want logits get a copy.
            hidden: float32 [H, hidden] on the device, of rows that want hidden states.
        """
        count, before = len(logits), self._ended
        picked, whole, later = _wants(row_requests, count)
        errors: dict[int, Exception] = {}
        if row_requests is None or not len(picked):
            tokens = torch.empty(0, dtype=torch.int64, device=logits.device)
        else:
            tokens, errors = self.choose(logits, row_requests, picked, picked)
        if not len(whole):
            values = logits[:0]
        elif len(whole) < count:
            values = logits.index_select(0, self._staging.send([whole])[0])
        else:
            values = logits if kept else logits.clone()
        host_tokens, mark = self.copied(tokens)
        return Answer(
            answers=self,
            before=before,
            began=began,
            mark=mark,
            values=values,
            value_places=_places(whole, count),
            chosen=ChosenTokens(tokens, _places(picked, count)),
            errors=errors,
            host_tokens=[host_tokens],
            hidden=hidden,
            logits=logits if later else None,
        )

    def choose(
        self,
        logits: torch.Tensor,
        row_requests: RowRequests,
        entries: NDArray[np.int64],
        rows: NDArray[np.int64],
    ) -> tuple[torch.Tensor, dict[int, Exception]]:
        """Chooses a token for each of `rows` of the logits, by these entries of the requests; −1 where that fails.

        Returns:
            int64 [n] on the device, and the errors by row.
        """

        def choose(some: NDArray[np.int64]) -> torch.Tensor:
            return self._chooser.choose_async(
                logits, draws_of(row_requests, entries[some], rows[some], logits.shape[1])
            )

        every = np.arange(len(rows))
        try:
            return choose(every), {}
        except Exception:
            answers = isolate(every.tolist(), lambda some: list(choose(np.array(some, dtype=np.int64))))
        none = torch.full((), -1, dtype=torch.int64, device=logits.device)
        failed = {row: one for row, one in zip(rows.tolist(), answers, strict=True) if isinstance(one, Exception)}
        return torch.stack([none if isinstance(one, Exception) else one for one in answers]), failed

    def copied(self, tokens: torch.Tensor) -> tuple[torch.Tensor, Mark]:
        """Enqueues a copy of tokens to pinned memory, which is full after the mark."""
        host = self._accelerator.host_buffer(tokens.nbytes).view(torch.int64)
        host.copy_(tokens, non_blocking=True)
        self._ended = self._accelerator.mark()
        return host, self._ended

    def marked(self) -> Mark:
        """Marks the work that is enqueued."""
        return self._accelerator.mark()


def _wants(row_requests: RowRequests | None, count: int) -> tuple[NDArray[np.int64], NDArray[np.int64], bool]:
    """Returns the logit rows that need a token, those that need their logits, and whether some choose later."""
    if row_requests is None:
        return np.zeros(0, dtype=np.int64), np.arange(count), False
    kinds, described = row_requests.kinds, row_requests.described
    found = kinds.tobytes()
    later = RowNeed.LATER in found
    if not later and RowNeed.LOGITS not in found and (described is None or not described.any()):
        return np.arange(count), np.zeros(0, dtype=np.int64), False  # most steps that decode
    whole = kinds == RowNeed.LOGITS
    picked = ~whole & (kinds != RowNeed.LATER)
    return np.flatnonzero(picked), np.flatnonzero(whole if described is None else whole | described), later


def _places(rows: NDArray[np.int64], count: int) -> NDArray[np.int64]:
    places = np.full(count, -1, dtype=np.int64)
    places[rows] = np.arange(len(rows))
    return places


class CudaRunner:
    """A model, its KV pool and the device that they are on.

    Args:
        model: what to run.
        accelerator: the device.
        name: of the kernels, for `facts`.
        size: of the KV pool.
        num_states: size of the pool of recurrent states, that of zeros included; 0 for a model without.
        backend: attention kernels.
        chooser: chooses tokens on the device.
        limits: the size of the largest step.
        cuda_graphs: run steps as captured graphs.
        pictures: the store of pictures in prompts; None: the model reads text only.
        trie_walk: walks tries of tokens for masks, on the host; None: numpy does.
        communicator: connects the ranks that share the model. Only rank 0 chooses tokens; the other ranks receive them.
    """

    def __init__(
        self,
        model: DeviceModel,
        accelerator: Accelerator,
        *,
        name: str,
        size: PoolSize,
        num_states: int = 0,
        # Any: each backend prepares plans in its own form, and only the backend reads it.
        backend: GraphBackend[Any],
        chooser: DeviceChooser,
        limits: StepLimits,
        cuda_graphs: bool,
        pictures: VisionStore | None = None,
        trie_walk: Walk | None = None,
        communicator: Communicator = SINGLE_RANK,
    ) -> None:
        self.model = model
        self.chooser = chooser
        self.pictures = pictures
        self.trie_walk = trie_walk
        self.vocab_size = model.vocab_size
        self.context_length = model.context_length
        self.num_slots = size.slots
        self.window_pool = size.window_pool(model.kv_geometry)
        self.num_states = num_states
        assert (model.state_geometry is None) == (num_states == 0), "a pool of states belongs to such a model"
        self.states: StatePool | None = None
        if model.state_geometry is not None:  # with a slot that the rows of padding move
            self.states = StatePool(model.state_geometry, num_states + 1, accelerator.device, fixed=True)
        self.pool = KVPool(model.kv_geometry, size, accelerator.device, fixed=True)
        self.pages = None if num_states else DevicePages(self.pool, accelerator)
        self._communicator = communicator
        self._name = name
        self._accelerator = accelerator
        self._device = accelerator.device
        self._backend = backend
        entries = table_entries(limits.sequences, min(model.context_length, size.slots))
        self._table = SlotTable(accelerator, entries, windows=self.window_pool is not None)
        backend.use_table(self._table)
        self._staging = Staging(accelerator, 1 << 16)
        self._sources_staging = Staging(accelerator, 1 << 12)
        self._answers = Answers(accelerator, chooser)
        self._last: Answer | None = None  # of the step that was launched last
        self._eager_steps = 0
        self._began = accelerator.mark()  # before the work of the step that was launched last
        self._captured: CapturedSteps | None = None
        if cuda_graphs:
            self._captured = CapturedSteps(
                accelerator,
                lambda inputs, out: self._compute(inputs, None, out),
                backend,
                model.windows,
                limits=limits,
                vocab_size=model.vocab_size,
                states=self.states,
                adapters=model.adapters,
            )

    # ------------------------------------------------------------------------------------------ a step

    def launch(self, batch: Batch) -> Answer:
        """Launches a step, and returns while it runs."""
        self._accelerator.use()
        try:
            with room_for_step(batch.rows, self._accelerator.give_back):
                return self._launch(batch)
        except Exception:
            self._table.clear()  # slots of this step may not have been written
            raise

    def _launch(self, batch: Batch) -> Answer:
        if batch.rope_positions is not None and self._in_table(batch):  # text is at one position on all axes
            batch = replace(batch, positions=batch.rope_positions[0], rope_positions=None)
        batch = replace(batch, places=self._table.place(batch))
        entries = None if batch.places is None else self._table.rows(batch)
        captured = self._captured
        replayed = None
        if captured is not None and entries is not None and captured.takes(batch):
            replayed = captured.run(batch, entries, self._resolve)
        logits, hidden = self._run(batch, entries) if replayed is None else (replayed, None)
        unread = self._communicator.rank > 0  # only rank 0 has whole logits
        answer = self._answers.begin(
            logits, batch.row_requests, began=self._began, kept=replayed is None or unread, hidden=hidden
        )
        self._last = answer
        return answer

    def _in_table(self, batch: Batch) -> bool:
        """Returns whether all rows are text at positions of the model's table. After a clip they may be larger."""
        turned = batch.rope_positions
        return turned is not None and not batch.pictures and int(turned[0].max()) < self.context_length

    def time_steps(self) -> None:
        """See `TimedRunner.time_steps`."""
        self._answers.timed = True

    def forward(self, batch: Batch) -> Logits:
        """Runs one step and waits for it."""
        return self.launch(batch).result()

    def capture_graphs(self) -> None:
        """Captures all graphs. Called before the first step, so that no step waits for a capture.

        Ranks capture the same sizes in the same order. A graph pads its step, and ranks add up parts of one length: so
        all ranks have graphs, or none has. Where some cannot capture, the first of them logs why. Work that fails
        before it is captured is a step that fails, see distributed/ranks.py.
        """
        captured, ranks = self._captured, self._communicator
        if captured is None:
            return
        if not alike(ranks, self._accelerator.name):  # plans would fit on some ranks only
            self._drop_graphs(f"the ranks have different devices, here {self._accelerator.name}", logs=ranks.rank == 0)
            return
        for size in captured.sizes:
            reason = None
            try:
                captured.capture(size)
            except CaptureFailed as error:
                reason = str(error)
            first = first_failed(ranks, failed=reason is not None)
            if first is not None:
                self._drop_graphs(f"steps of {size} rows: {reason}", logs=ranks.rank == first)
                return

    def _drop_graphs(self, reason: str, *, logs: bool) -> None:
        """Launches all steps kernel by kernel from now on. logs: this rank says why."""
        self._captured = None
        self._accelerator.give_back()
        if logs:
            where = f"rank {self._communicator.rank}: " if self._communicator.ranks > 1 else ""
            _log.warning("steps are launched kernel by kernel, not as graphs: %s%s", where, reason)

    def facts(self) -> dict[str, str | int | float]:
        captured = self._captured
        return {
            "kernels": self._name,
            "weights": self.model.weights,
            "kv_dtype": dtype_name(self.model.kv_geometry.dtype),
            "state_bytes": 0 if self.states is None else self.num_states * self.states.geometry.bytes_per_slot,
            "keys_read": self._backend.counters.keys_read,
            "keys_saved": self._backend.counters.keys_saved,
            "torch_prompts": self._backend.counters.torch_prompts,
            "graphs": captured.graphs if captured else 0,
            "graph_replays": captured.replays if captured else 0,
            "eager_steps": self._eager_steps,
            "sent_slots": self._table.sent,
            "smaller_tiles": replaced_tiles(),
            "device_seconds": self._answers.device_seconds,
            **(self.pictures.facts() if self.pictures is not None else {}),
        }

    def clear(self) -> None:
        self.pool.clear()
        self._table.clear()
        if self.states is not None:
            self.states.clear()

    # ------------------------------------------------------------------------------------------ how

    def _run(self, batch: Batch, entries: RowEntries | None) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Runs any step kernel by kernel → its logits in new memory, and its hidden states if any are asked for."""
        self._eager_steps += 1
        given = None
        token_ids = batch.token_ids
        if self.pictures is not None and batch.pictures:
            with torch.inference_mode():
                given = self.pictures.given(batch.pictures)
            token_ids = without_pictures(token_ids)
        outputs, asked = batch.outputs, batch.hidden_rows
        writes = (batch.write_slots, batch.write_slots_of(windowed=True))
        own = NO_ENTRIES if entries is None else entries
        arrays: list[NDArray[np.generic]] = [token_ids, batch.positions, *writes, outputs]
        arrays += [own.entries, own.slots, own.window_slots]
        if asked is not None:
            arrays += [np.searchsorted(outputs, batch.logit_rows), np.searchsorted(outputs, asked)]
        if batch.adapters is not None:
            arrays.append(adapters_of(batch, self.model.adapters))
        if batch.rope_positions is not None:
            arrays.append(batch.rope_positions)
        ids, positions, write_slots, window_writes, output_rows, at, slots, window_slots, *places = self._staging.send(
            arrays
        )
        turned = None if batch.rope_positions is None else places.pop()
        adapters = None if batch.adapters is None else places.pop()
        plans = {window: self._backend.plan(batch, window) for window in self.model.windows}
        states = None if self.states is None else StateStep(self.states, batch.states)
        rows = None if len(outputs) == batch.rows else output_rows
        written = None if entries is None else (at, slots, window_slots)
        inputs = StepInputs(ids, positions, write_slots, window_writes, written, rows, plans, states, adapters, turned)
        self._resolve(batch, inputs.token_ids)
        # Outside inference mode: a sampler may write to it.
        out = torch.empty((len(batch.logit_rows), self.vocab_size), device=self._device)
        hidden = self._compute(inputs, given, out, (places[0], places[1]) if places else None)
        return out, None if hidden is None else hidden.float()

    def _resolve(self, batch: Batch, token_ids: torch.Tensor) -> None:
        """Fills in the previous step's tokens, after the host's work for a step and before the device's."""
        self._began = self._accelerator.mark()
        if batch.token_sources is None:
            return
        rows = np.flatnonzero(batch.token_sources >= 0)
        if not len(rows):
            return
        if self._communicator.rank == 0:
            self._fill_in(rows, batch.token_sources[rows], token_ids)
        if self._communicator.ranks > 1:
            self._communicator.broadcast(token_ids)

    def _fill_in(self, rows: NDArray[np.int64], logit_rows: NDArray[np.int64], token_ids: torch.Tensor) -> None:
        """Writes to `rows` the tokens that the previous step chooses from its `logit_rows`."""
        assert self._last is not None, "a step was launched before"
        chosen = self._last.chosen
        places = chosen.places[logit_rows]
        assert places.min() >= 0, "the step before chooses a token for each row that is asked for"
        targets, sources = self._sources_staging.send([rows, places])
        # A token is −1 where none could be chosen. That text ends; its row in this step only needs a valid id.
        token_ids.index_copy_(0, targets, chosen.tokens.index_select(0, sources).clamp_min_(0))

    def _compute(
        self,
        inputs: StepInputs,
        given: Given | None,
        out: torch.Tensor,
        hidden: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> torch.Tensor | None:
        attention = AttentionStep(
            backend=self._backend,
            pool=self.pool,
            plans=inputs.plans,
            write_slots=inputs.write_slots,
            window_write_slots=inputs.window_write_slots,
        )
        with torch.inference_mode():
            if inputs.entries is not None:
                self._table.write(*inputs.entries)
            rows = DeviceRows(
                inputs.token_ids,
                inputs.positions,
                inputs.output_rows,
                given,
                inputs.rope_positions,
                inputs.states,
                hidden,
                inputs.adapters,
            )
            return self.model.forward(rows, attention, out=out)
