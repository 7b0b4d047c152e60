"""Runs steps as captured graphs: one graph for each number of rows that steps are padded to.

A step of a 7B model is some 300 kernels of a few microseconds each. Launching them one by one takes longer than running
them: measured for 8 billion parameters and some hundred rows, 25 to 30 ms on the host next to 7 to 20 ms on the device.
A captured step is launched by one call. The attention plan, which the kernels read from memory, says which rows belong
to which sequence. So a graph depends only on the number of rows: a decode step, a prefill step and a step with forced
tokens run as the same graph. All buffers that a graph reads and writes have fixed addresses:

inputs    | token ids | positions | write slots | logit rows |  shared by all sizes: steps run one after another
slots     | of all running sequences |                          slot_table.py; a step writes those of its rows first
plans     | plan of window class 0 | plan of window class 1 |  filled by `plan_into`, read by the graphs of all sizes
pool      keys and values                                      kv_pool.py, `fixed`
logits    | row 0 | row 1 | …                                  float32; a step of any size writes the first rows

A step with at most as many rows as the logits buffer computes the logits of all its rows, a larger one those of its
logit rows. A row of padding is a sequence of one token at position 0. Its key lies in the dummy slot, which it writes
itself, so padding needs no special case in kernels and computes finite numbers.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from ...attention.backend import AttentionBackend
from ...attention.plan import Window
from ...cache.state_pool import StatePool, StateRows, StepStates, are_single_rows
from ...cache.state_slots import NO_STATE
from ...core.batch import DUMMY_SLOT, Batch
from ...core.messages import NO_ADAPTER
from .device import Accelerator, Graph, Staging, StepLimits
from .slot_table import NO_ENTRIES, RowEntries, SlotTable

Number = TypeVar("Number", bound=np.generic)
_OWN_KEY = np.array([DUMMY_SLOT], dtype=np.int32)


def _longer(array: NDArray[Number], more: int, value: int = 0) -> NDArray[Number]:
    """Returns a one-dimensional array with `more` equal numbers after its own: np.pad, in a tenth of its time."""
    longer = np.full(len(array) + more, value, dtype=array.dtype)
    longer[: len(array)] = array
    return longer


def padded(batch: Batch, rows: int) -> Batch:
    """Adds rows of padding, which need no logits, after a step's own rows; row requests are not padded."""
    more = rows - batch.rows
    assert more >= 0, "a step is padded to more rows than it has"
    if not more:
        return batch
    nothing: tuple[()] = ()
    return replace(
        batch,
        token_ids=_longer(batch.token_ids, more),
        positions=_longer(batch.positions, more),
        write_slots=_longer(batch.write_slots, more, DUMMY_SLOT),
        query_lengths=_longer(batch.query_lengths, more, 1),
        prefix_lengths=_longer(batch.prefix_lengths, more),
        slots=batch.slots + (_OWN_KEY,) * more,
        window_slots=batch.window_slots and batch.window_slots + (_OWN_KEY,) * more,
        window_write_slots=None
        if batch.window_write_slots is None
        else _longer(batch.window_write_slots, more, DUMMY_SLOT),
        paths=batch.paths and batch.paths + (nothing,) * more,
        generated=None if batch.generated is None else _longer(batch.generated, more),
        spans=batch.spans and batch.spans + (nothing,) * more,
        token_sources=None if batch.token_sources is None else _longer(batch.token_sources, more, -1),
        places=None if batch.places is None else _longer(batch.places, more),  # entry 0 has the dummy slot
    )


def idle(rows: int) -> Batch:
    """Builds a step of padding only, for the capture of a graph."""
    return Batch(
        token_ids=np.zeros(rows, dtype=np.int64),
        positions=np.zeros(rows, dtype=np.int64),
        write_slots=np.full(rows, DUMMY_SLOT, dtype=np.int64),
        query_lengths=np.ones(rows, dtype=np.int32),
        prefix_lengths=np.zeros(rows, dtype=np.int32),
        slots=(_OWN_KEY,) * rows,
        logit_rows=np.zeros(0, dtype=np.int64),
        places=np.zeros(rows, dtype=np.int32),
    )


