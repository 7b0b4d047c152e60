"""Small steps as captured graphs: what they read and write lies at addresses that stay.

Launched kernel by kernel, a step of few rows takes the host longer than the device. A plan of attention says which rows
belong together, and the kernels read it from memory; so what a graph knows of a step is its number of rows, and a step
that decodes, one that computes the short text between two answers and one that jumps ahead run as the same graph.

inputs    | token ids | positions | write slots |  one place for all sizes: steps come one after another
plans     of each window class                     plans.py
pool      keys and values                          kv_pool.py, `fixed`
logits    | row 0 | row 1 | …                      float32, the first rows of a step of any size
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ..batch import Batch
from .device import Accelerator
from .graphs import DecodeGraphs, sizes_upto
from .padding import idle, padded
from .plans import GraphBackend, GraphPlans
from .staging import Staging

MOST_ROWS = 512  # more rows than that keep a device busy without graphs


@dataclass(frozen=True, slots=True)
class StepInputs:
    """The rows of one step, on the device."""

    token_ids: torch.Tensor  # int64 [R]
    positions: torch.Tensor  # int64 [R]
    write_slots: torch.Tensor  # int64 [R]
    plans: dict[int | None, Any]  # window class → prepared plan; Any: only the backend that made it reads it


def graph_rows(max_running: int) -> int:
    """Most rows of a step that runs as a graph: they all have logits that stay where they are."""
    return min(max_running, MOST_ROWS)


class CapturedDecodes:
    """Runs steps of few rows that show no pictures.

    Args:
        compute: what is captured: all logits of a step, written to the second argument.
        max_running: most sequences of a step, and most rows of one that runs as a graph.
        context_length: most keys of one row.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        compute: Callable[[StepInputs, torch.Tensor], None],
        backend: GraphBackend[Any],  # Any: as in StepInputs
        windows: tuple[int | None, ...],
        *,
        max_running: int,
        context_length: int,
        vocab_size: int,
    ) -> None:
        sizes = sizes_upto(graph_rows(max_running))
        most = sizes[-1]
        self._compute = compute
        self._graphs = DecodeGraphs(accelerator, sizes, self._work)
        self._plans = GraphPlans(backend, windows, rows=most, keys=most * context_length)
        self._staging = Staging(accelerator, 3 * 8 * (most + 1))
        self._logit_rows = Staging(accelerator, 8 * (most + 1))
        self._inputs: dict[int, StepInputs] = {}  # by size, at the same addresses every time
        self._logits = torch.empty((most, vocab_size), device=accelerator.device)

    @property
    def graphs(self) -> int:
        """How many are captured."""
        return len(self._graphs)

    @property
    def replays(self) -> int:
        return self._graphs.replays

    def takes(self, batch: Batch) -> bool:
        return not batch.pictures and batch.rows <= self._graphs.most_rows and self._plans.holds(batch)

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
        logits = self._logits[: batch.rows]
        if len(batch.logit_rows) == batch.rows:
            return logits
        return logits.index_select(0, self._logit_rows.send([batch.logit_rows])[0])

    def capture_all(self) -> None:
        """Now; otherwise each graph is captured by the first step of its size.

        Largest first: the smaller ones find their memory in what it took.
        """
        for size in reversed(self._graphs.sizes):
            fits = self._send(idle(size))
            assert fits, "a row that sees its own key needs one item"
            self._graphs.capture(size)

    def _send(self, batch: Batch) -> bool:
        if not self._plans.fill(batch):
            return False
        token_ids, positions, write_slots = self._staging.send([batch.token_ids, batch.positions, batch.write_slots])
        self._inputs[batch.rows] = StepInputs(token_ids, positions, write_slots, self._plans.by_window)
        return True

    def _work(self, size: int) -> None:
        self._compute(self._inputs[size], self._logits[:size])
