"""Attention in Triton: the items of a plan, and the merge of their partial results, in one launch.

    items × KV heads ──► one unit of work each                             attend_items
                           rows × group packed into BLOCK_M query vectors
                           keys and values gathered by slot, BLOCK_N at a time
                           result ──► out                                  rows with one part
                                  ──► part_out, part_lse                   rows with several
                                        counter + 1; the last part ──► out

The reference is `TorchBackend` in attention/backend.py. Products are of the queries' dtype with float32 sums, softmax
and partial results are float32. `TritonPlan` in `attention_backend.py` has the arrays that the kernels read.

The grid is persistent: programs take units until those that the device's memory counts are done, so a captured graph
runs plans of any size, in one launch: first items of many rows, then those of few, in a tile of their own. Where
products count, the loop over keys is two: tiles that some row sees in part, with a mask, and tiles that every row sees
whole, without one. Where loading counts, it is one: a second loop would wait for its first tile again. The slots of a
tile are loaded while an earlier tile is computed, so that the copies of its keys and values, which the compiler lets
run ahead of the products, wait for no address.

A layer's heads are constants that a kernel is compiled for (`HeadShape`). Latents (DeepSeek) are keys whose first
numbers are their values: a tile of them is loaded once and multiplied twice. Sinks enter the sum of a row's
exponentials where the row is done: at the end of its only item, or in the merge.

A row's parts are merged by the program that finishes the last of them, which a counter for each row and unit of work
tells: a second launch costs every layer of a captured graph more than a microsecond (1.3 by published figures), also in
steps that merge nothing. So rows of any number of parts are merged so: there is one rule. The counter is added
to with release and acquire, after a barrier: what all threads of a program have written is there for the program that
finds the count complete. It sets the counter back to 0, and parts are merged in their order, whichever program does it:
a replayed graph gives the same bits. `merge_parts` is the separate launch, to compare with (`Ways.fused`).

Where sequences share keys, a plan may have queues of items instead of units that programs take by turns: see
`TritonPlan`.

Kernels are launched with PDL (see jit.py). Before they wait they read the plan's counts, which copies write.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple, Self

import torch
import triton.language as tl

from ....lang.errors import ParameterError
from ...attention.backend import AttentionGeometry
from ...cache.kv_pool import FLOAT8, LayerKV
from .fitting import Room, largest_that_fits, shared_bytes
from .jit import block_of, jit, wait_for_previous_kernels
from .tuning import HugeTile, PlanSizes, Tuning, VectorTile, read_tuning

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MOST_HEAD_DIM = 640  # 512 of the largest values, and what follows them in keys
MOST_VALUE_DIM = 512
HEAD_DIM_UNIT = 16
SMALL_VECTOR, LARGE_VECTOR, HUGE_VECTOR = 128, 256, 512  # bytes
FEW, HALF, MANY = 16, 64, 128  # query vectors: the least of a product, and the most of one row of heads


@dataclass(frozen=True, slots=True)
class HeadShape:
    """The heads of one layer, as its kernels are compiled for them.

    Query heads that share a KV head are in one tile, which reads its keys once. A large group is divided: each unit of
    work takes `group` heads of it, the last one perhaps fewer.
    """

    heads: int
    kv_heads: int
    head_dim: int  # numbers of a value, and of a key before its tail
    tail: int  # further numbers of a key
    latent: bool  # values lie in their keys
    group: int  # query heads of a unit of work

    @classmethod
    def of(cls, heads: int, layer: LayerKV, most: int) -> Self:
        """Returns the shape of a layer. most: query heads of a unit of work."""
        assert layer.value_dim <= layer.head_dim, "a key has the numbers of a value, and perhaps more"
        group = divided(heads // layer.kv_heads, most)
        return cls(heads, layer.kv_heads, layer.value_dim, layer.head_dim - layer.value_dim, layer.latent, group)

    @property
    def shares(self) -> int:
        """Units of work of one item and KV head."""
        return -(-(self.heads // self.kv_heads) // self.group)

    @property
    def units(self) -> int:
        """Units of work of one item."""
        return self.kv_heads * self.shares


def divided(group: int, most: int) -> int:
    """Returns the query heads of each unit of work of a group: as even as they can be, `most` at most."""
    return -(-group // -(-group // most))


def unit_heads(geometry: AttentionGeometry, dtype: torch.dtype) -> int:
    """Returns the query heads of a unit of work, whose results fit into registers. dtype: of queries."""
    if geometry.head_dim * dtype.itemsize <= HUGE_VECTOR:
        return divided(geometry.group, MANY)
    return divided(geometry.group, FEW if dtype is torch.float32 else HALF)


@dataclass(frozen=True, slots=True)
class Tile:
    """Sizes with which one kind of item is computed."""

    vectors: int  # query vectors: rows × heads of a group
    keys: int
    warps: int
    stages: int  # tiles of keys that are under way at once, the one that is computed included
    resident: int  # programs on a multiprocessor
    two_loops: bool  # tiles that need no mask are computed without one
    registers: int | None = None  # of a thread, at most; None: as the compiler likes
    apart: bool = False  # launched apart from items of few rows: together they would share the registers of either

    def rows(self, group: int) -> int:
        """Returns the most rows of an item, for units of work of `group` query heads."""
        return self.vectors // group


class AttentionTiles(NamedTuple):
    """The sizes for one model: what a program computes at once, and with how many threads.

    Items come in kinds by their number of query vectors (rows × heads of a group), each with a tile of its own. Its
    numbers are those of the device's class (`tuning.Tuning`); on an H100:

        FEW      at most 16, or one row      decode: a stream of keys, limited by memory
        SOME     at most 64, or 32           branches of a tree in captured decode steps, in one launch with FEW
        MANY     at most 128, or 64          prompts: limited by products

    Where keys are streamed, a tile of keys and one of values are 16 KiB each, and a program has one pair: it waits for
    it, computes it, and asks for the next. Four programs share a multiprocessor, so three pairs are on their way
    meanwhile, and short runs, of which there are many, start four at a time. For that a thread may take 128 registers.
    A shared run is read once for all the query vectors of a tile, so `some` is as wide as these registers allow: 64,
    with half as many keys at once. What spills there does so where an item starts and ends, not in the loop over keys.
    Larger vectors and narrow keys that are widened take more: there two programs have two pairs on their way each.

    Where products count, a tile has as many keys as leave room for the results in the registers. By the compiler a
    program takes up to 192 KiB of shared memory on Hopper and Blackwell, 104 on an A100. Devices with 99 have one pair
    on its way: 72 KiB. `some` and `many` are never in the same plan.

    Heads of more than 512 bytes (Gemma 4's of 512 numbers, DeepSeek's latents of 576) have tiles of 16 keys and values,
    or of 32 latents, and results of at most 64 vectors. Their sizes follow from registers and shared memory, and were
    not measured.
    """

    few: Tile
    some: Tile
    many: Tile


def tiles_for(
    geometry: AttentionGeometry,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    *,
    tuning: Tuning | None = None,
    room: Room | None = None,
) -> AttentionTiles:
    """For queries and results of `dtype`, keys and values of `kv_dtype`.

    Args:
        tuning: numbers of the device's class; None: the default ones.
        room: its shared memory; None: without a limit. Tiles that it does not hold have fewer stages or keys.

    Raises:
        ParameterError: a head_dim or a dtype that the kernels do not take.
    """
    head_dim = geometry.head_dim
    if head_dim % HEAD_DIM_UNIT or not 0 < head_dim <= (MOST_HEAD_DIM if geometry.latent else MOST_VALUE_DIM):
        raise ParameterError(
            f"head_dim={head_dim}: the Triton kernels take multiples of {HEAD_DIM_UNIT} up to {MOST_VALUE_DIM}, of "
            f'latents {MOST_HEAD_DIM}; write kernels="torch"'
        )
    if dtype not in DTYPES:
        known = ", ".join(map(_name, DTYPES))
        raise ParameterError(f'dtype={_name(dtype)}: the Triton kernels take {known}; write kernels="torch"')
    if kv_dtype not in (dtype, FLOAT8):
        raise ParameterError(
            f"keys and values in {_name(kv_dtype)} for queries in {_name(dtype)}: the Triton kernels take a pool of "
            f'the same dtype, or of {_name(FLOAT8)}; write kv_dtype="auto"'
        )
    tiles = _tiles_of(geometry, dtype, kv_dtype, tuning or read_tuning())
    if room is None:
        return tiles

    def needs(tile: Tile) -> int:
        return shared_bytes(tile, room, *tile_bytes(tile, geometry, dtype, kv_dtype))

    shape = (geometry, dtype, kv_dtype)
    few, some, many = (largest_that_fits("attention", tile, room, needs, shape) for tile in tiles)
    return AttentionTiles(few, some, many)


def tile_bytes(tile: Tile, geometry: AttentionGeometry, dtype: torch.dtype, kv_dtype: torch.dtype) -> tuple[int, int]:
    """Returns the shared memory of a tile of keys and values, and of queries and the weights of keys.

    Keys that have a tail, and values narrower than their keys, take less.
    """
    key = -(-geometry.head_dim // 64) * 64 if geometry.latent else block_of(geometry.head_dim, least=HEAD_DIM_UNIT)
    value = 0 if geometry.latent else key
    stage = tile.keys * (key + value) * kv_dtype.itemsize
    return stage, tile.vectors * (key + tile.keys) * dtype.itemsize


def _tiles_of(geometry: AttentionGeometry, dtype: torch.dtype, kv_dtype: torch.dtype, tuning: Tuning) -> AttentionTiles:
    head_dim, heads = geometry.head_dim, unit_heads(geometry, dtype)
    exact = dtype is torch.float32  # multiplied without tensor cores: operands are in registers
    if head_dim * dtype.itemsize > HUGE_VECTOR:
        return _huge(tuning.attention_huge, heads, latent=geometry.latent, exact=exact)
    least = block_of(heads)  # one row at least
    vector = block_of(head_dim, least=HEAD_DIM_UNIT) * dtype.itemsize  # bytes
    slow = exact or least > HALF
    if not slow and vector <= LARGE_VECTOR and kv_dtype is dtype:
        row = tuning.attention_stream
    else:
        row = tuning.attention_few_wide if slow else tuning.attention_few
    few, plan = _tile(row, least, vector, two_loops=False), tuning.attention_plan
    wide = not slow and vector <= LARGE_VECTOR
    fewer = max(HEAD_DIM_UNIT, few.keys // 2) if exact or wide else few.keys
    return AttentionTiles(
        few=few,
        some=replace(few, vectors=max(plan.wide_vectors if wide else plan.some_vectors, least), keys=fewer),
        many=_many(tuning, vector, least, plain=not exact and kv_dtype is dtype),
    )


def narrowed(tiles: AttentionTiles, heads: int, plan: PlanSizes) -> AttentionTiles:
    """Returns the tiles for `heads` heads of a unit of work without those of `wide_vectors`, for comparison."""
    few, some = tiles.few, tiles.some
    if some.vectors <= max(plan.some_vectors, few.vectors):
        return tiles
    return tiles._replace(some=replace(few, vectors=max(plan.some_vectors, block_of(heads))))


def _many(tuning: Tuning, vector: int, least: int, *, plain: bool) -> Tile:
    """`plain` is what was measured on an H100, where the others take from 5 percent longer to twice as long."""
    if vector > LARGE_VECTOR:
        row = tuning.attention_many_large if plain else tuning.attention_many_widened
    elif plain and vector <= SMALL_VECTOR:
        row = tuning.attention_many_small
    else:
        row = tuning.attention_many_half if plain and least <= HALF else tuning.attention_many
    return _tile(row, least, vector, two_loops=True)


def _tile(row: VectorTile, least: int, vector: int, *, two_loops: bool) -> Tile:
    """Returns the tile of a row of the table. least: query vectors of one row; vector: bytes of a key."""
    return Tile(
        vectors=max(row.vectors, least),
        keys=min(row.keys, row.tile_bytes // vector),
        warps=row.warps,
        stages=row.stages,
        resident=row.resident,
        two_loops=two_loops,
        registers=row.registers,
        apart=two_loops,
    )


def _huge(row: HugeTile, heads: int, *, latent: bool, exact: bool) -> AttentionTiles:
    """Returns the tiles of `heads` heads of more than HUGE_VECTOR bytes. exact: in float32."""
    least = block_of(heads)
    keys = row.latent_keys if latent and not exact else row.keys
    warps = row.warps if exact or least > FEW else row.few_warps
    few = Tile(max(FEW, least), keys, warps, row.stages, row.resident, two_loops=False)
    some = replace(few, vectors=max(FEW if exact else row.some_vectors, least), warps=row.warps, apart=True)
    if exact or (latent and least > heads):  # addresses of rows that begin anywhere in a larger tile spill
        return AttentionTiles(few, some, some)
    many = replace(some, vectors=max(row.many_vectors, least), two_loops=not latent)  # two loops spill, too
    return AttentionTiles(few, some, many)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


LOG2_E = 1.4426950408889634  # softmax is computed with powers of 2
_LOG2_E = tl.constexpr(LOG2_E)
ITEM_COLUMNS = tl.constexpr(5)  # first place in slots, places, first key in kv_idx, keys, position of the first key
# Row, place among the partial results or −1, first visible position, end of them, number among merged rows or −1.
SLOT_COLUMNS = tl.constexpr(5)
MERGE_COLUMNS = tl.constexpr(3)  # row, first place of its parts, parts
MERGED = tl.constexpr(2)  # where bounds counts the rows that are merged
QUEUES = tl.constexpr(3)  # and queues
MERGED_NUMBERS = 4096  # of partial results that a program loads at once when it merges: 32 for each of 128 threads
LOWEST = tl.constexpr(-1.0e30)  # below every logit, and finite: a row may see nothing of a tile


@jit
def attend_items(  # type: ignore[no-untyped-def]
    queries: tl.tensor,  # [R, KV_HEADS * HEADS, HEAD_DIM + TAIL], heads side by side
    keys: tl.tensor,  # [slots, KV_HEADS, HEAD_DIM + TAIL]
    values: tl.tensor,  # [slots, KV_HEADS, HEAD_DIM]; with LATENT the same memory as keys
    out: tl.tensor,  # [R, KV_HEADS * HEADS, HEAD_DIM]
    part_out: tl.tensor,  # float32 [P, KV_HEADS * HEADS, HEAD_DIM]
    part_lse: tl.tensor,  # float32 [P, KV_HEADS * HEADS], to the base 2
    sinks: tl.tensor | None,  # float32 [KV_HEADS * HEADS]; None: there are none
    counters: tl.tensor,  # int32 [M, units of an item] 0 before and after: parts that are done
    bounds: tl.tensor,  # items of few rows are [0, bounds[0]), those of more [bounds[0], bounds[1])
    items: tl.tensor,  # [I, ITEM_COLUMNS]
    slots: tl.tensor,  # [S, SLOT_COLUMNS]
    merges: tl.tensor,  # [M, MERGE_COLUMNS]
    ends: tl.tensor,  # [2, Q + 1], with QUEUED: queue q has items [ends[q], ends[q + 1]) of few rows, and so of more
    kv_idx: tl.tensor,  # [T]
    query_stride: int,  # elements from one row to the next
    out_stride: int,
    scale: float,  # logits → powers of 2; with SOFTCAP: tanh → powers of 2
    inner_scale: float,  # with SOFTCAP: logits → powers of 2 of the tanh
    KV_HEADS: tl.constexpr,
    HEADS: tl.constexpr,  # query heads of a KV head
    GROUP: tl.constexpr,  # those of a unit of work
    HEAD_DIM: tl.constexpr,
    TAIL: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_TAIL: tl.constexpr,
    LATENT: tl.constexpr,
    SOFTCAP: tl.constexpr,
    PRODUCT: tl.constexpr,  # dtype of what is multiplied
    FEW_VECTORS: tl.constexpr,  # 0: this launch leaves items of few rows out
    FEW_KEYS: tl.constexpr,
    MORE_VECTORS: tl.constexpr,  # 0: this launch leaves items of more rows out
    MORE_KEYS: tl.constexpr,
    MORE_TWO_LOOPS: tl.constexpr,
    QUEUED: tl.constexpr,  # the plan may have queues
    HEADS_AT_ONCE: tl.constexpr,  # of which parts are loaded
    MERGE_PARTS: tl.constexpr,  # parts of a row that are loaded at once; 0: `merge_parts` is launched after this
    PDL: tl.constexpr,
):
    """Computes all items. A program takes every so many units of work, or those of its queue and part of an item."""
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    few = tl.load(bounds)
    queues = 0
    if QUEUED:
        queues = tl.load(bounds + QUEUES)
    wait_for_previous_kernels(PDL)
    UNITS: tl.constexpr = KV_HEADS * ((HEADS + GROUP - 1) // GROUP)  # of an item
    units = 0
    if MORE_VECTORS:
        more = tl.load(bounds + 1) - few
        units = more * UNITS
        start, stop, step = program, units, programs
        if queues > 0:
            start, stop = _queue_of(ends + queues + 1, queues, UNITS)
            step = UNITS
        for unit in range(start, stop, step):
            if MORE_TWO_LOOPS:  # a head after the other: tiles of a prompt read the same keys, found in the L2 cache
                item = few + unit % more
                part = unit // more
            else:  # the heads of an item together: they lie side by side in memory
                item = few + unit // UNITS
                part = unit % UNITS
            _attend_item(
                *(queries, keys, values, out, part_out, part_lse, sinks, counters, items + item * ITEM_COLUMNS, slots),
                *(merges, kv_idx, part, query_stride, out_stride, scale, inner_scale, KV_HEADS, HEADS, GROUP, HEAD_DIM),
                *(TAIL, BLOCK_D, BLOCK_TAIL, LATENT, SOFTCAP, PRODUCT, MORE_VECTORS, MORE_KEYS, MORE_TWO_LOOPS),
                *(HEADS_AT_ONCE, MERGE_PARTS),
            )
    if FEW_VECTORS:
        start = program + tl.cdiv(tl.maximum(units - program, 0), programs) * programs - units
        stop, step = few * UNITS, programs
        if queues > 0:
            start, stop = _queue_of(ends, queues, UNITS)
            step = UNITS
        for unit in range(start, stop, step):
            _attend_item(
                *(queries, keys, values, out, part_out, part_lse, sinks, counters),
                *(items + unit // UNITS * ITEM_COLUMNS, slots, merges, kv_idx, unit % UNITS, query_stride, out_stride),
                *(scale, inner_scale, KV_HEADS, HEADS, GROUP, HEAD_DIM, TAIL, BLOCK_D, BLOCK_TAIL, LATENT, SOFTCAP),
                *(PRODUCT, FEW_VECTORS, FEW_KEYS, False, HEADS_AT_ONCE, MERGE_PARTS),
            )


@jit
def _queue_of(ends: tl.tensor, queues: tl.tensor, UNITS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns the range of units of this program's queue: UNITS apart, and empty for programs without one."""
    queue = tl.program_id(0) // UNITS
    first = tl.load(ends + queue, mask=queue < queues, other=0)
    end = tl.load(ends + queue + 1, mask=queue < queues, other=0)
    return first * UNITS + tl.program_id(0) % UNITS, end * UNITS


