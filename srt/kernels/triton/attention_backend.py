"""The attention backend over the Triton kernels: cuts a step, sends the plan, launches.

A step is one launch, in which the parts of rows are merged, too. The slots that items read lie in a table that a runner
keeps from step to step (`use_table`), or are sent with the plan. A plan that captured graphs read (`reserve`) is
launched whole every time, with as many programs as the device runs at once: the kernels find the counts on the device.
Other plans are launched kind by kind, those that there are, each with as many programs as it has units of work.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from ....lang.errors import MissingExtraError
from ...attention.backend import AttentionCounters, AttentionGeometry
from ...attention.long_prompts import GatheredPrompts, long_prompts
from ...attention.plan import ITEMS_PER_WORKER, AttentionPlan, Cut, Int32, Window, make_plan
from ...cache.kv_pool import FLOAT8, KVPool, LayerKV
from ...core.batch import Batch
from ..cpu.attention import PackingPlanner
from ..cpu.library import NoKernels

try:
    import triton
    import triton.language as tl

    from .attention import (
        HEAD_DIM_UNIT,
        LOG2_E,
        MERGED_NUMBERS,
        AttentionTiles,
        HeadShape,
        Tile,
        attend_items,
        merge_parts,
        narrowed,
        store_rows,
        tiles_for,
        unit_heads,
    )
    from .fitting import Room, launch_fitting, room_of, smaller
    from .jit import block_of, pdl_options
    from .tuning import Columns, MergeTile, Tuning, tuning_for
except ImportError as error:
    raise MissingExtraError("triton", "runtime") from error

_log = logging.getLogger(__name__)
BOUNDS = 4
MERGE = 3  # numbers of a merged row
ALIGNMENT = 4  # int32: Triton reads 16 bytes at once where it knows that an address is a multiple of them


@dataclass(frozen=True, slots=True)
class Capacity:
    """The capacity of a buffer: I items, S places of rows in them, M rows with several parts, Q queues, T slots."""

    items: int
    slots: int
    merged: int
    places: int  # partial results
    queues: int = 0
    keys: int = 0

    def holds(self, other: "Capacity") -> bool:
        return (
            other.items <= self.items
            and other.slots <= self.slots
            and other.merged <= self.merged
            and other.places <= self.places
            and other.queues <= self.queues
            and other.keys <= self.keys
        )


@dataclass(frozen=True, slots=True)
class PackedPlan:
    """The arrays of the drawing, on the host, and what they hold."""

    items: Int32  # [I, 5]
    slots: Int32  # [S, 5]
    merges: Int32  # [M, 3]
    ends: Int32  # [2, Q + 1]; empty: there are no queues
    kv_idx: Int32  # [T]; empty: the keys are in a table
    few: int  # items of few rows

    @property
    def size(self) -> Capacity:
        places, queues = int(self.merges[:, 2].sum()), max(0, self.ends.size // 2 - 1)
        return Capacity(len(self.items), len(self.slots), len(self.merges), places, queues, len(self.kv_idx))

    def write(self, items: Int32, slots: Int32, merges: Int32, ends: Int32) -> None:
        """Writes the arrays to the beginnings of these, which are at least as long."""
        pairs = ((items, self.items), (slots, self.slots), (merges, self.merges), (ends, self.ends))
        for target, array in pairs:
            target[: array.size] = array.ravel()


class ReadyPlan(NamedTuple):
    """A packed plan that may be sent: its size, and what writes its arrays (see `PackedPlan.write`)."""

    few: int
    size: Capacity
    kv_idx: Int32
    keys_read: int
    keys_saved: int
    write: Callable[[Int32, Int32, Int32, Int32], None]


def pack(plan: AttentionPlan, few_rows: int, queues: int = 0) -> PackedPlan:
    """Packs a plan. few_rows: most rows of an item of the first kind. queues: what it was cut for (`Cut.queues`)."""
    counts = np.diff(plan.item_q)
    descending = np.arange(plan.items - 1, -1, -1)
    small = counts[descending] <= few_rows
    kinds = descending[small], descending[~small]
    order = np.concatenate(kinds)
    ends = np.zeros(0, dtype=np.int32)
    if len(plan.item_queue):
        numbers = np.arange(queues + 1)
        first, second = (np.searchsorted(plan.item_queue[of_kind], numbers) for of_kind in kinds)
        ends = np.stack([first, second]).astype(np.int32)
    length = plan.item_kv[order, 1] - plan.item_kv[order, 0]
    first_key, kv_idx = plan.item_kv[order, 0], plan.kv_idx
    if len(kv_idx):
        first_key, kv_idx = _read_keys(first_key, length, kv_idx)
    items = np.stack([plan.item_q[order], counts[order], first_key, length, plan.item_pos[order]], axis=1)

    parts = np.diff(plan.merge_ptr)  # [R]
    rows = np.flatnonzero(parts > 1)
    by_row = plan.merge_slot[np.repeat(parts > 1, parts)]  # places in q_rows of all parts that are merged, row by row
    place, merge = np.full((2, len(plan.q_rows)), -1, dtype=np.int32)
    place[by_row] = np.arange(len(by_row), dtype=np.int32)
    merged = parts[rows]
    merge[by_row] = np.repeat(np.arange(len(rows), dtype=np.int32), merged)
    return PackedPlan(
        items=items.astype(np.int32, copy=False),
        slots=np.stack([plan.q_rows, place, plan.row_lo[plan.q_rows], plan.row_hi[plan.q_rows], merge], axis=1),
        merges=np.stack([rows, np.cumsum(merged) - merged, merged], axis=1).astype(np.int32),
        ends=ends,
        kv_idx=kv_idx,
        few=int(small.sum()),
    )


def _read_keys(first: Int32, length: Int32, kv_idx: Int32) -> tuple[Int32, Int32]:
    """The keys that items read, moved together, and where each item finds its first.

    Of keys that many sequences share, only one copy is read, and of those before a window none: mostly far fewer than
    the sequences have.
    """
    order = np.argsort(first, kind="stable")
    ascending = first[order]
    reach = np.maximum.accumulate(ascending + length[order])
    apart = np.concatenate([[True], ascending[1:] > reach[:-1]])  # begins a run that those before do not touch
    begin = ascending[apart]
    end = reach[np.concatenate([np.flatnonzero(apart)[1:] - 1, [len(reach) - 1]])]
    if (end - begin).sum() == len(kv_idx):
        return first, kv_idx
    moved = np.cumsum(end - begin) - end  # from old to new places
    places = np.empty_like(first)
    places[order] = ascending + moved[np.cumsum(apart) - 1]
    return places, np.concatenate([kv_idx[i:j] for i, j in zip(begin.tolist(), end.tolist(), strict=True)])


class KeySlots(Protocol):
    """Has the slots of all running sequences on the device: `runners.cuda.slot_table.SlotTable`."""

    def slots_of(self, *, windowed: bool) -> torch.Tensor:
        """Returns the table of layers that are `windowed`, or of the others: int32 [entries], always the same one."""


class TritonPlan:
    """A plan on the device, and room for its partial results. Arrays stay where they are for good.

    It is one int32 buffer, filled by one transfer:

        bounds   [few, items, merged, queues]   items of few rows are [0, few), those of more [few, items)
        items    [I, 5]                 first place in slots, places, first key in kv_idx, keys, position of the first
        slots    [S, 5]                 row, place among the partial results or −1, first visible position, end of them,
                                        number in merges or −1
        merges   [M, 3]                 row, first place of its parts, which lie side by side, and how many there are
        ends     [2, Q + 1]             queue q has the items [ends[q], ends[q + 1]) of few rows, and so of more
        kv_idx   [T]                    slots of the pool that items read; last, for only what is used of it is sent.
                                        Where a table has them this is the table, and not in the buffer

    Items of both kinds come in descending cost: the last ones to run are short. Where sequences share keys and one
    launch has both kinds, they come in queues of the same cost (`Cut.queues`), as many as programs run at once on one
    unit of work of an item: a program takes one unit of all items of its queue, those of more rows first. A step that
    shares nothing has no queues.

    Counters lie apart from the buffer. They are 0 when a launch begins and when it ends, so a replayed graph needs
    nothing of the host. The host's memory is fresh for each plan: torch's pinned allocator gives it out again when the
    copy is done, so no transfer is waited for.

    Args:
        capacity: what it can be filled with.
        tiles: of the two kinds of items, few rows and more.
        heads: query heads of a unit of work, at most.
        fixed: captured graphs read it, so launches must not depend on what it is filled with.
        table: has the slots of all keys; None: the plan has them.
    """

    def __init__(
        self,
        capacity: Capacity,
        tiles: tuple[Tile, Tile],
        geometry: AttentionGeometry,
        device: torch.device,
        *,
        heads: int,
        fixed: bool,
        table: torch.Tensor | None = None,
    ) -> None:
        self.capacity = capacity
        self.tiles = tiles
        self.heads = heads
        self.fixed = fixed
        self.counts = (0, 0, 0)  # items of few rows, items of more, merged rows
        self.long: GatheredPrompts | None = None  # they attend in its place, in layers that they take
        ends = 2 * (capacity.queues + 1)
        sizes = (BOUNDS, 5 * capacity.items, 5 * capacity.slots, MERGE * capacity.merged, ends, capacity.keys)
        *starts, total = np.cumsum([0, *(-(-size // ALIGNMENT) * ALIGNMENT for size in sizes)]).tolist()
        self._starts = starts
        self._buffer = torch.empty(total, dtype=torch.int32, device=device)
        if fixed:
            self._buffer[:BOUNDS] = 0  # no items, until it is filled
        views = [self._buffer[start:] for start in self._starts]
        self.bounds, self.items, self.slots, self.merges, self.ends, own = views
        self.kv_idx = own if table is None else table
        parts = (capacity.places, geometry.heads)
        self.part_out = torch.empty((*parts, geometry.head_dim), dtype=torch.float32, device=device)
        self.part_lse = torch.empty(parts, dtype=torch.float32, device=device)
        # Of each merged row and unit of work, of which there are at most as many as heads.
        self.counters = torch.zeros((capacity.merged, geometry.heads), dtype=torch.int32, device=device)

    def fill(self, plan: ReadyPlan) -> None:
        """Sends a plan that fits. Earlier kernels have read the old one: copies and kernels are in one stream."""
        size = plan.size
        assert self.capacity.holds(size), "a plan that is larger than its buffer"
        self.counts = (plan.few, size.items - plan.few, size.merged)
        used = self._starts[3] + MERGE * size.merged
        if size.queues:
            used = self._starts[4] + 2 * (size.queues + 1)
        if size.keys:
            used = self._starts[5] + size.keys
        pinned = self._buffer.is_cuda
        host = torch.empty(used, dtype=torch.int32, pin_memory=pinned)
        numbers = host.numpy()
        numbers[:BOUNDS] = plan.few, size.items, size.merged, size.queues
        _, *starts, keys = self._starts
        plan.write(*[numbers[start:] for start in starts])
        if size.keys:
            numbers[keys:used] = plan.kv_idx
        self._buffer[:used].copy_(host, non_blocking=pinned)


_NO_KEYS = np.zeros(0, dtype=np.int32)


def _native_planner() -> PackingPlanner | None:
    """Returns the planner in C++; None where it cannot be compiled: numpy plans then, in several times as long."""
    try:
        return PackingPlanner()
    except NoKernels as error:
        _log.warning("numpy plans attention: %s", error)
        return None


HOST_MULTIPROCESSORS = 2  # of the interpreter, which runs one program after another
MANY_PARTS = 128  # rows of a captured step for which there is room in sixteen parts; for those after them in four
_DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}
# The interpreter multiplies bfloat16 as the integers that it keeps them in; products of float32 are exact for both.
_INTERPRETED = not isinstance(attend_items, triton.JITFunction)


@dataclass(frozen=True, slots=True)
class Ways:
    """Ways of computing; a benchmark turns them off one by one, and finds what each of them is worth.

    fused: the program that computes the last part of a row merges its parts; else another launch does.
    wide: items of captured decode steps have up to `wide_vectors` query vectors; else `some_vectors`.
    balanced: where sequences share keys, programs have queues of equal cost; else they take items by turns.
    """

    fused: bool = True
    wide: bool = True
    balanced: bool = True


@dataclass(frozen=True, slots=True)
class Sizes:
    """Describes how steps are cut for layers of one geometry, and the tiles that compute the items."""

    geometry: AttentionGeometry
    heads: int  # query heads of a unit of work
    tiles: AttentionTiles
    cut: Cut

    @classmethod
    def of(
        cls,
        geometry: AttentionGeometry,
        *,
        dtype: torch.dtype,
        kv_dtype: torch.dtype,
        tree: bool,
        multiprocessors: int,
        tuning: Tuning,
        room: Room,
        ways: Ways,
    ) -> "Sizes":
        """Returns the sizes for a device. tuning: numbers of its class; room: its shared memory."""
        plan, heads = tuning.attention_plan, unit_heads(geometry, dtype)
        tiles = tiles_for(geometry, dtype, kv_dtype, tuning=tuning, room=room)
        if not ways.wide:
            tiles = narrowed(tiles, heads, plan)
        units = geometry.kv_heads * -(-geometry.group // heads)  # of work for each item
        resident = min(tiles.few.resident, tiles.some.resident)
        cut = Cut(
            tiles.many.rows(heads),
            tree=tree,
            # The planner makes ITEMS_PER_WORKER items for each worker.
            workers=max(1, multiprocessors // units),
            merge_keys=plan.merge_keys,
            load_cost=max(1, plan.load_vectors // geometry.group),
            shortest_run=plan.shortest_run,
            run_per_row=plan.run_per_vector * geometry.group,
            single_run=None,
            queues=0 if tiles.some.apart or not ways.balanced else resident * multiprocessors // units,
            start_keys=plan.start_keys,
            part_keys=min(heads, geometry.group),  # a part of a query vector takes as much memory as one key
        )
        return cls(geometry, heads, tiles, cut)


class TritonBackend:
    """An AttentionBackend (see attention/backend.py) over the Triton kernels.

    Args:
        geometry: heads of the model; the largest group and heads where layers differ.
        device: where pool and queries are. The CPU works in Triton's interpreter only.
        dtype: of queries and results.
        kv_dtype: of the pool: the same, or float8_e4m3fn; None is the same.
        tree_attention: keys that sequences share are read once for all of them, where it pays.
        torch_prompts: steps of long prompts attend by torch's kernel, see attention/long_prompts.py.
        multiprocessors: of the device; None asks it.
        windows: heads of the layers of a window class, where they are not those of the model.
        ways: which ways of computing are taken; a benchmark turns some off.

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
        torch_prompts: bool = True,
        multiprocessors: int | None = None,
        windows: Mapping[Window, AttentionGeometry] | None = None,
        ways: Ways = Ways(),
    ) -> None:
        self.device = torch.device(device)
        self.multiprocessors = multiprocessors or _multiprocessors(self.device)
        self.tuning = tuning_for(self.device)
        sizes = partial(
            Sizes.of,
            dtype=dtype,
            kv_dtype=kv_dtype or dtype,
            tree=tree_attention,
            multiprocessors=self.multiprocessors,
            tuning=self.tuning,
            room=room_of(self.device),
            ways=ways,
        )
        self._ways = ways
        self.sizes = sizes(geometry)
        self._by_window = {window: sizes(own) for window, own in (windows or {}).items()}
        has_flash = self.device.type != "cuda" or torch.backends.cuda.is_flash_attention_available()
        self._torch_prompts = torch_prompts and has_flash
        self._early = pdl_options(self.device)
        self._table: KeySlots | None = None
        self._planner = _native_planner()
        self.counters = AttentionCounters()

    def use_table(self, table: KeySlots) -> None:
        """Has plans of batches with `places` read the slots of keys from this table."""
        self._table = table

    def plan(self, batch: Batch, window: Window) -> TritonPlan:
        """On the device when the work that is enqueued now is done; see attention/backend.py."""
        sizes = self._sizes(window)
        tiles = (sizes.tiles.few, sizes.tiles.many)
        ready = self._make(batch, window, replace(sizes.cut, queues=0), tiles[0].rows(sizes.heads))
        table = None if batch.places is None else self._table_of(window)
        plan = TritonPlan(ready.size, tiles, sizes.geometry, self.device, heads=sizes.heads, fixed=False, table=table)
        plan.fill(ready)
        self.counters.add(ready.keys_read, ready.keys_saved)
        if table is not None and self._torch_prompts:
            plan.long = long_prompts(batch, window, table, group=sizes.geometry.group, counters=self.counters)
        return plan

    def _make(self, batch: Batch, window: Window, cut: Cut, few_rows: int) -> ReadyPlan:
        """Cuts a batch; natively where that is possible and its slots are in a table."""
        if self._planner is None or batch.places is None:
            host = make_plan(batch, window, cut)
            packed = pack(host, few_rows, cut.queues)
            saved = host.keys_saved
            return ReadyPlan(packed.few, packed.size, packed.kv_idx, host.keys_read, saved, packed.write)
        native = self._planner.plan(batch, window, cut, few_rows)
        counts = native.size
        size = Capacity(counts.items, counts.slots, counts.merged, counts.places, native.queues)
        return ReadyPlan(native.size.few, size, _NO_KEYS, native.keys_read, native.keys_saved, native.write)

    def _table_of(self, window: Window) -> torch.Tensor:
        assert self._table is not None, "the runner that placed the batch has a table"
        return self._table.slots_of(windowed=window is not None)

    def reserve(self, window: Window, *, rows: int, wide: bool = False) -> TritonPlan:
        """Allocates a plan at fixed addresses, for captured graphs. `attend` with it can be captured.

        It is filled with batches that have `places`, and reads the table that is used when it is made.

        Args:
            window: the class of the layers that read it.
            rows: most rows of a step. A step may have fewer: results of the others are not written.
            wide: it is for prompts, whose items have many rows of one sequence; else for steps that mostly decode.
        """
        sizes = self._sizes(window)
        merged = sizes.cut.workers * ITEMS_PER_WORKER
        # Every row is in an item of its own, and in those of the runs that it shares, some cut. A place takes as
        # much memory as the result of a row in float32, so what is left over by many rows is counted tightly.
        tiles = (sizes.tiles.few, sizes.tiles.many if wide else sizes.tiles.some)
        queues = 0 if wide else sizes.cut.queues
        parts = 4 * rows + 12 * min(rows, MANY_PARTS) + 2 * merged + queues * min(rows, tiles[1].rows(sizes.heads))
        capacity = Capacity(4 * rows + 2 * merged + queues, slots=parts, merged=rows, places=parts, queues=queues)
        table = self._table_of(window)
        return TritonPlan(capacity, tiles, sizes.geometry, self.device, heads=sizes.heads, fixed=True, table=table)

    def plan_into(self, plan: TritonPlan, batch: Batch, window: Window) -> bool:
        """Fills a reserved plan with a step of at most its rows.

        A step whose shared runs need more room than there is, is planned without sharing: a step that only decodes fits
        then. False: another one does not, and the plan is as it was.
        """
        block_rows, queues = plan.tiles[1].rows(plan.heads), plan.capacity.queues
        cut = replace(self._sizes(window).cut, block_rows=block_rows, queues=queues)
        few = plan.tiles[0].rows(plan.heads)
        for tree in (True, False) if cut.tree else (False,):
            ready = self._make(batch, window, replace(cut, tree=tree), few)
            if plan.capacity.holds(ready.size):
                plan.fill(ready)
                self.counters.add(ready.keys_read, ready.keys_saved)
                return True
        return False

    def _sizes(self, window: Window) -> Sizes:
        return self._by_window.get(window, self.sizes)

    def store(
        self, layer: int, keys: torch.Tensor, values: torch.Tensor | None, pool: KVPool, slots: torch.Tensor
    ) -> None:
        """Writes keys and values [R, kv_heads, head_dim] to `slots` [R], rounded to the pool's dtype."""
        keys, values = _rows(keys), None if values is None else _rows(values)
        store = self.tuning.attention_store
        constants = store_constants(pool.geometry.layers[layer], pool.geometry.dtype, store)
        store_rows[(len(keys), triton.cdiv(constants["KEY_WIDTH"], constants["BLOCK"]))](
            keys=keys,
            values=values,
            key_pool=pool.keys[layer],
            value_pool=pool.values[layer],
            slots=slots,
            key_stride=keys.stride(0),
            value_stride=0 if values is None else values.stride(0),
            **constants,
            num_warps=store.warps,
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
        sinks: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See attention/backend.py. `scale` is more than 0."""
        assert scale > 0, "the largest logit is found before it is scaled"
        queries = _rows(queries)
        shape = HeadShape.of(queries.shape[1], pool.geometry.layers[layer], plan.heads)
        if out is None:
            out = queries.new_empty((len(queries), shape.heads, shape.head_dim))
        long, kv = plan.long, pool.geometry
        if long is not None and not softcap and sinks is None and long.takes(queries, kv.layers[layer], kv.dtype):
            long.attend(queries, pool.keys[layer], pool.values[layer], scale=scale, out=out)
            return out
        target = _rows(out)  # itself, where its heads lie side by side
        few, more = plan.tiles
        launch = partial(self._launch, layer, shape, queries, pool, plan, target, scale, softcap, sinks)
        if plan.fixed and more.apart:
            launch(few, None, few.resident * self.multiprocessors)
            launch(None, more, more.resident * self.multiprocessors)
        elif plan.fixed:
            launch(few, more, min(few.resident, more.resident) * self.multiprocessors)
        else:
            if plan.counts[0]:
                launch(few, None, plan.counts[0] * shape.units)
            if plan.counts[1]:
                launch(None, more, plan.counts[1] * shape.units)
        if self._ways.fused:
            return out if target is out else out.copy_(target)
        units = plan.counts[2] * shape.heads
        merge = self.tuning.attention_merge
        programs = merge.resident * self.multiprocessors if plan.fixed else units
        if programs:
            merge_parts[(programs,)](
                part_out=plan.part_out,
                part_lse=plan.part_lse,
                out=target,
                sinks=sinks,
                bounds=plan.bounds,
                merges=plan.merges,
                out_stride=target.stride(0),
                **merge_constants(shape, merge),
                **self._early,
                num_warps=merge.warps,
            )
        return out if target is out else out.copy_(target)

    def _launch(
        self,
        layer: int,
        shape: HeadShape,
        queries: torch.Tensor,
        pool: KVPool,
        plan: TritonPlan,
        out: torch.Tensor,
        scale: float,
        softcap: float,
        sinks: torch.Tensor | None,
        few: Tile | None,
        more: Tile | None,
        programs: int,
    ) -> None:
        def launch(tiles: tuple[Tile | None, Tile | None]) -> None:
            launched = [tile for tile in tiles if tile]
            attend_items[(programs,)](
                queries=queries,
                keys=pool.keys[layer],
                values=pool.values[layer],
                out=out,
                part_out=plan.part_out,
                part_lse=plan.part_lse,
                sinks=sinks,
                counters=plan.counters,
                bounds=plan.bounds,
                items=plan.items,
                slots=plan.slots,
                merges=plan.merges,
                ends=plan.ends,
                kv_idx=plan.kv_idx,
                query_stride=queries.stride(0),
                out_stride=out.stride(0),
                scale=(softcap or scale) * LOG2_E,
                inner_scale=2 * LOG2_E * scale / softcap if softcap else 0.0,
                **item_constants(shape, *tiles, softcap=softcap, dtype=queries.dtype, fused=self._ways.fused),
                **self._early,
                num_warps=max(tile.warps for tile in launched),
                num_stages=launched[-1].stages,  # the larger tile fills shared memory and registers
                maxnreg=launched[-1].registers,
                enable_fp_fusion=True,
            )

        compiled_for = (shape, queries.dtype, pool.geometry.dtype, softcap > 0, sinks is None)
        launch_fitting("attention", (few, more), launch, shape=compiled_for, following=_smaller_tiles)


def _smaller_tiles(tiles: tuple[Tile | None, Tile | None]) -> tuple[Tile | None, Tile | None] | None:
    """Returns the next smaller tiles of both kinds, of as many query vectors: the plan is cut for those."""
    less = tuple(None if tile is None else smaller(tile) for tile in tiles)
    if less == (None, None):
        return None
    few, more = (one or tile for one, tile in zip(less, tiles, strict=True))
    return few, more


# Any, in the four: Triton takes numbers, dtypes and None alike.
def item_constants(
    shape: HeadShape, few: Tile | None, more: Tile | None, *, softcap: float, dtype: torch.dtype, fused: bool = True
) -> dict[str, Any]:
    """Returns the constants that `attend_items` is compiled for.

    Args:
        few, more: tiles of the two kinds of items; None: the launch leaves them out.
        dtype: of queries.
        fused: see `Ways`.
    """
    block_d = block_of(shape.head_dim)
    at_once = min(block_of(shape.group), MERGED_NUMBERS // block_d)
    return {
        "KV_HEADS": shape.kv_heads,
        "HEADS": shape.heads // shape.kv_heads,
        "GROUP": shape.group,
        "HEAD_DIM": shape.head_dim,
        "TAIL": shape.tail,
        "BLOCK_D": block_d,
        "BLOCK_TAIL": block_of(shape.tail, least=HEAD_DIM_UNIT),
        "LATENT": shape.latent,
        "SOFTCAP": softcap > 0,
        "PRODUCT": tl.float32 if _INTERPRETED else _DTYPES[dtype],
        "FEW_VECTORS": few.vectors if few else 0,
        "FEW_KEYS": few.keys if few else 0,
        "MORE_VECTORS": more.vectors if more else 0,
        "MORE_KEYS": more.keys if more else 0,
        "MORE_TWO_LOOPS": more.two_loops if more else False,
        "QUEUED": few is not None and more is not None,
        "HEADS_AT_ONCE": at_once,
        "MERGE_PARTS": MERGED_NUMBERS // (block_d * at_once) if fused else 0,
    }


def merge_constants(shape: HeadShape, tile: MergeTile) -> dict[str, Any]:
    return {
        "HEADS": shape.heads,
        "HEAD_DIM": shape.head_dim,
        "BLOCK_D": block_of(shape.head_dim),
        "BLOCK_PARTS": tile.parts,
    }


def store_constants(layer: LayerKV, kv_dtype: torch.dtype, tile: Columns) -> dict[str, Any]:
    key_width, value_width = layer.kv_heads * layer.head_dim, layer.kv_heads * layer.value_dim
    largest = torch.finfo(FLOAT8).max if kv_dtype is FLOAT8 else None
    return {
        "LARGEST": largest,
        "KEY_WIDTH": key_width,
        "VALUE_WIDTH": 0 if layer.latent else value_width,
        "BLOCK": min(block_of(key_width), tile.columns),
    }


def _multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return HOST_MULTIPROCESSORS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    """Returns [R, heads, head_dim] with contiguous heads; rows may be strided."""
    plain = tensor.stride(2) == 1 and tensor.stride(1) == tensor.shape[2]
    return tensor if plain else tensor.contiguous()
