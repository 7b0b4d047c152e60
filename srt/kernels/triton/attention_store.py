"""New keys and values into the pool, in Triton."""

import triton.language as tl

from .jit import jit


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
    """Copy rows to their slots. The dummy slot stays as it is: several rows may have it."""
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
