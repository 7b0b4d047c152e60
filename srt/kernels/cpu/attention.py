"""Attention on the CPU in C++: the pool is read where it lies, at page size 1, once for all rows of an item.

The torch twin is `attention/torch_backend.py`; both take the same plans.
"""

import ctypes
from dataclasses import dataclass, replace

import torch

from ....lang.errors import ParameterError
from ...attention.backend import AttentionCounters, AttentionGeometry
from ...attention.plan import AttentionPlan, Cut, make_plan
from ...batch import Batch
from ...kv_pool import KVPool
from .library import load_library

BLOCK_VECTORS = 128  # query vectors of one item: with a block of keys and values they fit into the L2 cache
_HEAD_DIM_UNIT = 16


_PLAN_SIZES = ("rows", "items", "partials", "keys")
_PLAN_ARRAYS = (
    *("row_lo", "row_hi", "item_q", "q_rows", "item_kv", "item_pos", "item_full", "kv_idx"),
    *("merge_ptr", "merge_slot"),
)


class PlanArguments(ctypes.Structure):
    """`umbel::AttentionPlan`: sizes and pointers. Whoever passes it on keeps the plan alive."""

    _fields_ = [(name, ctypes.c_long) for name in _PLAN_SIZES] + [(name, ctypes.c_void_p) for name in _PLAN_ARRAYS]


class ShapeArguments(ctypes.Structure):
    """`umbel::AttentionShape`."""

    _fields_ = [(name, ctypes.c_long) for name in ("heads", "kv_heads", "head_dim")] + [
        (name, ctypes.c_float) for name in ("scale", "softcap")
    ]


class LayerArguments(ctypes.Structure):
    """`umbel::LayerPool`: one layer of the pool."""

    _fields_ = [("keys", ctypes.c_void_p), ("values", ctypes.c_void_p), ("is_bf16", ctypes.c_int)]


@dataclass(frozen=True, slots=True)
class CpuPlan:
    """A plan with the pointers to its arrays."""

    host: AttentionPlan
    arguments: PlanArguments


def plan_arguments(plan: AttentionPlan) -> PlanArguments:
    """Pointers to the arrays of `plan`, which must outlive them."""
    arguments = PlanArguments(rows=len(plan.row_lo), items=plan.items, partials=len(plan.q_rows), keys=len(plan.kv_idx))
    for name in _PLAN_ARRAYS:
        array = getattr(plan, name)
        assert array.flags.c_contiguous, "kernels read plain arrays"
        setattr(arguments, name, array.ctypes.data)
    return arguments


def layer_arguments(pool: KVPool, layer: int) -> LayerArguments:
    """Pointers to one layer, valid until the pool is cleared."""
    keys, values = pool.keys[layer], pool.values[layer]
    return LayerArguments(keys.data_ptr(), values.data_ptr(), keys.dtype is torch.bfloat16)


class CpuBackend:
    """An AttentionBackend (see attention/backend.py) over the C++ kernels, on the threads of their team.

    Args:
        geometry: heads of the model; head_dim is a multiple of 16.
        library: the compiled kernels; None loads them.
        block_rows: most query rows of one item; None takes what fits the cache.
        split: most keys of one item; None: no limit.
        tree_attention: keys that sequences share are read once for all of them, where it pays.

    Raises:
        ParameterError: a head_dim that the kernels do not take.
        NoKernels: the kernels cannot be had here.
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
        if geometry.head_dim % _HEAD_DIM_UNIT:
            raise ParameterError(
                f"head_dim={geometry.head_dim}: the CPU kernels take multiples of {_HEAD_DIM_UNIT}; use TorchBackend"
            )
        self.geometry = geometry
        self._library = library or load_library()
        declare(self._library)
        self.cut = Cut(
            max(1, BLOCK_VECTORS // geometry.group) if block_rows is None else block_rows, split, tree=tree_attention
        )
        self.counters = AttentionCounters()

    def plan(self, batch: Batch, window: int | None) -> CpuPlan:
        plan = make_plan(batch, window, replace(self.cut, workers=self._library.umbel_threads()))
        self.counters.add(plan.keys_read, plan.keys_saved)
        return CpuPlan(plan, plan_arguments(plan))

    def store(self, layer: int, keys: torch.Tensor, values: torch.Tensor, pool: KVPool, slots: torch.Tensor) -> None:
        keys, values = _rows(keys), _rows(values)
        self._library.umbel_store(
            self._shape(1.0, 0.0),
            layer_arguments(pool, layer),
            keys.data_ptr(),
            keys.stride(0),
            values.data_ptr(),
            values.stride(0),
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
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if out is None:
            out = torch.empty_like(queries, memory_format=torch.contiguous_format)
        given = _rows(queries)
        direct = out.dtype is torch.float32 and _rows(out) is out
        result = out if direct else torch.empty(queries.shape)
        self._library.umbel_attend(
            plan.arguments,
            self._shape(scale, softcap),
            layer_arguments(pool, layer),
            given.data_ptr(),
            given.stride(0),
            result.data_ptr(),
            result.stride(0),
        )
        return out if direct else out.copy_(result)

    def _shape(self, scale: float, softcap: float) -> ShapeArguments:
        return ShapeArguments(self.geometry.heads, self.geometry.kv_heads, self.geometry.head_dim, scale, softcap)


def declare(library: ctypes.CDLL) -> None:
    """The C functions of attention.cpp."""
    shape, layer = ctypes.POINTER(ShapeArguments), ctypes.POINTER(LayerArguments)
    first, stride = ctypes.c_void_p, ctypes.c_long  # where the first row is, elements from one row to the next
    library.umbel_attend.argtypes = [ctypes.POINTER(PlanArguments), shape, layer, first, stride, first, stride]
    library.umbel_attend.restype = None
    library.umbel_store.argtypes = [shape, layer, first, stride, first, stride, ctypes.c_void_p, ctypes.c_long]
    library.umbel_store.restype = None


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    """Float32 [R, heads, head_dim] with heads side by side; rows may lie apart."""
    tensor = tensor.float()
    head_dim = tensor.shape[2]
    plain = tensor.stride(2) == 1 and tensor.stride(1) == head_dim
    return tensor if plain else tensor.contiguous()
