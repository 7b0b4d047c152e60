"""The kernels of this folder in plain torch, by the same names: on any device, and the oracle of the tests.

Nothing here imports Triton.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch.nn import functional

from ...cache.kv_pool import movable, rounded
from ...layers.linear import ACTIVATIONS, HeadNorm, RMSNorm
from ...layers.low_rank import AdapterBlocks, LowRankStack
from ...layers.quantized import QuantizedTensor, multiply
from ...layers.rope import apply_rope


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, *, eps: float, centered: bool, out: torch.Tensor | None = None
) -> torch.Tensor:
    """See `norm.rms_norm`."""
    normed = RMSNorm(weight, eps=eps, centered=centered)(x)
    return normed if out is None else out.copy_(normed)


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
    """See `norm.add_rms_norm`."""
    added = x if after is None else rms_norm(x, after, eps=eps, centered=centered)
    residual += added if scale == 1.0 else added * scale
    if factor is not None:
        residual *= factor
    return residual if weight is None else rms_norm(residual, weight, eps=eps, centered=centered)


def act_and_multiply(gate_up: torch.Tensor, activation: str) -> torch.Tensor:
    """See `activation.act_and_multiply`."""
    gate, up = gate_up.chunk(2, dim=-1)
    return ACTIVATIONS[activation](gate) * up


def linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """See `linear.linear`."""
    result = functional.linear(x, weight, bias)
    return result if out is None else out.copy_(result)


def gated(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str) -> torch.Tensor:
    """See `linear.gated`."""
    return act_and_multiply(functional.linear(x, weight, bias), activation)


def quantized_linear(x: torch.Tensor, weight: QuantizedTensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """See `quantized.quantized_linear`."""
    result = multiply(weight, x)
    return result if out is None else out.copy_(result)


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
    """See `rope.rope_and_store`."""
    head_dim, kv_heads = table.shape[1], 0 if keys is None else keys.shape[1]
    split = qkv.view(len(qkv), -1, head_dim)
    heads = split.shape[1] - 2 * kv_heads
    queries, new_keys, new_values = torch.split(split, [heads, kv_heads, kv_heads], dim=1)
    queries = queries[:, :: 2 if gated else 1]
    if head_norm is not None:
        norm = partial(rms_norm, eps=head_norm.eps, centered=head_norm.centered)
        queries, new_keys = norm(queries, head_norm.query_weight), norm(new_keys, head_norm.key_weight)
        new_values = new_values if head_norm.value_weight is None else norm(new_values, head_norm.value_weight)
    pairs = (head_dim if rotated is None else rotated) // 2
    cos, sin = (part[..., :pairs] for part in table.index_select(0, positions)[:, None].chunk(2, dim=-1))
    angles = torch.cat([cos, cos], dim=-1), torch.cat([-sin, sin], dim=-1)  # [R, 1, 2 pairs]
    if keys is not None and values is not None:
        for pool, new in ((keys, apply_rope(new_keys, angles, interleaved=interleaved)), (values, new_values)):
            movable(pool).index_copy_(0, slots, movable(rounded(new, pool.dtype)))
    return apply_rope(queries, angles, interleaved=interleaved).contiguous()


def route(logits: torch.Tensor, top_k: int, *, renormalise: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """See `moe.route`."""
    probabilities = functional.softmax(logits.float(), dim=-1)
    # A stable sort, so that of equal experts the first comes first: torch.topk leaves ties open.
    order = probabilities.sort(dim=-1, descending=True, stable=True).indices[:, :top_k]
    weights = probabilities.gather(1, order)
    if renormalise:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return weights, order.int()


def fused_experts(
    x: torch.Tensor,
    gate_up: torch.Tensor | QuantizedTensor,
    down: torch.Tensor | QuantizedTensor,
    weights: torch.Tensor,
    experts: torch.Tensor,
    *,
    activation: str,
    gated: bool = True,
    biases: tuple[torch.Tensor, torch.Tensor] | None = None,
    clamp: tuple[float, float] | None = None,
) -> torch.Tensor:
    """See `moe.fused_experts`."""

    hidden = x.shape[1]
    count = len(down) if isinstance(down, torch.Tensor) else down.shape[0] // hidden

    def product(rows: torch.Tensor, which: int, expert: int) -> torch.Tensor:
        stack, bias = (gate_up, down)[which], None if biases is None else biases[which][expert]
        if isinstance(stack, torch.Tensor):
            return functional.linear(rows, stack[expert], bias)
        outputs = stack.shape[0] // count
        out = multiply(stack.part(expert * outputs, (expert + 1) * outputs), rows)
        return out if bias is None else out + bias

    def mlp(rows: torch.Tensor, expert: int) -> torch.Tensor:
        inner = product(rows, 0, expert)
        if not gated:
            inner = ACTIVATIONS[activation](inner)
        elif clamp is None:
            inner = act_and_multiply(inner, activation)
        else:
            inner = _clamped(inner, *clamp)
        return product(inner, 1, expert)

    return _by_expert(x, weights, experts, count, mlp)


def _clamped(gate_up: torch.Tensor, limit: float, alpha: float) -> torch.Tensor:
    """Computes a clamped gate: see `decoder_config.ClampedGate`."""
    gate, up = gate_up.chunk(2, dim=-1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (up + 1) * (gate * torch.sigmoid(gate * alpha))


def adapter_blocks(adapters: torch.Tensor, count: int) -> AdapterBlocks:
    """See `low_rank.adapter_blocks`; what the reference does not read is empty."""
    nothing = adapters.new_empty(0)
    return AdapterBlocks(adapters, nothing, nothing, nothing, 0)


def add_low_rank(x: torch.Tensor, out: torch.Tensor, blocks: AdapterBlocks, stack: LowRankStack) -> None:
    """See `low_rank.add_low_rank`. Every row multiplies by the matrices of its own."""
    count = len(stack.down)
    own = blocks.adapters.clamp(max=count - 1).long()  # of rows without an adapter the last one, times 0
    scales = stack.scales[own] * (blocks.adapters < count)[:, None]  # [R, maps]
    hidden = (torch.einsum("ri,rpki->rpk", x, stack.down[own]) * scales[..., None]).to(x.dtype)
    for first, end, part in stack.tiles.tolist():
        out[:, first:end] += torch.einsum("rk,rok->ro", hidden[:, part], stack.up[own, first:end])


def _by_expert(
    x: torch.Tensor,
    weights: torch.Tensor,
    experts: torch.Tensor,
    count: int,
    mlp: Callable[[torch.Tensor, int], torch.Tensor],
) -> torch.Tensor:
    """Sums weight · mlp(rows of x, expert) over each row's experts, one expert after another."""
    result = torch.zeros_like(x)
    by_expert = experts.flatten().argsort(stable=True)  # pairs, token · top_k + choice
    sizes = torch.bincount(experts.flatten(), minlength=count).tolist()
    for expert, pairs in enumerate(torch.split(by_expert, sizes)):
        if not len(pairs):
            continue
        tokens = pairs // experts.shape[1]
        mixed = mlp(x[tokens], expert) * weights.flatten()[pairs, None]
        result.index_add_(0, tokens, mixed.to(x.dtype))
    return result
