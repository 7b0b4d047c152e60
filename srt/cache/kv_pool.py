"""Stores keys and values of every cached token, by slot. Cache and running requests share one pool.

slot_allocator.py hands out slots; here they are only memory. Slot 0 (`batch.DUMMY_SLOT`) has no owner: rows whose key
is already in the pool write there.

A pool may have a narrower dtype than the model. In float8 (e4m3: 3 bits of fraction, 2⁻⁹ to 448) it takes half of
bfloat16's memory. There is no scale: e4m3 is as precise at 0.02 as at 400, and larger values become 448, never
infinite. In the measured layers of Gemma 3 270M keys reach 97 and values 107, and 1 to 4 % of the numbers lie below
2⁻⁶, where precision fades. The cost there, over 512 rows of two texts, against float32 without float8:

    computed in    pool       mean KL divergence of the next token    same most likely token
    float32        float8     0.019                                   93 of 100 rows
    bfloat16       float8     0.021                                   90
    bfloat16       bfloat16   0.001                                   96
"""

import ctypes
import math
import weakref
from dataclasses import dataclass, replace

import numpy as np
import torch

from ...lang.errors import ParameterError
from ..core.batch import WindowPool

FLOAT8 = torch.float8_e4m3fn


@dataclass(frozen=True, slots=True)
class LayerKV:
    """The shape of one token's keys and values in one layer."""

    kv_heads: int
    head_dim: int  # numbers of a key
    value_dim: int  # numbers of a value
    latent: bool = False  # values are the first numbers of their keys, and take no memory of their own
    source: int | None = None  # an earlier layer whose keys and values this one reads; it stores none
    windowed: bool = False  # its rows see the last `KVGeometry.reach` tokens at most

    def __post_init__(self) -> None:
        assert not self.latent or (self.kv_heads == 1 and self.value_dim <= self.head_dim), "values lie in their keys"

    @property
    def stored(self) -> int:
        """Numbers that a token takes in this layer."""
        if self.source is not None:
            return 0
        return self.kv_heads * (self.head_dim + (0 if self.latent else self.value_dim))


@dataclass(frozen=True, slots=True)
class KVGeometry:
    """The shape and dtype of one token's keys and values, layer by layer."""

    layers: tuple[LayerKV, ...]
    dtype: torch.dtype
    reach: int = 0  # tokens that a row sees in windowed layers, its own included; 0: there are no such layers
    window_share: float = 1.0  # window slots for each slot, where windowed layers have a pool of their own

    @classmethod
    def uniform(cls, layers: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> "KVGeometry":
        """Describes layers that are all alike, with values of the size of their keys."""
        return cls((LayerKV(kv_heads, head_dim, head_dim),) * layers, dtype)

    @property
    def bytes_per_slot(self) -> int:
        """Bytes of a token in all layers."""
        return sum(layer.stored for layer in self.layers) * self.dtype.itemsize

    @property
    def bytes_per_window_slot(self) -> int:
        """Bytes of a token in windowed layers."""
        return sum(layer.stored for layer in self.layers if layer.windowed) * self.dtype.itemsize

    def bytes_of(self, size: "PoolSize") -> int:
        """Returns the bytes of a pool."""
        windows = self.bytes_per_window_slot
        return size.slots * (self.bytes_per_slot - windows) + (size.window_slots or size.slots) * windows

    def rounded_to(self, dtype: torch.dtype | None) -> "KVGeometry":
        """Returns the same geometry in another dtype; None: in this one."""
        return self if dtype is None else replace(self, dtype=dtype)


@dataclass(frozen=True, slots=True)
class PoolSize:
    """The size of a pool. Both include the dummy slot."""

    slots: int
    window_slots: int = 0  # of windowed layers; 0: they have no slots of their own

    def window_pool(self, geometry: KVGeometry) -> WindowPool | None:
        """Returns the pool of windowed layers; None: all layers have the same slots."""
        return WindowPool(self.window_slots, geometry.reach) if self.window_slots else None


class KVPool:
    """Holds `keys[layer]`, [slots, kv_heads, head_dim], and `values[layer]`, [slots, kv_heads, value_dim].

    Layers that read the keys of another hold the tensors of that layer. Latent values are a view of their keys. On the
    CPU pages are mapped when used. Windowed layers may have fewer slots.

    Args:
        size: of the pool; a number of slots is that of all layers.
        library: the CPU kernels, if available: with them the pool lies in 2 MiB pages.
        fixed: the tensors never move; captured graphs hold their addresses.
    """

    def __init__(
        self,
        geometry: KVGeometry,
        size: PoolSize | int,
        device: torch.device | str,
        *,
        library: ctypes.CDLL | None = None,
        fixed: bool = False,
    ) -> None:
        self.size = PoolSize(size) if isinstance(size, int) else size
        num_slots = self.size.slots
        if num_slots < 2:
            raise ParameterError(f"num_slots={num_slots}: write at least 2, the dummy slot and one token")
        self.geometry = geometry
        self.num_slots = num_slots
        self.device = torch.device(device)
        self._library = library if self.device.type == "cpu" else None
        self._fixed = fixed
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []
        try:
            self._allocate()
        except (MemoryError, torch.OutOfMemoryError) as error:
            raise ParameterError(
                f"a KV pool of {num_slots - 1} tokens takes {geometry.bytes_of(self.size)} bytes, more than "
                "there is; write a smaller pool_tokens or pool_memory"
            ) from error

    def clear(self) -> None:
        """Forgets all keys and values."""
        if self._fixed:
            for part in (*self.keys, *self.values):
                part.zero_()
        else:
            self._allocate()

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor | None, slots: torch.Tensor) -> None:
        """Writes keys and values [R, kv_heads, head_dim] to slots [R] (int64), rounded to the pool's dtype.

        values: None where they lie in their keys.
        """
        for part, new in ((self.keys[layer], keys), (self.values[layer], values)):
            if new is not None:
                movable(part).index_copy_(0, slots, movable(rounded(new, part.dtype)))

    def _allocate(self) -> None:
        """Allocates the tensors. The old ones are freed first: two pools may not fit."""
        self.keys.clear()
        self.values.clear()
        for layer in self.geometry.layers:
            if layer.source is not None:
                self.keys.append(self.keys[layer.source])
                self.values.append(self.values[layer.source])
                continue
            slots = self.size.window_slots if layer.windowed and self.size.window_slots else self.num_slots
            keys = self._zeros((slots, layer.kv_heads, layer.head_dim))
            self.keys.append(keys)
            if layer.latent:
                self.values.append(keys[..., : layer.value_dim])
            else:
                self.values.append(self._zeros((slots, layer.kv_heads, layer.value_dim)))

    def _zeros(self, shape: tuple[int, int, int]) -> torch.Tensor:
        if self._library is not None:
            return zero_pages(self._library, shape, self.geometry.dtype)
        return lazy_zeros(shape, self.geometry.dtype, self.device)


