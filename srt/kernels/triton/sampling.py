"""Logits → tokens on the device, by the definition of a draw (`sampling/sampler.py`). The reference is TorchSampling.

    logits [rows, vocab]     a row is tiles of 128 tokens that lie side by side
        │
      scan                   row × chunk of the vocabulary: the only read of all logits
        │    maxima          of each tile: its largest logit,
        │    scores, roots   and a bound of its scores, or its masses, by what is drawn
        │
        ├──► token           a draw without limits: the program that comes last to a row finishes it
        │
        ├── select ──► token            a draw with top_k, top_p or min_p
        │                               row × part of its tiles; packed: copies of what can stay
        │
        └── summarise_rows ──► log-normalisers, largest logits      row

    scan     One read of the logits. Of each tile stay its largest logit and, by what is drawn, a bound of its scores or
             its mass. The program that comes last to a row finishes a draw without limits: it reads the tile again that
             has the largest logit, or the highest bound, and others only while they may have a better score.
    select   Only where some draw has top_k, top_p or min_p. By the maxima and masses of tiles it is known from which
             logit on a token can stay; the tiles that have such are read again, and what can stay is copied: a few
             hundred tokens as a rule. The program that comes last to a row has them all. It compares each with each,
             and those that stay race. Where there are too many for that, the winner of a race stays if little lies
             above it; where there are more than the copy holds, over the row itself.

    tile      128 tokens: 512 bytes in float32, which a warp reads in one instruction
    maximum   of a tile's logits. Tokens above a bound lie in tiles whose maximum is above it: the others are not read
    mass      Σ exp((logit − maximum) / temperature) of a tile
    root      Σ exp((logit − maximum) / temperature / 2)

Nothing is sorted. Noise is bounded, or rough in float32, until it is known which tokens can win: one, as a rule. Those
are compared in float64.

The file goes from the whole to its parts: what a runner calls, the first pass, the second, summaries, and what they
have in common: reading tiles and entries, bounds, noise.
"""

from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from triton.language.extra import libdevice

from ...core.batch import Draws, LogitsError, Summary
from .jit import INTERPRETED, block_of, jit, pdl_options, wait_for_previous_kernels
from .tuning import tuning_for

NO_TOKEN = tl.constexpr(2**31 - 1)  # larger than every token, so that the first of several is the smallest
TILE = tl.constexpr(128)
SMALLEST = tl.constexpr(-3.4028234663852886e38)  # of finite logits: −∞ is what may not be chosen
LOG2_E = tl.constexpr(1.4426950408889634)

LINE = tl.constexpr(32)  # counters of a draw: a line of the cache, so that draws do not wait for each other
SCANNED, SELECTED, COPIED = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)  # programs that are done; entries

# Of bounds of scores and sums with them, in units of log 2.
ROUNDING = tl.constexpr(1e-3)
_WAYS = tl.constexpr(8)  # bounds that are tried at once
_ROUNDS = tl.constexpr(2)  # each time between two of those before
_ROUNDING = tl.constexpr(2e-6)  # of sums in float32 of numbers that are not negative, as a part of them

_FEW = tl.constexpr(256)  # entries that are compared in pairs
_STEP = tl.constexpr(16)  # of them at once

# Rough scores are wrong by half of this at most, in units of log 2: where the best has little noise, by more.
_CLOSE = tl.constexpr(1.4e-3)
_FAR = tl.constexpr(1.4)
_LITTLE_NOISE = tl.constexpr(-2.2)

_COLUMNS = 7
_COUNTERS = LINE.value // 2  # numbers of 8 bytes


class TritonSampling:
    """A `sampler.Chooser` for logits on the device that kernels run on.

    Args:
        candidates: tokens of a row that are copied at most; None: as the table of the device's class says.
    """

    def __init__(self, *, candidates: int | None = None) -> None:
        self._candidates = candidates

    def choose(self, logits: torch.Tensor, draws: Draws) -> NDArray[np.int64]:
        """Chooses one token for each draw. logits: [_, vocab] of any floating dtype; rows may be strided."""
        tokens: NDArray[np.int64] = self.choose_async(logits, draws).cpu().numpy()
        if (tokens < 0).any():
            raise LogitsError
        return tokens

    def choose_async(self, logits: torch.Tensor, draws: Draws) -> torch.Tensor:
        """Returns int64 [n] on the logits' device; −1 where the logits of a row are not numbers. Does not wait."""
        return self.choose_sent(logits, DeviceDraws.of(draws, logits.device))

    def choose_sent(self, logits: torch.Tensor, draws: "DeviceDraws") -> torch.Tensor:
        """`choose_async` for columns that are there already: kernels only, so it can be captured in a graph."""
        tokens = torch.empty(len(draws), dtype=torch.int64, device=logits.device)
        if not len(draws):
            return tokens
        tiles = _VocabTiles.of(logits, draws, tokens)
        if draws.limited:
            tile = tuning_for(logits.device).sampling_select
            part = tile.wide_part if draws.nuclei else tile.part
            scratch = self._scratch(draws, tiles)
            select[(triton.cdiv(tiles.count, part), len(draws))](
                logits,
                **draws.columns(),
                maxima=tiles.maxima,
                masses=tiles.scores,
                roots=tiles.roots,
                **scratch,
                chosen=tokens,
                stride=logits.stride(0),
                vocab=logits.shape[1],
                part=part,
                TILES=tiles.count,
                TILE_BLOCK=block_of(tiles.count),
                PART=tile.part,
                READ_TILES=tile.tiles,
                ROOM=scratch["packed"].shape[1],
                READ=tile.read,
                SOME=tile.some,
                num_warps=tile.warps,
                enable_fp_fusion=False,  # the definition rounds a product before the sum
                **pdl_options(logits.device),
            )
        return tokens

    def summarise(self, logits: torch.Tensor, rows: NDArray[np.int64], top: int) -> Summary:
        """Computes log-normalisers of rows and their `top` largest logits."""
        count, vocab = len(rows), logits.shape[1]
        top = min(top, vocab)
        normalisers = torch.empty(count, dtype=torch.float64, device=logits.device)
        top_tokens = torch.empty((count, top), dtype=torch.int32, device=logits.device)
        top_logits = torch.empty((count, top), dtype=torch.float32, device=logits.device)
        if count:
            draws = DeviceDraws.of(_plain(rows), logits.device)
            tiles = _VocabTiles.of(logits, draws, torch.empty(count, dtype=torch.int64, device=logits.device))
            tile, scratch = tuning_for(logits.device).sampling_summary, self._scratch(draws, tiles)
            summarise_rows[(count,)](
                logits,
                rows=draws.rows,
                counters=draws.counters,
                maxima=tiles.maxima,
                masses=tiles.scores,
                **scratch,
                normalisers=normalisers,
                top_tokens=top_tokens,
                top_logits=top_logits,
                stride=logits.stride(0),
                vocab=vocab,
                top=top,
                TILES=tiles.count,
                TILE_BLOCK=block_of(tiles.count),
                READ_TILES=tile.tiles,
                ROOM=scratch["packed"].shape[1],
                READ=tile.read,
                num_warps=tile.warps,
                enable_fp_fusion=False,
            )
        summary = Summary(normalisers.cpu().numpy(), top_tokens.cpu().numpy(), top_logits.cpu().numpy())
        if not np.isfinite(summary.normalisers).all():
            raise LogitsError
        return summary

    def _scratch(self, draws: "DeviceDraws", tiles: "_VocabTiles") -> dict[str, torch.Tensor]:
        """Allocates scratch for copied entries, and for the tiles that have them."""
        device = draws.rows.device
        candidates = self._candidates or tuning_for(device).sampling_select.candidates
        entries = torch.empty((len(draws), candidates), dtype=torch.int64, device=device)
        held = torch.empty((len(draws), tiles.count), dtype=torch.int32, device=device)
        return {"packed": entries, "held": held}


