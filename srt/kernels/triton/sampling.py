"""Logits → tokens on the device, by the definition of a draw (gumbel.py). The reference is TorchSampling.

    scan     row × chunk of the vocabulary, one read of the logits. Of each tile of 128 tokens stay its largest logit
             and, by what is drawn, a bound of its scores or its mass. The program that comes last to a row finishes a
             draw without limits: it reads the tile again that has the largest logit, or the highest bound, and others
             only while they may have a better score.
    select   row × part of its tiles, only where some draw has top_k, top_p or min_p. By the maxima and masses of tiles
             it is known from which logit on a token can stay; the tiles that have such are read again, and what can
             stay is copied: a few hundred tokens as a rule. The program that comes last to a row has them all. It
             compares each with each, and those that stay race. Where there are too many for that, the winner of a
             race stays if little lies above it; where there are more than the copy holds, over the row itself.

Nothing is sorted. Noise is bounded, or rough in float32, until it is known which tokens can win: one, as a rule. Those
are compared in float64.
"""

from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray

from ...core.batch import Draws, LogitsError, Summary
from .jit import block_of, jit, pdl_options
from .sampling_kernels import COPIED, LINE, NO_TOKEN, TILE, kth_bound, scan
from .sampling_select import copy, next_of, select

_COLUMNS = 7
_LINE = LINE.value // 2  # numbers of 8 bytes


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

    @classmethod
    def of(cls, draws: Draws, device: torch.device) -> "DeviceDraws":
        """The host does not wait for the copy: it is in the device's stream, in front of what reads it."""
        count = len(draws)
        room = _room(count)
        masks = [] if draws.masks is None else [mask for mask in draws.masks if mask is not None]
        words = len(masks[0]) if masks else 0
        host = np.zeros(_LINE * count + _COLUMNS * room + len(masks) * words // 2 + 1, dtype=np.int64)
        columns = host[_LINE * count :][: _COLUMNS * room].reshape(_COLUMNS, room)[:, :count]
        columns[0] = draws.rows
        columns[1] = draws.inverse_temperatures.view(np.int64)
        columns[2] = draws.keys.view(np.int64)
        columns[3] = draws.top_p.view(np.int64)
        with np.errstate(divide="ignore"):
            columns[4] = np.log(draws.min_p).view(np.int64)
        columns[5] = draws.top_k
        columns[6] = _mask_rows(draws)
        if masks:
            packed = host[_LINE * count + _COLUMNS * room :].view(np.uint32)[: len(masks) * words]
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
        columns = memory[_LINE * count :][: _COLUMNS * room].view(_COLUMNS, room)[:, :count]
        return cls(
            limited=limited,
            nuclei=nuclei,
            counters=memory[: _LINE * count].view(torch.int32).view(count, LINE.value),
            rows=columns[0],
            inverse_temperatures=columns[1].view(torch.float64),
            keys=columns[2],
            top_p=columns[3].view(torch.float64),
            log_min_p=columns[4].view(torch.float64),
            top_k=columns[5],
            mask_rows=columns[6],
            masks=memory[_LINE * count + _COLUMNS * room :].view(torch.int32)[: masks * words].view(masks, words),
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


_SCANNED = 16  # tiles that a scanning program reads at once
_PROGRAMS = 512  # of a scan, where there is so much: large devices hold them at once
_MOST_READS = 8  # of a scanning program
_SELECTED, _SUMMARISED = 16, 8  # tiles that are read again at once
_SELECT_WARPS = 8
_PART, _WIDE_PART = 256, 128  # tiles of a selecting program; where nuclei may be wide
_CANDIDATES = 8192  # tokens that are copied, 64 KiB a row
_READ, _SOME = 1024, 4096  # tokens of a search that are read at once; that are read once for all


class TritonSampling:
    """A `sampler.Chooser` for logits on the device that kernels run on.

    Args:
        candidates: tokens of a row that are copied at most.
    """

    def __init__(self, *, candidates: int = _CANDIDATES) -> None:
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

    def choose_sent(self, logits: torch.Tensor, draws: DeviceDraws) -> torch.Tensor:
        """`choose_async` for columns that are there already: kernels only, so it can be captured in a graph."""
        tokens = torch.empty(len(draws), dtype=torch.int64, device=logits.device)
        if not len(draws):
            return tokens
        tiles = _VocabTiles.of(logits, draws, tokens)
        if draws.limited:
            part = _WIDE_PART if draws.nuclei else _PART
            select[(triton.cdiv(tiles.count, part), len(draws))](
                *(logits, draws.rows, draws.mask_rows, draws.masks),
                *(draws.inverse_temperatures, draws.keys, draws.top_k, draws.top_p, draws.log_min_p),
                *(draws.counters, tiles.maxima, tiles.scores, tiles.roots, *self._scratch(draws, tiles), tokens),
                *(logits.stride(0), logits.shape[1], draws.masks.shape[1], part),
                TILES=tiles.count,
                TILE_BLOCK=block_of(tiles.count),
                PART=_PART,
                READ_TILES=_SELECTED,
                ROOM=self._candidates,
                READ=_READ,
                SOME=_SOME,
                num_warps=_SELECT_WARPS,
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
            summarise_rows[(count,)](
                *(logits, draws.rows, draws.counters, tiles.maxima, tiles.scores, *self._scratch(draws, tiles)),
                *(normalisers, top_tokens, top_logits, logits.stride(0), vocab, top),
                TILES=tiles.count,
                TILE_BLOCK=block_of(tiles.count),
                READ_TILES=_SUMMARISED,
                ROOM=self._candidates,
                READ=_READ,
                num_warps=8,
                enable_fp_fusion=False,
            )
        summary = Summary(normalisers.cpu().numpy(), top_tokens.cpu().numpy(), top_logits.cpu().numpy())
        if not np.isfinite(summary.normalisers).all():
            raise LogitsError
        return summary

    def _scratch(self, draws: DeviceDraws, tiles: "_VocabTiles") -> tuple[torch.Tensor, torch.Tensor]:
        """Allocates scratch for copied entries, and for the tiles that have them."""
        entries = torch.empty((len(draws), self._candidates), dtype=torch.int64, device=draws.rows.device)
        return entries, torch.empty((len(draws), tiles.count), dtype=torch.int32, device=draws.rows.device)


class _VocabTiles:
    """Maxima and sums of the tiles of each row: [n, tiles] each."""

    def __init__(self, count: int, vocab: int, device: torch.device) -> None:
        self.read: int = min(_SCANNED, block_of(triton.cdiv(vocab, TILE.value)))  # by a program at once
        self.reads: int = triton.cdiv(vocab, TILE.value * self.read)  # of a row
        self.count = self.reads * self.read
        self.maxima, self.scores, self.roots = torch.empty((3, count, self.count), device=device)

    @classmethod
    def of(cls, logits: torch.Tensor, draws: DeviceDraws, tokens: torch.Tensor) -> "_VocabTiles":
        """Scans. tokens: those of draws without limits are written."""
        assert logits.stride(1) == 1, "the logits of a row lie side by side"
        count, vocab = len(draws), logits.shape[1]
        tiles = cls(count, vocab, logits.device)
        reads = min(triton.cdiv(count * tiles.reads, _PROGRAMS), _MOST_READS)  # of a program
        scan[(triton.cdiv(tiles.reads, reads), count)](
            *(logits, draws.rows, draws.mask_rows, draws.masks),
            *(draws.inverse_temperatures, draws.keys, draws.top_k, draws.top_p, draws.log_min_p),
            *(draws.counters, tiles.maxima, tiles.scores, tiles.roots, tokens),
            *(logits.stride(0), vocab, draws.masks.shape[1], reads * tiles.read),
            TILES=tiles.count,
            READ_TILES=tiles.read,
            TILE_BLOCK=block_of(tiles.count),
            num_warps=4,
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
