"""Logits → tokens, for all rows of a step together.

What a row gets depends on its logits, its parameters and (seed, position), never on the rest of the batch: the
uniform number of a draw is a hash of seed and position, and a token is found by walking the kept probabilities in
the order of the vocabulary. So a text is the same alone, in a batch, and after a retraction.

Order of operations on a row, each on the result of the one before:
repetition, frequency and presence penalties → logit_bias → tokens forbidden before min_tokens → temperature →
top_k → top_p (mass among what top_k kept) → min_p (relative to the best token). Tokens that tie with the last one
kept are kept too, so ties never depend on how a library sorts.

A vocabulary has up to 262,144 tokens: nothing here sorts it. A best token or the top of a row comes from the maxima
of blocks, then from the few blocks that can hold it; a nucleus wider than that from a histogram over the leading
bits of the weights, whose one decisive bin is sorted. Passes over whole rows write to one buffer that is kept:
fresh memory of that size costs more than the arithmetic.
"""

from collections.abc import Sequence
from enum import Enum
from typing import assert_never

import torch

from ..lang.errors import EngineError
from .adjustments import adjust
from .draw import Draw, uniform

_BLOCK = 128  # tokens whose maximum is taken first; divides the vocabularies of Llama, Qwen and Gemma
_NUCLEUS = 64  # tokens among which a nucleus is looked for first
_ROWS = 16  # rows of whole-vocabulary work at once: 16 MiB at 262,144 tokens
_BIN_SHIFT = 16  # of the bits of a weight: sign, exponent and 7 bits of the fraction stay


