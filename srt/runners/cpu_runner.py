"""Runs steps on the native CPU kernels: a `batch.Runner` like `torch_runner.TorchRunner`, without torch in the step.

The decoder is one native call; then the head computes logits or a token for each row, as its RowNeed says.
"""

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from ...lang.runtime_options import Weights
from ..cache.kv_pool import KVGeometry, KVPool, PoolSize
from ..cache.pool_pages import PoolPages
from ..cache.state_pool import StatePool
from ..core.batch import Batch, Logits, LogitsError, RowNeed, RowRequests, isolate, without_pictures
from ..kernels.cpu.attention import HEAD_DIM_UNIT, CpuBackend
from ..kernels.cpu.head import CpuSampling
from ..kernels.cpu.library import isa_of
from ..kernels.cpu.recurrent import StateTable
from ..kernels.cpu.trie_walk import CpuTrieWalk
from ..layers.checkpoint import Tensors
from ..layers.config_values import Config
from ..layers.low_rank import Adapter
from ..models.cpu_decoder import CpuDecoder, CpuRows, PoolTable
from ..models.cpu_streams import MOST_STREAMS
from ..models.decoder_config import PARALLEL_STREAMS
from ..models.families import is_family, read_config
from ..multimodal.store import VisionStore
from ..sampling.sampler import choose_few
from ..weights.quantization import cpu_method
from .memory import room_for_step
from .torch_runner import LogitsBuffer

_LOGITS = int(RowNeed.LOGITS)


class CpuRunner:
    """A model on the native kernels, its KV pool and its attention.

    Args:
        model: the decoder.
        size: of the KV pool.
        num_states: size of the pool of recurrent states, that of zeros included; 0 for a model without.
        tree_attention: read the keys that sequences of a step share once.
        library: the kernels that `model` runs on.
        pictures: the store of pictures in prompts; None: the model reads text only.
    """

    def __init__(
        self,
        model: CpuDecoder,
        *,
        size: PoolSize,
        num_states: int = 0,
        tree_attention: bool,
        library: ctypes.CDLL,
        pictures: VisionStore | None = None,
    ) -> None:
        self.model = model
        self.pictures = pictures
        self.vocab_size = model.vocab_size
        self.context_length = model.context_length
        self.num_slots = size.slots
        self.num_states = num_states
        self.window_pool = size.window_pool(model.kv_geometry)
        self.pool = KVPool(model.kv_geometry, size, "cpu", library=library)
        self.pages = None if num_states else PoolPages(self.pool)
        self._table = PoolTable(self.pool)
        assert (model.state_geometry is None) == (num_states == 0), "a pool of states belongs to such a model"
        self.states: StatePool | None = None
        self._state_table: StateTable | None = None
        if model.state_geometry is not None:
            self.states = StatePool(model.state_geometry, num_states, torch.device("cpu"), library)
            self._state_table = StateTable(self.states)
        self._attention = CpuBackend(model.attention_geometry, library=library, tree_attention=tree_attention)
        self._library = library
        self.chooser = CpuSampling(library)
        self.trie_walk = CpuTrieWalk(library)
        self._hidden = self._latest_hidden = torch.empty((0, model.config.hidden_size))
        self._logits = LogitsBuffer(model.vocab_size, "cpu")
        self._no_logits = torch.empty((0, model.vocab_size))

    def forward(self, batch: Batch) -> Logits:
        """Runs one step. Logits lie in a buffer that the next step overwrites."""
        with room_for_step(batch.rows):
            return self._forward(batch)

    def _forward(self, batch: Batch) -> Logits:
        assert (batch.window_slots is None) == (self.window_pool is None), "slots outside a pool are never read"
        outputs = batch.outputs
        hidden = self._hidden_of(len(outputs))
        given = self.pictures.given(batch.pictures) if self.pictures is not None and batch.pictures else None
        token_ids = batch.token_ids if given is None else without_pictures(batch.token_ids)
        writes = [batch.write_slots_of(windowed=window is not None) for window in self.model.windows]
        rows = CpuRows(
            token_ids,
            batch.positions,
            writes,
            outputs,
            given,
            batch.adapters,
            batch.states,
            batch.rope_positions,
        )
        plans = [self._attention.plan(batch, window) for window in self.model.windows]
        self.model.forward(rows, plans, self._table, hidden, self._state_table)
        if batch.hidden_rows is None:
            return self._answer(hidden, batch.row_requests)
        logits = self._answer(_rows(hidden, np.searchsorted(outputs, batch.logit_rows)), batch.row_requests)
        vectors = hidden[torch.from_numpy(np.searchsorted(outputs, batch.hidden_rows))]
        return replace(logits, hidden=vectors.div_(self.model.config.logit_scale))  # which the final norm has

    def _hidden_of(self, rows: int) -> torch.Tensor:
        """Returns float32 [rows, hidden] of undefined content, in memory that earlier calls returned."""
        if rows != self._latest_hidden.shape[0]:
            if rows > len(self._hidden):
                self._hidden = torch.empty((2 * rows, self.model.config.hidden_size))
            self._latest_hidden = self._hidden[:rows]
        return self._latest_hidden

    def facts(self) -> dict[str, str | int | float]:
        head = self.model.head.counters
        return {
            "kernels": f"native {isa_of(self._library).value}",
            "weights": self.model.method.name,
            "state_bytes": 0 if self.states is None else self.num_states * self.states.geometry.bytes_per_slot,
            "keys_read": self._attention.counters.keys_read,
            "keys_saved": self._attention.counters.keys_saved,
            "screened_rows": head.rows - head.fallbacks if self.model.head.screens else 0,
            "screen_candidates": head.candidates,
            "screen_fallbacks": head.fallbacks,
            **(self.pictures.facts() if self.pictures is not None else {}),
        }

    def clear(self) -> None:
        self.pool.clear()
        self._table = PoolTable(self.pool)
        if self.states is not None:
            self.states.clear()
            self._state_table = StateTable(self.states)

    def _answer(self, hidden: torch.Tensor, row_requests: RowRequests | None) -> Logits:
        """Computes logits for the rows that want them, tokens for the others. hidden: [L, hidden]"""
        count, softcap = hidden.shape[0], self.model.config.logit_softcap
        if row_requests is None or softcap:  # capped logits may tie where these do not
            values = self.model.head.all(hidden, self._logits.take(count))
            return Logits.complete(torch.tanh(values.div_(softcap), out=values).mul_(softcap) if softcap else values)
        # Lists: the caches hold no code of numpy after a forward pass, and every function of it costs 5 to 20 µs anew.
        places, tokens, errors = [-1] * count, [-1] * count, dict[int, Exception]()
        whole = [row for row, kind in enumerate(row_requests.kinds.tolist()) if kind == _LOGITS]
        few = [row for row, allowed in row_requests.allowed.items() if allowed.few is not None]
        apart = {*whole, *few}
        for choose, rows in (
            (lambda some: [self._choose_few(hidden, row_requests, row) for row in some], few),
            (lambda some: self._choose(hidden, row_requests, some), [row for row in range(count) if row not in apart]),
        ):
            for row, answer in zip(rows, isolate(rows, choose), strict=True):
                if isinstance(answer, Exception):
                    errors[row] = answer
                elif answer < 0:
                    errors[row] = LogitsError()
                else:
                    tokens[row] = answer
        values = self._no_logits
        if whole:
            for place, row in enumerate(whole):
                places[row] = place
            values = self.model.head.all(_rows(hidden, np.array(whole)), self._logits.take(len(whole)))
        return Logits(values, np.array(places, dtype=np.int64), np.array(tokens, dtype=np.int64), errors)

    def _choose(self, hidden: torch.Tensor, row_requests: RowRequests, rows: Sequence[int]) -> list[int]:
        """Chooses a token for each row; −1 where its logits are not numbers."""
        if len(rows) < hidden.shape[0]:
            some = np.array(rows)
            hidden, row_requests = _rows(hidden, some), row_requests.take(some)
        tokens: list[int] = self.model.head.choose(hidden, row_requests).tokens.tolist()
        return tokens

    def _choose_few(self, hidden: torch.Tensor, row_requests: RowRequests, row: int) -> int:
        few = row_requests.allowed[row].few
        assert few is not None, "called for rows that choose among few tokens"
        return choose_few(self.model.head.some(hidden[row : row + 1], few)[0].numpy(), few, row_requests, row)


