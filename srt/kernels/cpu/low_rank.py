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
COLUMNS = 16  # outputs of a panel of B


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
    """The changes that all adapters make to one product, laid out once. `address`: None where there are none."""

    def __init__(self, adapters: Sequence[Adapter], tensors: LinearTensors) -> None:
        self._kept: list[torch.Tensor] = []
        self._parts = []
        for adapter in adapters:
            parts = [self._part(first, change) for first, change in adapter.of(tensors)]
            self._parts.append((_Part * len(parts))(*parts))
        self._changes = (_Change * len(self._parts))(
            *(_Change(ctypes.addressof(parts), len(parts)) for parts in self._parts)
        )
        self.address = ctypes.addressof(self._changes) if any(map(len, self._parts)) else None

    def _part(self, first: int, change: LowRank) -> _Part:
        dtypes = {change.down.dtype, change.up.dtype}
        dtype = torch.bfloat16 if dtypes == {torch.bfloat16} else torch.float32
        width, rank = change.up.shape
        padded = functional.pad(change.up.to(dtype), (0, 0, 0, -width % COLUMNS))
        down = change.down.to(dtype).contiguous()
        up = padded.view(-1, COLUMNS, rank).transpose(1, 2).contiguous()
        self._kept += [down, up]
        is_bf16 = int(dtype is torch.bfloat16)
        return _Part(down.data_ptr(), up.data_ptr(), rank, first, width, change.scale, is_bf16)


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