class Sampler:
    """Chooses tokens. Adjusts the rows of the logits it draws from in place: take log-probabilities before.

    Args:
        vocab_size: columns of the logits that are tokens; the rest is padding of the model and is never chosen.
    """

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self._weights = torch.empty(0)  # [_ROWS, vocab padded to whole blocks], made when it is needed

    def sample(self, logits: torch.Tensor, draws: Sequence[Draw]) -> list[int]:
        """One token for each draw. logits: float32 [L, vocab].

        Raises:
            EngineError: the logits of a row are not numbers.
        """
        logits = logits[:, : self.vocab_size]
        adjust(logits, draws)
        chosen = [0] * len(draws)
        for (way, count), group in self._groups(draws).items():
            some = [draws[i] for i in group]
            rows = _rows(logits, [draw.row for draw in some])
            match way:
                case _Way.BEST:
                    tokens = _best(rows)
                case _Way.TOP:
                    tokens = self._from_top(rows, some, count)
                case _Way.ALL:
                    tokens = self._from_all(rows, some)
                case _:
                    assert_never(way)
            for i, token in zip(group, tokens, strict=True):
                chosen[i] = token
        return chosen

    def _groups(self, draws: Sequence[Draw]) -> dict[tuple["_Way", int], list[int]]:
        """Draws that are computed together: (way, number of candidates) → their indices."""
        groups: dict[tuple[_Way, int], list[int]] = {}
        for i, draw in enumerate(draws):
            top_k = draw.sampling.top_k
            if draw.sampling.greedy:
                key = (_Way.BEST, 0)
            elif 0 < top_k < self.vocab_size:  # twice as many candidates, for ties with the last one
                key = (_Way.TOP, min(self.vocab_size, max(64, 1 << (2 * top_k - 1).bit_length())))
            else:
                key = (_Way.ALL, 0)
            groups.setdefault(key, []).append(i)
        return groups

    # ------------------------------------------------------------------------------------- whole vocab

    def _from_all(self, logits: torch.Tensor, draws: Sequence[Draw]) -> list[int]:
        """No top_k: any token may be kept. logits: [n, vocab]."""
        tokens: list[int] = []
        for first in range(0, len(draws), _ROWS):
            some = draws[first : first + _ROWS]
            weights = self._weigh(logits[first : first + _ROWS], some)
            _cut(weights, some)
            tokens += _walk(weights, some)
        return tokens

    def _weigh(self, logits: torch.Tensor, draws: Sequence[Draw]) -> torch.Tensor:
        """exp((logits − best) / temperature) in the kept buffer, the best is 1: [n, vocab padded with zeros]."""
        best = logits.amax(dim=-1, keepdim=True)
        _require_numbers(best)
        width = -(-self.vocab_size // _BLOCK) * _BLOCK
        if self._weights.shape != (_ROWS, width) or self._weights.device != logits.device:
            self._weights = torch.zeros((_ROWS, width), device=logits.device)
        buffer = self._weights[: len(draws)]
        inside = buffer[:, : self.vocab_size]
        torch.sub(logits, best, out=inside)
        inside.div_(_temperatures(draws, logits.device).clamp(min=1e-30).float()).exp_()
        return buffer

    # ------------------------------------------------------------------------------------- top_k

    def _from_top(self, logits: torch.Tensor, draws: Sequence[Draw], count: int) -> list[int]:
        """Draws among the `count` best tokens of each row; again with more where ties could lie outside of them."""
        chosen = [0] * len(draws)
        left = list(range(len(draws)))
        while left:
            rows = logits if len(left) == len(draws) else logits[left]
            tokens, enough = self._among(rows, [draws[i] for i in left], count)
            for i, token in zip(left, tokens, strict=True):
                chosen[i] = token  # of rows that need more candidates it is replaced
            left = [i for i, known in zip(left, enough, strict=True) if not known]
            count = min(self.vocab_size, count * 8)
        return chosen

    def _among(self, logits: torch.Tensor, draws: Sequence[Draw], count: int) -> tuple[list[int], list[bool]]:
        """Tokens, and False for rows of which a kept token may be missing."""
        device = logits.device
        values, ids = _top(logits, count)  # [n, count], best first
        values = values.double()
        best = values[:, :1]
        _require_numbers(best)
        scaled = (values - best) / _temperatures(draws, device)  # [n, count], the best is 0
        last = torch.tensor([min(draw.sampling.top_k, count) - 1 for draw in draws], device=device)[:, None]
        weights = torch.where(values >= values.gather(1, last), scaled.exp(), 0.0)  # the k-th and all that tie with it
        top_p = _column([draw.sampling.top_p for draw in draws], device)
        reached = weights.cumsum(dim=-1) >= top_p * weights.sum(dim=-1, keepdim=True) * (1 - 1e-12)
        nucleus = torch.where(top_p < 1, reached.int().max(dim=-1, keepdim=True).indices, count - 1)
        least = _column([draw.sampling.min_p for draw in draws], device)
        kept = (weights > 0) & (values >= values.gather(1, nucleus)) & (scaled >= least.log())
        enough = ~kept[:, -1] if count < self.vocab_size else torch.ones(len(draws), dtype=torch.bool, device=device)
        order = ids.argsort(dim=-1)
        walked = torch.where(kept, weights, 0.0).gather(1, order)
        ends = walked.cumsum(dim=-1)
        places = _first_above(ends, _uniforms(draws, device) * ends[:, -1], walked)
        tokens = ids.gather(1, order).gather(1, places[:, None])[:, 0]
        return tokens.tolist(), enough.tolist()


class _Way(Enum):
    BEST = "best"  # temperature 0
    TOP = "top"  # top_k: among candidates
    ALL = "all"  # the whole vocabulary, cut by top_p and min_p


def _best(logits: torch.Tensor) -> list[int]:
    """The most likely token of each row, the first of equal ones."""
    rows, size = logits.shape
    if size % _BLOCK:
        best = logits.max(dim=-1)
        _require_numbers(best.values)
        tokens: list[int] = best.indices.tolist()
        return tokens
    blocks = logits.view(rows, -1, _BLOCK)
    block = blocks.amax(dim=-1).max(dim=-1)
    _require_numbers(block.values)
    inside = blocks[torch.arange(rows, device=logits.device), block.indices].max(dim=-1).indices
    tokens = (block.indices * _BLOCK + inside).tolist()
    return tokens


def _cut(weights: torch.Tensor, draws: Sequence[Draw]) -> None:
    """Sets weights to 0 that top_p or min_p leave out. weights: [n, width], the best is 1."""
    floors = [draw.sampling.min_p for draw in draws]
    nuclei = [i for i, draw in enumerate(draws) if draw.sampling.top_p < 1]
    if nuclei:
        some = _rows(weights, nuclei)
        wanted = _column([draws[i].sampling.top_p for i in nuclei], weights.device) * _masses(some).sum(
            dim=-1, keepdim=True
        )
        top = _top(some, min(_NUCLEUS, some.shape[1]))[0].double()
        reached = top.cumsum(dim=-1) >= wanted
        ends = top.gather(1, reached.int().max(dim=-1, keepdim=True).indices)[:, 0].tolist()
        for place, (i, known) in enumerate(zip(nuclei, reached[:, -1].tolist(), strict=True)):
            end = ends[place] if known else _nucleus_end(some[place], wanted[place, 0])
            floors[i] = max(floors[i], end)
    for row, floor in enumerate(floors):
        if floor > 0:
            weights[row].masked_fill_(weights[row] < floor, 0.0)


def _nucleus_end(weights: torch.Tensor, wanted: torch.Tensor) -> float:
    """The weight with which the mass from the largest weight down reaches `wanted`. weights: [width], 0 to 1.

    The bits of floats that are not negative are ordered like the floats, so their leading bits are bins in order.
    """
    bins = weights.view(torch.int32) >> _BIN_SHIFT
    mass = torch.bincount(bins, weights=weights.double()).flip(0).cumsum(0)  # from the highest bin down
    above = int(torch.searchsorted(mass, wanted))
    if above >= len(mass):
        return 0.0  # rounding: the whole row does not reach it
    inside = weights[bins == len(mass) - 1 - above].double().sort(descending=True).values
    before = mass[above - 1] if above else mass.new_zeros(())
    place = int(torch.searchsorted(inside.cumsum(0) + before, wanted))
    return float(inside[min(place, len(inside) - 1)])


def _walk(weights: torch.Tensor, draws: Sequence[Draw]) -> list[int]:
    """Along the vocabulary to the draw's share of the mass: find the block in which it lies, then the token."""
    masses = _masses(weights)  # [n, blocks]
    ends = masses.cumsum(dim=-1)
    _require_numbers(ends[:, -1])
    targets = _uniforms(draws, weights.device) * ends[:, -1]  # [n]
    blocks = _first_above(ends, targets, masses)
    row = torch.arange(len(draws), device=weights.device)
    before = ends[row, blocks] - masses[row, blocks]
    inside = weights.view(len(draws), -1, _BLOCK)[row, blocks].double()  # [n, _BLOCK]
    offsets = _first_above(inside.cumsum(dim=-1), targets - before, inside)
    tokens: list[int] = (blocks * _BLOCK + offsets).tolist()
    return tokens


def _masses(weights: torch.Tensor) -> torch.Tensor:
    """Sums of blocks: [n, blocks], float64 so that sums over them are exact enough to find a token's place."""
    return weights.view(len(weights), -1, _BLOCK).sum(dim=-1).double()


def _rows(logits: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
    """The rows, without a copy when they are all or an interval of them."""
    if list(rows) == list(range(rows[0], rows[0] + len(rows))):
        return logits[rows[0] : rows[0] + len(rows)]
    return logits[torch.tensor(rows, device=logits.device)]


def _require_numbers(values: torch.Tensor) -> None:
    """A NaN would choose some token in silence, and its keys may be wrong too: the step has failed."""
    if not bool(values.isfinite().all()):
        raise EngineError("the model's logits are not numbers: no token can be chosen")


def _column(values: Sequence[float], device: torch.device) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64, device=device)[:, None]


def _uniforms(draws: Sequence[Draw], device: torch.device) -> torch.Tensor:
    return torch.tensor([uniform(draw.seed, draw.position) for draw in draws], dtype=torch.float64, device=device)


def _temperatures(draws: Sequence[Draw], device: torch.device) -> torch.Tensor:
    return _column([draw.sampling.temperature for draw in draws], device)


def _first_above(ends: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Index of the first end above the target; the last one with weight if rounding leaves none. ends: [n, m]."""
    above = ends > targets[:, None]
    possible = above & (weights > 0)
    positions = torch.arange(ends.shape[1], device=ends.device)
    last_weighted = torch.where(weights > 0, positions, -1).max(dim=-1).values
    return torch.where(possible.any(dim=-1), possible.int().max(dim=-1).indices, last_weighted)


def _top(logits: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The `count` largest values of each row, best first, and their ids.

    The largest `count` values lie in the `count` blocks with the largest maxima.
    """
    rows, size = logits.shape
    blocks = size // _BLOCK
    if count * 2 > blocks:
        top = logits.topk(count, dim=-1)
        return top.values, top.indices
    body = logits[:, : blocks * _BLOCK].reshape(rows, blocks, _BLOCK)  # a view
    best_blocks = body.amax(dim=-1).topk(count, dim=-1).indices  # [n, count]
    values = body.gather(1, best_blocks[:, :, None].expand(-1, -1, _BLOCK)).flatten(1)
    within = torch.arange(_BLOCK, device=logits.device)
    ids = (best_blocks[:, :, None] * _BLOCK + within).flatten(1)
    rest = torch.arange(blocks * _BLOCK, size, device=logits.device)
    values = torch.cat([values, logits[:, blocks * _BLOCK :]], dim=1)
    ids = torch.cat([ids, rest.expand(rows, -1)], dim=1)
    top = values.topk(count, dim=-1)
    return top.values, ids.gather(1, top.indices)
