"""Ragged random batches and a dense float32 loop: the oracle of every attention backend."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import torch
from hypothesis import strategies
from umbel.srt.attention.backend import AttentionGeometry
from umbel.srt.attention.plan import BothWays, Chunk, Window
from umbel.srt.cache.kv_pool import KVGeometry, KVPool, LayerKV
from umbel.srt.core.batch import DUMMY_SLOT, Batch

HEADS = AttentionGeometry(heads=6, kv_heads=2, head_dim=8)


@dataclass(frozen=True)
class Sequence:
    prefix: int
    query: int
    cached: bool = False  # the key of its only row is in the pool already


# Windows that slide, chunks, and neither.
windows = strategies.one_of(
    strategies.none(), strategies.integers(1, 30), strategies.builds(Chunk, strategies.integers(1, 30))
)
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


@dataclass(frozen=True)
class Branch:
    """Begins as a copy of an earlier branch, goes on with tokens of its own. Its last `query` tokens are rows."""

    parent: int  # which of the earlier ones; -1: none
    kept: float  # share of the parent's tokens
    own: int
    query: int
    private: int  # tokens at the end that the radix tree does not have


branches = strategies.lists(
    strategies.builds(
        Branch,
        parent=strategies.integers(-1, 5),
        kept=strategies.sampled_from([1.0, 1.0, 0.6, 0.3]),
        own=strategies.integers(0, 120),
        query=strategies.one_of(strategies.just(1), strategies.just(1), strategies.integers(1, 30)),
        private=strategies.integers(0, 3),
    ),
    min_size=1,
    max_size=7,
)


def make_tree_batch(parts: list[Branch], seed: int) -> tuple[Batch, int]:
    """Branches of one tree with scattered slots, their radix paths included. Also the pool's size."""
    rng = np.random.default_rng(seed)
    free = iter(rng.permutation(np.arange(1, 2 + sum(part.own + 1 for part in parts))).astype(np.int32))
    slots: list[np.ndarray] = []
    for number, part in enumerate(parts):
        parent = slots[part.parent % number] if number and part.parent >= 0 else np.zeros(0, dtype=np.int32)
        kept = parent[: int(part.kept * len(parent))]
        fresh = [next(free) for _ in range(max(part.own, 1 - len(kept)))]
        slots.append(np.concatenate([kept, np.array(fresh, dtype=np.int32)]))
    queries = [min(part.query, len(own)) for part, own in zip(parts, slots, strict=True)]
    in_tree = [max(0, len(own) - part.private) for part, own in zip(parts, slots, strict=True)]
    rows = sum(queries)
    batch = Batch(
        token_ids=np.zeros(rows, dtype=np.int64),
        positions=np.concatenate([np.arange(len(s) - q, len(s)) for s, q in zip(slots, queries, strict=True)]),
        write_slots=np.concatenate([s[len(s) - q :] for s, q in zip(slots, queries, strict=True)]).astype(np.int64),
        query_lengths=np.array(queries, dtype=np.int32),
        prefix_lengths=np.array([len(s) - q for s, q in zip(slots, queries, strict=True)], dtype=np.int32),
        slots=tuple(slots),
        logit_rows=np.arange(rows),
        paths=radix_paths(slots, in_tree),
    )
    return batch, max(int(own.max()) for own in slots) + 1


def radix_paths(slots: list[np.ndarray], in_tree: list[int]) -> tuple[tuple[tuple[int, int, int], ...], ...]:
    """A node ends where two sequences part or where one of them ends."""
    paths: list[list[tuple[int, int, int]]] = [[] for _ in slots]
    todo = [([i for i, length in enumerate(in_tree) if length], 0)]
    node = 0
    while todo:
        group, start = todo.pop()
        for slot in sorted({int(slots[i][start]) for i in group}):
            here = [i for i in group if slots[i][start] == slot]
            end = start + 1
            while all(end < in_tree[i] for i in here) and len({int(slots[i][end]) for i in here}) == 1:
                end += 1
            node += 1
            for i in here:
                paths[i].append((node, start, end - start))
            todo.append(([i for i in here if in_tree[i] > end], end))
    return tuple(map(tuple, paths))


def with_pictures(batch: Batch, seed: int) -> Batch:
    """The same rows, some of which see the rest of a picture too: short and long ones, side by side, before the rows,
    among them, and reaching into them."""
    rng = np.random.default_rng(seed)
    spans = []
    for slots in batch.slots:
        edges = np.unique(rng.integers(0, len(slots) + 1, 2 * rng.integers(0, 4))).tolist()
        spans.append(tuple(pair for pair in pairwise(edges) if rng.random() < 0.7))
    return replace(batch, spans=tuple(spans))


def seen(batch: Batch, window: Window) -> Iterator[np.ndarray]:
    """The positions that each row sees, by definition."""
    for index, (prefix, count) in enumerate(zip(batch.prefix_lengths, batch.query_lengths, strict=True)):
        for position in range(prefix, prefix + count):
            positions = np.arange(len(batch.slots[index]))
            visible = positions <= position
            if isinstance(window, BothWays):
                visible = np.abs(positions - position) < (window.size or len(positions))
            elif isinstance(window, Chunk):
                visible &= positions // window.size == position // window.size
            elif window is not None:
                visible &= positions > position - window
            for start, end in batch.spans[index] if batch.spans else ():
                if start <= position < end:
                    visible |= (positions >= start) & (positions < end)
            yield positions[visible]


def random_pool(
    num_slots: int, geometry: AttentionGeometry, dtype: torch.dtype, seed: int, layer: LayerKV | None = None
) -> KVPool:
    """Makes a pool of one layer, full of values. The dummy slot holds NaN, which must not reach a result.

    layer: None: by the geometry.
    """
    layer = layer or LayerKV(geometry.kv_heads, geometry.head_dim, geometry.head_dim)
    pool = KVPool(KVGeometry((layer,), dtype), num_slots, "cpu")
    generator = torch.Generator().manual_seed(seed)
    for part in (pool.keys[0], pool.values[0]):
        part.copy_(torch.randn(part.shape, generator=generator))
        part[DUMMY_SLOT] = float("nan")
    return pool


def dense_attention(
    batch: Batch,
    pool: KVPool,
    queries: torch.Tensor,
    *,
    window: Window,
    scale: float,
    softcap: float,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Row by row and head by head, float32, from the definition."""
    group = queries.shape[1] // pool.geometry.layers[0].kv_heads
    result = torch.empty(*queries.shape[:2], pool.values[0].shape[2])
    owners = np.repeat(np.arange(len(batch.slots)), batch.query_lengths)
    for row, (owner, positions) in enumerate(zip(owners, seen(batch, window), strict=True)):
        places = torch.from_numpy(batch.slots[owner][positions].astype(np.int64))
        for head in range(queries.shape[1]):
            keys = pool.keys[0][places, head // group].float()
            logits = keys @ queries[row, head].float() * scale
            if softcap:
                logits = softcap * torch.tanh(logits / softcap)
            if sinks is not None:
                logits = torch.cat([logits, sinks[head : head + 1]])
            result[row, head] = logits.softmax(0)[: len(keys)] @ pool.values[0][places, head // group].float()
    return result
