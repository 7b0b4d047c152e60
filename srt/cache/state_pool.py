"""Stores the recurrent states of running requests and of snapshots, by slot, and runs the layers that change them.

state_slots.py hands out slots; here they are only memory. Slot 0 is the state before the first token: zeros.

A step gives each layer the same runs of rows (`batch.StateRun`), each from the state in one slot to that in another.
Runs take effect in order, and most do not touch each other's slots, so they are computed together in waves:

    runs     A: 0 → 5    B: 3 → 3    C: 5 → 6    D: 5 → 7
    waves    [A, B]  [C, D]          all of a wave read their states before one of them writes
"""

import ctypes
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from ...lang.errors import ParameterError
from ..core.batch import StateRun
from .kv_pool import lazy_zeros, zero_pages
from .state_slots import NO_STATE

States = tuple[torch.Tensor, ...]  # of n sequences in one layer: [n, *part.shape] for each part

# Computes the rows of n sequences, which have T each: inputs [n, T, C] and the states before them → outputs [n, T, D]
# and the states after them.
Scan = Callable[[torch.Tensor, States], tuple[torch.Tensor, States]]

LEAST_STATES = 8  # slots of a pool: for a few requests and snapshots
MOST_STATES = 1024


@dataclass(frozen=True, slots=True)
class StatePart:
    """One tensor of a layer's state: the last inputs of a convolution, or a memory."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class StateGeometry:
    """The recurrent state of one sequence, layer by layer; layers of attention have none."""

    layers: tuple[tuple[StatePart, ...], ...]

    @property
    def bytes_per_slot(self) -> int:
        return sum(part.nbytes for layer in self.layers for part in layer)


class StatePool:
    """Holds `parts[layer][i]`, [num_states, *shape]. On the CPU pages are mapped when used.

    library: the native CPU kernels, which allocate larger pages; None: they do not compute.
    fixed: the tensors never move; captured graphs hold their addresses.
    """

    def __init__(
        self,
        geometry: StateGeometry,
        num_states: int,
        device: torch.device,
        library: ctypes.CDLL | None = None,
        *,
        fixed: bool = False,
    ) -> None:
        self.geometry = geometry
        self.num_states = num_states
        self.device = device
        self._library = library
        self._fixed = fixed
        self.parts: list[States] = []
        try:
            self._allocate()
        except (MemoryError, ValueError, RuntimeError) as error:  # ValueError: more than a size can say
            raise ParameterError(
                f"a pool of {num_states} recurrent states takes {num_states * geometry.bytes_per_slot} bytes, more "
                "than there is; write a smaller pool_tokens or pool_memory"
            ) from error

    def clear(self) -> None:
        """Forgets all states."""
        if self._fixed:
            for parts in self.parts:
                for part in parts:
                    part.zero_()
        else:
            self._allocate()

    def _allocate(self) -> None:
        self.parts.clear()
        for layer in self.geometry.layers:
            shapes = [((self.num_states, *part.shape), part.dtype) for part in layer]
            self.parts.append(tuple(self._zeros(shape, dtype) for shape, dtype in shapes))

    def _zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        if self._library is not None:
            return zero_pages(self._library, shape, dtype)
        return lazy_zeros(shape, dtype, self.device)


@dataclass(frozen=True, slots=True)
class _Group:
    """Runs of one wave that have equally many rows."""

    rows: torch.Tensor  # int64 [n · T] in the step
    sources: torch.Tensor  # int64 [n]
    targets: torch.Tensor  # int64 [n]


class StepStates(Protocol):
    """The recurrent states of one step: read and moved by the layers that have some."""

    def scan(self, layer: int, inputs: torch.Tensor, scan: Scan) -> torch.Tensor:
        """Runs a layer on all rows, [R, C] → [R, D], and moves its states.

        layer: its number among the layers of the pool.
        """


class StateRows:
    """The states of a step in which every row is the next token of a sequence of its own.

    Nothing depends on the host but the content of the indices, so such a step can be captured.

    Args:
        sources, targets: int64 [R], slots of the state before and after each row; rows that share a target are padding.
    """

    def __init__(self, pool: StatePool, sources: torch.Tensor, targets: torch.Tensor) -> None:
        self._pool = pool
        self._sources = sources
        self._targets = targets

    def scan(self, layer: int, inputs: torch.Tensor, scan: Scan) -> torch.Tensor:
        """See `StepStates`."""
        parts = self._pool.parts[layer]
        out, after = scan(inputs[:, None], tuple(part.index_select(0, self._sources) for part in parts))
        for part, values in zip(parts, after, strict=True):
            part.index_copy_(0, self._targets, values.to(part.dtype))
        return out[:, 0]


def are_single_rows(runs: Sequence[StateRun]) -> bool:
    """Returns whether `StateRows` computes the runs: each has one row, and none reads what another writes."""
    return all(run.rows == 1 for run in runs) and len(waves(runs)) == 1


class StateStep:
    """The runs of one step on a pool."""

    def __init__(self, pool: StatePool, runs: Sequence[StateRun]) -> None:
        self._pool = pool
        self._waves = [self._groups(wave) for wave in waves(runs)]

    def scan(self, layer: int, inputs: torch.Tensor, scan: Scan) -> torch.Tensor:
        """See `StepStates`."""
        parts = self._pool.parts[layer]
        outputs: torch.Tensor | None = None
        for wave in self._waves:
            moved: list[tuple[torch.Tensor, States]] = []
            for group in wave:
                before = tuple(part.index_select(0, group.sources) for part in parts)
                rows = inputs.index_select(0, group.rows).view(len(group.sources), -1, inputs.shape[1])
                out, after = scan(rows, before)
                if outputs is None:
                    outputs = out.new_empty((len(inputs), out.shape[-1]))
                outputs.index_copy_(0, group.rows, out.flatten(0, 1))
                moved.append((group.targets, after))
            for targets, after in moved:
                for part, values in zip(parts, after, strict=True):
                    part.index_copy_(0, targets, values.to(part.dtype))
        assert outputs is not None, "a step has rows"
        return outputs

    def _groups(self, wave: Sequence[tuple[int, StateRun]]) -> list[_Group]:
        by_rows: dict[int, list[tuple[int, StateRun]]] = {}
        for first, run in wave:
            by_rows.setdefault(run.rows, []).append((first, run))
        device = self._pool.device
        return [
            _Group(
                rows=torch.cat([torch.arange(first, first + rows) for first, _ in members]).to(device),
                sources=torch.tensor([run.source for _, run in members], device=device),
                targets=torch.tensor([run.target for _, run in members], device=device),
            )
            for rows, members in by_rows.items()
        ]


def waves(runs: Sequence[StateRun]) -> list[list[tuple[int, StateRun]]]:
    """Divides runs into waves, each run with its first row. A wave reads all of its states before it writes one.

    A run comes after those that write its source or its target, and not before those that read its target.
    """
    found: list[list[tuple[int, StateRun]]] = []
    written: dict[int, int] = {}  # slot → the last wave that writes it
    read: dict[int, int] = {}  # slot → the last wave that reads it
    first = 0
    for run in runs:
        assert run.target != NO_STATE, "the state of zeros is never written"
        wave = max(written.get(run.source, -1) + 1, written.get(run.target, -1) + 1, read.get(run.target, 0))
        if wave == len(found):
            found.append([])
        found[wave].append((first, run))
        written[run.target] = wave
        read[run.source] = max(read.get(run.source, 0), wave)
        first += run.rows
    return found


def independent_groups(runs: Sequence[StateRun]) -> list[list[tuple[int, StateRun]]]:
    """Divides runs, each with its first row, into groups that touch no slot that another group writes.

    Runs of a group keep their order.
    """
    root = {run.target: run.target for run in runs}  # of the slots that are written, towards the one of its group

    def find(slot: int) -> int:
        while root[slot] != slot:
            root[slot] = slot = root[root[slot]]
        return slot

    for run in runs:
        if run.source in root:
            root[find(run.source)] = find(run.target)
    groups: dict[int, list[tuple[int, StateRun]]] = {}
    first = 0
    for run in runs:
        groups.setdefault(find(run.target), []).append((first, run))
        first += run.rows
    return list(groups.values())


def states_for_bytes(geometry: StateGeometry, budget: int) -> int:
    """Returns the number of slots, that of zeros included, that fit into `budget` bytes.

    Raises:
        ParameterError: fewer than LEAST_STATES fit; the message says how many bytes to give.
    """
    slots = min(budget // geometry.bytes_per_slot, MOST_STATES)
    if slots < LEAST_STATES:
        raise ParameterError(
            f"{budget} bytes hold {slots} recurrent states of this model ({geometry.bytes_per_slot} bytes each); half "
            f"of the pool is theirs: write at least {2 * LEAST_STATES * geometry.bytes_per_slot} bytes"
        )
    return slots