class _VocabTiles:
    """Maxima and sums of the tiles of each row: [n, tiles] each."""

    def __init__(self, count: int, vocab: int, device: torch.device) -> None:
        most = tuning_for(device).sampling_scan.tiles
        self.read: int = min(most, block_of(triton.cdiv(vocab, TILE.value)))  # by a program at once
        self.reads: int = triton.cdiv(vocab, TILE.value * self.read)  # of a row
        self.count = self.reads * self.read
        self.maxima, self.scores, self.roots = torch.empty((3, count, self.count), device=device)

    @classmethod
    def of(cls, logits: torch.Tensor, draws: "DeviceDraws", tokens: torch.Tensor) -> "_VocabTiles":
        """Scans. tokens: those of draws without limits are written."""
        assert logits.stride(1) == 1, "the logits of a row lie side by side"
        count, vocab = len(draws), logits.shape[1]
        tiles = cls(count, vocab, logits.device)
        tile = tuning_for(logits.device).sampling_scan
        reads = min(triton.cdiv(count * tiles.reads, tile.programs), tile.most_reads)  # of a program
        scan[(triton.cdiv(tiles.reads, reads), count)](
            logits,
            **draws.columns(),
            maxima=tiles.maxima,
            scores=tiles.scores,
            roots=tiles.roots,
            chosen=tokens,
            stride=logits.stride(0),
            vocab=vocab,
            span=reads * tiles.read,
            TILES=tiles.count,
            READ_TILES=tiles.read,
            TILE_BLOCK=block_of(tiles.count),
            num_warps=tile.warps,
            enable_fp_fusion=False,
            **pdl_options(logits.device),
        )
        return tiles


def _plain(rows: NDArray[np.int64]) -> Draws:
    """Draws at temperature 1 from nuclei, for which the masses of tiles are needed; their tokens are not asked for."""
    count = len(rows)
    return Draws(
        rows=rows,
        inverse_temperatures=np.ones(count),
        keys=np.zeros(count, dtype=np.uint64),
        top_k=np.zeros(count, dtype=np.int32),
        top_p=np.full(count, 0.5),
        min_p=np.zeros(count),
    )


