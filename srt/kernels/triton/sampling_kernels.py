"""The two passes of sampling: over chunks of the vocabulary, and over what they found. See `sampling.py`."""

import triton.language as tl

from .jit import jit
from .sampling_noise import NO_TOKEN, read_logits, winner
from .sampling_search import (
    best_of,
    collect,
    float_of,
    floor_of,
    key_of,
    kth_of,
    mass_above,
    next_of,
    nucleus_bound,
    race,
)

TILE = tl.constexpr(128)  # tokens whose maximum is kept
SMALLEST = tl.constexpr(-3.4028234663852886e38)  # of finite logits: −∞ is what may not be chosen


@jit
def scan(  # type: ignore[no-untyped-def]
    logits: tl.tensor,
    rows: tl.tensor,
    mask_rows: tl.tensor,
    masks: tl.tensor,
    inverse_temperatures: tl.tensor,
    keys: tl.tensor,
    top_k: tl.tensor,
    top_p: tl.tensor,
    log_min_p: tl.tensor,
    best: tl.tensor,  # [n, CHUNKS] NaN: some logit is not a number
    tokens: tl.tensor,  # [2, n, CHUNKS] the first token with the best logit; the winner of the race
    masses: tl.tensor,  # [n, CHUNKS] Σ exp((logit − best) / temperature)
    scores: tl.tensor,  # [n, CHUNKS] of the winner
    tiles: tl.tensor,  # [n, CHUNKS · CHUNK / TILE]
    stride: int,
    vocab: int,
    words: int,
    CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    TILES: tl.constexpr = CHUNK // TILE
    draw = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    row = logits + tl.load(rows + draw) * stride
    first = chunk * CHUNK
    ids = first + tl.arange(0, TILES)[:, None] * TILE + tl.arange(0, TILE)[None, :]  # [TILES, TILE]
    values = read_logits(row, ids, vocab, masks, tl.load(mask_rows + draw), words)
    broken = tl.max((values != values).to(tl.int32))
    values = tl.where(values != values, -float("inf"), values)
    maxima = tl.max(values, axis=1)
    largest = tl.max(maxima, axis=0)
    tl.store(tiles + (draw * CHUNKS + chunk) * TILES + tl.arange(0, TILES), maxima)
    at = draw * CHUNKS + chunk
    tl.store(best + at, tl.where(broken > 0, float("nan"), largest))
    tl.store(tokens + at, tl.min(tl.where(values == largest, ids, NO_TOKEN)))

    inverse = tl.load(inverse_temperatures + draw)
    if inverse > 0:
        finite = values > -float("inf")
        scaled = (tl.where(finite, values, largest) - largest) * inverse.to(tl.float32)
        tl.store(masses + at, tl.sum(tl.where(finite, tl.exp(scaled), 0.0)))
        free = (tl.load(top_k + draw) == 0) & (tl.load(top_p + draw) >= 1.0)
        if free & (tl.load(log_min_p + draw) == -float("inf")):
            score, token = winner(values, ids, finite, largest, inverse, tl.load(keys + draw))
            tl.store(scores + at, score)
            tl.store(tokens + tl.num_programs(0).to(tl.int64) * CHUNKS + at, token)


@jit
def finish_choice(  # type: ignore[no-untyped-def]
    logits: tl.tensor,
    rows: tl.tensor,
    mask_rows: tl.tensor,
    masks: tl.tensor,
    inverse_temperatures: tl.tensor,
    keys: tl.tensor,
    top_k: tl.tensor,
    top_p: tl.tensor,
    log_min_p: tl.tensor,
    best: tl.tensor,
    tokens: tl.tensor,
    masses: tl.tensor,
    scores: tl.tensor,
    tiles: tl.tensor,
    values: tl.tensor,  # [n, CANDIDATES] scratch
    ids: tl.tensor,
    chosen: tl.tensor,  # [n]
    stride: int,
    vocab: int,
    words: int,
    CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNK_BLOCK: tl.constexpr,
    TILE_BLOCK: tl.constexpr,
    CANDIDATES: tl.constexpr,
    READ: tl.constexpr,
):
    TILES: tl.constexpr = CHUNKS * CHUNK // TILE
    draw = tl.program_id(0).to(tl.int64)
    largest, broken = best_of(best + draw * CHUNKS, CHUNKS, CHUNK_BLOCK)
    chunk = tl.arange(0, CHUNK_BLOCK)
    at = draw * CHUNKS + chunk
    inside = chunk < CHUNKS
    inverse = tl.load(inverse_temperatures + draw)
    k = tl.load(top_k + draw)
    p = tl.load(top_p + draw)
    least = tl.load(log_min_p + draw)
    token = tl.full([], NO_TOKEN, tl.int32)
    if broken == 0:
        if inverse == 0:
            leads = inside & (tl.load(best + at, mask=inside, other=-float("inf")) == largest)
            token = tl.min(tl.load(tokens + at, mask=leads, other=NO_TOKEN))
        elif (k == 0) & (p >= 1.0) & (least == -float("inf")):
            score = tl.load(scores + at, mask=inside, other=-float("inf"))
            leads = inside & (score == tl.max(score))
            winners = tokens + tl.num_programs(0).to(tl.int64) * CHUNKS
            token = tl.min(tl.load(winners + at, mask=leads, other=NO_TOKEN))
        else:
            row = logits + tl.load(rows + draw) * stride
            mask_row = tl.load(mask_rows + draw)
            scale = inverse.to(tl.float32)
            # What can stay lies above `low`. The two bounds do not meet: the mass of a nucleus is that of all top_k.
            low = tl.full([], SMALLEST, tl.float32)
            wanted = tl.full([], 0.0, tl.float64)
            if k > 0:
                if k <= TILES:
                    low = tl.maximum(low, kth_of(tiles + draw * TILES, k, TILES, TILE_BLOCK))
            else:
                # Below this, all tokens together have less than 1 − p of the best token's mass.
                reach = tl.log(tl.cast(vocab, tl.float64)) - tl.log(1.0 - p)
                reach = tl.where(p < 1.0, tl.minimum(reach, -least), -least)
                low = tl.maximum(low, (largest.to(tl.float64) - (reach * 1.000001 + 1e-6) / inverse).to(tl.float32))
                low = float_of(key_of(low) - 1)  # the conversion may have rounded it upwards
                low = tl.maximum(low, SMALLEST)
                if p < 1.0:
                    maxima = tl.load(best + at, mask=inside, other=-float("inf"))
                    share = tl.load(masses + at, mask=inside & (maxima > -float("inf")), other=0.0)
                    mass = tl.sum(share.to(tl.float64) * tl.exp((maxima - largest) * scale).to(tl.float64))
                    wanted = mass * (p * (1.0 - 1e-6))
                    low = nucleus_bound(
                        row, vocab, masks, mask_row, words, tiles + draw * TILES,
                        low, largest, scale, wanted, READ, TILE,
                    )  # fmt: skip
            count = collect(
                row, vocab, masks, mask_row, words, tiles + draw * TILES, low,
                values + draw * CANDIDATES, ids + draw * CANDIDATES, CANDIDATES, READ, TILE,
            )  # fmt: skip
            copied = count <= CANDIDATES
            size = tl.where(copied, count, vocab)
            source_values = values + draw * CANDIDATES
            source_ids = ids + draw * CANDIDATES
            if k > 0:
                low = floor_of(
                    row, vocab, masks, mask_row, words, source_values, source_ids, size, copied,
                    low, largest, 0.0, k.to(tl.float64), READ,
                )  # fmt: skip
            if p < 1.0:
                if k > 0:
                    mass = mass_above(
                        row, vocab, masks, mask_row, words, source_values, source_ids, size, copied,
                        low, largest, scale, READ,
                    )  # fmt: skip
                    wanted = mass * (p * (1.0 - 1e-6))
                low = floor_of(
                    row, vocab, masks, mask_row, words, source_values, source_ids, size, copied,
                    low, largest, scale, wanted, READ,
                )  # fmt: skip
            token = race(
                row, vocab, masks, mask_row, words, source_values, source_ids, size, copied,
                low, largest, inverse, least, tl.load(keys + draw), READ,
            )  # fmt: skip
    tl.store(chosen + draw, tl.where(token == NO_TOKEN, -1, token).to(tl.int64))


@jit
def finish_summary(  # type: ignore[no-untyped-def]
    logits: tl.tensor,
    rows: tl.tensor,
    best: tl.tensor,
    masses: tl.tensor,
    tiles: tl.tensor,
    values: tl.tensor,  # [n, CANDIDATES] scratch
    ids: tl.tensor,
    normalisers: tl.tensor,  # float64 [n]
    top_tokens: tl.tensor,  # [n, top] −1 where there are no more
    top_logits: tl.tensor,
    stride: int,
    vocab: int,
    top: int,
    CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNK_BLOCK: tl.constexpr,
    TILE_BLOCK: tl.constexpr,
    CANDIDATES: tl.constexpr,
    READ: tl.constexpr,
):
    TILES: tl.constexpr = CHUNKS * CHUNK // TILE
    draw = tl.program_id(0).to(tl.int64)
    largest, broken = best_of(best + draw * CHUNKS, CHUNKS, CHUNK_BLOCK)
    if broken:
        tl.store(normalisers + draw, tl.full([], float("nan"), tl.float64))
    else:
        chunk = tl.arange(0, CHUNK_BLOCK)
        maxima = tl.load(best + draw * CHUNKS + chunk, mask=chunk < CHUNKS, other=-float("inf"))
        share = tl.load(masses + draw * CHUNKS + chunk, mask=maxima > -float("inf"), other=0.0)
        mass = tl.sum(share.to(tl.float64) * tl.exp((maxima - largest).to(tl.float64)))
        tl.store(normalisers + draw, largest.to(tl.float64) + tl.log(mass))
        row = logits + tl.load(rows + draw) * stride
        low = tl.full([], SMALLEST, tl.float32)
        if (top > 0) & (top <= TILES):
            low = tl.maximum(low, kth_of(tiles + draw * TILES, top, TILES, TILE_BLOCK))
        if top > 0:
            source_values = values + draw * CANDIDATES
            source_ids = ids + draw * CANDIDATES
            count = collect(
                row, vocab, row, -1, 0, tiles + draw * TILES, low, source_values, source_ids, CANDIDATES, READ, TILE
            )
            copied = count <= CANDIDATES
            size = tl.where(copied, count, vocab)
            value = tl.full([], float("inf"), tl.float32)
            token = tl.full([], -1, tl.int32)
            place = 0
            while place < top:
                value, token = next_of(row, vocab, source_values, source_ids, size, copied, value, token, READ)
                tl.store(top_tokens + draw * top + place, tl.where(token == NO_TOKEN, -1, token))
                tl.store(top_logits + draw * top + place, value)
                place += 1