@jit
def _attend_item(  # type: ignore[no-untyped-def]
    queries: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    out: tl.tensor,
    part_out: tl.tensor,
    part_lse: tl.tensor,
    sinks: tl.tensor | None,
    counters: tl.tensor,
    item: tl.tensor,  # where it is described
    slots: tl.tensor,
    merges: tl.tensor,
    kv_idx: tl.tensor,
    part: tl.tensor,  # of the item's units of work
    query_stride: int,
    out_stride: int,
    scale: float,
    inner_scale: float,
    KV_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    TAIL: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_TAIL: tl.constexpr,
    LATENT: tl.constexpr,
    SOFTCAP: tl.constexpr,
    PRODUCT: tl.constexpr,
    BLOCK_M: tl.constexpr,  # query vectors
    BLOCK_N: tl.constexpr,  # keys
    TWO_LOOPS: tl.constexpr,
    HEADS_AT_ONCE: tl.constexpr,
    MERGE_PARTS: tl.constexpr,
):
    """Computes one item for GROUP query heads of one KV head, and merges the rows of which that is the last part."""
    SHARES: tl.constexpr = (HEADS + GROUP - 1) // GROUP
    KEY_DIM: tl.constexpr = HEAD_DIM + TAIL
    vector = tl.arange(0, BLOCK_M)
    number = tl.arange(0, BLOCK_N)
    at = tl.arange(0, BLOCK_D)
    first_slot = tl.load(item)
    rows = tl.load(item + 1)
    first_key = tl.load(item + 2)
    length = tl.load(item + 3)
    position = tl.load(item + 4)
    index = kv_idx + first_key
    gathered = tl.load(index + tl.minimum(number, length - 1))  # before anything that waits for an address

    kv_head = part // SHARES
    of_group = part % SHARES * GROUP + vector % GROUP
    real = (vector // GROUP < rows) & (of_group < HEADS)
    slot = slots + (first_slot + vector // GROUP) * SLOT_COLUMNS
    row = tl.load(slot, mask=real, other=0).to(tl.int64)
    place = tl.load(slot + 1, mask=real, other=-1)
    # What each query vector sees of the run, as numbers of keys; those that are none see all of it.
    low = tl.where(real, tl.load(slot + 2, mask=real, other=0) - position, 0)
    high = tl.where(real, tl.minimum(tl.load(slot + 3, mask=real, other=0) - position, length), length)
    head = kv_head * HEADS + of_group
    inside = real[:, None] & (at < HEAD_DIM)[None, :]
    here = queries + row[:, None] * query_stride + head[:, None] * KEY_DIM
    query = tl.load(here + at[None, :], mask=inside, other=0.0)  # [BLOCK_M, BLOCK_D]
    query_tail = query
    if TAIL:
        tail = tl.arange(0, BLOCK_TAIL)
        query_tail = tl.load(
            here + HEAD_DIM + tail[None, :], mask=real[:, None] & (tail < TAIL)[None, :], other=0.0
        )  # [BLOCK_M, BLOCK_TAIL]

    key_at = keys + kv_head * KEY_DIM
    value_at = values + kv_head * HEAD_DIM
    acc = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    total = tl.zeros([BLOCK_M], dtype=tl.float32)
    top = tl.full([BLOCK_M], LOWEST, dtype=tl.float32)

    #   tiles   | masked | whole ... whole | masked |         a run that a window cuts, and its causal end
    #           0        before            after   tiles
    tiles = (length + BLOCK_N - 1) // BLOCK_N
    before = tiles
    after = tiles
    if TWO_LOOPS:
        before = tl.minimum((tl.maximum(tl.max(low, 0), 0) + BLOCK_N - 1) // BLOCK_N, tiles)
        after = tl.maximum(tl.minimum(tl.min(high, 0), length) // BLOCK_N, before)
        gathered = tl.load(index + tl.minimum(tl.where(before > 0, 0, after) * BLOCK_N + number, length - 1))
    whole = after - before
    for step in range(tiles - whole):
        tile = tl.where(step < before, step, step + whole)
        following = tl.where(step + 1 < before, step + 1, step + 1 + whole)
        slot_of = gathered.to(tl.int64)[:, None] * KV_HEADS
        gathered = tl.load(index + tl.minimum(following * BLOCK_N + number, length - 1))
        acc, total, top = _add_tile(
            *(acc, total, top, query, query_tail, key_at + slot_of * KEY_DIM, value_at + slot_of * HEAD_DIM),
            *(tile * BLOCK_N + number, low, high, scale, inner_scale, True),
            *(HEAD_DIM, TAIL, BLOCK_D, BLOCK_TAIL, LATENT, SOFTCAP, PRODUCT),
        )
    if TWO_LOOPS:
        gathered = tl.load(index + tl.minimum(before * BLOCK_N + number, length - 1))
        for tile in range(before, after):
            slot_of = gathered.to(tl.int64)[:, None] * KV_HEADS
            gathered = tl.load(index + tl.minimum((tile + 1) * BLOCK_N + number, length - 1))
            acc, total, top = _add_tile(
                *(acc, total, top, query, query_tail, key_at + slot_of * KEY_DIM, value_at + slot_of * HEAD_DIM),
                *(tile * BLOCK_N + number, low, high, scale, inner_scale, False),
                *(HEAD_DIM, TAIL, BLOCK_D, BLOCK_TAIL, LATENT, SOFTCAP, PRODUCT),
            )

    if sinks is not None:
        sink = tl.load(sinks + head, mask=real & (place < 0), other=float("-inf")) * _LOG2_E
        highest = tl.maximum(top, sink)
        acc = acc * tl.exp2(top - highest)[:, None]
        total = total * tl.exp2(top - highest) + tl.exp2(sink - highest)
        top = highest
    result = acc / total[:, None]
    direct = inside & (place < 0)[:, None]
    there = row[:, None] * out_stride + head[:, None] * HEAD_DIM + at[None, :]
    tl.store(out + there, result.to(out.dtype.element_ty), mask=direct)
    partial = place.to(tl.int64) * (KV_HEADS * HEADS) + head
    tl.store(part_out + partial[:, None] * HEAD_DIM + at[None, :], result, mask=inside & (place >= 0)[:, None])
    tl.store(part_lse + partial, top + tl.log2(total), mask=real & (place >= 0))

    if MERGE_PARTS:
        tl.debug_barrier()  # what all threads have written, the counters say is there
        leads = (place >= 0) & (vector % GROUP == 0)  # a counter for each row
        merge = tl.load(slot + 4, mask=leads, other=0)
        parts = tl.load(merges + merge * MERGE_COLUMNS + 2, mask=leads, other=0)
        counter = counters + merge * (KV_HEADS * SHARES) + part
        done = tl.atomic_add(counter, 1, mask=leads, sem="acq_rel")
        last = leads & (done == parts - 1)
        tl.store(counter, 0, mask=last)
        waiting = tl.where(last, merge, -1)
        merge_next = tl.max(waiting, 0)
        while merge_next >= 0:
            _merge_row(
                *(part_out, part_lse, out, sinks, merges + merge_next * MERGE_COLUMNS, part, out_stride),
                *(KV_HEADS, HEADS, GROUP, HEAD_DIM, HEADS_AT_ONCE, BLOCK_D, MERGE_PARTS),
            )
            waiting = tl.where(waiting == merge_next, -1, waiting)
            merge_next = tl.max(waiting, 0)


@jit
def _merge_row(  # type: ignore[no-untyped-def]
    part_out: tl.tensor,
    part_lse: tl.tensor,
    out: tl.tensor,
    sinks: tl.tensor | None,
    merge: tl.tensor,  # where the row is described
    part: tl.tensor,  # of the units of work
    out_stride: int,
    KV_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEADS_AT_ONCE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Merges the parts of one row, for the GROUP query heads of a unit of work: as `merge_parts` does.

    Other multiprocessors have written them, so they are read from the L2 cache.
    """
    SHARES: tl.constexpr = (HEADS + GROUP - 1) // GROUP
    at = tl.arange(0, BLOCK_D)
    number = tl.arange(0, PARTS)
    row = tl.load(merge).to(tl.int64)
    first = tl.load(merge + 1)
    end = first + tl.load(merge + 2)
    for start_head in range(0, GROUP, HEADS_AT_ONCE):
        of_unit = start_head + tl.arange(0, HEADS_AT_ONCE)
        of_group = part % SHARES * GROUP + of_unit
        real = (of_unit < GROUP) & (of_group < HEADS)
        head = part // SHARES * HEADS + of_group
        acc = tl.zeros([HEADS_AT_ONCE, BLOCK_D], dtype=tl.float32)
        total = tl.zeros([HEADS_AT_ONCE], dtype=tl.float32)
        top = tl.full([HEADS_AT_ONCE], LOWEST, dtype=tl.float32)
        for start in range(first, end, PARTS):
            there = (start + number < end)[:, None] & real[None, :]  # [PARTS, heads]
            place = (start + number).to(tl.int64)[:, None] * (KV_HEADS * HEADS) + head[None, :]
            lse = tl.load(part_lse + place, mask=there, other=float("-inf"), cache_modifier=".cg")
            result = tl.load(
                part_out + place[:, :, None] * HEAD_DIM + at[None, None, :],
                mask=there[:, :, None] & (at < HEAD_DIM)[None, None, :],
                other=0.0,
                cache_modifier=".cg",
            )
            highest = tl.maximum(top, tl.max(lse, 0))
            weight = tl.exp2(lse - highest[None, :])
            shrink = tl.exp2(top - highest)
            acc = acc * shrink[:, None] + tl.sum(weight[:, :, None] * result, 0)
            total = total * shrink + tl.sum(weight, 0)
            top = highest
        if sinks is not None:
            sink = tl.load(sinks + head, mask=real, other=0.0) * _LOG2_E
            highest = tl.maximum(top, sink)
            acc = acc * tl.exp2(top - highest)[:, None]
            total = total * tl.exp2(top - highest) + tl.exp2(sink - highest)
        there_out = out + row * out_stride + head[:, None] * HEAD_DIM + at[None, :]
        mask = real[:, None] & (at < HEAD_DIM)[None, :]
        tl.store(there_out, (acc / tl.where(real, total, 1.0)[:, None]).to(out.dtype.element_ty), mask=mask)


@jit
def _add_tile(  # type: ignore[no-untyped-def]
    acc: tl.tensor,  # float32 [BLOCK_M, BLOCK_D]
    total: tl.tensor,  # float32 [BLOCK_M]
    top: tl.tensor,
    query: tl.tensor,  # [BLOCK_M, BLOCK_D]
    query_tail: tl.tensor,  # [BLOCK_M, BLOCK_TAIL]
    key_at: tl.tensor,  # [BLOCK_N, 1], of the first numbers
    value_at: tl.tensor,
    number: tl.tensor,  # [BLOCK_N] of the keys, in the run
    low: tl.tensor,  # [BLOCK_M]
    high: tl.tensor,
    scale: float,
    inner_scale: float,
    MASKED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    TAIL: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_TAIL: tl.constexpr,
    LATENT: tl.constexpr,
    SOFTCAP: tl.constexpr,
    PRODUCT: tl.constexpr,
):
    """One tile of keys and values into the running softmax. Slots beyond the run repeat its last: no foreign value."""
    key = _numbers(key_at, HEAD_DIM, BLOCK_D)
    value = key
    if not LATENT:
        value = _numbers(value_at, HEAD_DIM, BLOCK_D)
    dtype: tl.constexpr = query.dtype
    logits = tl.dot(query.to(PRODUCT), tl.trans(key.to(dtype).to(PRODUCT)), input_precision="ieee")
    if TAIL:
        tail = _numbers(key_at + HEAD_DIM, TAIL, BLOCK_TAIL)
        logits = tl.dot(query_tail.to(PRODUCT), tl.trans(tail.to(dtype).to(PRODUCT)), logits, input_precision="ieee")
    if SOFTCAP:
        logits = 1.0 - 2.0 / (tl.exp2(logits * inner_scale) + 1.0)
    if MASKED:
        seen = (number[None, :] >= low[:, None]) & (number[None, :] < high[:, None])
        logits = tl.where(seen, logits, float("-inf"))
    highest = tl.maximum(top, tl.max(logits, 1) * scale)
    weight = tl.exp2(logits * scale - highest[:, None])
    shrink = tl.exp2(top - highest)
    total = total * shrink + tl.sum(weight, 1)
    weighted = weight.to(dtype).to(PRODUCT)
    acc = tl.dot(weighted, value.to(dtype).to(PRODUCT), acc * shrink[:, None], input_precision="ieee")
    return acc, total, highest


@jit
def _numbers(at: tl.tensor, SIZE: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Loads SIZE numbers from each address on, [BLOCK_N, 1] → [BLOCK_N, BLOCK], 0 after them."""
    number = tl.arange(0, BLOCK)[None, :]
    if SIZE == BLOCK:
        return tl.load(at + number)
    return tl.load(at + number, mask=number < SIZE, other=0.0)


@jit
def merge_parts(  # type: ignore[no-untyped-def]
    part_out: tl.tensor,  # float32 [P, HEADS, HEAD_DIM]
    part_lse: tl.tensor,  # float32 [P, HEADS], to the base 2
    out: tl.tensor,  # [R, HEADS, HEAD_DIM], heads side by side
    sinks: tl.tensor | None,  # float32 [HEADS]; None: there are none
    bounds: tl.tensor,
    merges: tl.tensor,  # [M, MERGE_COLUMNS]
    out_stride: int,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_PARTS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Averages the parts of each row and head, weighted by the softmax of their log-sum-exps."""
    at = tl.arange(0, BLOCK_D)
    part = tl.arange(0, BLOCK_PARTS)
    units = tl.load(bounds + MERGED) * HEADS
    wait_for_previous_kernels(PDL)
    for unit in range(tl.program_id(0), units, tl.num_programs(0)):
        head = unit % HEADS
        merge = merges + unit // HEADS * MERGE_COLUMNS
        row = tl.load(merge).to(tl.int64)
        first = tl.load(merge + 1)
        end = first + tl.load(merge + 2)
        acc = tl.zeros([BLOCK_D], dtype=tl.float32)
        total = tl.zeros([1], dtype=tl.float32)
        top = tl.full([1], LOWEST, dtype=tl.float32)
        for start in range(first, end, BLOCK_PARTS):
            there = start + part < end
            place = (start + part).to(tl.int64) * HEADS + head
            lse = tl.load(part_lse + place, mask=there, other=float("-inf"))
            mask = there[:, None] & (at < HEAD_DIM)[None, :]
            result = tl.load(part_out + place[:, None] * HEAD_DIM + at[None, :], mask=mask, other=0.0)
            highest = tl.maximum(top, tl.max(lse, 0))
            weight = tl.exp2(lse - highest)
            shrink = tl.exp2(top - highest)
            acc = acc * shrink + tl.sum(weight[:, None] * result, 0)
            total = total * shrink + tl.sum(weight, 0)
            top = highest
        if sinks is not None:
            sink = tl.load(sinks + head) * _LOG2_E
            highest = tl.maximum(top, sink)
            acc = acc * tl.exp2(top - highest)
            total = total * tl.exp2(top - highest) + tl.exp2(sink - highest)
        there_out = out + row * out_stride + head * HEAD_DIM + at
        tl.store(there_out, (acc / total).to(out.dtype.element_ty), mask=at < HEAD_DIM)


@jit
def store_rows(  # type: ignore[no-untyped-def]
    keys: tl.tensor,  # [R, KEY_WIDTH], rows may lie apart
    values: tl.tensor,  # [R, VALUE_WIDTH]
    key_pool: tl.tensor,  # [slots, KEY_WIDTH]
    value_pool: tl.tensor,  # [slots, VALUE_WIDTH]
    slots: tl.tensor,  # int64 [R]
    key_stride: int,
    value_stride: int,
    LARGEST: tl.constexpr,  # of a pool without infinity; None: no number is cut off
    KEY_WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,  # 0: values lie in their keys
    BLOCK: tl.constexpr,
):
    """Copies rows to their slots. The dummy slot stays as it is: several rows may have it."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slots + row)
    _store_row(keys + row * key_stride, key_pool + slot * KEY_WIDTH, at, slot, LARGEST, KEY_WIDTH)
    if VALUE_WIDTH:
        _store_row(values + row * value_stride, value_pool + slot * VALUE_WIDTH, at, slot, LARGEST, VALUE_WIDTH)


@jit
def _store_row(  # type: ignore[no-untyped-def]
    source: tl.tensor, target: tl.tensor, at: tl.tensor, slot: tl.tensor, LARGEST: tl.constexpr, WIDTH: tl.constexpr
):
    inside = at < tl.where(slot == 0, 0, WIDTH)
    numbers = tl.load(source + at, mask=inside, other=0.0)
    if LARGEST is not None:
        numbers = tl.clamp(numbers.to(tl.float32), -LARGEST, LARGEST, propagate_nan=tl.PropagateNan.ALL)
    tl.store(target + at, numbers.to(target.dtype.element_ty), mask=inside)
