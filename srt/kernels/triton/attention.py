"""Attention in Triton: the items of a plan, and the merge of their partial results.

    items × KV heads ──► one unit of work each                             attend_items
                           rows × group packed into BLOCK_M query vectors
                           keys and values gathered by slot, BLOCK_N at a time
                           result ──► out                                  rows with one part
                                  ──► part_out, part_lse ──► out           merge_parts, rows with several

The reference is `attention/torch_backend.py`. Products are of the queries' dtype with float32 sums, softmax and partial
results are float32. `attention_plan.py` draws the arrays that the kernels read.

The grid is persistent: programs take units until those that the device's memory counts are done, so a captured graph
runs plans of any size, in one launch: first items of many rows, then those of few, in a tile of their own. Where
products count, the loop over keys is two: tiles that some row sees in part, with a mask, and tiles that every row sees
whole, without one. Where loading counts, it is one: a second loop would wait for its first tile again. The slots of a
tile are loaded while an earlier tile is computed, so that the copies of its keys and values, which the compiler lets
run ahead of the products, wait for no address.

Both kernels are launched early (see pdl.py). Before they wait they read the plan's counts, which copies write.
"""

import triton.language as tl

from .jit import jit
from .pdl import wait_for_previous_kernels

LOG2_E = 1.4426950408889634  # softmax is computed with powers of 2
ITEM_COLUMNS = tl.constexpr(5)  # first place in slots, places, first key in kv_idx, keys, position of the first key
SLOT_COLUMNS = tl.constexpr(4)  # row, place among the partial results or −1, first visible position, end of them
MERGE_COLUMNS = tl.constexpr(3)  # row, first place of its parts, parts
MERGED = tl.constexpr(2)  # where bounds counts the rows that are merged
LOWEST = tl.constexpr(-1.0e30)  # below every logit, and finite: a row may see nothing of a tile


