"""Mixture of experts: every token goes through the few experts that its router chose, and nothing else is computed.

    route      logits [T, E] → weights and experts [T, k]                          one program for a token
    arrange    pairs (token, choice), T · k of them, by expert, in blocks:         one program for an expert

               rows    [ 3 7 · · | 0 4 5 9 | 12 · · · | … ]        · = padding, a number after all pairs
               expert      0         2          2                  one for each block

    gate_up    block × columns: act(x Gᵀ) × (x Uᵀ) of the block's expert, written by pair; without gates act(x Uᵀ)
    down       block × columns: times Dᵀ, times the router's weight, written by pair
    combine    the k results of a token, summed in the order of its choices

Few tokens take a shorter way, `_few_through_experts`: two passes, in which every pair of token and choice reads its
expert for itself. Experts without tokens are not read. Blocks of 16 rows are for decoding, where the weights are what
costs; larger ones for prompts. How many blocks there are is known on the device only: grids
have room for the most there can be, and the rest of the programs end at once, so a step can be captured in a graph.
Nothing is added in an order that changes.

Experts are floats, or codes that stay packed (`layers.quantized`): then a program widens its tile in registers, once
for all rows of its block, and a pair reads the codes of its expert, and nothing else.

The references are `reference.route` and `reference.fused_experts`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from ...layers.quantized import QuantizedTensor
from .fitting import Room, largest_that_fits, launch_fitting, room_of, shared_bytes
from .jit import block_of, jit, multiplied, pdl_options, rounded, wait_for_previous_kernels
from .linear import ACTIVATION_KINDS, activated, depth_for, linear, sums_of_rows, weights_of_tile
from .quantized import kind_of, pointers_of, products_of_codes, sub_of, sums_of_codes
from .tuning import CodesPairTile, MoeChoice, MoeTiles, Tuning, tuning_for

__all__ = ["MoeTiles", "fused_experts", "linear", "route", "tiles_for"]  # linear: of routers; `experts.ExpertKernels`


def tiles_for(pairs: int, experts: int, tuning: Tuning, *, codes: bool = False) -> MoeTiles:
    """Returns the cut for `pairs` of token and expert, as if they were spread evenly. codes: experts are packed."""
    each, choice = pairs / experts, tuning.moe_choice
    if each <= choice.decode_pairs:
        return tuning.moe_codes_decode if codes else tuning.moe_decode
    if each <= choice.middle_pairs:
        return tuning.moe_codes_middle if codes else tuning.moe_middle
    return tuning.moe_codes_prefill if codes else tuning.moe_prefill


def route(logits: torch.Tensor, top_k: int, *, renormalise: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Chooses the most probable experts of each token.

    Args:
        logits: [T, E], the router's product; rows may lie apart.
        top_k: experts of a token, E at most.
        renormalise: the weights of a token sum to one.

    Returns:
        weights float32 [T, top_k] and experts int32 [T, top_k], the most probable first, of equal ones the first.
    """
    tokens, experts = logits.shape
    assert 0 < top_k <= experts, "a token goes through experts that there are"
    assert logits.stride(1) == 1, "the logits of a token lie side by side"
    weights = torch.empty((tokens, top_k), dtype=torch.float32, device=logits.device)
    chosen = torch.empty((tokens, top_k), dtype=torch.int32, device=logits.device)
    if tokens:
        route_tokens[(tokens,)](
            logits,
            weights=weights,
            chosen=chosen,
            stride=logits.stride(0),
            experts=experts,
            TOP_K=top_k,
            RENORMALISE=renormalise,
            CHOICES=block_of(top_k),
            BLOCK=block_of(experts),
            num_warps=1,
            enable_fp_fusion=False,
            **pdl_options(logits.device),
        )
    return weights, chosen


Stack = torch.Tensor | QuantizedTensor


