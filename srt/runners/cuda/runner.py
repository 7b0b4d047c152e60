"""Runs steps on a CUDA device, as a `batch.AsyncRunner`.

The host packs a step; the device fills in tokens, runs the forward pass and chooses tokens.

    host    plan, pack ─┐                        plan, pack ─┐                       read the tokens of step 1
    device              └ copy │ step 1 │ choose │ copy ──►   └ copy │ step 2 │ choose │ copy ──►
                                     '── chosen tokens ────────────────►'  for rows whose token step 1 chose

Steps are padded to one of a few sizes and run as captured graphs. The largest steps and those with pictures are
launched kernel by kernel. All work goes through one stream, so a step reads what earlier steps have written, and the
host may enqueue copies to a step's buffers while the previous step still runs.
"""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ....fsm.tokens.masks import Walk
from ...attention.backend import AttentionStep
from ...cache.kv_pool import KVPool
from ...core.batch import Batch, Logits
from ...core.image_token_ids import without_pictures
from ...core.model import Given
from ...distributed.communicator import SINGLE_RANK, Communicator
from ...multimodal.store import VisionStore
from .answers import Answer, Answers, ChosenTokens, DeviceChooser
from .decoder import CudaDecoder, DeviceRows
from .device import Accelerator, Staging
from .graphs import CapturedSteps, GraphBackend, StepInputs
from .memory import StepLimits


class CudaRunner:
    """A model, its KV pool and the device that they are on.

    Args:
        model: what to run.
        accelerator: the device.
        name: of the kernels, for `facts`.
        num_slots: size of the KV pool, the dummy slot included.
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
        model: CudaDecoder,
        accelerator: Accelerator,
        *,
        name: str,
        num_slots: int,
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
        self.num_slots = num_slots
        self.pool = KVPool(model.kv_geometry, num_slots, accelerator.device, fixed=True)
        self._communicator = communicator
        self._name = name
        self._accelerator = accelerator
        self._device = accelerator.device
        self._backend = backend
        self._staging = Staging(accelerator, 1 << 16)
        self._sources_staging = Staging(accelerator, 1 << 12)
        self._answers = Answers(accelerator, chooser)
        self._chosen: ChosenTokens | None = None  # by the step that was launched last
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
                context_length=min(model.context_length, num_slots),
                vocab_size=model.vocab_size,
            )

    # ------------------------------------------------------------------------------------------ a step

    def launch(self, batch: Batch) -> Answer:
        """Launches a step, and returns while it runs."""
        self._accelerator.use()
        captured = self._captured
        replayed = captured.run(batch, self._resolve) if captured is not None and captured.takes(batch) else None
        logits = self._run(batch) if replayed is None else replayed
        answer = self._answers.begin(logits, batch.row_requests, began=self._began, kept=replayed is None)
        self._chosen = answer.chosen
        return answer

    def forward(self, batch: Batch) -> Logits:
        """Runs one step and waits for it."""
        return self.launch(batch).result()

    def capture_graphs(self) -> None:
        """Captures all graphs. Called before the first step, so that no step waits for a capture."""
        if self._captured is not None:
            self._captured.capture_all()

    def facts(self) -> dict[str, str | int | float]:
        captured = self._captured
        return {
            "kernels": self._name,
            "weights": _name(self.model.dtype),
            "kv_dtype": _name(self.model.kv_geometry.dtype),
            "keys_read": self._backend.counters.keys_read,
            "keys_saved": self._backend.counters.keys_saved,
            "graphs": captured.graphs if captured else 0,
            "graph_replays": captured.replays if captured else 0,
            "eager_steps": self._eager_steps,
            "device_seconds": self._answers.device_seconds,
            **(self.pictures.facts() if self.pictures is not None else {}),
        }

    def clear(self) -> None:
        self.pool.clear()

    # ------------------------------------------------------------------------------------------ how

    def _run(self, batch: Batch) -> torch.Tensor:
        """Runs any step kernel by kernel, and returns its logits in new memory."""
        self._eager_steps += 1
        given = None
        token_ids = batch.token_ids
        if self.pictures is not None and batch.pictures:
            with torch.inference_mode():
                given = self.pictures.given(batch.pictures)
            token_ids = without_pictures(token_ids)
        arrays = [token_ids, batch.positions, batch.write_slots, batch.logit_rows]
        ids, positions, write_slots, logit_rows = self._staging.send(arrays)
        plans = {window: self._backend.plan(batch, window) for window in self.model.windows}
        every = len(batch.logit_rows) == batch.rows
        inputs = StepInputs(ids, positions, write_slots, None if every else logit_rows, plans)
        self._resolve(batch, inputs.token_ids)
        # Outside inference mode: a sampler may write to it.
        out = torch.empty((len(batch.logit_rows), self.vocab_size), device=self._device)
        self._compute(inputs, given, out)
        return out

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
        assert self._chosen is not None, "a step was launched before"
        places = self._chosen.places[logit_rows]
        assert places.min() >= 0, "the step before chooses a token for each row that is asked for"
        targets, sources = self._sources_staging.send([rows, places])
        # A token is −1 where none could be chosen. That text ends; its row in this step only needs a valid id.
        token_ids.index_copy_(0, targets, self._chosen.tokens.index_select(0, sources).clamp_min_(0))

    def _compute(self, inputs: StepInputs, given: Given | None, out: torch.Tensor) -> None:
        attention = AttentionStep(
            backend=self._backend, pool=self.pool, plans=inputs.plans, write_slots=inputs.write_slots
        )
        with torch.inference_mode():
            self.model.forward(
                DeviceRows(inputs.token_ids, inputs.positions, inputs.logit_rows, given), attention, out=out
            )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
