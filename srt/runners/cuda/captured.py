"""Steps as captured graphs: what they read and write lies at addresses that stay.

Launched kernel by kernel, a step of some hundred rows takes the host longer than the device: measured for 8 billion
parameters, 25 to 30 ms beside 7 to 20. A plan of attention says which rows belong together, and the kernels read it
from memory; so what a graph knows of a step is its number of rows, and a step that decodes, one that computes a prompt
and one that jumps ahead run as the same graph.

inputs    | token ids | positions | write slots | logit rows |  one place for all sizes: steps follow each other
plans     of each window class                                 plans.py
pool      keys and values                                      kv_pool.py, `fixed`
logits    | row 0 | row 1 | …                                  float32, the first ones of a step of any size

Steps of at most as many rows as there are logits get the logits of all of their rows, larger ones of those asked for.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ...core.batch import Batch
from .device import Accelerator
from .graphs import StepGraphs, sizes_upto
from .memory import StepLimits
from .padding import idle, padded
from .plans import GraphBackend, GraphPlans
from .staging import Staging

MOST_ROWS = 1024  # more rows than that keep a device busy without graphs
FEW_ROWS = 128  # steps of more rows are mostly prompts


@dataclass(frozen=True, slots=True)
class StepInputs:
    """The rows of one step, on the device."""

    token_ids: torch.Tensor  # int64 [R]
    positions: torch.Tensor  # int64 [R]
    write_slots: torch.Tensor  # int64 [R]
    logit_rows: torch.Tensor | None  # int64 [L] ascending; None: all
    plans: dict[int | None, Any]  # window class → prepared plan; Any: only the backend that made it reads it


def graph_rows(limits: StepLimits) -> int:
    """Most rows of a step that runs as a graph."""
    return min(limits.rows, MOST_ROWS)


def graph_plans(
    backend: GraphBackend[Any],  # Any: as in StepInputs
    windows: tuple[int | None, ...],
    limits: StepLimits,
    context_length: int,
) -> tuple[GraphPlans, GraphPlans]:
    """For steps of few rows, and for steps of more: the same where there are no more."""
    most = graph_rows(limits)
    few = min(most, FEW_ROWS)
    small = GraphPlans(backend, windows, rows=few, keys=few * context_length, wide=False)
    if most == few:
        return small, small
    return small, GraphPlans(backend, windows, rows=most, keys=most * context_length, wide=True)


def graph_logits(limits: StepLimits) -> int:
    """Most rows of logits of such a step. They stay where they are."""
    return min(limits.logits, graph_rows(limits))


class CapturedSteps:
    """Runs steps that show no pictures.

    Args:
        compute: what is captured: the logits of a step, written to the second argument.
        limits: the largest step that there will be.
        context_length: most keys of one row.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        compute: Callable[[StepInputs, torch.Tensor], None],
        backend: GraphBackend[Any],  # Any: as in StepInputs
        windows: tuple[int | None, ...],
        *,
        limits: StepLimits,
        context_length: int,
        vocab_size: int,
    ) -> None:
        most, self._most_logits = graph_rows(limits), graph_logits(limits)
        self._compute = compute
        self._graphs = StepGraphs(accelerator, sizes_upto(most), self._work)
        self._small, self._large = graph_plans(backend, windows, limits, context_length)
        self._staging = Staging(accelerator, 3 * 8 * (most + 1) + 8 * (self._most_logits + 1))
        self._some_rows = Staging(accelerator, 8 * (self._most_logits + 1))
        self._inputs: dict[int, StepInputs] = {}  # by size, at the same addresses every time
        self._logits = torch.empty((self._most_logits, vocab_size), device=accelerator.device)

    @property
    def graphs(self) -> int:
        """How many are captured."""
        return len(self._graphs)

    @property
    def replays(self) -> int:
        return self._graphs.replays

    def takes(self, batch: Batch) -> bool:
        logits = min(batch.rows, len(batch.logit_rows))
        if batch.pictures or batch.rows > self._graphs.most_rows or logits > self._most_logits:
            return False
        return self._plans_for(self._graphs.size_for(batch.rows)).holds(batch)

    def run(self, batch: Batch, resolve: Callable[[Batch, torch.Tensor], None]) -> torch.Tensor | None:
        """Logits [L, vocab] of a step that it takes, in memory that the next one overwrites. None: its rows see so many
        runs of keys that their plan does not fit.

        resolve: fills in token ids that are on the device only.
        """
        size = self._graphs.size_for(batch.rows)
        if not self._send(padded(batch, size)):
            return None
        resolve(batch, self._inputs[size].token_ids)
        self._graphs.run(size)
        count = len(batch.logit_rows)
        if self._knows_rows(size) or count == batch.rows:
            return self._logits[:count]
        return self._logits.index_select(0, self._some_rows.send([batch.logit_rows])[0])

    def capture_all(self) -> None:
        """Now; otherwise each graph is captured by the first step of its size.

        Largest first: the smaller ones find their memory in what it took.
        """
        for size in reversed(self._graphs.sizes):
            fits = self._send(idle(size))
            assert fits, "a row that sees its own key needs one item"
            self._graphs.capture(size)

    def _send(self, batch: Batch) -> bool:
        size, wanted = batch.rows, np.zeros(0, dtype=np.int64)
        plans = self._plans_for(size)
        if not plans.fill(batch):
            return False
        if self._knows_rows(size):
            wanted = np.zeros(self._most_logits, dtype=np.int64)  # padding asks for a row again
            wanted[: len(batch.logit_rows)] = batch.logit_rows
        sent = self._staging.send([batch.token_ids, batch.positions, batch.write_slots, wanted])
        token_ids, positions, write_slots, logit_rows = sent
        self._inputs[size] = StepInputs(
            token_ids, positions, write_slots, logit_rows if self._knows_rows(size) else None, plans.by_window
        )
        return True

    def _plans_for(self, size: int) -> GraphPlans:
        return self._small if size <= FEW_ROWS else self._large

    def _knows_rows(self, size: int) -> bool:
        """The graph is told which rows' logits are wanted; else it gives those of all."""
        return size > self._most_logits

    def _work(self, size: int) -> None:
        self._compute(self._inputs[size], self._logits[:size])
