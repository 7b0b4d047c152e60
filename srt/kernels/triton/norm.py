"""RMS norms, with the residual sum before them: one read and one write of each row.

The references are `reference.rms_norm` and `reference.add_rms_norm`. A program has one row, so a row gives the same
bits alone and in a batch. Sums are float32; results are rounded where `norm.RMSNorm` rounds. Like all kernels here but
those of attention they are compiled without fused products and sums, which round less often than torch does.
"""

import torch
import triton.language as tl

from .jit import block_of, jit, pdl_options, rounded, wait_for_previous_kernels
from .tuning import WholeRow, tuning_for

_MOST_HIDDEN = 65_536  # elements of a row that a program holds in registers


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, *, eps: float, centered: bool, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Computes x / rms(x) × weight.

    Args:
        x: [R, hidden] of the model's dtype; rows may lie apart.
        weight: [hidden] as the checkpoint stores it, in the model's dtype.
        centered: the weight is stored minus one (Gemma).
        out: [R, hidden] in the dtype of x, written; rows may lie apart, and it may be x. None: a new tensor.

    Returns:
        [R, hidden] in the dtype of x.
    """
    rows, hidden = x.shape
    _require(x, weight, hidden)
    if out is None:
        out = torch.empty((rows, hidden), dtype=x.dtype, device=x.device)
    assert out.shape == x.shape, "a row of the result has the elements of a row of x"
    assert out.stride(1) == 1, "the elements of a row lie side by side"
    if rows:
        block = block_of(hidden)
        normalise_rows[(rows,)](
            x,
            weight,
            out,
            x_stride=x.stride(0),
            out_stride=out.stride(0),
            hidden=hidden,
            eps=eps,
            CENTERED=centered,
            BLOCK=block,
            num_warps=warps_for(block, tuning_for(x.device).norm),
            enable_fp_fusion=False,
            **pdl_options(x.device),
        )
    return out


def add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None,
    *,
    eps: float,
    centered: bool,
    after: torch.Tensor | None = None,
    scale: float = 1.0,
    factor: torch.Tensor | None = None,
) -> torch.Tensor:
    """residual = factor · (residual + scale · x), and the norm of that.

    Args:
        x: [R, hidden], what attention or an MLP gave; rows may lie apart.
        residual: [R, hidden] of the same dtype; holds the sum afterwards.
        weight: [hidden], of the norm of the sum; None: the sum is not normalised.
        after: [hidden], the weight of a norm that x goes through before it is added (Gemma's sandwich).
        scale: multiplies what is added (Granite).
        factor: [1], multiplies the sum (Gemma 4); None: 1.

    Returns:
        [R, hidden] in the dtype of x: the norm of the sum; without one, `residual` itself.
    """
    rows, hidden = x.shape
    for norm in (weight, after):
        if norm is not None:
            _require(x, norm, hidden)
    assert residual.shape[1] == hidden, "a residual has the rows of what is added to it"
    assert x.stride(1) == residual.stride(1) == 1, "the elements of a row lie side by side"
    out = residual if weight is None else torch.empty((rows, hidden), dtype=x.dtype, device=x.device)
    if rows:
        block = block_of(hidden)
        add_and_normalise_rows[(rows,)](
            x,
            residual,
            weight=x if weight is None else weight,
            after=x if after is None else after,
            factor=factor,
            out=out,
            x_stride=x.stride(0),
            residual_stride=residual.stride(0),
            hidden=hidden,
            eps=eps,
            scale=scale,
            CENTERED=centered,
            SANDWICH=after is not None,
            SCALED=scale != 1.0,
            NORMED=weight is not None,
            BLOCK=block,
            num_warps=warps_for(block, tuning_for(x.device).norm),
            enable_fp_fusion=False,
            **pdl_options(x.device),
        )
    return out


def _require(x: torch.Tensor, weight: torch.Tensor, hidden: int) -> None:
    """Checks what a kernel cannot."""
    assert x.shape[1] == hidden, "a residual has the rows of what is added to it"
    assert weight.shape == (hidden,), "one weight for each element of a row"
    assert x.stride(1) == 1, "the elements of a row lie side by side"
    assert weight.is_contiguous(), "the weights lie side by side"
    assert hidden <= _MOST_HIDDEN, f"a row of {hidden} elements does not fit a program"


def warps_for(block: int, tile: WholeRow) -> int:
    """Returns the warps of a row. 16 to 32 elements for each thread: enough loads in flight, and no register spills."""
    return min(max(block // tile.elements, 1), tile.most_warps)


@jit
def normed(x: tl.tensor, weight: tl.tensor, hidden: int, eps: float, dtype: tl.constexpr, CENTERED: tl.constexpr):  # type: ignore[no-untyped-def]
    """The norm of one row: float32 [BLOCK], rounded to dtype. x: float32, 0 after its `hidden` elements."""
    scaled = x * tl.rsqrt(tl.sum(x * x, axis=0) / hidden + eps)
    if CENTERED:
        return rounded(scaled * (weight.to(tl.float32) + 1.0), dtype).to(tl.float32)
    return rounded(weight.to(tl.float32) * rounded(scaled, dtype).to(tl.float32), dtype).to(tl.float32)


@jit
def normalise_rows(  # type: ignore[no-untyped-def]
    x: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    x_stride: int,
    out_stride: int,
    hidden: int,
    eps: float,
    CENTERED: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < hidden
    dtype: tl.constexpr = out.dtype.element_ty
    weights = tl.load(weight + at, mask=inside, other=0.0)
    wait_for_previous_kernels(PDL)
    values = tl.load(x + row * x_stride + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * out_stride + at, normed(values, weights, hidden, eps, dtype, CENTERED).to(dtype), mask=inside)


@jit
def add_and_normalise_rows(  # type: ignore[no-untyped-def]
    x: tl.tensor,
    residual: tl.tensor,
    weight: tl.tensor,
    after: tl.tensor,
    factor: tl.tensor | None,
    out: tl.tensor,
    x_stride: int,
    residual_stride: int,
    hidden: int,
    eps: float,
    scale: float,
    CENTERED: tl.constexpr,
    SANDWICH: tl.constexpr,
    SCALED: tl.constexpr,
    NORMED: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < hidden
    dtype: tl.constexpr = residual.dtype.element_ty
    if NORMED:
        weights = tl.load(weight + at, mask=inside, other=0.0)
    wait_for_previous_kernels(PDL)
    added = tl.load(x + row * x_stride + at, mask=inside, other=0.0).to(tl.float32)
    before = tl.load(residual + row * residual_stride + at, mask=inside, other=0.0).to(tl.float32)
    if SANDWICH:
        added = normed(added, tl.load(after + at, mask=inside, other=0.0), hidden, eps, dtype, CENTERED)
    if SCALED:
        added = rounded(added * scale, dtype).to(tl.float32)
    total = rounded(before + added, dtype)
    if factor is not None:
        total = rounded(total.to(tl.float32) * tl.load(factor).to(tl.float32), dtype)
    tl.store(residual + row * residual_stride + at, total, mask=inside)
    if NORMED:
        result = normed(total.to(tl.float32), weights, hidden, eps, dtype, CENTERED)
        tl.store(out + row * hidden + at, result.to(dtype), mask=inside)