def fused_experts(
    x: torch.Tensor,
    gate_up: Stack,
    down: Stack,
    weights: torch.Tensor,
    experts: torch.Tensor,
    *,
    activation: str,
    gated: bool = True,
    biases: tuple[torch.Tensor, torch.Tensor] | None = None,
    clamp: tuple[float, float] | None = None,
    tiles: MoeTiles | None = None,
) -> torch.Tensor:
    """Runs each token through its experts, and sums their outputs, weighted.

    Args:
        x: [T, hidden] of the model's dtype; rows may lie apart.
        gate_up: [E, 2 width, hidden], gates above ups; [E, width, hidden] without gates. Packed: experts stacked along
            their outputs, [E · 2 width, hidden], with groups that fit tiles.
        down: [E, hidden, width]; packed: [E · hidden, width].
        weights: [T, top_k] of any floating dtype.
        experts: int32 [T, top_k], each in [0, E).
        activation: one of `linear.ACTIVATIONS`.
        gated: the activation of gates multiplies ups; else ups are activated.
        biases: of both maps, [E, 2 width or width] and [E, hidden].
        clamp: limit and alpha of a clamped gate, which takes the place of the activation: `decoder_config.ClampedGate`.
        tiles: the cut; None: `tiles_for`, or none where tokens are few.

    Returns:
        [T, hidden] in the dtype of x. Results of experts are rounded to it, their sum is float32.
    """
    tokens, hidden = x.shape
    width, top_k = down.shape[-1], experts.shape[1]
    count = down.shape[0] // (hidden if isinstance(down, QuantizedTensor) else 1)
    _check_stack(gate_up, count, (1 + gated) * width, hidden)
    _check_stack(down, count, hidden, width)
    assert weights.is_contiguous(), "choices lie side by side"
    assert experts.is_contiguous(), "choices lie side by side"
    assert x.stride(1) == 1, "the elements of a row lie side by side"
    if not tokens:
        return torch.empty_like(x)
    limit, alpha = clamp or (None, 0.0)
    into = {
        "WIDTH": width,
        "HIDDEN": hidden,
        "KIND": ACTIVATION_KINDS[activation],
        "GATED": gated,
        "LIMIT": limit,
        "ALPHA": alpha,
    }
    into_bias, out_bias = biases or (None, None)
    mixture = _Mixture(x, gate_up, down, weights, experts, into_bias, out_bias, count, into)
    tuning = tuning_for(x.device)
    if tiles is None and are_few(tokens * top_k, count, top_k, tuning.moe_choice):
        return _few_through_experts(mixture)
    if tiles is None:
        tiles = tiles_for(tokens * top_k, count, tuning, codes=not isinstance(down, torch.Tensor))
    return _sorted_through_experts(mixture, tiles)


@dataclass(frozen=True, slots=True, eq=False)
class _Mixture:
    """The arguments of `fused_experts`, which has looked at them."""

    x: torch.Tensor
    gate_up: Stack
    down: Stack
    weights: torch.Tensor
    experts: torch.Tensor
    into_bias: torch.Tensor | None
    out_bias: torch.Tensor | None
    count: int
    into: Mapping[str, Any]  # constants of the kernels of gates and ups. Any: Triton takes numbers and None alike

    @property
    def width(self) -> int:
        return self.down.shape[-1]


def _check_stack(stack: Stack, count: int, outputs: int, inputs: int) -> None:
    if isinstance(stack, QuantizedTensor):
        assert stack.shape == (count * outputs, inputs), "experts stacked along their outputs, over what goes in"
        assert stack.permutation is None, "inputs are in order"
        assert stack.fits_tiles, "groups fit tiles"
    else:
        assert stack.shape == (count, outputs, inputs), "as many outputs for each expert, over what goes in"
        assert stack.is_contiguous(), "experts lie one after the other"


def _pointers(stack: Stack) -> dict[str, torch.Tensor | None]:
    """Returns floats, or codes with what they stand for: arguments of the kernels."""
    if isinstance(stack, torch.Tensor):
        return {"weight": stack, "scales": None, "zeros": None, "table": None}
    pointers = pointers_of(stack)
    return {"weight": pointers.pop("codes"), **pointers}


def _form(stack: Stack, depth: int) -> dict[str, int | bool | None]:
    """Returns the constants that say how the kernels read a stack, `depth` inputs at a time."""
    if isinstance(stack, torch.Tensor):
        return {"CODES": None, "GROUPS": 1, "ZEROS": False, "SUB": depth, "BLOCK_K": depth}
    zeros, groups = stack.zeros is not None, stack.scales.shape[1]
    return {"CODES": kind_of(stack), "GROUPS": groups, "ZEROS": zeros, "SUB": sub_of(stack, depth), "BLOCK_K": depth}


def _kind(stack: Stack, dtype: torch.dtype) -> tuple[torch.dtype, int | None]:
    """Returns what a stack is, as far as the kernels' resources depend on it."""
    return dtype, None if isinstance(stack, torch.Tensor) else kind_of(stack)