def zero_pages(library: ctypes.CDLL, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Returns zeros in 2 MiB pages: streaming through them is a third faster than with pages of 4 KiB.

    They take memory when they are first written, and are freed with the last tensor that shares them.

    Raises:
        MemoryError: the address space is too small.
    """
    library.umbel_allocate.argtypes = [ctypes.c_long]
    library.umbel_allocate.restype = ctypes.c_void_p
    library.umbel_free.argtypes = [ctypes.c_void_p, ctypes.c_long]
    library.umbel_free.restype = None
    size = math.prod(shape) * dtype.itemsize
    pointer = library.umbel_allocate(size) if size < 1 << 63 else None
    if not pointer:
        raise MemoryError(f"no {size} bytes of memory")
    memory = (ctypes.c_char * size).from_address(pointer)  # the tensor keeps it, and with it the pages
    weakref.finalize(memory, library.umbel_free, pointer, size).atexit = False
    return torch.frombuffer(memory, dtype=torch.uint8).view(dtype).view(shape)


def rounded(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Converts to the dtype of a pool. Values too large for float8 become its largest number: it has no infinity."""
    if dtype is FLOAT8:
        largest = torch.finfo(FLOAT8).max
        values = values.clamp(-largest, largest)
    return values.to(dtype)


def movable(values: torch.Tensor) -> torch.Tensor:
    """Views float8 as bytes, which torch can move everywhere (on the CPU float8 has no index_copy_)."""
    return values.view(torch.uint8) if values.dtype is FLOAT8 else values


def lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Allocates zeros. `torch.zeros` writes every page; numpy's calloc maps a page when it is first touched."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    untouched = np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(untouched).view(dtype).view(shape)


LEAST_GAIN = 1.25  # tokens with a pool for windowed layers for each token without, or it is not worth its costs


def size_for_bytes(
    geometry: KVGeometry, budget: int, *, least_windows: int = 0, one_pool: bool = False, minimum_tokens: int = 256
) -> PoolSize:
    """Returns the size of a pool that fits into `budget` bytes.

    Windowed layers get slots of their own, `window_share` of the others', where that makes room for many more tokens.

    Args:
        least_windows: window slots that there must be in a pool of their own.
        one_pool: they get no pool of their own.

    Raises:
        ParameterError: fewer than `minimum_tokens` fit; the message says how many bytes to give.
    """
    size = PoolSize(budget // geometry.bytes_per_slot)
    if geometry.reach and not one_pool:
        windows = geometry.bytes_per_window_slot
        rest = geometry.bytes_per_slot - windows
        slots = int(budget / (rest + geometry.window_share * windows))
        window_slots = max(int(slots * geometry.window_share), least_windows)
        if rest:
            slots = max(0, budget - window_slots * windows) // rest
        if window_slots * windows <= budget and slots >= LEAST_GAIN * size.slots:
            size = PoolSize(slots, window_slots)
    if size.slots < minimum_tokens + 1:
        needed = (minimum_tokens + 1) * geometry.bytes_per_slot
        raise ParameterError(
            f"a KV pool of {budget} bytes holds {max(size.slots - 1, 0)} tokens of this model "
            f"({geometry.bytes_per_slot} bytes each); write at least {needed} bytes for {minimum_tokens} tokens"
        )
    return size


def size_for_slots(geometry: KVGeometry, slots: int, *, least_windows: int, sequences: int) -> PoolSize:
    """Returns the size of a pool of so many slots, the dummy included.

    Windowed layers get slots of their own where fewer than all are enough for the windows of `sequences` requests.

    Args:
        least_windows: window slots beyond those windows.
    """
    if not geometry.reach:
        return PoolSize(slots)
    windows = max(int(slots * geometry.window_share), sequences * geometry.reach + least_windows)
    return PoolSize(slots, windows) if windows * LEAST_GAIN <= slots else PoolSize(slots)
