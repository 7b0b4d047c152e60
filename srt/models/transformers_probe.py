"""Tests whether a model of transformers can run on the KV pool: records its attention, then compares logits."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.nn import functional

from ...lang.errors import ModelError
from ..attention.backend import AttentionStep
from ..attention.torch_backend import TorchBackend
from ..cache.kv_pool import KVPool
from ..core.batch import Batch
from .model import Rows, attention_geometry

if TYPE_CHECKING:
    from .transformers_model import TransformersModel

LONGEST_PROBE = 64  # tokens; a window wider than this is taken as the model states it
TOLERANCES = {torch.float32: 1e-3, torch.float16: 0.03, torch.bfloat16: 0.1}  # relative to the largest logit


@dataclass(frozen=True, slots=True)
class AttentionRecord:
    """The attention of a model, as recorded from the calls of its layers."""

    layers: tuple[int, ...]  # the numbers the model gives its attention layers
    heads: int
    kv_heads: int
    head_dim: int
    windows: tuple[int | None, ...]


class Recorder:
    """Stands in for a step: records shapes and windows of each layer, and attends within the given rows only."""

    def __init__(self) -> None:
        self._shapes: set[tuple[int, int, int, int]] = set()  # heads, kv_heads, key and value head_dim
        self._window_of: dict[int, int | None] = {}

    def attend(
        self,
        layer: int,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        *,
        window: int | None,
        scale: float,
        softcap: float,
    ) -> torch.Tensor:
        if layer in self._window_of:
            raise ModelError(f"it attends more than once in layer {layer}")
        self._window_of[layer] = window
        self._shapes.add((queries.shape[1], keys.shape[1], keys.shape[2], values.shape[2]))
        query, key, value = (tensor.transpose(0, 1) for tensor in (queries, keys, values))
        attended = functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scale, enable_gqa=True
        )
        return attended.transpose(0, 1)

    def record(self, config: Any) -> AttentionRecord:  # Any: transformers is untyped
        if not self._window_of:
            raise ModelError("it never called for attention")
        if len(self._shapes) > 1:
            raise ModelError(f"its layers differ in heads (heads, kv heads, key size, value size): {self._shapes}")
        heads, kv_heads, head_dim, value_dim = next(iter(self._shapes))
        if head_dim != value_dim:
            raise ModelError(f"keys have {head_dim} numbers per head, values {value_dim}")
        for layer, kind in enumerate(getattr(config, "layer_types", None) or ()):
            stated = self._window_of.get(layer)
            if kind == "sliding_attention" and stated is None:
                raise ModelError(f"layer {layer} has a sliding window that it does not pass to its attention")
            if kind not in ("sliding_attention", "full_attention"):
                raise ModelError(f"layer {layer} is of type {kind!r}, which has no KV cache of ours")
        return AttentionRecord(
            layers=tuple(sorted(self._window_of)),
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            windows=tuple(dict.fromkeys(self._window_of.values())),
        )


def check_logits(model: "TransformersModel", module: Any, name: str) -> None:
    """Compares two sequences, interleaved and in pieces, with transformers' own attention on each of them whole.

    `name`: of umbel's attention function. Any: transformers is untyped.
    """
    narrow = [window for window in model.windows if window is not None and window < LONGEST_PROBE - 4]
    length = min(max([9, *(window + 4 for window in narrow)]), model.context_length)
    generator = np.random.default_rng(0)
    sequences = [generator.integers(0, model.vocab_size, count) for count in (length, max(length - 2, 1))]

    module.set_attn_implementation("eager")
    try:
        expected = [
            module(input_ids=torch.from_numpy(ids)[None].to(model.device), use_cache=False).logits[0].float()
            for ids in sequences
        ]
    finally:
        module.set_attn_implementation(name)

    cuts = [length // 2, length // 3]
    steps = [
        [(ids, 0, cut) for ids, cut in zip(sequences, cuts, strict=True)],
        [(ids, cut, len(ids)) for ids, cut in zip(sequences, cuts, strict=True)],
    ]
    pool = KVPool(model.kv_geometry, 1 + sum(map(len, sequences)), model.device)
    actual = [_run(model, pool, step) for step in steps]
    for index, logits in enumerate(expected):
        joined = torch.cat([step[index] for step in actual])
        error = float((joined - logits).abs().max() / logits.abs().max())
        if not error <= TOLERANCES[model.kv_geometry.dtype]:  # NaN fails as well
            raise ModelError(
                f"its logits on our KV pool differ from transformers' own by {error:.1%}; "
                "it keeps state besides keys and values, or its attention is not plain causal attention"
            )


def _run(
    model: "TransformersModel", pool: KVPool, pieces: Sequence[tuple[np.ndarray[Any, Any], int, int]]
) -> list[torch.Tensor]:
    """Runs rows [start, end) of each sequence in one step. Any: the shape and type parameters of an array."""
    first_slot = np.cumsum([1] + [len(ids) for ids, _, _ in pieces])
    slots = [
        np.arange(first, first + end, dtype=np.int32)
        for first, (_, _, end) in zip(first_slot.tolist(), pieces, strict=False)
    ]
    counts = [end - start for _, start, end in pieces]
    batch = Batch(
        token_ids=np.concatenate([ids[start:end] for ids, start, end in pieces]),
        positions=np.concatenate([np.arange(start, end) for _, start, end in pieces]),
        write_slots=np.concatenate([run[start:] for run, (_, start, _) in zip(slots, pieces, strict=True)]).astype(
            np.int64
        ),
        query_lengths=np.array(counts, dtype=np.int32),
        prefix_lengths=np.array([start for _, start, _ in pieces], dtype=np.int32),
        slots=tuple(slots),
        logit_rows=np.arange(sum(counts)),
    )
    backend = TorchBackend(attention_geometry(model), model.device)
    step = AttentionStep(
        backend=backend,
        pool=pool,
        plans={window: backend.plan(batch, window) for window in model.windows},
        write_slots=torch.from_numpy(batch.write_slots).to(model.device),
    )
    rows = Rows(
        token_ids=torch.from_numpy(batch.token_ids).to(model.device),
        positions=torch.from_numpy(batch.positions).to(model.device),
        logit_rows=torch.from_numpy(batch.logit_rows).to(model.device),
    )
    out = torch.empty((sum(counts), model.vocab_size), device=model.device)
    return list(torch.split(model.forward(rows, step, out=out), counts))