# Any: constants of a kernel, and options of its launch.
def _block_constants(stack: Stack, cut: MoeTiles, dtype: torch.dtype) -> dict[str, Any]:
    return {
        **_form(stack, cut.depth * 2 // dtype.itemsize),
        "PRECISION": "ieee" if dtype is torch.float32 else "tf32",
        "BLOCK_M": cut.rows,
        "GROUP": cut.group,
        "num_warps": cut.warps,
        "num_stages": cut.stages,
        "enable_fp_fusion": False,
    }


def fitting_cut(cut: MoeTiles, stack: Stack, dtype: torch.dtype, room: Room) -> MoeTiles:
    """Returns the cut, or the largest smaller one of as many rows that a device holds."""
    bits = None if isinstance(stack, torch.Tensor) else stack.kind.bits
    return block_cut(cut, bits, dtype, room)


def block_cut(cut: MoeTiles, bits: int | None, dtype: torch.dtype, room: Room) -> MoeTiles:
    """See `fitting_cut`. bits: of a code; None: experts are floats. What is widened passes through shared memory."""

    def needs(cut: MoeTiles) -> int:
        numbers = 2 * cut.depth  # bytes
        weights = 2 * cut.columns * (numbers if bits is None else cut.depth * 2 // dtype.itemsize * bits // 8)
        widened = 0 if bits is None else 2 * cut.columns * cut.depth * 4
        return shared_bytes(cut, room, cut.rows * numbers + weights, fixed=widened)

    return largest_that_fits("moe", cut, room, needs, shape=(bits, dtype))


def _sorted_through_experts(mixture: _Mixture, cut: MoeTiles) -> torch.Tensor:
    x, width = mixture.x, mixture.width
    (tokens, hidden), top_k = x.shape, mixture.experts.shape[1]
    pairs = tokens * top_k
    out = torch.empty((tokens, hidden), dtype=x.dtype, device=x.device)
    cut = fitting_cut(cut, mixture.gate_up, x.dtype, room_of(x.device))
    blocks = arranged(mixture.experts, mixture.count, cut.rows)
    middle = torch.empty((pairs, width), dtype=x.dtype, device=x.device)
    mixed = torch.empty((pairs, hidden), dtype=x.dtype, device=x.device)
    order = {"rows": blocks.rows, "owners": blocks.experts, "filled": blocks.count}

    def launch_gate_up(cut: MoeTiles) -> None:
        gate_up_blocks[(blocks.most * triton.cdiv(width, cut.columns),)](
            x,
            **_pointers(mixture.gate_up),
            bias=mixture.into_bias,
            middle=middle,
            **order,
            x_stride=x.stride(0),
            pairs=pairs,
            top_k=top_k,
            **mixture.into,
            **_block_constants(mixture.gate_up, cut, x.dtype),
            BLOCK_N=cut.columns,
        )

    def launch_down(cut: MoeTiles) -> None:
        down_blocks[(blocks.most * triton.cdiv(hidden, 2 * cut.columns),)](
            middle,
            **_pointers(mixture.down),
            bias=mixture.out_bias,
            mixed=mixed,
            shares=mixture.weights,
            **order,
            pairs=pairs,
            WIDTH=width,
            HIDDEN=hidden,
            **_block_constants(mixture.down, cut, x.dtype),
            BLOCK_N=2 * cut.columns,
        )

    launch_fitting("moe_gate_up", cut, launch_gate_up, shape=_kind(mixture.gate_up, x.dtype))
    launch_fitting("moe_down", cut, launch_down, shape=_kind(mixture.down, x.dtype))
    tile = tuning_for(x.device).moe_combine
    combine_pairs[(tokens, triton.cdiv(hidden, tile.columns))](
        mixed, out, hidden=hidden, TOP_K=top_k, BLOCK=tile.columns, num_warps=tile.warps, enable_fp_fusion=False
    )
    return out


@dataclass(frozen=True, slots=True, eq=False)
class Blocks:
    """Pairs by expert, in blocks that each have one expert."""

    rows: torch.Tensor  # int32 [most · block rows]: token · top_k + choice; the number of pairs is padding
    experts: torch.Tensor  # int32 [most]
    count: torch.Tensor  # int32 [1] blocks there are
    most: int  # blocks there can be


def arranged(experts: torch.Tensor, count: int, block_rows: int) -> Blocks:
    """Sorts pairs by expert. experts: int32, each in [0, count); pairs of expert `count` are left out."""
    pairs = experts.numel()
    # c pairs of an expert fill ⌈c / rows⌉ ≤ (c + rows − 1) / rows blocks.
    most = min(pairs, (pairs + min(count, pairs) * (block_rows - 1)) // block_rows)
    memory = torch.empty(most * (block_rows + 1) + 1, dtype=torch.int32, device=experts.device)
    rows, owners, filled = torch.split(memory, [most * block_rows, most, 1])
    tile = tuning_for(experts.device).moe_arrange
    arrange_pairs[(count,)](
        experts,
        rows=rows,
        owners=owners,
        filled=filled,
        pairs=pairs,
        EXPERTS=count,
        BINS=block_of(count + 1),  # one more, for what is left out and what lies after the last pair
        BLOCK_M=block_rows,
        TILE=min(tile.pairs, block_of(pairs, least=16)),
        num_warps=tile.warps,
        enable_fp_fusion=False,
    )
    return Blocks(rows, owners, filled, most)


def are_few(pairs: int, experts: int, top_k: int, choice: MoeChoice) -> bool:
    """Pairs of so few tokens that experts which several of them chose cost less than sorting; one token always is."""
    return pairs <= max(top_k, experts // choice.share)


@dataclass(frozen=True, slots=True)
class PairCut:
    """Sizes of a program in which rows meet lines of their own: columns of each, and inputs at a time."""

    columns: int
    depth: int
    warps: int


def gate_cut(stack: Stack, hidden: int, gated: bool, tuning: Tuning) -> PairCut:
    """Returns the cut for one pair; a column is a gate and an up, or an up."""
    if isinstance(stack, QuantizedTensor):
        return code_cut(1 + gated, hidden, tuning.moe_codes_pairs)
    tile = tuning.moe_gate_pairs
    return PairCut(tile.outputs, depth_for(hidden, stack.dtype, tile.warps), tile.warps)


def down_cut(stack: Stack, width: int, choices: int, tuning: Tuning) -> PairCut:
    """Returns the cut for one token; a column is that of all its choices."""
    if isinstance(stack, QuantizedTensor):
        return code_cut(choices, width, tuning.moe_codes_pairs)
    tile = tuning.moe_down_tokens
    # A warp for each row, which has numbers of its own to meet.
    return PairCut(max(tile.outputs // choices, 1), depth_for(width, stack.dtype, 1), tile.warps)


def code_cut(lines: int, inputs: int, tile: CodesPairTile) -> PairCut:
    """Returns the cut for `lines` lines of codes a column."""
    depth = min(tile.most_depth, block_of(inputs))
    # What lies after the last input is computed, too.
    while depth > tile.least_depth and -inputs % depth > inputs // 8:
        depth //= 2
    return PairCut(max(1, min(tile.columns, tile.numbers // (lines * depth))), depth, tile.warps)


def _few_through_experts(mixture: _Mixture) -> torch.Tensor:
    x, width = mixture.x, mixture.width
    (tokens, hidden), top_k = x.shape, mixture.experts.shape[1]
    pairs = tokens * top_k
    middle = torch.empty((pairs, width), dtype=x.dtype, device=x.device)
    out = torch.empty((tokens, hidden), dtype=x.dtype, device=x.device)
    common = {"enable_fp_fusion": False, **pdl_options(x.device)}
    tuning = tuning_for(x.device)
    cut = gate_cut(mixture.gate_up, hidden, mixture.into["GATED"], tuning)
    gate_up_pairs[(triton.cdiv(width, cut.columns), pairs)](
        x,
        **_pointers(mixture.gate_up),
        bias=mixture.into_bias,
        middle=middle,
        experts=mixture.experts,
        x_stride=x.stride(0),
        top_k=top_k,
        **mixture.into,
        **_form(mixture.gate_up, cut.depth),
        **common,
        BLOCK_N=cut.columns,
        num_warps=cut.warps,
    )
    choices = block_of(top_k)
    cut = down_cut(mixture.down, width, choices, tuning)
    down_tokens[(triton.cdiv(hidden, cut.columns), tokens)](
        middle,
        **_pointers(mixture.down),
        bias=mixture.out_bias,
        out=out,
        shares=mixture.weights,
        experts=mixture.experts,
        WIDTH=width,
        HIDDEN=hidden,
        TOP_K=top_k,
        CHOICES=choices,
        **_form(mixture.down, cut.depth),
        **common,
        BLOCK_N=cut.columns,
        num_warps=cut.warps,
    )
    return out


@jit
def gate_of(  # type: ignore[no-untyped-def]
    gate: tl.tensor, up: tl.tensor, KIND: tl.constexpr, LIMIT: tl.constexpr, ALPHA: tl.constexpr, dtype: tl.constexpr
):
    """Computes the activation of gates times ups; both float32, rounded to dtype wherever torch rounds."""
    if LIMIT is None:
        product = rounded(activated(gate, KIND), dtype).to(tl.float32) * up
    else:
        gate = tl.minimum(gate, LIMIT)
        up = rounded(tl.minimum(tl.maximum(up, -LIMIT), LIMIT) + 1.0, dtype).to(tl.float32)
        share = rounded(1.0 / (1.0 + tl.exp(-rounded(gate * ALPHA, dtype).to(tl.float32))), dtype).to(tl.float32)
        product = up * rounded(gate * share, dtype).to(tl.float32)
    return rounded(product, dtype)


@jit
def gate_up_pairs(  # type: ignore[no-untyped-def]
    x: tl.tensor,
    weight: tl.tensor,  # floats, or codes, which the three that follow belong to
    scales: tl.tensor | None,
    zeros: tl.tensor | None,
    table: tl.tensor | None,
    bias: tl.tensor | None,
    middle: tl.tensor,
    experts: tl.tensor,
    x_stride: int,
    top_k: int,
    WIDTH: tl.constexpr,
    HIDDEN: tl.constexpr,
    KIND: tl.constexpr,
    GATED: tl.constexpr,
    LIMIT: tl.constexpr,
    ALPHA: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    CODES: tl.constexpr,
    GROUPS: tl.constexpr,
    ZEROS: tl.constexpr,
    SUB: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_previous_kernels(PDL)
    PARTS: tl.constexpr = 2 if GATED else 1
    pair = tl.program_id(1).to(tl.int64)
    first = tl.program_id(0) * BLOCK_N
    number = tl.arange(0, PARTS * BLOCK_N)  # gate 0, up 0, gate 1, up 1, …; or one after the other
    column = first + number // PARTS
    expert = tl.load(experts + pair).to(tl.int64)
    line = expert * (PARTS * WIDTH) + (number % PARTS) * WIDTH + column
    row = (x + pair // top_k * x_stride + tl.arange(0, BLOCK_K))[None, :]
    if CODES is None:
        at = weight + line[:, None] * HIDDEN + tl.arange(0, BLOCK_K)[None, :]
        inside = (column < WIDTH)[:, None]
        ahead = weights_of_tile(at, inside, 0, HIDDEN, BLOCK_K)
        sums = sums_of_rows(row, at, inside, ahead, HIDDEN, PARTS * BLOCK_N, BLOCK_K)
    else:
        there = tl.where(column < WIDTH, line, 0)[:, None]
        sums = sums_of_codes(row, weight, scales, zeros, table, there, HIDDEN, GROUPS, CODES, ZEROS, BLOCK_K, SUB)
    if bias is not None:
        sums += tl.load(bias + line, mask=column < WIDTH, other=0.0).to(tl.float32)
    dtype: tl.constexpr = middle.dtype.element_ty
    sums = rounded(sums, dtype).to(tl.float32)
    if GATED:
        gate, up = tl.split(tl.reshape(sums, [BLOCK_N, 2]))
        result = gate_of(gate, up, KIND, LIMIT, ALPHA, dtype)
    else:
        result = rounded(activated(sums, KIND), dtype)
    own = first + tl.arange(0, BLOCK_N)
    tl.store(middle + pair * WIDTH + own, result, mask=own < WIDTH)


@jit
def down_tokens(  # type: ignore[no-untyped-def]
    middle: tl.tensor,
    weight: tl.tensor,  # floats, or codes, which the three that follow belong to
    scales: tl.tensor | None,
    zeros: tl.tensor | None,
    table: tl.tensor | None,
    bias: tl.tensor | None,
    out: tl.tensor,
    shares: tl.tensor,
    experts: tl.tensor,
    WIDTH: tl.constexpr,
    HIDDEN: tl.constexpr,
    TOP_K: tl.constexpr,
    CHOICES: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    CODES: tl.constexpr,
    GROUPS: tl.constexpr,
    ZEROS: tl.constexpr,
    SUB: tl.constexpr,
    PDL: tl.constexpr,
):
    token = tl.program_id(1).to(tl.int64)
    number = tl.arange(0, CHOICES * BLOCK_N)  # the columns of the first choice, those of the second, …
    choice = number // BLOCK_N
    column = tl.program_id(0) * BLOCK_N + number % BLOCK_N
    real = (choice < TOP_K) & (column < HIDDEN)
    pair = token * TOP_K + choice
    # Chosen before the gates were launched, and those have waited; past what this multiprocessor read in earlier steps.
    expert = tl.load(experts + pair, mask=real, other=0, cache_modifier=".cg").to(tl.int64)
    depth = tl.arange(0, BLOCK_K)[None, :]
    if CODES is None:
        at, inside = weight + (expert * HIDDEN + column)[:, None] * WIDTH + depth, real[:, None]
        ahead = weights_of_tile(at, inside, 0, WIDTH, BLOCK_K)
        wait_for_previous_kernels(PDL)
        row = middle + tl.where(real, pair, 0)[:, None] * WIDTH + depth
        sums = sums_of_rows(row, at, inside, ahead, WIDTH, CHOICES * BLOCK_N, BLOCK_K)
    else:
        wait_for_previous_kernels(PDL)
        there = tl.where(real, expert * HIDDEN + column, 0)[:, None]
        choices = tl.arange(0, CHOICES)
        row = middle + (token * TOP_K + tl.where(choices < TOP_K, choices, 0))[:, None] * WIDTH + depth
        sums = sums_of_codes(row, weight, scales, zeros, table, there, WIDTH, GROUPS, CODES, ZEROS, BLOCK_K, SUB)
    if bias is not None:
        sums += tl.load(bias + expert * HIDDEN + column, mask=real, other=0.0).to(tl.float32)
    dtype: tl.constexpr = out.dtype.element_ty
    result = rounded(sums, dtype).to(tl.float32) * tl.load(shares + pair, mask=real, other=0.0).to(tl.float32)
    results = tl.reshape(rounded(result, dtype).to(tl.float32), [CHOICES, BLOCK_N])
    own = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    tl.store(out + token * HIDDEN + own, rounded(tl.sum(results, axis=0), dtype), mask=own < HIDDEN)


@jit
def route_tokens(  # type: ignore[no-untyped-def]
    logits: tl.tensor,
    weights: tl.tensor,
    chosen: tl.tensor,
    stride: int,
    experts: int,
    TOP_K: tl.constexpr,
    RENORMALISE: tl.constexpr,
    CHOICES: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_previous_kernels(PDL)
    token = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, BLOCK)
    choice = tl.arange(0, CHOICES)
    values = tl.load(logits + token * stride + expert, mask=expert < experts, other=-float("inf")).to(tl.float32)
    left = tl.exp(values - tl.max(values, axis=0))
    left = left / tl.sum(left, axis=0)
    left = tl.where(expert < experts, left, -1.0)
    taken = tl.zeros([CHOICES], dtype=tl.float32)
    for choice_number in tl.static_range(TOP_K):
        winner = tl.minimum(tl.argmax(left, axis=0), experts - 1)  # logits that are no numbers choose some expert too
        taken = tl.where(choice == choice_number, tl.max(left, axis=0), taken)
        tl.store(chosen + token * TOP_K + choice_number, winner)
        left = tl.where(expert == winner, -1.0, left)
    if RENORMALISE:
        taken = taken / tl.sum(taken, axis=0)
    tl.store(weights + token * TOP_K + choice, taken, mask=choice < TOP_K)


@jit
def arrange_pairs(  # type: ignore[no-untyped-def]
    experts: tl.tensor,
    rows: tl.tensor,
    owners: tl.tensor,
    filled: tl.tensor,
    pairs: int,
    EXPERTS: tl.constexpr,
    BINS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TILE: tl.constexpr,
):
    expert = tl.program_id(0)
    counts = tl.zeros([BINS], dtype=tl.int32)
    first = 0
    while first < pairs:
        pair = first + tl.arange(0, TILE)
        counts += tl.histogram(tl.load(experts + pair, mask=pair < pairs, other=EXPERTS), BINS)
        first += TILE
    blocks = (counts + BLOCK_M - 1) // BLOCK_M
    bins = tl.arange(0, BINS)
    before = tl.sum(tl.where(bins < expert, blocks, 0), axis=0)
    own = tl.sum(tl.where(bins == expert, blocks, 0), axis=0)
    if expert == EXPERTS - 1:
        tl.store(filled, before + own)

    place = before * BLOCK_M
    first = 0
    while first < pairs:
        pair = first + tl.arange(0, TILE)
        mine = (tl.load(experts + pair, mask=pair < pairs, other=EXPERTS) == expert).to(tl.int32)
        tl.store(rows + place + tl.cumsum(mine, axis=0) - 1, pair, mask=mine > 0)
        place += tl.sum(mine, axis=0)
        first += TILE
    padding = place + tl.arange(0, BLOCK_M)
    tl.store(rows + padding, tl.full([BLOCK_M], 0, tl.int32) + pairs, mask=padding < (before + own) * BLOCK_M)
    first = 0
    while first < own:
        block = first + tl.arange(0, TILE)
        tl.store(owners + before + block, tl.full([TILE], 0, tl.int32) + expert, mask=block < own)
        first += TILE


@jit
def _place(blocks: int, columns: int, GROUP: tl.constexpr):  # type: ignore[no-untyped-def]
    """The block and the columns of this program: GROUP blocks side by side share each cut of the weights."""
    program = tl.program_id(0)
    group = program // (GROUP * columns)
    size = tl.minimum(blocks - group * GROUP, GROUP)
    within = program % (GROUP * columns)
    return group * GROUP + within % size, within // size


@jit
def gate_up_blocks(  # type: ignore[no-untyped-def]
    x: tl.tensor,
    weight: tl.tensor,  # floats, or codes, which the three that follow belong to
    scales: tl.tensor | None,
    zeros: tl.tensor | None,
    table: tl.tensor | None,
    bias: tl.tensor | None,
    middle: tl.tensor,
    rows: tl.tensor,
    owners: tl.tensor,
    filled: tl.tensor,
    x_stride: int,
    pairs: int,
    top_k: int,
    WIDTH: tl.constexpr,
    HIDDEN: tl.constexpr,
    KIND: tl.constexpr,
    GATED: tl.constexpr,
    LIMIT: tl.constexpr,
    ALPHA: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    CODES: tl.constexpr,
    GROUPS: tl.constexpr,
    ZEROS: tl.constexpr,
    SUB: tl.constexpr,
    GROUP: tl.constexpr,
):
    COLUMNS: tl.constexpr = (WIDTH + BLOCK_N - 1) // BLOCK_N
    LINES: tl.constexpr = 2 * WIDTH if GATED else WIDTH  # of an expert
    blocks = tl.load(filled)
    if tl.program_id(0) < blocks * COLUMNS:
        block, columns = _place(blocks, COLUMNS, GROUP)
        dtype: tl.constexpr = middle.dtype.element_ty
        pair = tl.load(rows + block * BLOCK_M + tl.arange(0, BLOCK_M))
        expert = tl.load(owners + block).to(tl.int64)
        column = columns * BLOCK_N + tl.arange(0, BLOCK_N)
        depth = tl.arange(0, BLOCK_K)
        there = (pair < pairs)[:, None]
        rows_at = x + (pair // top_k).to(tl.int64) * x_stride
        if CODES is None:
            inputs = rows_at[:, None] + depth[None, :]
            gates = weight + expert * (LINES * HIDDEN) + column[None, :] * HIDDEN + depth[:, None]
            gate = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
            up = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
            for start in range(0, HIDDEN, BLOCK_K):
                inside = depth < HIDDEN - start
                mask = (column < WIDTH)[None, :] & inside[:, None]
                left = tl.load(inputs + start, mask=there & inside[None, :], other=0.0)
                gate = multiplied(left, tl.load(gates + start, mask=mask, other=0.0), gate, PRECISION)
                if GATED:
                    ups = tl.load(gates + WIDTH * HIDDEN + start, mask=mask, other=0.0)
                    up = multiplied(left, ups, up, PRECISION)
        else:
            PARTS: tl.constexpr = LINES // WIDTH
            number = tl.arange(0, PARTS * BLOCK_N)  # gate 0, up 0, gate 1, up 1, …; or one after the other
            target = columns * BLOCK_N + number // PARTS
            line = tl.where(target < WIDTH, expert * LINES + (number % PARTS) * WIDTH + target, 0)[:, None]
            gate = products_of_codes(
                rows_at[None, :] + depth[:, None],
                pair < pairs,
                weight,
                scales,
                zeros,
                table,
                line,
                HIDDEN,
                GROUPS,
                CODES,
                ZEROS,
                BLOCK_M,
                PARTS * BLOCK_N,
                BLOCK_K,
                SUB,
            )
            if GATED:
                both = tl.permute(tl.reshape(gate, [BLOCK_N, 2, BLOCK_M]), [2, 0, 1])
                gate, up = tl.split(both)
            else:
                gate = tl.trans(gate)
        if bias is not None:
            own = bias + expert * LINES + column
            gate += tl.load(own, mask=column < WIDTH, other=0.0).to(tl.float32)[None, :]
            if GATED:
                up += tl.load(own + WIDTH, mask=column < WIDTH, other=0.0).to(tl.float32)[None, :]
        gate = rounded(gate, dtype).to(tl.float32)
        if GATED:
            result = gate_of(gate, rounded(up, dtype).to(tl.float32), KIND, LIMIT, ALPHA, dtype)
        else:
            result = rounded(activated(gate, KIND), dtype)
        at = pair.to(tl.int64)[:, None] * WIDTH + column[None, :]
        tl.store(middle + at, result, mask=there & (column < WIDTH)[None, :])


@jit
def down_blocks(  # type: ignore[no-untyped-def]
    middle: tl.tensor,
    weight: tl.tensor,  # floats, or codes, which the three that follow belong to
    scales: tl.tensor | None,
    zeros: tl.tensor | None,
    table: tl.tensor | None,
    bias: tl.tensor | None,
    mixed: tl.tensor,
    shares: tl.tensor,
    rows: tl.tensor,
    owners: tl.tensor,
    filled: tl.tensor,
    pairs: int,
    WIDTH: tl.constexpr,
    HIDDEN: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    CODES: tl.constexpr,
    GROUPS: tl.constexpr,
    ZEROS: tl.constexpr,
    SUB: tl.constexpr,
    GROUP: tl.constexpr,
):
    COLUMNS: tl.constexpr = (HIDDEN + BLOCK_N - 1) // BLOCK_N
    blocks = tl.load(filled)
    if tl.program_id(0) < blocks * COLUMNS:
        block, columns = _place(blocks, COLUMNS, GROUP)
        dtype: tl.constexpr = mixed.dtype.element_ty
        pair = tl.load(rows + block * BLOCK_M + tl.arange(0, BLOCK_M))
        expert = tl.load(owners + block).to(tl.int64)
        column = columns * BLOCK_N + tl.arange(0, BLOCK_N)
        depth = tl.arange(0, BLOCK_K)
        there = (pair < pairs)[:, None]
        rows_at = middle + pair.to(tl.int64) * WIDTH
        if CODES is None:
            inputs = rows_at[:, None] + depth[None, :]
            maps = weight + expert * (HIDDEN * WIDTH) + column[None, :] * WIDTH + depth[:, None]
            total = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
            for start in range(0, WIDTH, BLOCK_K):
                inside = depth < WIDTH - start
                left = tl.load(inputs + start, mask=there & inside[None, :], other=0.0)
                right = tl.load(maps + start, mask=(column < HIDDEN)[None, :] & inside[:, None], other=0.0)
                total = multiplied(left, right, total, PRECISION)
        else:
            line = tl.where(column < HIDDEN, expert * HIDDEN + column, 0)[:, None]
            total = products_of_codes(
                rows_at[None, :] + depth[:, None],
                pair < pairs,
                weight,
                scales,
                zeros,
                table,
                line,
                WIDTH,
                GROUPS,
                CODES,
                ZEROS,
                BLOCK_M,
                BLOCK_N,
                BLOCK_K,
                SUB,
            )
            total = tl.trans(total)
        if bias is not None:
            own = bias + expert * HIDDEN + column
            total += tl.load(own, mask=column < HIDDEN, other=0.0).to(tl.float32)[None, :]
        share = tl.load(shares + pair, mask=pair < pairs, other=0.0).to(tl.float32)[:, None]
        at = pair.to(tl.int64)[:, None] * HIDDEN + column[None, :]
        result = rounded(total, dtype).to(tl.float32) * share
        tl.store(mixed + at, rounded(result, dtype), mask=there & (column < HIDDEN)[None, :])


@jit
def combine_pairs(  # type: ignore[no-untyped-def]
    mixed: tl.tensor, out: tl.tensor, hidden: int, TOP_K: tl.constexpr, BLOCK: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < hidden
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for choice in tl.static_range(TOP_K):
        place = mixed + (token * TOP_K + choice) * hidden + column
        total += tl.load(place, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + token * hidden + column, rounded(total, out.dtype.element_ty), mask=inside)