def sizes_upto(most: int) -> tuple[int, ...]:
    """Returns the sizes that steps are padded to: 1, 2, 4, 8, 12, 16, 24, 32, 48, 64 and so on, the last is `most`.

    From 8 rows on at most a third of a padded step is padding. More graphs would take longer to capture.
    """
    sizes = [1, 2, 4]
    power = 8
    while sizes[-1] < most:
        sizes += [power, power * 3 // 2]
        power *= 2
    return (*(size for size in sizes if size < most), most)


def adapters_of(batch: Batch, count: int) -> NDArray[np.int32]:
    """Returns the adapter of each row, [R]; `count` where a row uses none."""
    used = np.full(batch.rows, count, dtype=np.int32)
    if batch.adapters is not None:
        own = used[: len(batch.adapters)]  # padding uses none
        own[:] = np.where(batch.adapters == NO_ADAPTER, count, batch.adapters)
    return used


class StepGraphs:
    """Captures one graph for each size, at its first run or in `capture`.

    Args:
        sizes: ascending.
        work: runs a step of the given number of rows.
    """

    def __init__(self, accelerator: Accelerator, sizes: Sequence[int], work: Callable[[int], None]) -> None:
        self.sizes = sizes
        self.replays = 0
        self._accelerator = accelerator
        self._work = work
        self._graphs: dict[int, Graph] = {}

    def __len__(self) -> int:
        """Returns the number of captured graphs."""
        return len(self._graphs)

    @property
    def most_rows(self) -> int:
        return self.sizes[-1]

    def holds(self, size: int) -> bool:
        """Returns whether the graph of a size is captured."""
        return size in self._graphs

    def size_for(self, rows: int) -> int:
        """Returns the smallest size of at least `rows` rows, which are at most `most_rows`."""
        return self.sizes[bisect_left(self.sizes, rows)]

    def capture(self, size: int) -> None:
        if size not in self._graphs:
            self._graphs[size] = self._accelerator.capture(lambda: self._work(size))

    def run(self, size: int) -> None:
        """Runs one step of `size` rows."""
        self.capture(size)
        self._graphs[size].replay()
        self.replays += 1


Prepared = TypeVar("Prepared")


class GraphBackend(AttentionBackend[Prepared], Protocol[Prepared]):
    """An attention backend whose plans can be refilled at fixed addresses. The Triton one is `TritonBackend`."""

    def use_table(self, table: SlotTable) -> None:
        """Has plans of batches with `places` read the slots of keys from this table."""

    def reserve(self, window: Window, *, rows: int, wide: bool = False) -> Prepared:
        """Allocates a plan of one class for steps of at most `rows` rows, whose batches have `places`.

        wide: laid out for prefill, else for steps that mostly decode.
        """

    def plan_into(self, plan: Prepared, batch: Batch, window: Window) -> bool:
        """Fills a reserved plan with a step. False: it does not fit; a step that only decodes always fits."""


class GraphPlans:
    """Keeps one plan for each window class, refilled for each step.

    Args:
        rows: most rows of a step.
        wide: see `GraphBackend.reserve`.
    """

    # Any: each backend has its own prepared form, and only the backend reads it.
    def __init__(self, backend: GraphBackend[Any], windows: Sequence[Window], *, rows: int, wide: bool) -> None:
        self._backend = backend
        self.by_window = {window: backend.reserve(window, rows=rows, wide=wide) for window in windows}

    def fill(self, batch: Batch) -> bool:
        """Fills all plans with a step; False: one does not fit."""
        return all(self._backend.plan_into(plan, batch, window) for window, plan in self.by_window.items())


FEW_ROWS = 128  # steps of more rows are mostly prompts


@dataclass(frozen=True, slots=True)
class StepInputs:
    """The rows of one step, on the device."""

    token_ids: torch.Tensor  # int64 [R]
    positions: torch.Tensor  # int64 [R]
    write_slots: torch.Tensor  # int64 [R]
    window_write_slots: torch.Tensor  # int64 [R], in window layers
    # int64 [R], int32 [R], int32 [R]: see `RowEntries`. None: the plans have the slots of all keys.
    entries: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None
    output_rows: torch.Tensor | None  # int64 [O] ascending: what the last layer computes; None: all
    plans: dict[Window, Any]  # window class → prepared plan; Any: only the backend that made it reads it
    states: StepStates | None = None  # None: the model has no recurrent states
    adapters: torch.Tensor | None = None  # int32 [R], see `DeviceRows`
    rope_positions: torch.Tensor | None = None  # int64 [3, R], see `DeviceRows`


def graph_rows(limits: StepLimits) -> int:
    """Returns the most rows of a step that runs as a graph."""
    return min(limits.rows, limits.graph_rows)


def graph_plans(
    backend: GraphBackend[Any],  # Any: as in StepInputs
    windows: tuple[Window, ...],
    limits: StepLimits,
) -> tuple[GraphPlans, GraphPlans]:
    """Makes the plans for steps of few rows and for larger ones; they are the same if no step is larger."""
    most = graph_rows(limits)
    few = min(most, FEW_ROWS)
    small = GraphPlans(backend, windows, rows=few, wide=False)
    if most == few:
        return small, small
    return small, GraphPlans(backend, windows, rows=most, wide=True)


def graph_logits(limits: StepLimits) -> int:
    """Returns the most logit rows of a step that runs as a graph."""
    return min(limits.logits, graph_rows(limits))


class CapturedSteps:
    """Runs steps without pictures as captured graphs.

    Args:
        compute: the captured call; writes the logits of a step to the second argument.
        limits: the size of the largest step.
        states: the pool of recurrent states, whose last slot is that of padding; None: the model has none. With states
            steps are captured in which every row is a sequence: how runs of more rows are computed depends on them.
        adapters: their number; if there are some, every graph computes what they change.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        compute: Callable[[StepInputs, torch.Tensor], object],
        backend: GraphBackend[Any],  # Any: as in StepInputs
        windows: tuple[Window, ...],
        *,
        limits: StepLimits,
        vocab_size: int,
        states: StatePool | None = None,
        adapters: int = 0,
    ) -> None:
        if states is not None:
            limits = replace(limits, rows=min(limits.rows, limits.sequences))
        most, self._most_logits = graph_rows(limits), graph_logits(limits)
        self._states = states
        self._adapters = adapters
        self._compute = compute
        self._graphs = StepGraphs(accelerator, sizes_upto(most), self._work)
        self._small, self._large = graph_plans(backend, windows, limits)
        self._staging = Staging(accelerator, 9 * 8 * (most + 1) + 8 * (self._most_logits + 1))
        self._some_rows = Staging(accelerator, 8 * (self._most_logits + 1))
        self._inputs: dict[int, StepInputs] = {}  # by size, at the same addresses every time
        self._logits = torch.empty((self._most_logits, vocab_size), device=accelerator.device)

    @property
    def graphs(self) -> int:
        """Number of captured graphs."""
        return len(self._graphs)

    @property
    def replays(self) -> int:
        return self._graphs.replays

    def takes(self, batch: Batch) -> bool:
        logits = min(batch.rows, len(batch.logit_rows))
        if batch.pictures or batch.rope_positions is not None or batch.hidden_rows is not None:
            return False
        if batch.rows > self._graphs.most_rows or logits > self._most_logits:
            return False
        return batch.places is not None and (self._states is None or are_single_rows(batch.states))

    def run(
        self, batch: Batch, entries: RowEntries, resolve: Callable[[Batch, torch.Tensor], None]
    ) -> torch.Tensor | None:
        """Runs a step for which `takes` is True and returns its logits [L, vocab], which the next one overwrites.

        None: its rows attend to so many runs of keys that their plan does not fit.

        Args:
            entries: what its rows write to the table of slots.
            resolve: fills in token ids that are on the device only.
        """
        size = self._graphs.size_for(batch.rows)
        if self._states is not None:
            self.capture(size)
        if not self._send(padded(batch, size), entries):
            return None
        resolve(batch, self._inputs[size].token_ids)
        self._graphs.run(size)
        count = len(batch.logit_rows)
        if self._knows_rows(size) or count == batch.rows:
            return self._logits[:count]
        return self._logits.index_select(0, self._some_rows.send([batch.logit_rows])[0])

    @property
    def sizes(self) -> tuple[int, ...]:
        """The sizes of steps, the largest first: captured in this order, the smaller ones reuse its memory."""
        return tuple(reversed(self._graphs.sizes))

    def capture(self, size: int) -> None:
        """Captures a graph with rows of padding: a capture runs them, and would move the states of others twice."""
        if not self._graphs.holds(size):
            fits = self._send(idle(size), NO_ENTRIES)
            assert fits, "a row that sees its own key needs one item"
            self._graphs.capture(size)

    def _send(self, batch: Batch, rows: RowEntries) -> bool:
        size, wanted = batch.rows, np.zeros(0, dtype=np.int64)
        plans = self._plans_for(size)
        if not plans.fill(batch):
            return False
        if self._knows_rows(size):
            wanted = np.zeros(self._most_logits, dtype=np.int64)  # padding asks for a row again
            wanted[: len(batch.logit_rows)] = batch.logit_rows
        used = np.zeros(0, dtype=np.int32) if not self._adapters else adapters_of(batch, self._adapters)
        arrays: list[NDArray[np.generic]] = [batch.token_ids, batch.positions]
        arrays += [batch.write_slots, batch.write_slots_of(windowed=True), wanted, *self._state_slots(batch), used]
        arrays += [_longer(array, size - len(array)) for array in (rows.entries, rows.slots, rows.window_slots)]
        token_ids, positions, write_slots, window_writes, *sent = self._staging.send(arrays)
        logit_rows, sources, targets, adapters, entries, slots, window_slots = sent
        self._inputs[size] = StepInputs(
            token_ids,
            positions,
            write_slots,
            window_writes,
            (entries, slots, window_slots),
            logit_rows if self._knows_rows(size) else None,
            plans.by_window,
            None if self._states is None else StateRows(self._states, sources, targets),
            adapters if self._adapters else None,
        )
        return True

    def _state_slots(self, batch: Batch) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Returns the slots of the states before and after each row; padding begins with zeros, as a first token."""
        if self._states is None:
            return (np.zeros(0, dtype=np.int64),) * 2
        sources = np.full(batch.rows, NO_STATE, dtype=np.int64)
        targets = np.full(batch.rows, self._states.num_states - 1, dtype=np.int64)
        for row, run in enumerate(batch.states):
            sources[row], targets[row] = run.source, run.target
        return sources, targets

    def _plans_for(self, size: int) -> GraphPlans:
        return self._small if size <= FEW_ROWS else self._large

    def _knows_rows(self, size: int) -> bool:
        """Returns whether the graph reads the logit rows; if not, it computes the logits of all rows."""
        return size > self._most_logits

    def _work(self, size: int) -> None:
        self._compute(self._inputs[size], self._logits[:size])
