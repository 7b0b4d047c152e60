"""Runs steps in torch. Owns the model, its KV pool and its attention backend."""

from typing import Any

import torch

from ..attention.backend import AttentionBackend, AttentionStep, TorchBackend
from ..cache.kv_pool import KVPool, PoolSize
from ..cache.pool_pages import PoolPages
from ..cache.state_pool import StatePool, StateStep
from ..core.batch import Batch, Logits, without_pictures
from ..layers.low_rank import AdapterRows
from ..models.decoder import Model, Rows, attention_geometry
from ..multimodal.store import VisionStore
from .memory import room_for_step

KEPT_BYTES = 256 << 20  # a larger buffer is freed after its step


class LogitsBuffer:
    """Keeps one growing buffer for logits: allocating it for every step would cost milliseconds of page faults."""

    def __init__(self, vocab_size: int, device: torch.device | str) -> None:
        self._buffer = torch.empty((0, vocab_size), device=device)

    def take(self, rows: int) -> torch.Tensor:
        """Returns float32 [rows, vocab] of undefined content, in the memory that earlier calls returned."""
        vocab_size = self._buffer.shape[1]
        if rows > len(self._buffer) or self._buffer.nbytes > KEPT_BYTES:
            kept = min(max(2 * len(self._buffer), 8), KEPT_BYTES // (vocab_size * 4))
            self._buffer = torch.empty((max(rows, kept), vocab_size), device=self._buffer.device)
        return self._buffer[:rows]


class TorchRunner:
    """A `batch.Runner` around a model in torch.

    Args:
        model: the model.
        num_slots: size of the KV pool, the dummy slot included.
        window_slots: size of the pool of layers with a window, the dummy slot included; 0: they have no own pool.
        num_states: size of the pool of recurrent states, that of zeros included; 0 for a model without.
        backend: attention kernels; None: in torch.
        pictures: the store of pictures in prompts; None: the model reads text only.
        kv_dtype: of the KV pool; None: that of the model.
        weights: the name of their format, for the facts; None: floats of the model's dtype.
    """

    chooser = None
    trie_walk = None

    def __init__(
        self,
        model: Model,
        *,
        num_slots: int,
        window_slots: int = 0,
        num_states: int = 0,
        # Any: each backend prepares plans in its own form, and only the backend reads it.
        backend: AttentionBackend[Any] | None = None,
        pictures: VisionStore | None = None,
        kv_dtype: torch.dtype | None = None,
        weights: str | None = None,
    ) -> None:
        self.model = model
        self.pictures = pictures
        self.vocab_size = model.vocab_size
        self.context_length = model.context_length
        size = PoolSize(num_slots, window_slots)
        self.num_slots = num_slots
        self.window_pool = size.window_pool(model.kv_geometry)
        self.num_states = num_states
        assert (model.state_geometry is None) == (num_states == 0), "a pool of states belongs to such a model"
        self.states: StatePool | None = None
        if model.state_geometry is not None:
            self.states = StatePool(model.state_geometry, num_states, model.device)
        self.pool = KVPool(model.kv_geometry.rounded_to(kv_dtype), size, model.device)
        self.pages = None if num_states else PoolPages(self.pool)
        self.backend: AttentionBackend[Any] = backend or TorchBackend(attention_geometry(model), model.device)
        self._logits = LogitsBuffer(self.vocab_size, model.device)
        self._weights = weights or str(model.kv_geometry.dtype).removeprefix("torch.")

    def forward(self, batch: Batch) -> Logits:
        """Runs one step and returns all logits of every logit row, in a buffer that the next step overwrites."""
        with room_for_step(batch.rows, torch.cuda.empty_cache):  # which does nothing where there is no GPU
            return self._forward(batch)

    def _forward(self, batch: Batch) -> Logits:
        assert (batch.window_slots is None) == (self.window_pool is None), "slots outside a pool are never read"
        device = self.model.device
        out = self._logits.take(len(batch.logit_rows))  # outside inference mode: a sampler may write to it
        with torch.inference_mode():
            given = self.pictures.given(batch.pictures) if self.pictures is not None and batch.pictures else None
            token_ids = batch.token_ids if given is None else without_pictures(batch.token_ids)
            attention = AttentionStep(
                backend=self.backend,
                pool=self.pool,
                plans={window: self.backend.plan(batch, window) for window in self.model.windows},
                write_slots=torch.from_numpy(batch.write_slots).to(device),
                window_write_slots=None
                if batch.window_write_slots is None
                else torch.from_numpy(batch.window_write_slots).to(device),
            )
            rows = Rows(
                token_ids=torch.from_numpy(token_ids).to(device),
                positions=torch.from_numpy(batch.positions).to(device),
                logit_rows=torch.from_numpy(batch.logit_rows).to(device),
                given=given,
                rope_positions=None
                if batch.rope_positions is None
                else torch.from_numpy(batch.rope_positions).to(device),
                adapted=AdapterRows.of(batch.adapters),
                states=None if self.states is None else StateStep(self.states, batch.states),
                hidden_rows=None if batch.hidden_rows is None else torch.from_numpy(batch.hidden_rows).to(device),
            )
            hidden = self.model.forward(rows, attention, out=out)
            return Logits.complete(out, None if hidden is None else hidden.float())

    def facts(self) -> dict[str, str | int | float]:
        return {
            "kernels": "torch",
            "weights": self._weights,
            "kv_dtype": str(self.pool.geometry.dtype).removeprefix("torch."),
            "state_bytes": 0 if self.states is None else self.num_states * self.states.geometry.bytes_per_slot,
            "keys_read": self.backend.counters.keys_read,
            "keys_saved": self.backend.counters.keys_saved,
            **(self.pictures.facts() if self.pictures is not None else {}),
        }

    def clear(self) -> None:
        self.pool.clear()
        if self.states is not None:
            self.states.clear()
