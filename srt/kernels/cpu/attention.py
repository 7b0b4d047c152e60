"""Computes attention on the CPU in C++: the pool is read in place, at page size 1, once for all rows of an item.

The torch reference is `TorchBackend` in attention/backend.py. The reference of the planner is `attention/plan.py`,
which makes the same plans, array by array. `PackingPlanner` plans for the kernels in Triton.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from numpy.typing import NDArray

from ....lang.errors import ParameterError
from ...attention.backend import AttentionCounters, AttentionGeometry
from ...attention.plan import AttentionPlan, BothWays, Chunk, Cut, Window, generated_apart, visible_intervals
from ...cache.kv_pool import KVPool
from ...core.batch import Batch
from .library import load_host_library, load_library

BLOCK_VECTORS = 96  # query vectors of one item: with a block of keys and values they fit into the L2 cache
HEAD_DIM_UNIT = 16


_PLAN_SIZES = ("rows", "items", "partials", "keys")
_PLAN_ARRAYS = (
    *("row_lo", "row_hi", "item_q", "q_rows", "item_kv", "item_pos", "item_full", "kv_idx"),
    *("merge_ptr", "merge_slot", "item_queue"),
)


class PlanArguments(ctypes.Structure):
    """`umbel::AttentionPlan`: sizes and pointers. The caller that passes it on keeps the plan alive."""

    _fields_ = [(name, ctypes.c_long) for name in _PLAN_SIZES] + [(name, ctypes.c_void_p) for name in _PLAN_ARRAYS]


class ShapeArguments(ctypes.Structure):
    """`umbel::AttentionShape`."""

    _fields_ = [
        *((name, ctypes.c_long) for name in ("heads", "kv_heads", "head_dim", "value_dim")),
        *((name, ctypes.c_float) for name in ("scale", "softcap")),
        ("sinks", ctypes.c_void_p),
    ]


class LayerArguments(ctypes.Structure):
    """`umbel::LayerPool`: one layer of the pool."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("keys", "values")),
        ("value_stride", ctypes.c_long),
        ("is_bf16", ctypes.c_int),
    ]


class _PlanRequest(ctypes.Structure):
    """`umbel::PlanRequest`: a batch and how to cut it; 0 is none in window and split."""

    _fields_ = [
        *((name, ctypes.c_long) for name in ("sequences", "keys")),
        *((name, ctypes.c_void_p) for name in ("query_lengths", "prefix_lengths", "path_ptr", "path")),
        *((name, ctypes.c_void_p) for name in ("kv_idx", "kv_start")),
        *((name, ctypes.c_long) for name in ("window", "block_rows", "split", "workers", "merge_keys", "load_cost")),
        *((name, ctypes.c_long) for name in ("shortest_run", "run_per_row", "single_run")),
        *((name, ctypes.c_long) for name in ("queues", "start_keys", "part_keys")),
        *((name, ctypes.c_void_p) for name in ("row_lo", "row_hi")),
    ]


class _PlanResult(ctypes.Structure):
    """`umbel::PlanResult`."""

    _fields_ = [("plan", PlanArguments), ("keys_read", ctypes.c_long), ("keys_saved", ctypes.c_long)]


class PackedSizes(ctypes.Structure):
    """`umbel::PackedSizes`: items of few rows, all items, their places for rows, rows with several parts, the parts."""

    _fields_ = [(name, ctypes.c_long) for name in ("few", "items", "slots", "merged", "places")]

    few: int
    items: int
    slots: int
    merged: int
    places: int


