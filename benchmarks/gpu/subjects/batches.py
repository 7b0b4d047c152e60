"""Steps and pools for the attention kernels: page size 1, and the slots of a sequence lie scattered over the pool."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from umbel.srt.attention.backend import AttentionGeometry
from umbel.srt.cache.kv_pool import KVGeometry, KVPool, movable, rounded
from umbel.srt.core.batch import Batch

Paths = tuple[tuple[tuple[int, int, int], ...], ...]


@dataclass(frozen=True, slots=True)
class Rows:
    """Of one sequence: keys that are in the pool already, and rows of the step."""

    prefix: int
    query: int = 1


@dataclass(frozen=True, slots=True)
class Step:
    """A step, and the slots that a pool for it has, the dummy slot included."""

    batch: Batch
    slots: int


def step_of(rows: Sequence[Rows], *, seed: int = 0) -> Step:
    """Sequences that share nothing."""
    total = 1 + sum(one.prefix + one.query for one in rows)
    free = np.random.default_rng(seed).permutation(np.arange(1, total)).astype(np.int32)
    ends = np.cumsum([one.prefix + one.query for one in rows])
    return Step(_batch(rows, np.split(free, ends[:-1]), ()), total)


def forked_step(branches: int, shared: int, own: int, *, tree: bool = True, seed: int = 0) -> Step:
    """Branches that decode behind one prefix: `shared` keys, then `own` of each. See `nested_step`."""
    return nested_step([(1, shared), (branches, own)], tree=tree, seed=seed)


def nested_step(levels: Sequence[tuple[int, int]], *, tree: bool = True, seed: int = 0) -> Step:
    """Branches that decode behind nodes of a tree, as many as the last level has.

    levels: of each from the root on its nodes and their keys; nodes of the next one are divided among them evenly, and
    the last key of the last level is its row's.
    tree: the step has paths that tell what its sequences share; else they share slots, and it has no paths.
    """
    total = 1 + sum(nodes * keys for nodes, keys in levels)
    free = np.random.default_rng(seed).permutation(np.arange(1, total)).astype(np.int32)
    leaves, length = levels[-1][0], sum(keys for _, keys in levels)
    slots: list[list[np.ndarray]] = [[] for _ in range(leaves)]
    paths: list[list[tuple[int, int, int]]] = [[] for _ in range(leaves)]
    first = node = position = 0
    for nodes, keys in levels:
        for leaf in range(leaves):
            own = leaf * nodes // leaves
            slots[leaf].append(free[first + own * keys : first + (own + 1) * keys])
            paths[leaf].append((1 + node + own, position, min(keys, length - 1 - position)))
        first, node, position = first + nodes * keys, node + nodes, position + keys
    whole = [np.concatenate(parts) for parts in slots]
    return Step(_batch([Rows(length - 1)] * leaves, whole, tuple(map(tuple, paths)) if tree else ()), total)


def _batch(rows: Sequence[Rows], slots: Sequence[np.ndarray], paths: Paths) -> Batch:
    count = sum(one.query for one in rows)
    return Batch(
        token_ids=np.zeros(count, dtype=np.int64),
        positions=np.concatenate([np.arange(one.prefix, one.prefix + one.query, dtype=np.int64) for one in rows]),
        write_slots=np.concatenate([own[one.prefix :] for one, own in zip(rows, slots, strict=True)]).astype(np.int64),
        query_lengths=np.array([one.query for one in rows], dtype=np.int32),
        prefix_lengths=np.array([one.prefix for one in rows], dtype=np.int32),
        slots=tuple(slots),
        logit_rows=np.cumsum([one.query for one in rows], dtype=np.int64) - 1,
        paths=paths,
    )


def pool_for(
    slots: int, geometry: AttentionGeometry, dtype: torch.dtype, device: torch.device, *, layers: int = 1
) -> KVPool:
    """Full of normal numbers, from a seed."""
    pool = KVPool(KVGeometry.uniform(layers, geometry.kv_heads, geometry.head_dim, dtype), slots, device)
    generator = torch.Generator(device).manual_seed(1)
    for part in (*pool.keys, *pool.values):
        numbers = torch.randn(part.shape, generator=generator, device=device)
        movable(part).copy_(movable(rounded(numbers, dtype)))
    return pool


def normal(*shape: int, device: torch.device, dtype: torch.dtype = torch.float32, seed: int = 2) -> torch.Tensor:
    """Normal numbers from a seed, rounded."""
    return torch.randn(shape, generator=torch.Generator(device).manual_seed(seed), device=device).to(dtype)
