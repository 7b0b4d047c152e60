"""Lays out the low-rank changes of adapters for the native decoder, which adds them within its step.

The structures are those of low_rank.h. A step reads the matrices once for each row that uses the adapter, or for two,
and waits for memory: they lie in pages of 2 MiB, and numbers take 16 bits. Where the file has bfloat16 they stay so.
Others are rounded to integers with a scale for each row of A and each column of B, which changes it by some 3e-5 of its
norm; a change with outliers stays float32, and so do changes of float32 weights.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from ...cache.kv_pool import zero_pages
from ...layers.checkpoint import LinearTensors
from ...layers.low_rank import Adapter, AdapterRows, LowRank

_POINTER = ctypes.c_void_p
_LONG = ctypes.c_long
COLUMNS = 32  # outputs of a panel of B
TOGETHER, WIDE = 4, 16  # rows of A whose numbers alternate, and how many of each stand together
LINE = 64  # bytes of a cache line
CHUNK = 32 << 20  # bytes of memory that is taken at a time
OUTLIER = 32  # times the median of its row: larger numbers take too many bits of the others
_LARGEST = 32767


class _Numbers(Enum):
    """`LowRankNumbers` of low_rank.h."""

    F32 = 0
    BF16 = 1
    INT16 = 2


class _Part(ctypes.Structure):
    """`LowRankPart` of low_rank.h."""

    _fields_ = [
        *((name, _POINTER) for name in ("down", "up", "scales")),
        *((name, _LONG) for name in ("rank", "first", "width")),
        ("numbers", ctypes.c_int),
    ]


class _Change(ctypes.Structure):
    """`LowRankChange` of low_rank.h."""

    _fields_ = [("parts", _POINTER), ("count", _LONG)]


class AdapterGroups(ctypes.Structure):
    """`AdapterGroups` of low_rank.h. All zeros: no row uses an adapter."""

    _fields_ = [("count", _LONG), *((name, _POINTER) for name in ("adapters", "starts", "rows"))]


class AdapterMemory:
    """Memory of a model's adapters in 2 MiB pages, which tensors share line by line."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self._chunk = torch.empty(0, dtype=torch.uint8)
        self._taken = 0

    def take(self, size: int) -> torch.Tensor:
        """Returns zeros, uint8 [size], from the begin of a cache line. Raises MemoryError when there is no memory."""
        whole = -(-size // LINE) * LINE
        if self._taken + whole > len(self._chunk):
            self._chunk, self._taken = zero_pages(self._library, (max(whole, CHUNK),), torch.uint8), 0
        taken = self._chunk[self._taken : self._taken + size]
        self._taken += whole
        return taken


class CpuChanges:
    """The changes that all adapters make to one product, laid out once. `address`: None where there are none.

    The matrices lie one after the other as a step reads them: of an adapter all A, then all B.

    Args:
        exact: float32 is not rounded.
    """

    def __init__(
        self, adapters: Sequence[Adapter], tensors: LinearTensors, memory: AdapterMemory, *, exact: bool
    ) -> None:
        self._memory, self._exact = memory, exact
        self._kept: list[torch.Tensor] = []
        self._parts = [self._laid_out(list(adapter.of(tensors))) for adapter in adapters]
        self._changes = (_Change * len(self._parts))(
            *(_Change(ctypes.addressof(parts), len(parts)) for parts in self._parts)
        )
        self.address = ctypes.addressof(self._changes) if any(map(len, self._parts)) else None

    def _laid_out(self, changes: Sequence[tuple[int, LowRank]]) -> ctypes.Array[_Part]:
        """Lays out the changes of one adapter, each with the first output of its map."""
        stored = [_StoredChange.of(change, exact=self._exact) for _, change in changes]
        downs = [(self._keep(one.down), self._keep(one.scales)) for one in stored]
        ups = [self._keep(one.up) for one in stored]
        parts = [
            _Part(down, up, scales, one.rank, first, len(change.up), one.numbers.value)
            for (first, change), one, (down, scales), up in zip(changes, stored, downs, ups, strict=True)
        ]
        return (_Part * len(parts))(*parts)

    def _keep(self, tensor: torch.Tensor) -> int:
        """Copies a tensor to the end of the memory and returns its address."""
        own = self._memory.take(tensor.nbytes)
        own.copy_(tensor.flatten().view(torch.uint8))
        self._kept.append(own)
        return own.data_ptr()


@dataclass(frozen=True, slots=True, eq=False)
class _StoredChange:
    """A change as the kernels read it."""

    numbers: _Numbers
    rank: int  # with the rows of zeros that fill the last group
    down: torch.Tensor  # [rank / 4, inputs / 16, 4, 16]
    up: torch.Tensor  # [outputs / 32, rank, 32]
    scales: torch.Tensor  # float32 [rank]

    @classmethod
    def of(cls, change: LowRank, *, exact: bool) -> "_StoredChange":
        down, up, numbers = change.down, change.up, _Numbers.BF16
        scales = torch.full((len(down),), change.scale)
        if {down.dtype, up.dtype} != {torch.bfloat16}:
            down, up, numbers = down.float(), up.float(), _Numbers.F32
            if not exact and _is_even(down) and _is_even(up.T):
                (down, of_down), (columns, of_up) = _integers(down), _integers(up.T)
                up, scales, numbers = columns.T, scales * of_down * of_up, _Numbers.INT16
        rank = -(-len(down) // TOGETHER) * TOGETHER
        down = functional.pad(down, (0, -down.shape[1] % WIDE, 0, rank - len(down)))
        up = functional.pad(up, (0, rank - up.shape[1], 0, -len(up) % COLUMNS))
        return cls(
            numbers,
            rank,
            down.view(-1, TOGETHER, down.shape[1] // WIDE, WIDE).transpose(1, 2).contiguous(),
            up.view(-1, COLUMNS, rank).transpose(1, 2).contiguous(),
            functional.pad(scales, (0, rank - len(scales))),
        )


def _is_even(rows: torch.Tensor) -> bool:
    """Returns whether no row has an outlier, nor what is no number."""
    sizes = rows.abs()
    return bool((sizes.amax(1) <= OUTLIER * sizes.median(1).values).all())


def _integers(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rounds each row to int16 with a float32 scale."""
    scales = rows.abs().amax(1) / _LARGEST
    codes = torch.where(scales > 0, 1 / scales, 0)[:, None].mul(rows).round()
    return codes.to(torch.int16), scales


class AdaptedRows:
    """Groups of one step, as the native decoder reads them. Kept alive until the step has run."""

    def __init__(self, adapters: NDArray[np.integer] | None) -> None:
        """adapters: [R], see `Batch.adapters`."""
        rows = AdapterRows.of(adapters)
        self.arguments = AdapterGroups()
        if rows is None:
            return
        indices, places = zip(*rows.groups, strict=True)
        self._arrays = [
            np.array(indices, dtype=np.int64),
            np.cumsum([0, *map(len, places)], dtype=np.int64),
            np.concatenate(places).astype(np.int64),
        ]
        self.arguments = AdapterGroups(len(indices), *(array.ctypes.data for array in self._arrays))