@jit
def attend_items(  # type: ignore[no-untyped-def]
    queries: tl.tensor,  # [R, KV_HEADS * GROUP, HEAD_DIM], heads side by side
    keys: tl.tensor,  # [slots, KV_HEADS, HEAD_DIM]
    values: tl.tensor,
    out: tl.tensor,  # as queries
    part_out: tl.tensor,  # float32 [P, KV_HEADS * GROUP, HEAD_DIM]
    part_lse: tl.tensor,  # float32 [P, KV_HEADS * GROUP], to the base 2
    bounds: tl.tensor,  # items of few rows are [0, bounds[0]), those of more [bounds[0], bounds[1])
    items: tl.tensor,  # [I, ITEM_COLUMNS]
    slots: tl.tensor,  # [S, SLOT_COLUMNS]
    kv_idx: tl.tensor,  # [T]
    query_stride: int,  # elements from one row to the next
    out_stride: int,
    scale: float,  # logits → powers of 2; with SOFTCAP: tanh → powers of 2
    inner_scale: float,  # with SOFTCAP: logits → powers of 2 of the tanh
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SOFTCAP: tl.constexpr,
    PRODUCT: tl.constexpr,  # dtype of what is multiplied
    FEW_VECTORS: tl.constexpr,  # 0: this launch leaves items of few rows out
    FEW_KEYS: tl.constexpr,
    MORE_VECTORS: tl.constexpr,  # 0: this launch leaves items of more rows out
    MORE_KEYS: tl.constexpr,
    MORE_TWO_LOOPS: tl.constexpr,
    PDL: tl.constexpr,
):
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    few = tl.load(bounds)
    wait_for_previous_kernels(PDL)
    units = 0
    if MORE_VECTORS:
        more = tl.load(bounds + 1) - few
        units = more * KV_HEADS
        for unit in range(program, units, programs):
            if MORE_TWO_LOOPS:  # a head after the other: tiles of a prompt read the same keys, found in the L2 cache
                kv_head = unit // more
                item = few + unit % more
            else:  # the heads of an item together: they lie side by side in memory
                kv_head = unit % KV_HEADS
                item = few + unit // KV_HEADS
            _attend_item(
                *(queries, keys, values, out, part_out, part_lse, items + item * ITEM_COLUMNS, slots, kv_idx),
                *(kv_head, query_stride, out_stride, scale, inner_scale, KV_HEADS, GROUP, HEAD_DIM, BLOCK_D, SOFTCAP),
                *(PRODUCT, MORE_VECTORS, MORE_KEYS, MORE_TWO_LOOPS),
            )
    if FEW_VECTORS:
        after = program + tl.cdiv(tl.maximum(units - program, 0), programs) * programs - units
        for unit in range(after, few * KV_HEADS, programs):
            _attend_item(
                *(queries, keys, values, out, part_out, part_lse),
                *(items + unit // KV_HEADS * ITEM_COLUMNS, slots, kv_idx),
                *(unit % KV_HEADS, query_stride, out_stride, scale, inner_scale, KV_HEADS, GROUP, HEAD_DIM, BLOCK_D),
                *(SOFTCAP, PRODUCT, FEW_VECTORS, FEW_KEYS, False),
            )


@jit
def _attend_item(  # type: ignore[no-untyped-def]
    queries: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    out: tl.tensor,
    part_out: tl.tensor,
    part_lse: tl.tensor,
    item: tl.tensor,  # where it is described
    slots: tl.tensor,
    kv_idx: tl.tensor,
    kv_head: tl.tensor,
    query_stride: int,
    out_stride: int,
    scale: float,
    inner_scale: float,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SOFTCAP: tl.constexpr,
    PRODUCT: tl.constexpr,
    BLOCK_M: tl.constexpr,  # query vectors
    BLOCK_N: tl.constexpr,  # keys
    TWO_LOOPS: tl.constexpr,
):
    """Computes one item and one KV head."""
    HEADS: tl.constexpr = KV_HEADS * GROUP
    SLOT_STRIDE: tl.constexpr = KV_HEADS * HEAD_DIM
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

    real = vector // GROUP < rows
    slot = slots + (first_slot + vector // GROUP) * SLOT_COLUMNS
    row = tl.load(slot, mask=real, other=0).to(tl.int64)
    place = tl.load(slot + 1, mask=real, other=-1)
    # What each query vector sees of the run, as numbers of keys; those that are none see all of it.
    low = tl.where(real, tl.load(slot + 2, mask=real, other=0) - position, 0)
    high = tl.where(real, tl.minimum(tl.load(slot + 3, mask=real, other=0) - position, length), length)
    head = kv_head * GROUP + vector % GROUP
    inside = real[:, None] & (at < HEAD_DIM)[None, :]
    here = row[:, None] * query_stride + head[:, None] * HEAD_DIM + at[None, :]
    query = tl.load(queries + here, mask=inside, other=0.0)  # [BLOCK_M, BLOCK_D]

    key_at = keys + kv_head * HEAD_DIM + at[None, :]
    value_at = values + kv_head * HEAD_DIM + at[None, :]
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
        offset = gathered.to(tl.int64)[:, None] * SLOT_STRIDE
        gathered = tl.load(index + tl.minimum(following * BLOCK_N + number, length - 1))
        acc, total, top = _add_tile(
            *(acc, total, top, query, key_at + offset, value_at + offset, at, tile * BLOCK_N + number, low, high),
            *(scale, inner_scale, True, HEAD_DIM, BLOCK_D, SOFTCAP, PRODUCT),
        )
    if TWO_LOOPS:
        gathered = tl.load(index + tl.minimum(before * BLOCK_N + number, length - 1))
        for tile in range(before, after):
            offset = gathered.to(tl.int64)[:, None] * SLOT_STRIDE
            gathered = tl.load(index + tl.minimum((tile + 1) * BLOCK_N + number, length - 1))
            acc, total, top = _add_tile(
                *(
                    acc,
                    total,
                    top,
                    query,
                    key_at + offset,
                    value_at + offset,
                    at,
                    tile * BLOCK_N + number,
                    low,
                    high,
                ),
                *(scale, inner_scale, False, HEAD_DIM, BLOCK_D, SOFTCAP, PRODUCT),
            )

    result = acc / total[:, None]
    direct = inside & (place < 0)[:, None]
    there = row[:, None] * out_stride + head[:, None] * HEAD_DIM + at[None, :]
    tl.store(out + there, result.to(out.dtype.element_ty), mask=direct)
    partial = place.to(tl.int64) * HEADS + head
    tl.store(part_out + partial[:, None] * HEAD_DIM + at[None, :], result, mask=inside & (place >= 0)[:, None])
    tl.store(part_lse + partial, top + tl.log2(total), mask=real & (place >= 0))


@jit
def _add_tile(  # type: ignore[no-untyped-def]
    acc: tl.tensor,  # float32 [BLOCK_M, BLOCK_D]
    total: tl.tensor,  # float32 [BLOCK_M]
    top: tl.tensor,
    query: tl.tensor,  # [BLOCK_M, BLOCK_D]
    key_at: tl.tensor,  # [BLOCK_N, BLOCK_D]
    value_at: tl.tensor,
    at: tl.tensor,
    number: tl.tensor,  # [BLOCK_N] of the keys, in the run
    low: tl.tensor,  # [BLOCK_M]
    high: tl.tensor,
    scale: float,
    inner_scale: float,
    MASKED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SOFTCAP: tl.constexpr,
    PRODUCT: tl.constexpr,
):
    """One tile of keys and values into the running softmax. Slots beyond the run repeat its last: no foreign value."""
    if HEAD_DIM == BLOCK_D:
        key = tl.load(key_at)
        value = tl.load(value_at)
    else:
        key = tl.load(key_at, mask=(at < HEAD_DIM)[None, :], other=0.0)
        value = tl.load(value_at, mask=(at < HEAD_DIM)[None, :], other=0.0)
    dtype: tl.constexpr = query.dtype
    logits = tl.dot(query.to(PRODUCT), tl.trans(key.to(dtype).to(PRODUCT)), input_precision="ieee")
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
def merge_parts(  # type: ignore[no-untyped-def]
    part_out: tl.tensor,  # float32 [P, HEADS, HEAD_DIM]
    part_lse: tl.tensor,  # float32 [P, HEADS], to the base 2
    out: tl.tensor,  # [R, HEADS, HEAD_DIM], heads side by side
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
        there_out = out + row * out_stride + head * HEAD_DIM + at
        tl.store(there_out, (acc / total).to(out.dtype.element_ty), mask=at < HEAD_DIM)


@jit
def store_rows(  # type: ignore[no-untyped-def]
    keys: tl.tensor,  # [R, WIDTH], rows may lie apart
    values: tl.tensor,
    key_pool: tl.tensor,  # [slots, WIDTH]
    value_pool: tl.tensor,
    slots: tl.tensor,  # int64 [R]
    key_stride: int,
    value_stride: int,
    LARGEST: tl.constexpr,  # of a pool without infinity; None: no number is cut off
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Copies rows to their slots. The dummy slot stays as it is: several rows may have it."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slots + row)
    inside = at < tl.where(slot == 0, 0, WIDTH)
    key = tl.load(keys + row * key_stride + at, mask=inside, other=0.0)
    value = tl.load(values + row * value_stride + at, mask=inside, other=0.0)
    if LARGEST is not None:
        key = tl.clamp(key.to(tl.float32), -LARGEST, LARGEST, propagate_nan=tl.PropagateNan.ALL)
        value = tl.clamp(value.to(tl.float32), -LARGEST, LARGEST, propagate_nan=tl.PropagateNan.ALL)
    tl.store(key_pool + slot * WIDTH + at, key.to(key_pool.dtype.element_ty), mask=inside)
    tl.store(value_pool + slot * WIDTH + at, value.to(value_pool.dtype.element_ty), mask=inside)