class CpuPlan:
    """A plan in the memory of the kernels, freed with this object. `arguments` points to its arrays."""

    __slots__ = ("_kept", "_result", "arguments", "library")

    def __init__(self, library: ctypes.CDLL, request: _PlanRequest, kept: object) -> None:
        self.library = library
        self._kept = kept  # owns what the request points to
        self._result = library.umbel_plan_attention(request)
        if not self._result:
            raise MemoryError("no memory for an attention plan")
        self.arguments: PlanArguments = self._result.contents.plan

    def __del__(self) -> None:
        if self._result:
            self.library.umbel_free_attention_plan(self._result)

    @property
    def keys_read(self) -> int:
        return int(self._result.contents.keys_read)

    @property
    def keys_saved(self) -> int:
        return int(self._result.contents.keys_saved)

    def copy(self) -> AttentionPlan:
        """Copies the arrays to numpy, for inspection."""
        at = self.arguments
        return AttentionPlan(
            row_lo=_integers(at.row_lo, at.rows),
            row_hi=_integers(at.row_hi, at.rows),
            item_q=_integers(at.item_q, at.items + 1),
            q_rows=_integers(at.q_rows, at.partials),
            item_kv=_integers(at.item_kv, 2 * at.items).reshape(-1, 2),
            item_pos=_integers(at.item_pos, at.items),
            item_full=np.array((ctypes.c_uint8 * at.items).from_address(at.item_full)),
            kv_idx=_integers(at.kv_idx, at.keys),
            merge_ptr=_integers(at.merge_ptr, at.rows + 1),
            merge_slot=_integers(at.merge_slot, at.partials),
            item_queue=_integers(at.item_queue, at.items) if at.item_queue else np.zeros(0, dtype=np.int32),
            keys_saved=self.keys_saved,
        )


def _integers(address: int, length: int) -> NDArray[np.int32]:
    return np.array((ctypes.c_int32 * length).from_address(address))


@dataclass(frozen=True, slots=True)
class _BatchArrays:
    """A batch in the form that the planner reads, the same for every window class."""

    batch: Batch
    tree: bool  # keys may be shared
    apart: Batch  # its generated rows are sequences of their own
    kv_idx: NDArray[np.int32]  # empty: they are in a table
    window_kv_idx: NDArray[np.int32]  # of window layers
    path_ptr: NDArray[np.int64] | None  # None: nothing is shared
    path: NDArray[np.int64] | None

    @classmethod
    def of(cls, batch: Batch, before: "_BatchArrays | None", *, tree: bool) -> "_BatchArrays":
        """Returns the arrays of a batch. before: of the one planned last: the same, or with mostly the same paths."""
        if before is not None and before.batch is batch and before.tree is tree:
            return before
        apart = generated_apart(batch)
        kv_idx = window_kv_idx = np.zeros(0, dtype=np.int32)
        if apart.places is None:
            kv_idx = window_kv_idx = _joined(apart.slots)
            if apart.window_slots is not None:
                window_kv_idx = _joined(apart.window_slots)
        if not (tree and len(batch.paths) > 1):
            return cls(batch, tree, apart, kv_idx, window_kv_idx, None, None)
        if before is not None and before.path_ptr is not None and before.apart.paths == apart.paths:
            return cls(batch, tree, apart, kv_idx, window_kv_idx, before.path_ptr, before.path)
        path_ptr = np.zeros(len(apart.paths) + 1, dtype=np.int64)
        np.cumsum([len(path) for path in apart.paths], out=path_ptr[1:])
        numbers = chain.from_iterable(chain.from_iterable(apart.paths))
        path = np.fromiter(numbers, np.int64, 3 * int(path_ptr[-1]))
        return cls(batch, tree, apart, kv_idx, window_kv_idx, path_ptr, path)

    def plan(self, library: ctypes.CDLL, cut: Cut, window: Window, *, workers: int) -> CpuPlan:
        """Plans for one class of windows. workers: in place of those of `cut`."""
        # The planner knows rows that see all before them, and windows that slide. Other intervals are computed here.
        low = high = None
        if any(self.apart.spans) or isinstance(window, Chunk | BothWays):
            low, high, _ = visible_intervals(self.apart, window)
        request = _PlanRequest(
            len(self.apart.query_lengths),
            len(self.kv_idx),
            self.apart.query_lengths.ctypes.data,
            self.apart.prefix_lengths.ctypes.data,
            None if self.path_ptr is None else self.path_ptr.ctypes.data,
            None if self.path is None else self.path.ctypes.data,
            (self.kv_idx if window is None else self.window_kv_idx).ctypes.data,
            None if self.apart.places is None else self.apart.places.ctypes.data,
            window if isinstance(window, int) else 0,
            cut.block_rows,
            cut.split or 0,
            workers,
            cut.merge_keys,
            cut.load_cost,
            cut.shortest_run,
            cut.run_per_row,
            cut.single_run or 0,
            cut.queues,
            cut.start_keys,
            cut.part_keys,
            None if low is None else low.ctypes.data,
            None if high is None else high.ctypes.data,
        )
        return CpuPlan(library, request, self)


