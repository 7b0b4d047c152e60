"""Low-rank changes of linear maps: the adapters of LoRA, applied in the rows of a step that ask for them.

    W x + b   becomes   W x + b + scale · B (A x)          A [rank, inputs], B [outputs, rank]

Weights are never merged, so rows of different adapters, and rows of none, share the product with W. A product that
computes several maps at once (queries, keys and values) has a change for each of them.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
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

    def add(self, x: torch.Tensor, out: torch.Tensor, rows: "AdapterRows | AdapterBlocks") -> None:
        """Adds the changes of x [R, inputs] to out [R, outputs], in the rows of each adapter."""
        assert isinstance(rows, AdapterRows), "rows that the host knows"
        for index, chosen in rows.groups:
            parts = self._parts[index]
            if not parts:
                continue
            places = torch.from_numpy(chosen).to(self._device)
            inputs = x.index_select(0, places)
            for first, down, up, scale in parts:
                change = (inputs @ down.T).mul_(scale) @ up.T
                out[:, first : first + len(up)].index_add_(0, places, change)


RANK_UNIT = 16  # ranks are filled up with zeros to powers of two of at least this, which tensor cores multiply
TILE_OUTPUTS = 64  # of one map


@dataclass(frozen=True, slots=True, eq=False)
class AdapterBlocks:
    """The rows of a step by adapter, on the device, in blocks of rows that each have one adapter."""

    adapters: torch.Tensor  # int32 [R]; the number of adapters where a row uses none
    rows: torch.Tensor  # int32 [blocks · rows of a block]; R is padding
    owners: torch.Tensor  # int32 [blocks] adapter of each block
    filled: torch.Tensor  # int32 [1] blocks that there are
    most: int  # blocks there can be


@dataclass(frozen=True, slots=True, eq=False)
class LowRankStack:
    """The changes that A adapters make to the P maps of one product. Where there is none, scale and matrices are 0."""

    down: torch.Tensor  # [A, P, rank, inputs]
    up: torch.Tensor  # [A, outputs, rank]
    scales: torch.Tensor  # float32 [A, P]
    tiles: torch.Tensor  # int32 [tiles, 3]: first output, one past the last, and their map; TILE_OUTPUTS at most

    @classmethod
    def of(
        cls, adapters: Sequence[Adapter], tensors: LinearTensors, *, dtype: torch.dtype, device: torch.device
    ) -> "LowRankStack | None":
        """Returns None where no adapter changes a map."""
        changes = [dict(adapter.of(tensors)) for adapter in adapters]  # by the first output of the map
        ranks = [len(low.down) for own in changes for low in own.values()]
        if not ranks:
            return None
        rank = max(RANK_UNIT, 1 << (max(ranks) - 1).bit_length())
        parts, outputs = len(tensors.widths), sum(tensors.widths)
        down = torch.zeros((len(adapters), parts, rank, tensors.inputs), dtype=dtype, device=device)
        up = torch.zeros((len(adapters), outputs, rank), dtype=dtype, device=device)
        scales = torch.zeros((len(adapters), parts))
        tiles: list[tuple[int, int, int]] = []
        first = 0
        for part, width in enumerate(tensors.widths):
            for index, own in enumerate(changes):
                low = own.get(first)
                if low is not None:
                    down[index, part, : len(low.down)] = low.down.to(device, dtype)
                    up[index, first : first + width, : len(low.down)] = low.up.to(device, dtype)
                    scales[index, part] = low.scale
            end = first + width
            tiles += [(start, min(start + TILE_OUTPUTS, end), part) for start in range(first, end, TILE_OUTPUTS)]
            first = end
        return cls(down, up, scales.to(device), torch.tensor(tiles, dtype=torch.int32, device=device))


class StackedChanges:
    """The changes that all adapters make to one product, multiplied by two kernels.

    Args:
        stack: None: no adapter changes the product.
        add: adds the changes of x to out; see `kernels.triton.low_rank`.
    """

    def __init__(
        self,
        stack: LowRankStack | None,
        add: Callable[[torch.Tensor, torch.Tensor, AdapterBlocks, LowRankStack], None],
    ) -> None:
        self._stack = stack
        self._add = add

    def add(self, x: torch.Tensor, out: torch.Tensor, rows: AdapterRows | AdapterBlocks) -> None:
        """Adds the changes of x [R, inputs] to out [R, outputs], in the rows of each adapter."""
        assert isinstance(rows, AdapterBlocks), "rows that are on the device"
        if self._stack is not None:
            self._add(x, out, rows, self._stack)


class TorchChanges:
    """Base of weight formats: torch multiplies the changes of adapters. Formats with kernels for them replace it."""

    def changes(
        self, adapters: Sequence[Adapter], tensors: LinearTensors, *, dtype: torch.dtype, device: torch.device
    ) -> LowRankChanges | StackedChanges:
        return LowRankChanges(adapters, tensors, dtype=dtype, device=device)
