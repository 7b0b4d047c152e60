"""Low-rank changes of linear maps: the adapters of LoRA, applied in the rows of a step that ask for them.

    W x + b   becomes   W x + b + scale · B (A x)          A [rank, inputs], B [outputs, rank]

Weights are never merged, so rows of different adapters, and rows of none, share the product with W. A product that
computes several maps at once (queries, keys and values) has a change for each of them.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from ..core.messages import NO_ADAPTER
from .checkpoint import LinearTensors


@dataclass(frozen=True, slots=True, eq=False)
class LowRank:
    """The change of one linear map, as its file stores it."""

    down: torch.Tensor  # A: [rank, inputs]
    up: torch.Tensor  # B: [outputs, rank]
    scale: float


@dataclass(frozen=True, slots=True)
class Adapter:
    """The changes of one adapter, by the name of the linear map in the checkpoint, without ".weight"."""

    name: str
    changes: Mapping[str, LowRank]

    def of(self, tensors: LinearTensors) -> Iterator[tuple[int, LowRank]]:
        """Yields the changes of maps that one product computes: (the first output of the map, its change)."""
        first = 0
        for name, width in zip(tensors.names, tensors.widths, strict=True):
            change = self.changes.get(name)
            if change is not None:
                yield first, change
            first += width


@dataclass(frozen=True, slots=True)
class AdapterRows:
    """The rows of a step that use adapters: (index of the adapter, its rows in ascending order), by index."""

    groups: tuple[tuple[int, NDArray[np.int64]], ...]

    @classmethod
    def of(cls, adapters: NDArray[np.integer] | None) -> "AdapterRows | None":
        """Groups rows by the index of their adapter, [R] (`Batch.adapters`); None where no row uses one."""
        if adapters is None:
            return None
        used = np.unique(adapters[adapters != NO_ADAPTER]).tolist()
        return cls(tuple((index, np.flatnonzero(adapters == index)) for index in used)) if used else None

    def part(self, first: int, end: int) -> "AdapterRows":
        """Returns the rows in [first, end), counted from `first`."""
        groups = ((index, rows[(rows >= first) & (rows < end)] - first) for index, rows in self.groups)
        return AdapterRows(tuple(group for group in groups if len(group[1])))


class LowRankChanges:
    """The changes that all adapters make to one product, multiplied by torch.

    Args:
        dtype: of the matrices, as of the model.
    """

    def __init__(
        self, adapters: Sequence[Adapter], tensors: LinearTensors, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._device = device
        self._parts = [
            [
                (first, change.down.to(device, dtype), change.up.to(device, dtype), change.scale)
                for first, change in adapter.of(tensors)
            ]
            for adapter in adapters
        ]

    def add(self, x: torch.Tensor, out: torch.Tensor, rows: AdapterRows) -> None:
        """Adds the changes of x [R, inputs] to out [R, outputs], in the rows of each adapter."""
        for index, chosen in rows.groups:
            parts = self._parts[index]
            if not parts:
                continue
            places = torch.from_numpy(chosen).to(self._device)
            inputs = x.index_select(0, places)
            for first, down, up, scale in parts:
                change = (inputs @ down.T).mul_(scale) @ up.T
                out[:, first : first + len(up)].index_add_(0, places, change)