def _joined(slots: Sequence[NDArray[np.int32]]) -> NDArray[np.int32]:
    """Concatenates the slots of sequences; those of one are left where they are."""
    return np.concatenate(slots) if len(slots) > 1 else np.ascontiguousarray(slots[0])


def layer_arguments(pool: KVPool, layer: int) -> LayerArguments:
    """Returns pointers to one layer, valid until the pool is cleared."""
    keys, values = pool.keys[layer], pool.values[layer]
    return LayerArguments(keys.data_ptr(), values.data_ptr(), values.stride(0), keys.dtype is torch.bfloat16)


class CpuBackend:
    """Implements AttentionBackend (see attention/backend.py) with the C++ kernels and their threads.

    Args:
        geometry: heads of the model; sizes of keys and values are multiples of 16 in every layer.
        library: the compiled kernels; None loads them.
        block_rows: most query rows of one item; None: as many as fit the cache.
        split: most keys of one item; None: no limit.
        tree_attention: keys that sequences share are read once for all of them, where it pays.

    Raises:
        ParameterError: a head_dim that the kernels do not support.
        NoKernels: the kernels are not available here.
    """

    def __init__(
        self,
        geometry: AttentionGeometry,
        *,
        library: ctypes.CDLL | None = None,
        block_rows: int | None = None,
        split: int | None = None,
        tree_attention: bool = True,
    ) -> None:
        if geometry.head_dim % HEAD_DIM_UNIT:
            raise ParameterError(
                f"head_dim={geometry.head_dim}: the CPU kernels take multiples of {HEAD_DIM_UNIT}; use TorchBackend"
            )
        self.geometry = geometry
        self._library = library or load_library()
        declare(self._library)
        declare_planner(self._library)
        self.cut = Cut(
            max(1, BLOCK_VECTORS // geometry.group) if block_rows is None else block_rows, split, tree=tree_attention
        )
        self.counters = AttentionCounters()
        self._latest: _BatchArrays | None = None  # of the batch that was planned last

    def plan(self, batch: Batch, window: Window) -> CpuPlan:
        self._latest = _BatchArrays.of(batch, self._latest, tree=self.cut.tree)
        plan = self._latest.plan(self._library, self.cut, window, workers=self._library.umbel_threads())
        self.counters.add(plan.keys_read, plan.keys_saved)
        return plan

    def store(
        self, layer: int, keys: torch.Tensor, values: torch.Tensor | None, pool: KVPool, slots: torch.Tensor
    ) -> None:
        keys = _rows(keys)
        values = None if values is None else _rows(values)
        self._library.umbel_store(
            self._shape(pool, layer, 1.0, 0.0, None),
            layer_arguments(pool, layer),
            keys.data_ptr(),
            keys.stride(0),
            None if values is None else values.data_ptr(),
            0 if values is None else values.stride(0),
            slots.data_ptr(),
            len(slots),
        )

    def attend(
        self,
        layer: int,
        queries: torch.Tensor,
        pool: KVPool,
        plan: CpuPlan,
        *,
        scale: float,
        softcap: float = 0.0,
        sinks: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if out is None:
            out = queries.new_empty((*queries.shape[:2], pool.values[layer].shape[2]))
        given = _rows(queries)
        direct = out.dtype is torch.float32 and _rows(out) is out
        result = out if direct else torch.empty(out.shape)
        self._library.umbel_attend(
            plan.arguments,
            self._shape(pool, layer, scale, softcap, sinks),
            layer_arguments(pool, layer),
            given.data_ptr(),
            given.stride(0),
            result.data_ptr(),
            result.stride(0),
        )
        return out if direct else out.copy_(result)

    def _shape(
        self, pool: KVPool, layer: int, scale: float, softcap: float, sinks: torch.Tensor | None
    ) -> ShapeArguments:
        _, kv_heads, head_dim = pool.keys[layer].shape
        value_dim = pool.values[layer].shape[2]
        pointer = None if sinks is None else sinks.data_ptr()
        return ShapeArguments(self.geometry.heads, kv_heads, head_dim, value_dim, scale, softcap, pointer)


@dataclass(frozen=True, slots=True)
class NativePacked:
    """A plan that can be written to the buffer of a `TritonPlan`."""

    plan: CpuPlan
    few_rows: int
    queues: int  # into which its items are divided; 0: they are not
    size: PackedSizes

    @property
    def keys_read(self) -> int:
        return self.plan.keys_read

    @property
    def keys_saved(self) -> int:
        return self.plan.keys_saved

    def write(
        self, items: NDArray[np.int32], slots: NDArray[np.int32], merges: NDArray[np.int32], queues: NDArray[np.int32]
    ) -> None:
        """Writes the arrays to the beginnings of these, which are at least as long."""
        targets = (array.ctypes.data for array in (items, slots, merges, queues))
        self.plan.library.umbel_pack_plan(self.plan.arguments, self.few_rows, self.queues, *targets)


class PackingPlanner:
    """Plans for the kernels in Triton, of batches whose slots are in a table: `make_plan` and `pack` in C++.

    Raises:
        NoKernels: the library of the host is not available here.
    """

    def __init__(self) -> None:
        self._library = load_host_library()
        declare_planner(self._library)
        self._latest: _BatchArrays | None = None  # of the batch that was planned last

    def plan(self, batch: Batch, window: Window, cut: Cut, few_rows: int) -> NativePacked:
        """Cuts a batch. few_rows: most rows of an item of the first kind."""
        self._latest = _BatchArrays.of(batch, self._latest, tree=cut.tree)
        plan = self._latest.plan(self._library, cut, window, workers=cut.workers)
        sizes = PackedSizes()
        self._library.umbel_packed_sizes(plan.arguments, few_rows, sizes)
        return NativePacked(plan, few_rows, cut.queues if plan.arguments.item_queue else 0, sizes)


def declare_planner(library: ctypes.CDLL) -> None:
    """Declares the C functions of attention_plan.cpp."""
    plan, array = ctypes.POINTER(PlanArguments), ctypes.c_void_p
    library.umbel_plan_attention.argtypes = [ctypes.POINTER(_PlanRequest)]
    library.umbel_plan_attention.restype = ctypes.POINTER(_PlanResult)
    library.umbel_free_attention_plan.argtypes = [ctypes.POINTER(_PlanResult)]
    library.umbel_free_attention_plan.restype = None
    library.umbel_packed_sizes.argtypes = [plan, ctypes.c_long, ctypes.POINTER(PackedSizes)]
    library.umbel_packed_sizes.restype = None
    library.umbel_pack_plan.argtypes = [plan, ctypes.c_long, ctypes.c_long, array, array, array, array]
    library.umbel_pack_plan.restype = None


def declare(library: ctypes.CDLL) -> None:
    """Declares the C functions of attention.cpp."""
    shape, layer = ctypes.POINTER(ShapeArguments), ctypes.POINTER(LayerArguments)
    first, stride = ctypes.c_void_p, ctypes.c_long  # where the first row is, elements from one row to the next
    library.umbel_attend.argtypes = [ctypes.POINTER(PlanArguments), shape, layer, first, stride, first, stride]
    library.umbel_attend.restype = None
    library.umbel_store.argtypes = [shape, layer, first, stride, first, stride, ctypes.c_void_p, ctypes.c_long]
    library.umbel_store.restype = None


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    """Converts to float32 [R, heads, head_dim] with contiguous heads; rows may be strided."""
    tensor = tensor.float()
    head_dim = tensor.shape[2]
    plain = tensor.stride(2) == 1 and tensor.stride(1) == head_dim
    return tensor if plain else tensor.contiguous()
