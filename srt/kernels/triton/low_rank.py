"""Adds what adapters change to a product: rows by adapter in blocks, two grouped products (`layers.low_rank`).

    blocks   rows    [ 3 7 · · | 0 4 5 9 | … ]     · = padding; rows of no adapter are in no block
             owner       0         2               one adapter for each block

    down     block × map       (x Aᵀ) · scale of the block's adapter, by row: [R, maps, rank]
    up       block × outputs   out += that Bᵀ

Blocks are made on the device from the adapter of each row, so a captured step runs with any adapters. Programs after
the last block end at once. The reference is `reference.add_low_rank`; every intermediate is rounded where
`LowRankChanges` rounds it.
"""

import torch
import triton.language as tl

from ...layers.low_rank import TILE_OUTPUTS, AdapterBlocks, LowRankStack
from .fitting import Room, largest_that_fits, launch_fitting, room_of, shared_bytes
from .jit import block_of, jit, multiplied, rounded
from .moe import arranged
from .tuning import GroupedTile, tuning_for

BLOCK_ROWS = 16  # least rows of a product of tensor cores


def adapter_blocks(adapters: torch.Tensor, count: int) -> AdapterBlocks:
    """Sorts the rows of a step by adapter, without waiting for the device.

    Args:
        adapters: int32 [R], `count` where a row uses none.
        count: the number of adapters.
    """
    blocks = arranged(adapters, count, BLOCK_ROWS)
    return AdapterBlocks(adapters, blocks.rows, blocks.experts, blocks.count, blocks.most)


def add_low_rank(x: torch.Tensor, out: torch.Tensor, blocks: AdapterBlocks, stack: LowRankStack) -> None:
    """out += scale · (x Aᵀ) Bᵀ in the rows of each adapter.

    Args:
        x: [R, inputs] of the model's dtype; rows may lie apart.
        out: [R, outputs] of the same dtype; rows may lie apart.
    """
    _, parts, rank, inputs = stack.down.shape
    rows, outputs = out.shape
    assert x.shape == (rows, inputs), "a row of x for each row of the result"
    assert x.stride(1) == out.stride(1) == 1, "the elements of a row lie side by side"
    if not rows:
        return
    hidden = torch.empty((rows, parts, rank), dtype=x.dtype, device=x.device)
    tile = changes_tile(rank, x.dtype, tuning_for(x.device).low_rank, room_of(x.device))
    precision = "ieee" if x.dtype is torch.float32 else "tf32"

    def launch_down(tile: GroupedTile) -> None:
        low_rank_down[(blocks.most, parts)](
            x,
            stack.down,
            scales=stack.scales,
            hidden=hidden,
            rows=blocks.rows,
            owners=blocks.owners,
            filled=blocks.filled,
            x_stride=x.stride(0),
            count=rows,
            INPUTS=inputs,
            RANK=rank,
            PARTS=parts,
            PRECISION=precision,
            BLOCK_M=BLOCK_ROWS,
            BLOCK_K=min(tile.depth, block_of(inputs, least=16)),
            num_warps=tile.warps,
            num_stages=tile.stages,
            enable_fp_fusion=False,
        )

    launch_fitting("low_rank", tile, launch_down, shape=(rank, x.dtype))
    low_rank_up[(blocks.most, len(stack.tiles))](
        hidden,
        stack.up,
        tiles=stack.tiles,
        out=out,
        rows=blocks.rows,
        owners=blocks.owners,
        filled=blocks.filled,
        out_stride=out.stride(0),
        count=rows,
        OUTPUTS=outputs,
        RANK=rank,
        PARTS=parts,
        PRECISION=precision,
        BLOCK_M=BLOCK_ROWS,
        BLOCK_N=TILE_OUTPUTS,
        num_warps=tile.warps,
        enable_fp_fusion=False,
    )


def changes_tile(rank: int, dtype: torch.dtype, tile: GroupedTile, room: Room) -> GroupedTile:
    """Returns the tile for maps of a rank, or the largest smaller one that a device holds."""

    def needs(tile: GroupedTile) -> int:
        return shared_bytes(tile, room, stage=(BLOCK_ROWS + rank) * tile.depth * dtype.itemsize)

    return largest_that_fits("low_rank", tile, room, needs, shape=(rank, dtype))


@jit
def low_rank_down(  # type: ignore[no-untyped-def]
    x: tl.tensor,
    down: tl.tensor,
    scales: tl.tensor,
    hidden: tl.tensor,
    rows: tl.tensor,
    owners: tl.tensor,
    filled: tl.tensor,
    x_stride: int,
    count: int,
    INPUTS: tl.constexpr,
    RANK: tl.constexpr,
    PARTS: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    block = tl.program_id(0)
    part = tl.program_id(1)
    if block < tl.load(filled):
        dtype: tl.constexpr = hidden.dtype.element_ty
        row = tl.load(rows + block * BLOCK_M + tl.arange(0, BLOCK_M))
        map_of = tl.load(owners + block).to(tl.int64) * PARTS + part
        rank = tl.arange(0, RANK)
        depth = tl.arange(0, BLOCK_K)
        there = (row < count)[:, None]
        numbers = x + row.to(tl.int64)[:, None] * x_stride + depth[None, :]
        maps = down + (map_of * RANK + rank)[None, :] * INPUTS + depth[:, None]
        total = tl.zeros([BLOCK_M, RANK], dtype=tl.float32)
        for start in range(0, INPUTS, BLOCK_K):
            inside = depth < INPUTS - start
            left = tl.load(numbers + start, mask=there & inside[None, :], other=0.0)
            right = tl.load(maps + start, mask=inside[:, None], other=0.0)
            total = multiplied(left, right, total, PRECISION)
        scaled = rounded(total, dtype).to(tl.float32) * tl.load(scales + map_of)
        at = (row.to(tl.int64)[:, None] * PARTS + part) * RANK + rank[None, :]
        tl.store(hidden + at, rounded(scaled, dtype), mask=there)


@jit
def low_rank_up(  # type: ignore[no-untyped-def]
    hidden: tl.tensor,
    up: tl.tensor,
    tiles: tl.tensor,
    out: tl.tensor,
    rows: tl.tensor,
    owners: tl.tensor,
    filled: tl.tensor,
    out_stride: int,
    count: int,
    OUTPUTS: tl.constexpr,
    RANK: tl.constexpr,
    PARTS: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    block = tl.program_id(0)
    tile = tiles + tl.program_id(1) * 3
    if block < tl.load(filled):
        dtype: tl.constexpr = out.dtype.element_ty
        row = tl.load(rows + block * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
        owner = tl.load(owners + block).to(tl.int64)
        column = tl.load(tile) + tl.arange(0, BLOCK_N)
        inside = column < tl.load(tile + 1)
        rank = tl.arange(0, RANK)
        there = (row < count)[:, None]
        left = tl.load(
            hidden + (row[:, None] * PARTS + tl.load(tile + 2)) * RANK + rank[None, :], mask=there, other=0.0
        )
        maps = up + (owner * OUTPUTS + column)[None, :] * RANK + rank[:, None]
        right = tl.load(maps, mask=inside[None, :], other=0.0)
        change = multiplied(left, right, tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32), PRECISION)
        at = out + row[:, None] * out_stride + column[None, :]
        mask = there & inside[None, :]
        before = tl.load(at, mask=mask, other=0.0).to(tl.float32)
        tl.store(at, rounded(before + rounded(change, dtype).to(tl.float32), dtype), mask=mask)
