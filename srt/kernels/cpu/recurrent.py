"""Lays out recurrent states and the runs of a step through them for the native decoder. See recurrent.h."""

import ctypes
from collections.abc import Sequence

import numpy as np

from ...cache.state_pool import StatePool, independent_groups
from ...core.batch import StateRun

_POINTER = ctypes.c_void_p
_LONG = ctypes.c_long


class StateRuns(ctypes.Structure):
    """`StateRuns` of recurrent.h. All zeros: the model has no recurrent states."""

    _fields_ = [("groups", _LONG), *((name, _POINTER) for name in ("starts", "first", "rows", "source", "target"))]


class _LayerStates(ctypes.Structure):
    """`LayerStates` of recurrent.h."""

    _fields_ = [("window", _POINTER), ("memory", _POINTER)]


class StateTable:
    """Holds the addresses of every recurrent layer's states, which are float32. Valid until the pool is cleared."""

    def __init__(self, pool: StatePool) -> None:
        entries = [_LayerStates(*(part.data_ptr() for part in parts)) for parts in pool.parts]
        self.layers = (_LayerStates * len(entries))(*entries)


class RunTable:
    """The runs of one step. `arguments` is valid as long as this object."""

    def __init__(self, runs: Sequence[StateRun]) -> None:
        groups = independent_groups(runs)
        ends = np.cumsum([0, *map(len, groups)], dtype=np.int64)
        numbers = [(first, *run) for group in groups for first, run in group]  # first, rows, source, target
        columns = np.ascontiguousarray(np.array(numbers, dtype=np.int64).reshape(-1, 4).T)
        self._kept = ends, columns
        self.arguments = StateRuns(len(groups), ends.ctypes.data, *(column.ctypes.data for column in columns))