def _rows(hidden: torch.Tensor, rows: NDArray[np.integer]) -> torch.Tensor:
    return hidden if len(rows) == len(hidden) else hidden[torch.from_numpy(rows)]


def obstacle(config: Config, *, dtype: torch.dtype, device: torch.device) -> str | None:
    """Returns why the native kernels cannot run this model here, as a clause; None when they can."""
    if device.type != "cpu":
        return f"they run on the CPU, not on {device}"
    if not is_family(config):
        return f"{config.get('model_type')!r} runs in transformers"
    if dtype not in (torch.float32, torch.bfloat16):
        return f"the KV pool would be {dtype}; write float32 or bfloat16"
    model = read_config(config)
    if model.streams is not None and model.streams.count > MOST_STREAMS:
        return f"they have at most {MOST_STREAMS} {PARALLEL_STREAMS}, not {model.streams.count}"
    for layer in model.kv_geometry(dtype).layers:
        if layer.head_dim % HEAD_DIM_UNIT or layer.value_dim % HEAD_DIM_UNIT:
            sizes = sorted({layer.head_dim, layer.value_dim})
            return f"head_dim={' and '.join(map(str, sizes))} is no multiple of {HEAD_DIM_UNIT}"
    return None


def build_cpu_runner(
    config: Config,
    tensors: Tensors,
    *,
    library: ctypes.CDLL,
    size: Callable[[KVGeometry], PoolSize],
    dtype: torch.dtype,
    weights: Weights,
    tree_attention: bool,
    screened_head: bool,
    num_states: Callable[[CpuDecoder, int], int] = lambda model, slots: 0,
    pictures: VisionStore | None = None,
    adapters: Sequence[Adapter] = (),
) -> CpuRunner:
    """Packs the weights and makes the pool.

    Args:
        size: computes the size of the pool from the geometry of one token.
        num_states: computes the size of the pool of recurrent states from the size of the KV pool.
        dtype: of the KV pool.
        weights: "auto", "float32", "bf16", "int8" or "int4"; "auto" keeps what the checkpoint stores.

    Raises:
        ModelError: configuration or tensors that cannot be used.
        EngineError: there is too little memory for the weights.
    """
    method = cpu_method(weights, library, exact=dtype is torch.float32)
    model = CpuDecoder(
        read_config(config),
        tensors,
        method=method,
        head_method=method.of_head,
        kv_dtype=dtype,
        screened=screened_head,
        library=library,
        adapters=adapters,
    )
    pool = size(model.kv_geometry)
    return CpuRunner(
        model,
        size=pool,
        num_states=num_states(model, pool.slots),
        tree_attention=tree_attention,
        library=library,
        pictures=pictures,
    )
