"""From the product of a layer's queries, keys and values to what attention reads, in one pass.

    qkv row:  [ q0 q1 … | k0 … | v0 … ]      heads of head_dim elements; each query may have a gate after it
                norm      norm   norm         where the model has one
                rope      rope                by the row's position
                queries   the pool's keys and values, at the row's slot

The reference is `reference.rope_and_store`. Every intermediate is rounded where `norm.RMSNorm` and `rope.apply_rope`
round it. Rows whose keys are in the pool already write to the dummy slot, which is never read.
"""

import torch
import triton
import triton.language as tl

from ...layers.linear import HeadNorm
from .jit import FP8_LARGEST, block_of, jit, pdl_options, rounded, wait_for_previous_kernels
from .tuning import tuning_for


def rope_and_store(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    table: torch.Tensor,
    keys: torch.Tensor | None,
    values: torch.Tensor | None,
    *,
    head_norm: HeadNorm | None = None,
    rotated: int | None = None,
    interleaved: bool = False,
    gated: bool = False,
) -> torch.Tensor:
    """Stores the keys and values of each row, and returns its queries, rotated.

    Args:
        qkv: [R, (heads + 2 kv_heads) · head_dim] of the model's dtype; rows may lie apart.
        positions: int64 [R], rows of the table.
        slots: int64 [R], of the pool; several rows may have slot 0 and no other.
        table: [P, head_dim] of the model's dtype: `layers.rope.rope_table`.
        keys, values: [slots, kv_heads, head_dim], a layer of the pool, in the model's dtype or float8_e4m3fn, which
            cuts off at ±448. None: a row has queries alone.
        head_norm: norm of each head of queries and keys before the rotation, and of values.
        rotated: dimensions of a head that are rotated, its first ones; None: all. The table's angles of the others
            are zero.
        interleaved: dimension 2i rotates with 2i + 1; else i with i + rotated / 2.
        gated: a row has 2 · heads where it else has heads: each query, and after it its gate, which is not read.

    Returns:
        [R, heads, head_dim] in the dtype of qkv, in one piece.
    """
    head_dim, step = table.shape[1], 2 if gated else 1
    kv_heads = 0 if keys is None else keys.shape[1]
    rows, heads = len(qkv), (qkv.shape[1] // head_dim - 2 * kv_heads) // step
    _require(qkv, table, keys, values, heads * step)
    queries = torch.empty((rows, heads, head_dim), dtype=qkv.dtype, device=qkv.device)
    if rows:
        tile = tuning_for(qkv.device).rope
        taken = tile.heads_of_few if rows <= tile.few_rows else tile.heads_of_many
        half_block = block_of(head_dim // 2)
        rope_and_store_heads[(rows, triton.cdiv(heads + 2 * kv_heads, taken))](
            qkv,
            positions=positions,
            slots=slots,
            table=table,
            query_weight=None if head_norm is None else head_norm.query_weight,
            key_weight=None if head_norm is None else head_norm.key_weight,
            value_weight=None if head_norm is None else head_norm.value_weight,
            queries=queries,
            keys=keys,
            values=values,
            qkv_stride=qkv.stride(0),
            slot_stride=0 if keys is None else keys.stride(0),
            heads=heads,
            kv_heads=kv_heads,
            eps=0.0 if head_norm is None else head_norm.eps,
            CENTERED=head_norm is not None and head_norm.centered,
            FP8=keys is not None and keys.dtype is torch.float8_e4m3fn,
            ROTATED=head_dim if rotated is None else rotated,
            INTERLEAVED=interleaved,
            QUERY_STEP=step,
            HEAD_DIM=head_dim,
            HALF_BLOCK=half_block,
            HEADS_BLOCK=taken,
            num_warps=min(max(taken * half_block // tile.pairs, 1), tile.most_warps),
            enable_fp_fusion=False,
            **pdl_options(qkv.device),
        )
    return queries


def _require(
    qkv: torch.Tensor, table: torch.Tensor, keys: torch.Tensor | None, values: torch.Tensor | None, heads: int
) -> None:
    """Checks what the kernel cannot."""
    head_dim, kv_heads = table.shape[1], 0 if keys is None else keys.shape[1]
    assert heads > 0, "a row of qkv has heads of queries, keys and values"
    assert qkv.shape[1] == (heads + 2 * kv_heads) * head_dim, "a row of qkv has whole heads"
    assert qkv.stride(1) == 1, "the elements of a row lie side by side"
    assert table.is_contiguous(), "a row of the table lies after the other"
    assert (keys is None) == (values is None), "keys have values"
    if keys is not None and values is not None:
        assert keys.shape == values.shape, "a slot has keys and values of the same heads"
        assert keys.stride() == values.stride() == (keys.stride(0), head_dim, 1), "the heads of a slot lie side by side"


@jit
def rope_and_store_heads(  # type: ignore[no-untyped-def]
    qkv: tl.tensor,
    positions: tl.tensor,
    slots: tl.tensor,
    table: tl.tensor,
    query_weight: tl.tensor | None,  # None: there are no norms of heads
    key_weight: tl.tensor | None,
    value_weight: tl.tensor | None,  # None: values are not normalised
    queries: tl.tensor,
    keys: tl.tensor | None,  # None: rows have queries alone
    values: tl.tensor | None,
    qkv_stride: int,
    slot_stride: int,
    heads: int,
    kv_heads: int,
    eps: float,
    CENTERED: tl.constexpr,
    FP8: tl.constexpr,
    ROTATED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    QUERY_STEP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    HEADS_BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_previous_kernels(PDL)
    HALF: tl.constexpr = HEAD_DIM // 2
    dtype: tl.constexpr = queries.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS_BLOCK + tl.arange(0, HEADS_BLOCK)
    at = tl.arange(0, HALF_BLOCK)
    inside = at < HALF
    is_query = (head < heads)[:, None]
    is_key = ((head >= heads) & (head < heads + kv_heads))[:, None]
    is_value = ((head >= heads + kv_heads) & (head < heads + 2 * kv_heads))[:, None]

    # Pair `at` is of the dimensions `first` and `second`; pairs after the rotated ones have angle 0.
    PAIRS: tl.constexpr = ROTATED // 2
    if INTERLEAVED:
        first = tl.where(at < PAIRS, 2 * at, at + PAIRS)
        second = tl.where(at < PAIRS, 2 * at + 1, at + HALF)
    else:
        first = tl.where(at < PAIRS, at, at + PAIRS)
        second = tl.where(at < PAIRS, at + PAIRS, at + HALF)

    source = tl.where(head < heads, head * QUERY_STEP, head + heads * (QUERY_STEP - 1))
    place = row * qkv_stride + source[:, None] * HEAD_DIM
    there = (is_query | is_key | is_value) & inside[None, :]
    low = tl.load(qkv + place + first[None, :], mask=there, other=0.0).to(tl.float32)  # [heads, half]
    high = tl.load(qkv + place + second[None, :], mask=there, other=0.0).to(tl.float32)
    value_low = low
    value_high = high

    if query_weight is not None:
        scale = tl.rsqrt((tl.sum(low * low, axis=1) + tl.sum(high * high, axis=1)) / HEAD_DIM + eps)[:, None]
        if value_weight is not None:
            value_low = _weighted(low * scale, value_weight, value_weight, first, is_query, inside, dtype, CENTERED)
            value_high = _weighted(high * scale, value_weight, value_weight, second, is_query, inside, dtype, CENTERED)
        low = _weighted(low * scale, query_weight, key_weight, first, is_query, inside, dtype, CENTERED)
        high = _weighted(high * scale, query_weight, key_weight, second, is_query, inside, dtype, CENTERED)

    angle = table + tl.load(positions + row).to(tl.int64) * HEAD_DIM + at
    cos = tl.load(angle, mask=inside, other=0.0).to(tl.float32)[None, :]
    sin = tl.load(angle + HALF, mask=inside, other=0.0).to(tl.float32)[None, :]
    turned_low = rounded(low * cos, dtype).to(tl.float32) - rounded(high * sin, dtype).to(tl.float32)
    turned_high = rounded(high * cos, dtype).to(tl.float32) + rounded(low * sin, dtype).to(tl.float32)

    query_at = (row * heads + head[:, None]) * HEAD_DIM
    tl.store(queries + query_at + first[None, :], rounded(turned_low, dtype), mask=is_query & inside[None, :])
    tl.store(queries + query_at + second[None, :], rounded(turned_high, dtype), mask=is_query & inside[None, :])
    if keys is not None:
        slot = tl.load(slots + row).to(tl.int64) * slot_stride
        key_at = slot + (head - heads)[:, None] * HEAD_DIM
        _store(keys, key_at + first[None, :], turned_low, is_key & inside[None, :], dtype, FP8)
        _store(keys, key_at + second[None, :], turned_high, is_key & inside[None, :], dtype, FP8)
        value_at = slot + (head - heads - kv_heads)[:, None] * HEAD_DIM
        _store(values, value_at + first[None, :], value_low, is_value & inside[None, :], dtype, FP8)
        _store(values, value_at + second[None, :], value_high, is_value & inside[None, :], dtype, FP8)


@jit
def _weighted(  # type: ignore[no-untyped-def]
    scaled: tl.tensor,
    query_weight: tl.tensor,
    key_weight: tl.tensor,
    at: tl.tensor,
    is_query: tl.tensor,
    inside: tl.tensor,
    dtype: tl.constexpr,
    CENTERED: tl.constexpr,
):
    """The dimensions `at` of each head, normalised, times the weight of its kind: [heads, half], rounded to dtype."""
    of_queries = tl.load(query_weight + at, mask=inside, other=0.0).to(tl.float32)[None, :]
    of_keys = tl.load(key_weight + at, mask=inside, other=0.0).to(tl.float32)[None, :]
    weight = tl.where(is_query, of_queries, of_keys)
    if CENTERED:
        return rounded(scaled * (weight + 1.0), dtype).to(tl.float32)
    return rounded(weight * rounded(scaled, dtype).to(tl.float32), dtype).to(tl.float32)


@jit
def _store(  # type: ignore[no-untyped-def]
    pool: tl.tensor,
    at: tl.tensor,
    x: tl.tensor,
    mask: tl.tensor,
    dtype: tl.constexpr,
    FP8: tl.constexpr,
):
    """Write half heads to the pool: in the model's dtype, or cut off for float8."""
    stored = rounded(x, dtype)
    if FP8:
        kept = tl.minimum(tl.maximum(stored.to(tl.float32), -FP8_LARGEST), FP8_LARGEST)
        stored = rounded(kept, pool.dtype.element_ty)
    tl.store(pool + at, stored, mask=mask)
