"""Logits → tokens on the device, by the definition of a draw (srt/draw.py). The twin is srt/torch_sampling.py.

    scan     row × chunk of the vocabulary, one read of the logits:         maxima of tiles of 128, the chunk's best
             token, its mass, and the winner of its race where the race is open to all
    finish   row: the chunks' results → a token. A row with top_k, top_p or min_p first bounds from below what can stay,
             by the maxima of tiles; copies what lies above (a few hundred tokens, and only tiles that have some are
             read again); bisects the bits of floats for the end of the top_k, then of the nucleus; and races what is
             left. Where more lies above than the copy holds, it bisects over the row itself.

Nothing is sorted. Noise is compared in float64, but only for tokens whose float32 score is within `_CLOSE` of the best
one of their block: there is one, as a rule.
"""

import numpy as np
import torch
import triton
from numpy.typing import NDArray

from ....lang.errors import EngineError
from ...draw import Draws
from ...torch_sampling import Summary
from .jit import block_of
from .sampling_columns import DeviceDraws
from .sampling_kernels import TILE, finish_choice, finish_summary, scan

_CHUNK = 2048  # tokens of a scanning program
_CANDIDATES = 8192  # tokens above the bound that are copied, 64 KiB a row
_READ = 2048  # tokens that a finishing program reads at once


class TritonSampling:
    """A `sampler.Chooser` for logits on the device that kernels run on.

    Args:
        candidates: tokens of a row that the search for the ends of top_k and top_p copies at most.
    """

    def __init__(self, *, candidates: int = _CANDIDATES) -> None:
        self._candidates = candidates

    def choose(self, logits: torch.Tensor, draws: Draws) -> NDArray[np.int64]:
        """One token for each draw. logits: [_, vocab] of any floating dtype; rows may lie apart."""
        tokens: NDArray[np.int64] = self.choose_async(logits, draws).cpu().numpy()
        if (tokens < 0).any():
            raise _no_numbers()
        return tokens

    def choose_async(self, logits: torch.Tensor, draws: Draws) -> torch.Tensor:
        """int64 [n] on the device of the logits; −1 where the logits of a row are not numbers. Nobody waits."""
        return self.choose_sent(logits, DeviceDraws.of(draws, logits.device))

    def choose_sent(self, logits: torch.Tensor, draws: DeviceDraws) -> torch.Tensor:
        """`choose_async` for columns that are there already: kernels only, so it can be captured in a graph."""
        tokens = torch.empty(len(draws), dtype=torch.int64, device=logits.device)
        if len(draws):
            vocab = logits.shape[1]
            parts = _Parts.of(logits, draws)
            values, ids = self._scratch(logits, len(draws))
            finish_choice[(len(draws),)](
                *(logits, draws.rows, draws.mask_rows, draws.masks),
                *(draws.inverse_temperatures, draws.keys, draws.top_k, draws.top_p, draws.log_min_p),
                *(parts.best, parts.tokens, parts.masses, parts.scores, parts.tiles, values, ids, tokens),
                *(logits.stride(0), vocab, draws.masks.shape[1]),
                CHUNKS=parts.chunks,
                CHUNK=parts.chunk,
                CHUNK_BLOCK=block_of(parts.chunks),
                TILE_BLOCK=block_of(parts.chunks * parts.chunk // TILE.value),
                CANDIDATES=self._candidates,
                READ=_READ,
                num_warps=8,
                enable_fp_fusion=False,  # the definition rounds a product before the sum
            )
        return tokens

    def summarise(self, logits: torch.Tensor, rows: NDArray[np.int64], top: int) -> Summary:
        """Log-normalisers of rows and their `top` largest logits."""
        count, vocab = len(rows), logits.shape[1]
        top = min(top, vocab)
        normalisers = torch.empty(count, dtype=torch.float64, device=logits.device)
        top_tokens = torch.empty((count, top), dtype=torch.int32, device=logits.device)
        top_logits = torch.empty((count, top), dtype=torch.float32, device=logits.device)
        if count:
            # The masses of chunks do not depend on what is drawn, but on a temperature: here it is 1.
            draws = DeviceDraws.of(_plain(rows), logits.device)
            parts = _Parts.of(logits, draws)
            values, ids = self._scratch(logits, count)
            finish_summary[(count,)](
                *(logits, draws.rows, parts.best, parts.masses, parts.tiles, values, ids),
                *(normalisers, top_tokens, top_logits, logits.stride(0), vocab, top),
                CHUNKS=parts.chunks,
                CHUNK=parts.chunk,
                CHUNK_BLOCK=block_of(parts.chunks),
                TILE_BLOCK=block_of(parts.chunks * parts.chunk // TILE.value),
                CANDIDATES=self._candidates,
                READ=_READ,
                num_warps=8,
                enable_fp_fusion=False,
            )
        summary = Summary(normalisers.cpu().numpy(), top_tokens.cpu().numpy(), top_logits.cpu().numpy())
        if not np.isfinite(summary.normalisers).all():
            raise _no_numbers()
        return summary

    def _scratch(self, logits: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        values = torch.empty((count, self._candidates), dtype=torch.float32, device=logits.device)
        return values, torch.empty((count, self._candidates), dtype=torch.int32, device=logits.device)


class _Parts:
    """What the chunks of each row found: [n, chunks], and the maxima of their tiles: [n, tiles]."""

    def __init__(self, count: int, vocab: int, device: torch.device) -> None:
        self.chunk = min(_CHUNK, block_of(vocab, least=TILE.value))
        self.chunks: int = triton.cdiv(vocab, self.chunk)
        self.best = torch.empty((count, self.chunks), dtype=torch.float32, device=device)
        self.tokens = torch.empty((2, count, self.chunks), dtype=torch.int32, device=device)  # the best, the winner
        self.masses = torch.empty((count, self.chunks), dtype=torch.float32, device=device)
        self.scores = torch.empty((count, self.chunks), dtype=torch.float64, device=device)
        self.tiles = torch.empty((count, self.chunks * self.chunk // TILE.value), dtype=torch.float32, device=device)

    @classmethod
    def of(cls, logits: torch.Tensor, draws: DeviceDraws) -> "_Parts":
        assert logits.stride(1) == 1, "the logits of a row lie side by side"
        vocab = logits.shape[1]
        parts = cls(len(draws), vocab, logits.device)
        scan[(len(draws), parts.chunks)](
            *(logits, draws.rows, draws.mask_rows, draws.masks),
            *(draws.inverse_temperatures, draws.keys, draws.top_k, draws.top_p, draws.log_min_p),
            *(parts.best, parts.tokens, parts.masses, parts.scores, parts.tiles),
            *(logits.stride(0), vocab, draws.masks.shape[1]),
            CHUNKS=parts.chunks,
            CHUNK=parts.chunk,
            num_warps=4,
            enable_fp_fusion=False,
        )
        return parts


def _plain(rows: NDArray[np.int64]) -> Draws:
    """Draws at temperature 1 in which no token wins: top_k makes them wait for a search that nobody asks for."""
    count = len(rows)
    return Draws(
        rows=rows,
        inverse_temperatures=np.ones(count),
        keys=np.zeros(count, dtype=np.uint64),
        top_k=np.ones(count, dtype=np.int32),
        top_p=np.ones(count),
        min_p=np.zeros(count),
    )


def _no_numbers() -> EngineError:
    return EngineError("the model's logits are not numbers: no token can be chosen")
