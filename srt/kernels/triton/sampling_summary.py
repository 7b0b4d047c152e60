"""Log-normalisers and the largest logits of rows, by what `scan` found in their tiles."""

import triton.language as tl

from .jit import jit
from .sampling_noise import NO_TOKEN
from .sampling_search import next_of
from .sampling_select import copy
from .sampling_tiles import COPIED, LINE, kth_bound


@jit
def summarise_rows(  # type: ignore[no-untyped-def]
    logits: tl.tensor,
    rows: tl.tensor,
    counters: tl.tensor,  # [n, LINE] 0 before and behind
    maxima: tl.tensor,  # [n, TILES]
    masses: tl.tensor,  # [n, TILES] at temperature 1
    packed: tl.tensor,  # [n, ROOM] scratch
    held: tl.tensor,  # [n, TILES] scratch
    normalisers: tl.tensor,  # [n] NaN: the row has what is not a number, or nothing that is finite
    top_tokens: tl.tensor,  # [n, top] −1: there are not so many finite logits
    top_logits: tl.tensor,  # [n, top]
    stride: int,
    vocab: int,
    top: int,
    TILES: tl.constexpr,
    TILE_BLOCK: tl.constexpr,
    READ_TILES: tl.constexpr,
    ROOM: tl.constexpr,
    READ: tl.constexpr,
):
    draw = tl.program_id(0).to(tl.int64)
    tile = tl.arange(0, TILE_BLOCK)
    best = tl.load(maxima + draw * TILES + tile, mask=tile < TILES, other=-float("inf"))
    largest = tl.max(best)
    if (largest < float("inf")) & (largest > -float("inf")):
        found = tl.load(masses + draw * TILES + tile, mask=tile < TILES, other=0.0).to(tl.float64)
        mass = tl.sum(found * tl.exp((best - largest).to(tl.float64)))
        tl.store(normalisers + draw, largest.to(tl.float64) + tl.log(mass))
        if top > 0:
            row = logits + tl.load(rows + draw) * stride
            low = kth_bound(best, largest, top)
            own = packed + draw * ROOM
            copy(
                row, vocab, row, -1, 0, maxima + draw * TILES, 0, TILE_BLOCK, low,
                counters + draw * LINE + COPIED, own, held + draw * TILES, TILES, TILE_BLOCK, READ_TILES, ROOM,
            )  # fmt: skip
            count = tl.load(counters + draw * LINE + COPIED)
            copied = count <= ROOM
            size = tl.where(copied, count, vocab)
            value = tl.full([], float("inf"), tl.float32)
            token = tl.full([], -1, tl.int32)
            place = 0
            while place < top:
                value, token = next_of(row, vocab, own, size, copied, value, token, READ)
                tl.store(top_tokens + draw * top + place, tl.where(token == NO_TOKEN, -1, token))
                tl.store(top_logits + draw * top + place, value)
                place += 1
            tl.store(counters + draw * LINE + COPIED, 0)
    else:
        tl.store(normalisers + draw, tl.full([], float("nan"), tl.float64))
