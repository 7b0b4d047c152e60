"""The attention backend over the Triton kernels: cuts a step, sends the plan, launches.

A step is one launch, and one of the merge when rows have several parts. A plan that captured graphs read (`reserve`) is
launched whole every time, with as many programs as the device runs at once: the kernels find the counts on the device.
Other plans are launched kind by kind, those that there are, each with as many programs as it has units of work.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import torch

from ....lang.errors import MissingExtraError
from ...attention.backend import AttentionCounters, AttentionGeometry
from ...attention.plan import ITEMS_PER_WORKER, AttentionPlan, Cut, make_plan
from ...cache.kv_pool import FLOAT8, KVPool
from ...core.batch import Batch

try:
    import triton
    import triton.language as tl

    from .attention import LOG2_E, attend_items, merge_parts, store_rows
    from .attention_plan import Capacity, TritonPlan, pack
    from .attention_tiles import Tile, tiles_for
    from .jit import block_of
    from .pdl import pdl_options
except ImportError as error:
    raise MissingExtraError("triton", "runtime") from error

HOST_MULTIPROCESSORS = 2  # of the interpreter, which runs one program after another
# Keys. Two tiles: of shorter runs, starting and merging costs more than it saves.
SHORTEST_RUN = 128
# Keys for each query vector of an item: a part of one is written and read in float32, as much as two keys.
RUN_PER_VECTOR = 16
# Query vectors whose products take as long as loading one key from device memory.
LOAD_VECTORS = 128
# With two rows a shared run pays from 256 keys on, with many from half of that.
MERGE_KEYS = 128
BLOCK_PARTS = 16
MANY_PARTS = 128  # rows of a captured step for which there is room in sixteen parts; for those after them in four
MERGE_RESIDENT = 8  # programs of the merge on a multiprocessor
STORE_BLOCK = 1024
_DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}
# The interpreter multiplies bfloat16 as the integers that it keeps them in; products of float32 are exact for both.
_INTERPRETED = not isinstance(attend_items, triton.JITFunction)


class TritonBackend:
    """An AttentionBackend (see attention/backend.py) over the Triton kernels.

    Args:
        geometry: heads of the model; head_dim is a multiple of 16 up to 256.
        device: where pool and queries are. The CPU works in Triton's interpreter only.
        dtype: of queries and results.
        kv_dtype: of the pool: the same, or float8_e4m3fn; None is the same.
        tree_attention: keys that sequences share are read once for all of them, where it pays.
        multiprocessors: of the device; None asks it.

    Raises:
        ParameterError: a head_dim or a dtype that the kernels do not take.
    """

    def __init__(
        self,
        geometry: AttentionGeometry,
        device: torch.device | str,
        *,
        dtype: torch.dtype,
        kv_dtype: torch.dtype | None = None,
        tree_attention: bool = True,
        multiprocessors: int | None = None,
    ) -> None:
        self.geometry = geometry
        self.device = torch.device(device)
        self.tiles = tiles_for(geometry, dtype, kv_dtype or dtype, shared_memory=_shared_memory(self.device))
        self.multiprocessors = multiprocessors or _multiprocessors(self.device)
        self.cut = Cut(
            self.tiles.many.rows(geometry),
            tree=tree_attention,
            # Units of work are items × KV heads; the planner makes ITEMS_PER_WORKER items for each worker.
            workers=max(1, self.multiprocessors // geometry.kv_heads),
            merge_keys=MERGE_KEYS,
            load_cost=max(1, LOAD_VECTORS // geometry.group),
            shortest_run=SHORTEST_RUN,
            run_per_row=RUN_PER_VECTOR * geometry.group,
            single_run=None,
        )
        self._early = pdl_options(self.device)
        self.counters = AttentionCounters()

    def plan(self, batch: Batch, window: int | None) -> TritonPlan:
        """On the device when the work that is enqueued now is done; see attention/backend.py."""
        tiles = (self.tiles.few, self.tiles.many)
        host = make_plan(batch, window, self.cut)
        packed = pack(host, tiles[0].rows(self.geometry))
        plan = TritonPlan(packed.size, tiles, self.geometry, self.device, fixed=False)
        plan.fill(packed)
        self._count(host)
        return plan

    def reserve(self, *, rows: int, keys: int, wide: bool = False) -> TritonPlan:
        """Allocates a plan at fixed addresses, for captured graphs. `attend` with it can be captured.

        Args:
            rows: most rows of a step. A step may have fewer: results of the others are not written.
            keys: most keys of a step, those of all sequences together.
            wide: it is for prompts, whose items have many rows of one sequence; else for steps that mostly decode.
        """
        merged = self.cut.workers * ITEMS_PER_WORKER
        # Every row is in an item of its own, and in those of the runs that it shares, some cut. A place takes as
        # much memory as the result of a row in float32, so what is left over by many rows is counted tightly.
        parts = 4 * rows + 12 * min(rows, MANY_PARTS) + 2 * merged
        capacity = Capacity(items=4 * rows + 2 * merged, slots=parts, merged=rows, places=parts, keys=keys)
        tiles = (self.tiles.few, self.tiles.many if wide else self.tiles.some)
        return TritonPlan(capacity, tiles, self.geometry, self.device, fixed=True)

    def plan_into(self, plan: TritonPlan, batch: Batch, window: int | None) -> bool:
        """Fills a reserved plan with a step of at most its rows and keys.

        A step whose shared runs need more room than there is, is planned without sharing: a step that only decodes fits
        then. False: another one does not, and the plan is as it was.
        """
        cut = replace(self.cut, block_rows=plan.tiles[1].rows(self.geometry))
        few = plan.tiles[0].rows(self.geometry)
        host = make_plan(batch, window, cut)
        packed = pack(host, few)
        if not plan.capacity.holds(packed.size):
            host = make_plan(batch, window, replace(cut, tree=False))
            packed = pack(host, few)
            if not plan.capacity.holds(packed.size):
                return False
        plan.fill(packed)
        self._count(host)
        return True

    def store(self, layer: int, keys: torch.Tensor, values: torch.Tensor, pool: KVPool, slots: torch.Tensor) -> None:
        """Writes keys and values [R, kv_heads, head_dim] to `slots` [R], rounded to the pool's dtype."""
        keys, values = _rows(keys), _rows(values)
        constants = store_constants(self.geometry, pool.geometry.dtype)
        store_rows[(len(keys), triton.cdiv(constants["WIDTH"], constants["BLOCK"]))](
            *(keys, values, pool.keys[layer], pool.values[layer], slots, keys.stride(0), values.stride(0)), **constants
        )

    def attend(
        self,
        layer: int,
        queries: torch.Tensor,
        pool: KVPool,
        plan: TritonPlan,
        *,
        scale: float,
        softcap: float = 0.0,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See attention/backend.py. `scale` is more than 0."""
        assert scale > 0, "the largest logit is found before it is scaled"
        queries = _rows(queries)
        if out is None:
            out = torch.empty_like(queries, memory_format=torch.contiguous_format)
        target = _rows(out)  # itself, where its heads lie side by side
        few, more = plan.tiles
        launch = partial(self._launch, layer, queries, pool, plan, target, scale, softcap)
        heads = self.geometry.kv_heads
        if plan.fixed and more is self.tiles.many:  # together they would share the registers of either
            launch(few, None, few.resident * self.multiprocessors)
            launch(None, more, more.resident * self.multiprocessors)
        elif plan.fixed:
            launch(few, more, min(few.resident, more.resident) * self.multiprocessors)
        else:
            if plan.counts[0]:
                launch(few, None, plan.counts[0] * heads)
            if plan.counts[1]:
                launch(None, more, plan.counts[1] * heads)
        units = plan.counts[2] * self.geometry.heads
        programs = MERGE_RESIDENT * self.multiprocessors if plan.fixed else units
        if programs:
            merge_parts[(programs,)](
                *(plan.part_out, plan.part_lse, target, plan.bounds, plan.merges, target.stride(0)),
                **merge_constants(self.geometry),
                **self._early,
                num_warps=1,
            )
        return out if target is out else out.copy_(target)

    def _launch(
        self,
        layer: int,
        queries: torch.Tensor,
        pool: KVPool,
        plan: TritonPlan,
        out: torch.Tensor,
        scale: float,
        softcap: float,
        few: Tile | None,
        more: Tile | None,
        programs: int,
    ) -> None:
        launched = [tile for tile in (few, more) if tile]
        attend_items[(programs,)](
            *(queries, pool.keys[layer], pool.values[layer], out, plan.part_out, plan.part_lse),
            *(plan.bounds, plan.items, plan.slots, plan.kv_idx, queries.stride(0), out.stride(0)),
            *((softcap or scale) * LOG2_E, 2 * LOG2_E * scale / softcap if softcap else 0.0),
            **item_constants(self.geometry, few, more, softcap=softcap, dtype=queries.dtype),
            **self._early,
            num_warps=max(tile.warps for tile in launched),
            num_stages=launched[-1].stages,  # the larger tile fills shared memory and registers
            maxnreg=launched[-1].registers,
            enable_fp_fusion=True,
        )

    def _count(self, plan: AttentionPlan) -> None:
        self.counters.add(plan.keys_read, plan.keys_saved)


# Any, in the four: Triton takes numbers, dtypes and None alike.
def item_constants(
    geometry: AttentionGeometry, few: Tile | None, more: Tile | None, *, softcap: float, dtype: torch.dtype
) -> dict[str, Any]:
    """Returns the constants that `attend_items` is compiled for.

    Args:
        few, more: tiles of the two kinds of items; None: the launch leaves them out.
        dtype: of queries.
    """
    return {
        "KV_HEADS": geometry.kv_heads,
        "GROUP": geometry.group,
        "HEAD_DIM": geometry.head_dim,
        "BLOCK_D": block_of(geometry.head_dim),
        "SOFTCAP": softcap > 0,
        "PRODUCT": tl.float32 if _INTERPRETED else _DTYPES[dtype],
        "FEW_VECTORS": few.vectors if few else 0,
        "FEW_KEYS": few.keys if few else 0,
        "MORE_VECTORS": more.vectors if more else 0,
        "MORE_KEYS": more.keys if more else 0,
        "MORE_TWO_LOOPS": more.two_loops if more else False,
    }


def merge_constants(geometry: AttentionGeometry) -> dict[str, Any]:
    return {
        "HEADS": geometry.heads,
        "HEAD_DIM": geometry.head_dim,
        "BLOCK_D": block_of(geometry.head_dim),
        "BLOCK_PARTS": BLOCK_PARTS,
    }


def store_constants(geometry: AttentionGeometry, kv_dtype: torch.dtype) -> dict[str, Any]:
    width = geometry.kv_heads * geometry.head_dim
    largest = torch.finfo(FLOAT8).max if kv_dtype is FLOAT8 else None
    return {"LARGEST": largest, "WIDTH": width, "BLOCK": min(block_of(width), STORE_BLOCK)}


def _multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return HOST_MULTIPROCESSORS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def _shared_memory(device: torch.device) -> int | None:
    """Returns the bytes of shared memory that a program may take; None: the interpreter has no limit."""
    if device.type != "cuda":
        return None
    properties = torch.cuda.get_device_properties(device)
    return int(properties.shared_memory_per_block_optin)  # type: ignore[attr-defined]  # it is not in torch's stubs


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    """Returns [R, heads, head_dim] with contiguous heads; rows may be strided."""
    plain = tensor.stride(2) == 1 and tensor.stride(1) == tensor.shape[2]
    return tensor if plain else tensor.contiguous()
