"""Copies pages out of a KV pool and into it, for the tiers of the cache.

A payload holds the tokens of a page layer by layer, keys before values:

    layer 0: [tokens, kv_heads, head_dim] keys · [tokens, kv_heads, value_dim] values · layer 1: …

Values that lie in their keys, and layers that read those of another, take no place. Layers with a window that have
slots of their own are in payloads of their own (`PagePart`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch
from numpy.typing import NDArray

from ..core.batch import PagePart
from .kv_pool import KVPool

_WORD = 8  # bytes that are copied at once, where rows allow it


@dataclass(frozen=True, slots=True)
class CopiedPages:
    """Implements `batch.SavedPages`: the copy is done."""

    payloads: list[NDArray[np.uint8]]

    def result(self) -> list[NDArray[np.uint8]]:
        return self.payloads


class PoolRows:
    """The tensors of a pool as rows of plain words, [slots, words], in the order of a payload."""

    def __init__(self, pool: KVPool) -> None:
        self._pool = pool
        geometry = pool.geometry
        dtype = str(geometry.dtype).removeprefix("torch.")
        shapes = [
            (layer.kv_heads, layer.head_dim, 0 if layer.latent else layer.value_dim, self._part(index))
            for index, layer in enumerate(geometry.layers)
            if layer.source is None
        ]
        parts = [f"{len([*same])}x{shape}" for shape, same in groupby(shapes)]
        self.layout = f"layers of (kv heads, key, value, part) in {dtype}: {' '.join(parts)}"

    def _part(self, index: int) -> PagePart:
        own = self._pool.geometry.layers[index].windowed and self._pool.size.window_slots
        return PagePart.WINDOWS if own else PagePart.TOKENS

    def tensors(self, part: PagePart) -> list[torch.Tensor]:
        """Returns the tensors of a part. They are views: the pool may allocate others when it is cleared."""
        pool = self._pool
        found = []
        for index, layer in enumerate(pool.geometry.layers):
            if layer.source is None and self._part(index) is part:
                found.append(_words(pool.keys[index]))
                if not layer.latent:
                    found.append(_words(pool.values[index]))
        return found

    def bytes_per_token(self, part: PagePart) -> int:
        layers = self._pool.geometry.layers
        stored = sum(layer.stored for index, layer in enumerate(layers) if self._part(index) is part)
        return stored * self._pool.geometry.dtype.itemsize


class PoolPages:
    """Implements `batch.PagePort` on a pool whose steps are done when they return."""

    def __init__(self, pool: KVPool) -> None:
        self._pool = pool
        self._rows = PoolRows(pool)
        self.layout = self._rows.layout
        self.bytes_per_token = self._rows.bytes_per_token

    def save(self, slots: NDArray[np.int32], part: PagePart) -> CopiedPages:
        pages, tokens = slots.shape
        index = torch.from_numpy(slots.reshape(-1).astype(np.int64)).to(self._pool.device)
        payloads = [np.empty(tokens * self.bytes_per_token(part), dtype=np.uint8) for _ in range(pages)]
        first = 0
        for rows in self._rows.tensors(part):
            copied = rows.index_select(0, index).cpu().view(torch.uint8).view(pages, -1).numpy()
            for payload, page in zip(payloads, copied, strict=True):
                payload[first : first + len(page)] = page
            first += copied.shape[1]
        return CopiedPages(payloads)

    def load(self, slots: NDArray[np.int32], payloads: Sequence[NDArray[np.uint8]], part: PagePart) -> None:
        index = torch.from_numpy(slots.astype(np.int64)).to(self._pool.device)
        write_rows(self._rows.tensors(part), index, torch.from_numpy(np.stack(payloads)).to(self._pool.device))


def write_rows(tensors: Sequence[torch.Tensor], index: torch.Tensor, payloads: torch.Tensor) -> None:
    """Writes the last tokens of payloads, uint8 [pages, bytes], to the rows `index` of each tensor."""
    pages, size = payloads.shape
    tokens = size // sum(rows[0].nbytes for rows in tensors)
    first = 0
    for rows in tensors:
        end = first + tokens * rows[0].nbytes
        values = payloads[:, first:end].reshape(pages * tokens, -1).view(rows.dtype)
        rows.index_copy_(0, index, values[len(values) - len(index) :])
        first = end


def _words(rows: torch.Tensor) -> torch.Tensor:
    """Views [slots, heads, numbers] as [slots, words], the widest that fit: few are copied faster than many bytes."""
    flat = rows.view(len(rows), -1).view(torch.uint8)
    return flat.view(torch.int64) if flat.shape[1] % _WORD == 0 else flat
