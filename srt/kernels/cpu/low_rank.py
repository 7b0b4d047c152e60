"""Lays out the low-rank changes of adapters for the native decoder, which adds them within its step.

The structures are those of low_rank.h. Matrices stay in bfloat16 where the file has both so, else they are float32: the
step reads them once for each row that uses the adapter, or for two.
"""

import ctypes
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from ...layers.checkpoint import LinearTensors
from ...layers.low_rank import Adapter, AdapterRows, LowRank

_POINTER = ctypes.c_void_p
_LONG = ctypes.c_long
COLUMNS = 32  # outputs of a panel of B
TOGETHER, WIDE = 4, 16  # rows of A whose numbers alternate, and how many of each stand together
LINE = 64  # bytes of a cache line


class _Part(ctypes.Structure):
    """`LowRankPart` of low_rank.h."""

    _fields_ = [
        ("down", _POINTER),
        ("up", _POINTER),
        *((name, _LONG) for name in ("rank", "first", "width")),
        ("scale", ctypes.c_float),
        ("is_bf16", ctypes.c_int),
    ]


class _Change(ctypes.Structure):
    """`LowRankChange` of low_rank.h."""

    _fields_ = [("parts", _POINTER), ("count", _LONG)]


class AdapterGroups(ctypes.Structure):
    """`AdapterGroups` of low_rank.h. All zeros: no row uses an adapter."""

    _fields_ = [("count", _LONG), *((name, _POINTER) for name in ("adapters", "starts", "rows"))]


class CpuChanges:
    """The changes that all adapters make to one product, laid out once. `address`: None where there are none.

    The matrices lie one after the other as a step reads them: of an adapter all A, then all B.
    """

    def __init__(self, adapters: Sequence[Adapter], tensors: LinearTensors) -> None:
        self._kept: list[torch.Tensor] = []
        self._parts = [self._laid_out(list(adapter.of(tensors))) for adapter in adapters]
        self._changes = (_Change * len(self._parts))(
            *(_Change(ctypes.addressof(parts), len(parts)) for parts in self._parts)
        )
        self.address = ctypes.addressof(self._changes) if any(map(len, self._parts)) else None

    def _laid_out(self, changes: Sequence[tuple[int, LowRank]]) -> ctypes.Array[_Part]:
        """Lays out the changes of one adapter, each with the first output of its map."""
        matrices = [_down(change) for _, change in changes] + [_up(change) for _, change in changes]
        sizes = [-(-matrix.nbytes // LINE) * LINE for matrix in matrices]
        memory = torch.zeros(sum(sizes) + LINE, dtype=torch.uint8)
        self._kept.append(memory)
        place = -memory.data_ptr() % LINE
        addresses = []
        for matrix, size in zip(matrices, sizes, strict=True):
            memory[place : place + matrix.nbytes] = matrix.flatten().view(torch.uint8)
            addresses.append(memory.data_ptr() + place)
            place += size
        downs, ups = addresses[: len(changes)], addresses[len(changes) :]
        parts = [
            _Part(down, up, _rank(change), first, len(change.up), change.scale, _dtype(change) is torch.bfloat16)
            for down, up, (first, change) in zip(downs, ups, changes, strict=True)
        ]
        return (_Part * len(parts))(*parts)


def _dtype(change: LowRank) -> torch.dtype:
    return torch.bfloat16 if {change.down.dtype, change.up.dtype} == {torch.bfloat16} else torch.float32


def _rank(change: LowRank) -> int:
    """Returns the rank with the rows of zeros that fill the last group."""
    return -(-len(change.down) // TOGETHER) * TOGETHER


def _down(change: LowRank) -> torch.Tensor:
    """Lays out A, [rank, inputs] → [rank / 4, inputs / 16, 4, 16]."""
    rank, inputs = change.down.shape
    padded = functional.pad(change.down.to(_dtype(change)), (0, -inputs % WIDE, 0, _rank(change) - rank))
    return padded.view(-1, TOGETHER, padded.shape[1] // WIDE, WIDE).transpose(1, 2).contiguous()


def _up(change: LowRank) -> torch.Tensor:
    """Lays out B, [outputs, rank] → [outputs / 32, rank, 32]."""
    width, rank = change.up.shape
    padded = functional.pad(change.up.to(_dtype(change)), (0, _rank(change) - rank, 0, -width % COLUMNS))
    return padded.view(-1, COLUMNS, padded.shape[1]).transpose(1, 2).contiguous()


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