@dataclass(frozen=True, slots=True, eq=False)
class DeviceDraws:
    """The columns of `batch.Draws` as kernels read them, sent in one transfer. n draws.

        | counters, a line of the cache each | rows | inverse_temperatures | … | masks |

    Columns begin at multiples of 16 bytes for any number of draws: Triton would compile the kernels again for columns
    that do not, and the first request of another size would wait for it.
    """

    limited: bool  # some draw has top_k, top_p or min_p
    nuclei: bool  # some draw has top_p without top_k
    counters: torch.Tensor  # int32 [n, LINE] 0: kernels count in it, and leave 0 after them
    rows: torch.Tensor  # int64 [n] of the logits
    inverse_temperatures: torch.Tensor  # float64 [n] 0 = the most likely token
    keys: torch.Tensor  # int64 [n] the bits of draw_key
    top_p: torch.Tensor  # float64 [n] 1 = all
    log_min_p: torch.Tensor  # float64 [n] −∞ = all
    top_k: torch.Tensor  # int64 [n] 0 = all
    mask_rows: torch.Tensor  # int64 [n] index into masks, −1 = all tokens may be chosen
    masks: torch.Tensor  # int32 [m, words] packed bits, as in Draws

    def __len__(self) -> int:
        return len(self.rows)

    def columns(self) -> dict[str, torch.Tensor | int]:
        """Returns what both passes read of the draws, by the names of their arguments. words: of a mask."""
        return {
            "rows": self.rows,
            "mask_rows": self.mask_rows,
            "masks": self.masks,
            "inverse_temperatures": self.inverse_temperatures,
            "keys": self.keys,
            "top_k": self.top_k,
            "top_p": self.top_p,
            "log_min_p": self.log_min_p,
            "counters": self.counters,
            "words": self.masks.shape[1],
        }

    @classmethod
    def of(cls, draws: Draws, device: torch.device) -> "DeviceDraws":
        """The host does not wait for the copy: it is in the device's stream, in front of what reads it."""
        count = len(draws)
        room = _room(count)
        masks = [] if draws.masks is None else [mask for mask in draws.masks if mask is not None]
        words = len(masks[0]) if masks else 0
        host = np.zeros(_COUNTERS * count + _COLUMNS * room + len(masks) * words // 2 + 1, dtype=np.int64)
        columns = host[_COUNTERS * count :][: _COLUMNS * room].reshape(_COLUMNS, room)[:, :count]
        columns[0] = draws.rows
        columns[1] = draws.inverse_temperatures.view(np.int64)
        columns[2] = draws.keys.view(np.int64)
        columns[3] = draws.top_p.view(np.int64)
        with np.errstate(divide="ignore"):
            columns[4] = np.log(draws.min_p).view(np.int64)
        columns[5] = draws.top_k
        columns[6] = _mask_rows(draws)
        if masks:
            packed = host[_COUNTERS * count + _COLUMNS * room :].view(np.uint32)[: len(masks) * words]
            np.stack(masks, out=packed.reshape(len(masks), words))
        races = draws.inverse_temperatures > 0
        limited = races & ((draws.top_k > 0) | (draws.top_p < 1) | (draws.min_p > 0))
        nuclei = races & (draws.top_k == 0) & (draws.top_p < 1)
        return cls._over(_sent(host, device), bool(limited.any()), bool(nuclei.any()), count, len(masks), words)

    @classmethod
    def _over(
        cls, memory: torch.Tensor, limited: bool, nuclei: bool, count: int, masks: int, words: int
    ) -> "DeviceDraws":
        room = _room(count)
        columns = memory[_COUNTERS * count :][: _COLUMNS * room].view(_COLUMNS, room)[:, :count]
        return cls(
            limited=limited,
            nuclei=nuclei,
            counters=memory[: _COUNTERS * count].view(torch.int32).view(count, LINE.value),
            rows=columns[0],
            inverse_temperatures=columns[1].view(torch.float64),
            keys=columns[2],
            top_p=columns[3].view(torch.float64),
            log_min_p=columns[4].view(torch.float64),
            top_k=columns[5],
            mask_rows=columns[6],
            masks=memory[_COUNTERS * count + _COLUMNS * room :].view(torch.int32)[: masks * words].view(masks, words),
        )


def _room(count: int) -> int:
    """Numbers of 8 bytes in the place of a column: an even number of them."""
    return count + count % 2


def _mask_rows(draws: Draws) -> NDArray[np.int64]:
    if draws.masks is None:
        return np.full(len(draws), -1, dtype=np.int64)
    masked = np.array([mask is not None for mask in draws.masks], dtype=np.int64)
    return np.where(masked > 0, masked.cumsum() - 1, -1)


def _sent(host: NDArray[np.int64], device: torch.device) -> torch.Tensor:
    memory = torch.from_numpy(host)
    if device.type == "cpu":
        return memory
    return memory.pin_memory().to(device, non_blocking=True)


# ------------------------------------------------------------------------------------------ the first pass


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
    counters: tl.tensor,  # [n, LINE] 0 before and after
    maxima: tl.tensor,  # [n, TILES] of the logits of tiles
    scores: tl.tensor,  # [n, TILES] bounds of the scores of tiles, by `most_noise`, less their maximum; or their masses
    roots: tl.tensor,  # [n, TILES]
    chosen: tl.tensor,  # [n] written for draws without limits
    stride: int,
    vocab: int,
    words: int,
    span: int,  # tiles of a program, which reads READ_TILES at once
    TILES: tl.constexpr,
    READ_TILES: tl.constexpr,
    TILE_BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_previous_kernels(PDL)
    draw = tl.program_id(1).to(tl.int64)
    row = logits + tl.load(rows + draw) * stride
    mask_row = tl.load(mask_rows + draw)
    inverse = tl.load(inverse_temperatures + draw)
    key = tl.load(keys + draw)
    p = tl.load(top_p + draw)
    open_to_all = (tl.load(top_k + draw) == 0) & (p >= 1.0) & (tl.load(log_min_p + draw) == -float("inf"))
    scale = scale_of(inverse)

    first = tl.program_id(0) * span
    end = first + span
    ids = tokens_of(first + tl.arange(0, READ_TILES))
    coming = tl.load(row + ids, mask=ids < vocab, other=-float("inf"))
    while first < end:
        # The next logits are on their way while these are computed with.
        tile = first + tl.arange(0, READ_TILES)
        values = allowed(coming, tile, masks, mask_row, words)
        ids = tokens_of(tile)
        first += READ_TILES
        next_ids = tokens_of(first + tl.arange(0, READ_TILES))
        coming = tl.load(row + next_ids, mask=next_ids < tl.where(first < end, vocab, 0), other=-float("inf"))
        largest = tl.max(values, axis=1, keep_dims=True)
        at = draw * TILES + tile[:, None]
        there = tile[:, None] < TILES
        tl.store(maxima + at, largest, mask=there)
        if inverse > 0:
            gap = values - tl.where(largest > -float("inf"), largest, 0.0)
            if open_to_all:
                # One operation; the definition's rounding is that of the exact score.
                most = tl.fma(gap, scale + tl.zeros_like(gap), most_noise(ids, key))
                tl.store(scores + at, tl.max(most, axis=1, keep_dims=True), mask=there)
            elif p < 1.0:
                half = tl.exp2(gap * (scale * 0.5))
                tl.store(scores + at, tl.sum(half * half, axis=1, keep_dims=True), mask=there)
                tl.store(roots + at, tl.sum(half, axis=1, keep_dims=True), mask=there)

    if (inverse == 0) | open_to_all:
        tl.debug_barrier()
        done = tl.atomic_add(counters + draw * LINE + SCANNED, 1, sem="acq_rel")
        if done == tl.num_programs(0) - 1:
            tl.store(counters + draw * LINE + SCANNED, 0)
            every = tl.arange(0, TILE_BLOCK)
            inside = every < TILES
            best = tl.load(maxima + draw * TILES + every, mask=inside, other=-float("inf"))
            top = tl.max(best)
            token = tl.full([], NO_TOKEN, tl.int32)
            if (top < float("inf")) & (top > -float("inf")):
                most = best
                if inverse > 0:
                    most = tl.load(scores + draw * TILES + every, mask=inside, other=-float("inf"))
                    most += tl.where(best > -float("inf"), best - top, 0.0) * scale
                token = winner_of_tiles(
                    row, vocab, masks, mask_row, words, inverse, key, most, top, TILES, TILE_BLOCK
                )  # fmt: skip
            tl.store(chosen + draw, tl.where(token == NO_TOKEN, -1, token).to(tl.int64))


@jit
def scale_of(inverse: tl.tensor):  # type: ignore[no-untyped-def]
    """1 / temperature in units of log 2; above 0, however hot it is: −∞ · 0 is not a number."""
    return tl.maximum(inverse.to(tl.float32), 1e-37) * LOG2_E


@jit
def winner_of_tiles(  # type: ignore[no-untyped-def]
    row: tl.tensor,
    vocab: int,
    masks: tl.tensor,
    mask_row: int,
    words: int,
    inverse: tl.tensor,
    key: int,
    most: tl.tensor,  # [TILE_BLOCK] bounds of the scores of tiles; at temperature 0 their largest logits
    largest: tl.tensor,
    TILES: tl.constexpr,
    TILE_BLOCK: tl.constexpr,
):
    """The token with the best score of a row, the first of equal ones; at temperature 0 a logit is its score.

    Tiles are read from the highest bound down, until none can have a score as good as the best: one, as a rule.
    """
    tile = tl.arange(0, TILE_BLOCK)
    best = tl.full([], -float("inf"), tl.float64)
    token = tl.full([], NO_TOKEN, tl.int32)
    reached = tl.full([], -float("inf"), tl.float32)  # the best score in the units of the bounds
    highest = tl.max(most)
    while (highest >= reached) & (highest > -float("inf")):
        at = tl.min(tl.where(most == highest, tile, TILE_BLOCK))
        one = at + tl.zeros([1], tl.int32)
        values = read_tiles(row, one, one < TILES, vocab, masks, mask_row, words)
        ids = tokens_of(one)
        scores = values.to(tl.float64)
        if inverse > 0:
            scores = scores * inverse + noise(token_hash(ids, key))
        score = tl.max(scores)
        first = tl.min(tl.where(scores == score, ids, NO_TOKEN))
        better = (score > best) | ((score == best) & (first < token))
        token = tl.where(better, first, token)
        best = tl.maximum(score, best)
        reached = best.to(tl.float32)
        if inverse > 0:
            none = largest.to(tl.float64) * inverse  # of the largest logit without noise; a huge one swallows noise
            reached = ((best - none - tl.abs(none) * 1e-15) * LOG2_E).to(tl.float32) - (32.0 + ROUNDING)
        most = tl.where(tile == at, -float("inf"), most)
        highest = tl.max(most)
    return token


# ------------------------------------------------------------------------------------------ the second pass
#
# Finds where top_k and the nucleus of a row end. The entries of a row are the copy of those above a bound, or, where
# the copy has not the room, all of its tokens:
#
#     copied       packed[0 .. size): token · 2³² + the bits of its logit      size = how many there are
#     not copied   the row's logits, with its mask                             size = vocab


@jit
def select(  # type: ignore[no-untyped-def]
    logits: tl.tensor,
    rows: tl.tensor,
    mask_rows: tl.tensor,
    masks: tl.tensor,
    inverse_temperatures: tl.tensor,
    keys: tl.tensor,
    top_k: tl.tensor,
    top_p: tl.tensor,
    log_min_p: tl.tensor,
    counters: tl.tensor,  # [n, LINE] 0 before and after
    maxima: tl.tensor,  # [n, TILES]
    masses: tl.tensor,  # [n, TILES] of draws with top_p
    roots: tl.tensor,  # [n, TILES]
    packed: tl.tensor,  # [n, ROOM] scratch
    held: tl.tensor,  # [n, TILES] scratch
    chosen: tl.tensor,  # [n] written for draws with limits
    stride: int,
    vocab: int,
    words: int,
    part: int,  # tiles of a program, PART at most
    TILES: tl.constexpr,
    TILE_BLOCK: tl.constexpr,
    PART: tl.constexpr,
    READ_TILES: tl.constexpr,
    ROOM: tl.constexpr,
    READ: tl.constexpr,
    SOME: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_previous_kernels(PDL)
    draw = tl.program_id(1).to(tl.int64)
    inverse = tl.load(inverse_temperatures + draw)
    k = tl.load(top_k + draw)
    p = tl.load(top_p + draw)
    least = tl.load(log_min_p + draw)
    if (inverse > 0) & ((k > 0) | (p < 1.0) | (least > -float("inf"))):
        row = logits + tl.load(rows + draw) * stride
        mask_row = tl.load(mask_rows + draw)
        key = tl.load(keys + draw)
        own = packed + draw * ROOM
        first = draw * TILES
        low, largest, wanted = bounds_of(
            maxima + first, masses + first, roots + first, vocab, inverse, k, p, least, TILES, TILE_BLOCK
        )
        copy(
            row, vocab, masks, mask_row, words, maxima + first, tl.program_id(0) * part, part, low,
            counters + draw * LINE + COPIED, own, held + first, TILES, PART, READ_TILES, ROOM,
        )  # fmt: skip
        done = tl.atomic_add(counters + draw * LINE + SELECTED, 1, sem="acq_rel")
        if done == tl.num_programs(0) - 1:
            count = tl.load(counters + draw * LINE + COPIED)
            token = tl.full([], NO_TOKEN, tl.int32)  # of a row that is not sound: nothing is copied
            if (count <= _FEW) & (count <= ROOM):
                token = winner_of_few(own, count, low, largest, wanted, k, p, least, inverse, key)
            elif (count <= SOME) & (count <= ROOM) & ((k == 0) | (p >= 1.0)):
                token = winner_of_some(own, count, largest, wanted, k, p, least, inverse, key, SOME)
            else:
                copied = count <= ROOM
                size = tl.where(copied, count, vocab)
                token = winner(
                    row, vocab, masks, mask_row, words, own, size, copied,
                    low, largest, wanted, k, p, least, inverse, key, READ,
                )  # fmt: skip
            tl.store(chosen + draw, tl.where(token == NO_TOKEN, -1, token).to(tl.int64))
            tl.store(counters + draw * LINE + SELECTED, 0)
            tl.store(counters + draw * LINE + COPIED, 0)


@jit
def bounds_of(  # type: ignore[no-untyped-def]
    maxima: tl.tensor,
    masses: tl.tensor,
    roots: tl.tensor,
    vocab: int,
    inverse: tl.tensor,
    k: tl.tensor,
    p: float,
    log_min_p: float,
    TILES: tl.constexpr,
    TILE_BLOCK: tl.constexpr,
):
    """Of a row: a logit that all reach that stay, the largest, and the mass of a nucleus where there is no top_k.

    The first is no number where the row is not sound: nothing reaches it.
    """
    tile = tl.arange(0, TILE_BLOCK)
    best = tl.load(maxima + tile, mask=tile < TILES, other=-float("inf"))
    largest = tl.max(best)
    low = tl.full([], SMALLEST, tl.float32)
    wanted = tl.full([], 0.0, tl.float64)
    if k > 0:
        low = kth_bound(best, largest, k)
    # The mass of a nucleus is that of all top_k: where there is one, neither bounds the other.
    if (k == 0) | (p >= 1.0):
        reach = -log_min_p
        if p < 1.0:
            distances = (best - largest) * inverse.to(tl.float32)
            shares = tl.exp2(distances * LOG2_E) * tl.load(masses + tile, mask=tile < TILES, other=0.0)
            root_shares = tl.exp2(distances * (LOG2_E * 0.5)) * tl.load(roots + tile, mask=tile < TILES, other=0.0)
            total = tl.sum(shares.to(tl.float64))
            wanted = total * (p * (1.0 - 1e-6))
            # Below this, all tokens together have less than 1 − p of the best token's mass.
            far = tl.log(tl.cast(vocab, tl.float64)) - tl.log(1.0 - p)
            nucleus = nucleus_bound(
                distances, shares, root_shares,
                total.to(tl.float32), (total * (1.0 - p)).to(tl.float32), far.to(tl.float32),
            )  # fmt: skip
            reach = tl.minimum(reach, nucleus.to(tl.float64))
        end = (largest.to(tl.float64) - (reach * 1.000001 + 1e-6) / inverse).to(tl.float32)
        end = float_of(key_of(tl.maximum(end, SMALLEST)) - 1)  # the conversion may have rounded it upwards
        low = tl.maximum(low, tl.maximum(end, SMALLEST))
    sound = (largest < float("inf")) & (largest > -float("inf"))
    return tl.where(sound, low, float("nan")), largest, wanted


@jit
def copy(  # type: ignore[no-untyped-def]
    row: tl.tensor,
    vocab: int,
    masks: tl.tensor,
    mask_row: int,
    words: int,
    maxima: tl.tensor,
    first: int,
    part: int,
    low: float,
    copied: tl.tensor,  # how many entries there are
    packed: tl.tensor,
    held: tl.tensor,  # [TILES] scratch: those of each part that have what is copied
    TILES: tl.constexpr,
    PART: tl.constexpr,
    READ_TILES: tl.constexpr,
    ROOM: tl.constexpr,
):
    """Copy the tokens of `part` tiles whose logits are `low` at least, as many as there is room for, and count all."""
    tile = first + tl.arange(0, PART)
    end = tl.minimum(first + part, TILES)
    holds = tl.load(maxima + tile, mask=tile < end, other=-float("inf")) >= low
    tl.store(held + first + tl.cumsum(holds.to(tl.int32), axis=0) - 1, tile, mask=holds)
    number = tl.sum(holds.to(tl.int32))
    tl.debug_barrier()  # what one thread has written others are going to read, here and below
    begin = 0
    some = tl.load(held + first + tl.arange(0, READ_TILES), mask=tl.arange(0, READ_TILES) < number, other=TILES)
    ids = tokens_of(some)
    coming = tl.load(row + ids, mask=ids < vocab, other=-float("inf"))
    while begin < number:
        # The next logits are on their way while these look for places.
        values = allowed(coming, some, masks, mask_row, words)
        begin += READ_TILES
        place = begin + tl.arange(0, READ_TILES)
        some = tl.load(held + first + place, mask=place < number, other=TILES)
        next_ids = tokens_of(some)
        coming = tl.load(row + next_ids, mask=next_ids < vocab, other=-float("inf"))
        above = (values >= low).to(tl.int32)
        # One counter for the row: a program asks for places for all that it has read, not each thread for its own.
        numbers = tl.sum(above, axis=1)
        after = tl.cumsum(above, axis=1) + (tl.cumsum(numbers, axis=0) - numbers)[:, None]
        slots = tl.atomic_add(copied, tl.sum(numbers), sem="relaxed") + after - 1
        entry = (ids.to(tl.int64) << 32) | (values.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF)
        tl.store(packed + slots, entry, mask=(above > 0) & (slots < ROOM))
        ids = next_ids
    tl.debug_barrier()


@jit
def winner_of_few(  # type: ignore[no-untyped-def]
    packed: tl.tensor,
    count: int,
    low: float,
    largest: float,
    wanted: float,
    k: tl.tensor,
    p: float,
    log_min_p: float,
    inverse: tl.tensor,
    key: int,
):
    """`winner` where there are few entries: each is compared with each, and no pass waits for another."""
    scale = inverse.to(tl.float32)
    values, ids = packed_entries(packed, count, tl.arange(0, _FEW))
    floor = low
    if (k > 0) | (p < 1.0):
        numbers = tl.zeros([_FEW], tl.int32)  # of entries that are as large
        masses = tl.zeros([_FEW], tl.float64)  # of them
        begin = 0
        while begin < count:
            found, _ = packed_entries(packed, count, begin + tl.arange(0, _STEP))
            weights = tl.exp((found - largest) * scale).to(tl.float64)
            ahead = found[:, None] >= values[None, :]
            numbers += tl.sum(ahead.to(tl.int32), axis=0)
            masses += tl.sum(tl.where(ahead, weights[:, None], 0.0), axis=0)
            begin += _STEP
        if k > 0:
            floor = tl.max(tl.where(numbers >= k, values, low))
            wanted = tl.max(tl.where(values >= floor, masses, 0.0)) * (p * (1.0 - 1e-6))
        if p < 1.0:
            floor = tl.maximum(floor, tl.max(tl.where(masses >= wanted, values, low)))
    kept = (values >= floor) & (values > -float("inf"))
    kept = kept & ((values.to(tl.float64) - tl.cast(largest, tl.float64)) * inverse >= log_min_p)
    score = tl.where(kept, values.to(tl.float64) * inverse + noise(token_hash(ids, key)), -float("inf"))
    return tl.min(tl.where(score == tl.max(score), ids, NO_TOKEN))


@jit
def winner_of_some(  # type: ignore[no-untyped-def]
    packed: tl.tensor,
    count: int,
    largest: float,
    wanted: float,
    k: tl.tensor,
    p: float,
    log_min_p: float,
    inverse: tl.tensor,
    key: int,
    SOME: tl.constexpr,
):
    """`winner` where one read holds all entries, and not both top_k and top_p limit them: they stay in registers."""
    values, ids = packed_entries(packed, count, tl.arange(0, SOME))
    apart = values - largest
    stay = values > -float("inf")
    stay = stay & ((values.to(tl.float64) - tl.cast(largest, tl.float64)) * inverse >= log_min_p)
    scores = apart * (inverse.to(tl.float32) * LOG2_E) + rough_noise(token_hash(ids, key))
    scores = tl.where(stay, scores, -float("inf"))
    weights = tl.exp(apart * inverse.to(tl.float32))
    weights = tl.where(p < 1.0, weights, 1.0)
    full = tl.where(p < 1.0, wanted, k.to(tl.float64))
    token = tl.full([], NO_TOKEN, tl.int32)
    racing = True
    while racing:
        token, logit = best_of(values, ids, scores, inverse, key)
        above = tl.sum(tl.where(values > logit, weights, 0.0).to(tl.float64))
        # What does not stay takes those below it along.
        racing = ((k > 0) | (p < 1.0)) & (above >= full) & (above > 0.0)
        scores = tl.where(values > logit, scores, -float("inf"))
    return token


@jit
def winner(  # type: ignore[no-untyped-def]
    row: tl.tensor,
    vocab: int,
    masks: tl.tensor,
    mask_row: int,
    words: int,
    packed: tl.tensor,
    size: int,
    copied: tl.tensor,
    low: float,
    largest: float,
    wanted: float,
    k: tl.tensor,
    p: float,
    log_min_p: float,
    inverse: tl.tensor,
    key: int,
    READ: tl.constexpr,
):
    """The token with the best score of those that stay.

    The winner of a race stays if few enough, or little enough mass, lie above it. If it does not, neither do those
    below it, and the rest race again: that is rare, since a nucleus has most of the mass.

    Args:
        low: nothing below it stays.
        wanted: mass of the nucleus, if k is 0.
    """
    scale = inverse.to(tl.float32)
    if (k > 0) & (p < 1.0):
        low = floor_of(
            row, vocab, masks, mask_row, words, packed, size, copied, low, largest, k.to(tl.float64), READ
        )  # fmt: skip
        mass = mass_above(row, vocab, masks, mask_row, words, packed, size, copied, low, largest, scale, READ)
        wanted = mass * (p * (1.0 - 1e-6))
    token = tl.full([], NO_TOKEN, tl.int32)
    racing = True
    while racing:
        token, logit = race(
            row, vocab, masks, mask_row, words, packed, size, copied, low, largest, inverse, log_min_p, key, READ
        )
        low = float_of(key_of(tl.where(logit == 0.0, 0.0, logit)) + 1)  # the next float; what is after −0 is 0 again
        racing = False
        if (p < 1.0) | (k > 0):
            weighed = tl.where(p < 1.0, scale, 0.0)
            above = mass_above(row, vocab, masks, mask_row, words, packed, size, copied, low, largest, weighed, READ)
            racing = (above >= tl.where(p < 1.0, wanted, k.to(tl.float64))) & (above > 0.0)
    return token


@jit
def race(  # type: ignore[no-untyped-def]
    row: tl.tensor,
    vocab: int,
    masks: tl.tensor,
    mask_row: int,
    words: int,
    packed: tl.tensor,
    size: int,
    copied: tl.tensor,
    low: float,
    largest: float,
    inverse: tl.tensor,
    log_min_p: float,
    key: int,
    READ: tl.constexpr,
):
    """The token with the best score among the entries that are at least `low` and stay by min_p, and its logit."""
    best = tl.full([], -float("inf"), tl.float64)
    token = tl.full([], NO_TOKEN, tl.int32)
    logit = tl.full([], -float("inf"), tl.float32)
    first = 0
    while first < size:
        at = first + tl.arange(0, READ)
        found, ids = entries(row, vocab, masks, mask_row, words, packed, size, copied, at)
        kept = (found >= low) & (found > -float("inf"))
        apart = tl.where(kept, found, largest).to(tl.float64) - tl.cast(largest, tl.float64)
        kept = kept & (apart * inverse >= log_min_p)
        scores = apart.to(tl.float32) * (inverse.to(tl.float32) * LOG2_E) + rough_noise(token_hash(ids, key))
        scores = tl.where(kept, scores, -float("inf"))
        candidate, value = best_of(found, ids, scores, inverse, key)
        score = value.to(tl.float64) * inverse + noise(token_hash(candidate, key))
        better = (score > best) | ((score == best) & (candidate < token))
        token = tl.where(better, candidate, token)
        logit = tl.where(better, value, logit)
        best = tl.maximum(score, best)
        first += READ
    return token, logit


@jit
def best_of(values: tl.tensor, ids: tl.tensor, scores: tl.tensor, inverse: tl.tensor, key: int):  # type: ignore[no-untyped-def]
    """The token with the best score of a block, and its logit: exactly, of those whose rough scores are close to best.

    NO_TOKEN and −∞ where no score is above −∞.
    """
    highest = tl.max(scores)
    close = (scores >= highest - margin_of(highest)) & (scores > -float("inf"))
    best = tl.full([], -float("inf"), tl.float64)
    token = tl.full([], NO_TOKEN, tl.int32)
    logit = tl.full([], -float("inf"), tl.float32)
    candidate = tl.min(tl.where(close, ids, NO_TOKEN))
    while candidate < NO_TOKEN:  # one, as a rule
        value = tl.max(tl.where(ids == candidate, values, -float("inf")))
        score = value.to(tl.float64) * inverse + noise(token_hash(candidate, key))
        better = score > best
        token = tl.where(better, candidate, token)
        logit = tl.where(better, value, logit)
        best = tl.maximum(score, best)
        candidate = tl.min(tl.where(close & (ids > candidate), ids, NO_TOKEN))
    return token, logit


@jit
def margin_of(best: float):  # type: ignore[no-untyped-def]
    """Bounds the distance from the best rough score to the winner's. The largest logit has the score of its noise."""
    return tl.where(best < _LITTLE_NOISE, _FAR, _CLOSE)


@jit
def floor_of(  # type: ignore[no-untyped-def]
    row: tl.tensor,
    vocab: int,
    masks: tl.tensor,
    mask_row: int,
    words: int,
    packed: tl.tensor,
    size: int,
    copied: tl.tensor,
    low: float,
    largest: float,
    count: float,
    READ: tl.constexpr,
):
    """The largest logit that `count` entries reach, between low and largest; low where fewer do.

    Bisects the bits of float32s, which is at most 32 passes over the entries.
    """
    bottom = key_of(low).to(tl.int64)
    top = key_of(largest).to(tl.int64) + 1
    while top - bottom > 1:
        middle = bottom + ((top - bottom) >> 1)
        reached = mass_above(
            row, vocab, masks, mask_row, words, packed, size, copied, float_of(middle.to(tl.int32)), largest, 0.0, READ
        )
        bottom = tl.where(reached >= count, middle, bottom)
        top = tl.where(reached >= count, top, middle)
    return float_of(bottom.to(tl.int32))


@jit
def mass_above(  # type: ignore[no-untyped-def]
    row: tl.tensor,
    vocab: int,
    masks: tl.tensor,
    mask_row: int,
    words: int,
    packed: tl.tensor,
    size: int,
    copied: tl.tensor,
    low: float,
    largest: float,
    scale: float,
    READ: tl.constexpr,
):
    """Σ exp((value − largest) · scale) of the entries that are at least `low`, in float64; scale 0 counts them."""
    mass = tl.full([], 0.0, tl.float64)
    first = 0
    while first < size:
        at = first + tl.arange(0, READ)
        found, _ = entries(row, vocab, masks, mask_row, words, packed, size, copied, at)
        above = found >= low
        weights = tl.exp((tl.where(above, found, largest) - largest) * scale)
        mass += tl.sum(tl.where(above, weights, 0.0).to(tl.float64))
        first += READ
    return mass


# ------------------------------------------------------------------------------------------ summaries


@jit
def summarise_rows(  # type: ignore[no-untyped-def]
    logits: tl.tensor,
    rows: tl.tensor,
    counters: tl.tensor,  # [n, LINE] 0 before and after
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


@jit
def next_of(  # type: ignore[no-untyped-def]
    row: tl.tensor,
    vocab: int,
    packed: tl.tensor,
    size: int,
    copied: tl.tensor,
    above: float,
    last: int,
    READ: tl.constexpr,
):
    """The entry that comes after (above, last) when the largest come first, and of equal ones the smallest token."""
    best = tl.full([], -float("inf"), tl.float32)
    token = tl.full([], NO_TOKEN, tl.int32)
    first = 0
    while first < size:
        at = first + tl.arange(0, READ)
        found, tokens = entries(row, vocab, row, -1, 0, packed, size, copied, at)
        after = (found < above) | ((found == above) & (tokens > last))
        after = after & (found > -float("inf"))
        value = tl.max(tl.where(after, found, -float("inf")))
        candidate = tl.min(tl.where(after & (found == value), tokens, NO_TOKEN))
        better = (value > best) | ((value == best) & (candidate < token))
        token = tl.where(better, candidate, token)
        best = tl.maximum(value, best)
        first += READ
    return best, token


# ------------------------------------------------------------------------------------------ reading tiles and entries


@jit
def tokens_of(tile: tl.tensor):  # type: ignore[no-untyped-def]
    """[N, TILE] of tiles [N]."""
    return tile[:, None] * TILE + tl.arange(0, TILE)[None, :]


@jit
def read_tiles(  # type: ignore[no-untyped-def]
    row: tl.tensor,
    tile: tl.tensor,
    wanted: tl.tensor,
    vocab: int,
    masks: tl.tensor,
    mask_row: int,
    words: int,
):
    """Logits of tiles [N, TILE] in float32; −∞ for tokens that there are not, and those of tiles that are not wanted.

    A mask is applied as `allowed` does.
    """
    ids = tokens_of(tile)
    values = tl.load(row + ids, mask=wanted[:, None] & (ids < vocab), other=-float("inf"))
    return allowed(values, tile, masks, mask_row, words)


@jit
def allowed(values: tl.tensor, tile: tl.tensor, masks: tl.tensor, mask_row: int, words: int):  # type: ignore[no-untyped-def]
    """Logits as they were read in float32, −∞ for those that a mask forbids, if there is one.

    What is not a number becomes +∞, which no sound row has.
    """
    values = values.to(tl.float32)
    if mask_row >= 0:
        # A word for 32 tokens: a load for each token would decide how all tokens lie in the registers.
        word = tile[:, None] * (TILE // 32) + tl.arange(0, TILE // 32)[None, :]
        bits = tl.load(masks + mask_row * words + word, mask=word < words, other=0)
        bits = (bits[:, :, None] >> tl.arange(0, 32)[None, None, :]) & 1
        values = tl.where(tl.reshape(bits, values.shape) == 1, values, -float("inf"))
    return tl.where(values != values, float("inf"), values)


@jit
def packed_entries(packed: tl.tensor, size: int, at: tl.tensor):  # type: ignore[no-untyped-def]
    """Logits and tokens of entries that are copied; −∞ and NO_TOKEN after the last one."""
    entry = tl.load(packed + at, mask=at < size, other=0)
    values = tl.where(at < size, entry.to(tl.int32).to(tl.float32, bitcast=True), -float("inf"))
    return values, tl.where(at < size, (entry >> 32).to(tl.int32), NO_TOKEN)


@jit
def entries(  # type: ignore[no-untyped-def]
    row: tl.tensor,
    vocab: int,
    masks: tl.tensor,
    mask_row: int,
    words: int,
    packed: tl.tensor,
    size: int,
    copied: tl.tensor,
    at: tl.tensor,
):
    """Logits and tokens of a block of a row's entries; −∞ after the last one."""
    if copied:
        values, ids = packed_entries(packed, size, at)
    else:
        there = at < vocab
        values = tl.load(row + at, mask=there, other=-float("inf")).to(tl.float32)
        if mask_row >= 0:
            bits = tl.load(masks + mask_row * words + at // 32, mask=there, other=0)
            values = tl.where(((bits >> (at % 32)) & 1) == 1, values, -float("inf"))
        ids = at
    return values, ids


# ------------------------------------------------------------------------------------------ bounds of what can stay


@jit
def kth_bound(maxima: tl.tensor, largest: float, k: int):  # type: ignore[no-untyped-def]
    """A logit that k tokens at least reach, since the maxima of k tiles do; SMALLEST where so many have none."""
    bottom = tl.min(tl.where(maxima > -float("inf"), maxima, float("inf")))
    width = (largest - bottom) / _WAYS
    low = tl.full([], SMALLEST, tl.float32)
    for _ in range(_ROUNDS):
        bounds = bottom + width * tl.arange(0, _WAYS).to(tl.float32)
        counts = tl.sum((maxima[None, :] >= bounds[:, None]).to(tl.int32), axis=1)
        low = tl.max(tl.where(counts >= k, bounds, low))
        bottom = tl.maximum(bottom, low)
        width = width / _WAYS
    return low


@jit
def nucleus_bound(  # type: ignore[no-untyped-def]
    maxima: tl.tensor,
    masses: tl.tensor,
    roots: tl.tensor,
    total: float,
    rest: float,
    reach: float,
):
    """Bounds the distance from the best logit to the end of a nucleus, in units of the temperature.

    With a token's x = (logit − best) / temperature, the tokens of a tile below y have at most the mass of all of them,
    if its maximum is below y; otherwise that of the others, and each of those less than exp(y), and all together less
    than Σ exp(x / 2) · exp(y / 2). The largest y is looked for below which all tiles have at most `rest`.

    Args:
        maxima: x of the best token of each tile.
        masses, roots: of tiles, as parts of the best token's.
        total: mass of all.
        rest: the mass that the nucleus need not have.
        reach: distance that is far enough in any case.
    """
    others = masses - tl.exp(maxima)
    root_others = roots - tl.exp(maxima * 0.5)
    bottom = -reach
    width = reach / _WAYS
    for _ in range(_ROUNDS):
        bounds = bottom + width * tl.arange(0, _WAYS).to(tl.float32)
        halves = tl.exp(bounds * 0.5)
        most = tl.minimum(others[None, :], (halves * halves)[:, None] * (TILE - 1))
        most = tl.minimum(most, root_others[None, :] * halves[:, None])
        below = tl.sum(tl.where(maxima[None, :] < bounds[:, None], masses[None, :], most), axis=1)
        enough = below * 1.0001 + total * _ROUNDING <= rest
        bottom = tl.max(tl.where(enough, bounds, bottom))
        width = width / _WAYS
    return -bottom + 1e-4  # exponentials round, too


@jit
def key_of(value: float):  # type: ignore[no-untyped-def]
    """int32 in the order of float32s. Its own inverse, but for the types: `float_of`."""
    bits = tl.cast(value, tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@jit
def float_of(key: int):  # type: ignore[no-untyped-def]
    """Returns the float32 that has this key."""
    return tl.where(key < 0, key ^ 0x7FFFFFFF, key).to(tl.int32).to(tl.float32, bitcast=True)


# ------------------------------------------------------------------------------------------ noise


@jit
def most_noise(ids: tl.tensor, key: int):  # type: ignore[no-untyped-def]
    """Bounds the noise of tokens from above, in units of log 2, less 32, up to `ROUNDING`: one hardware logarithm.

    −log(1 − u) is u at least, and hardly more for the small u of tokens that win among many. The last step of the hash
    changes it by a part of 2⁻¹⁴, and is left out.
    """
    return -_log2(_unfinished_hash(ids, key).to(tl.float32))


@jit
def rough_noise(hashes: tl.tensor):  # type: ignore[no-untyped-def]
    """The noise in units of log 2, less log₂(log 2), in float32: two logarithms of the hardware.

    Wrong by 0.0003 at most where it is above −2.8, and by 0.5 below: there 1 − u has few bits left. With u = h · 2⁻³²
    it is −log₂(−log₂(1 − u)), and for small u, where 1 − u would lose it, the inner logarithm is its series.
    """
    number = hashes.to(tl.float32)
    first = tl.fma(number, 3.3591075e-10, 1.6795538e-10)  # u · log₂ e, of the middle of u's interval
    series = tl.fma(first * 0.34657359, first, first)
    inner = -_log2(tl.fma(number, -2.3283063e-10, 1.0))  # the factor is less than 2⁻³²: the result is above 0
    return -_log2(tl.where(number < 33554432.0, series, inner))  # u < 2⁻⁷


@jit
def noise(hashes: tl.tensor):  # type: ignore[no-untyped-def]
    """Computes `sampler.gumbel` in float64.

    1 − (h + ½) · 2⁻³² is a float64, so its logarithm is log1p's: nothing is lost.
    """
    return -tl.log(-tl.log((4294967295.5 - hashes.to(tl.float64)) * 2.3283064365386963e-10))


@jit
def token_hash(ids: tl.tensor, key: int):  # type: ignore[no-untyped-def]
    """Computes `sampler.token_hash`: uint32. key: int64, the bits of draw_key."""
    h = _unfinished_hash(ids, key)
    return h ^ (h >> 14)


@jit
def _unfinished_hash(ids: tl.tensor, key: int):  # type: ignore[no-untyped-def]
    bits = tl.cast(key, tl.uint64, bitcast=True)
    h = ids.to(tl.uint32) ^ bits.to(tl.uint32)
    h = (h ^ (h >> 17)) * 0xED5AD4BB
    # (h ^ h >> 11 + high half) · factor: the half's product is one number for all tokens, and added for nothing.
    h = (h ^ (h >> 11)) * 0xAC4C1B51 + (bits >> 32).to(tl.uint32) * 0xAC4C1B51
    return (h ^ (h >> 15)) * 0x31848BAB


@jit
def _log2(x: tl.tensor):  # type: ignore[no-untyped-def]
    """Of the hardware: wrong by 2⁻²², where tl.log2 is exact and takes twenty instructions."""
    if INTERPRETED:  # the interpreter knows no functions of the device
        return tl.log2(x)
    else:
        return libdevice.fast_log2f(x)
