"""Ragged random batches and a dense float32 loop: the oracle of every attention backend."""

from dataclasses import dataclass

import numpy as np
import torch
from hypothesis import strategies
from umbel.srt.attention.backend import AttentionGeometry
from umbel.srt.batch import DUMMY_SLOT, Batch
from umbel.srt.kv_pool import KVGeometry, KVPool

HEADS = AttentionGeometry(heads=6, kv_heads=2, head_dim=8)


@dataclass(frozen=True)
class Sequence:
    prefix: int
    query: int
    cached: bool = False  # the key of its only row is in the pool already


sequences = strategies.lists(
    strategies.one_of(
        strategies.builds(Sequence, prefix=strategies.integers(0, 40), query=strategies.just(1)),  # decode
        strategies.builds(Sequence, prefix=strategies.integers(0, 40), query=strategies.integers(1, 25)),  # extend
        strategies.builds(
            Sequence, prefix=strategies.integers(0, 20), query=strategies.just(1), cached=strategies.just(True)
        ),
    ),
    min_size=1,
    max_size=6,
)


def make_batch(parts: list[Sequence], seed: int, *, shared: int = 0) -> tuple[Batch, int]:
    """Scattered slots; the first `shared` positions are the same slots in all sequences. Also the pool's size."""
    rng = np.random.default_rng(seed)
    total = 1 + sum(part.prefix + part.query for part in parts)
    free = rng.permutation(np.arange(1, total)).astype(np.int32)
    slots: list[np.ndarray] = []
    taken = 0
    for part in parts:
        length = part.prefix + part.query
        own = free[taken : taken + length]
        taken += length
        if slots:
            common = min(shared, part.prefix, len(slots[0]))
            own = np.concatenate([slots[0][:common], own[common:]])
        slots.append(own)
    writes = [
        np.full(part.query, DUMMY_SLOT) if part.cached else own[part.prefix :]
        for part, own in zip(parts, slots, strict=True)
    ]
    rows = sum(part.query for part in parts)
    batch = Batch(
        token_ids=np.zeros(rows, dtype=np.int64),
        positions=np.concatenate([np.arange(part.prefix, part.prefix + part.query) for part in parts]),
        write_slots=np.concatenate(writes).astype(np.int64),
        query_lengths=np.array([part.query for part in parts], dtype=np.int32),
        prefix_lengths=np.array([part.prefix for part in parts], dtype=np.int32),
        slots=tuple(slots),
        logit_rows=np.arange(rows),
    )
    return batch, total


def random_pool(num_slots: int, geometry: AttentionGeometry, dtype: torch.dtype, seed: int) -> KVPool:
    """One layer, full of values; the dummy slot holds NaN, which must reach nobody."""
    pool = KVPool(KVGeometry(1, geometry.kv_heads, geometry.head_dim, dtype), num_slots, "cpu")
    generator = torch.Generator().manual_seed(seed)
    for part in (pool.keys[0], pool.values[0]):
        part.copy_(torch.randn(part.shape, generator=generator))
        part[DUMMY_SLOT] = float("nan")
    return pool


def dense_attention(
    batch: Batch, pool: KVPool, queries: torch.Tensor, *, window: int | None, scale: float, softcap: float
) -> torch.Tensor:
    """Row by row and head by head, float32, from the definition."""
    group = queries.shape[1] // pool.geometry.kv_heads
    result = torch.empty(queries.shape)
    row = 0
    for slots, prefix, count in zip(batch.slots, batch.prefix_lengths, batch.query_lengths, strict=True):
        for position in range(prefix, prefix + count):
            first = 0 if window is None else max(0, position - window + 1)
            seen = torch.from_numpy(slots[first : position + 1].astype(np.int64))
            for head in range(queries.shape[1]):
                keys = pool.keys[0][seen, head // group].float()
                logits = keys @ queries[row, head].float() * scale
                if softcap:
                    logits = softcap * torch.tanh(logits / softcap)
                result[row, head] = logits.softmax(0) @ pool.values[0][seen, head // group].float()
            row += 1
    return result
