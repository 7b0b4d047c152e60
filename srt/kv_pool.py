"""The KV pool: keys and values of every cached token, by slot. One pool for cache and running requests.

Slots are handed out elsewhere; here they are only memory. Slot 0 (`batch.DUMMY_SLOT`) belongs to nobody: rows
whose key is already in the pool write there.
"""

import ctypes
import math
from dataclasses import dataclass

import numpy as np
import torch

from ..lang.errors import ParameterError
from .kernels.cpu.pages import zero_pages


@dataclass(frozen=True, slots=True)
class KVGeometry:
    """What one token costs."""

    layers: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def bytes_per_slot(self) -> int:
        return 2 * self.layers * self.kv_heads * self.head_dim * self.dtype.itemsize


class KVPool:
    """`keys[layer]` and `values[layer]`, each [slots, kv_heads, head_dim]. On the CPU memory is touched when used.

    Args:
        library: the CPU kernels, if they are there: with them the pool lies in 2 MiB pages.
    """

    def __init__(
        self,
        geometry: KVGeometry,
        num_slots: int,
        device: torch.device | str,
        *,
        library: ctypes.CDLL | None = None,
    ) -> None:
        if num_slots < 2:
            raise ParameterError(f"num_slots={num_slots}: write at least 2, the dummy slot and one token")
        self.geometry = geometry
        self.num_slots = num_slots
        self.device = torch.device(device)
        self._library = library if self.device.type == "cpu" else None
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []
        try:
            self.clear()
        except (MemoryError, torch.OutOfMemoryError) as error:
            raise ParameterError(
                f"a KV pool of {num_slots - 1} tokens takes {num_slots * geometry.bytes_per_slot} bytes, more than "
                "there is; write a smaller pool_tokens or pool_memory"
            ) from error

    def clear(self) -> None:
        """Forget everything. The old memory goes back first: two pools may not fit."""
        self.keys.clear()
        self.values.clear()
        shape = (self.num_slots, self.geometry.kv_heads, self.geometry.head_dim)
        for _ in range(self.geometry.layers):
            self.keys.append(self._zeros(shape))
            self.values.append(self._zeros(shape))

    def _zeros(self, shape: tuple[int, int, int]) -> torch.Tensor:
        if self._library is not None:
            return zero_pages(self._library, shape, self.geometry.dtype)
        return _zeros(shape, self.geometry.dtype, self.device)


def _zeros(shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros. `torch.zeros` writes every page; calloc behind numpy maps them when they are first touched."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    untouched = np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(untouched).view(dtype).view(shape)


def slots_for_bytes(geometry: KVGeometry, budget: int, *, minimum_tokens: int = 256) -> int:
    """The number of slots, the dummy included, that fit into `budget` bytes.

    Raises:
        ParameterError: fewer than `minimum_tokens` fit; the message says how many bytes to give.
    """
    slots = budget // geometry.bytes_per_slot
    if slots < minimum_tokens + 1:
        needed = (minimum_tokens + 1) * geometry.bytes_per_slot
        raise ParameterError(
            f"a KV pool of {budget} bytes holds {max(slots - 1, 0)} tokens of this model "
            f"({geometry.bytes_per_slot} bytes each); write at least {needed} bytes for {minimum_tokens} tokens"
        )
    return slots
