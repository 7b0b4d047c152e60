"""Logits → tokens, for all rows of a step together.

What a row gets depends on its logits, its parameters and (seed, position), never on the rest of the batch: the
uniform number of a draw is a hash of seed and position, and a token is found by walking the kept probabilities in
the order of the vocabulary. So a text is the same alone, in a batch, and after a retraction.

Order of operations on a row, each on the result of the one before:
repetition, frequency and presence penalties → logit_bias → tokens forbidden before min_tokens → temperature →
top_k → top_p (mass among what top_k kept) → min_p (relative to the best token). Tokens that tie with the last one
kept are kept too, so ties never depend on how a library sorts.

A vocabulary has up to 262,144 tokens: nothing here sorts it unless a nucleus really reaches that far. The top
values come from the maxima of blocks, then from the few blocks that can hold them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from ..lang.errors import EngineError
from ..lang.sampling import SamplingParams

_BLOCK = 512  # tokens whose maximum is taken first
_FIRST_CANDIDATES = 64  # candidates of a nucleus; × 8 for the rows for which they are too few
_MASK = (1 << 64) - 1


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) that depends on seed and position only: two rounds of splitmix64, its top 53 bits."""
    return (_mix(_mix(seed) ^ (position & _MASK)) >> 11) * 2.0**-53


def _mix(value: int) -> int:
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


@dataclass(frozen=True, slots=True)
class Draw:
    """One token to choose.

    `counts` are the generated tokens with their occurrences, `prompt` the prompt's tokens (for the repetition
    penalty), `forbidden` the tokens that may not be chosen now. `position` is that of the new token.
    """

    row: int  # of the logits
    sampling: SamplingParams
    seed: int
    position: int
    counts: Mapping[int, int]
    prompt: NDArray[np.int32]
    forbidden: frozenset[int] = frozenset()


class Sampler:
    """Chooses tokens. Adjusts the rows of the logits it draws from in place: take log-probabilities before.

    Args:
        vocab_size: columns of the logits that are tokens; the rest is padding of the model and is never chosen.
    """

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def sample(self, logits: torch.Tensor, draws: Sequence[Draw]) -> list[int]:
        """One token for each draw. logits: float32 [L, vocab]."""
        if not draws:
            return []
        logits = logits[:, : self.vocab_size]
        self._adjust(logits, draws)
        chosen = [0] * len(draws)
        greedy = [i for i, draw in enumerate(draws) if draw.sampling.greedy]
        if greedy:
            best = _rows(logits, [draws[i].row for i in greedy]).max(dim=-1)
            _require_numbers(best.values)
            for i, token in zip(greedy, best.indices.tolist(), strict=True):
                chosen[i] = token
        for group, chooser in (
            ([i for i, draw in enumerate(draws) if not draw.sampling.greedy and _whole(draw)], self._from_all),
            ([i for i, draw in enumerate(draws) if not draw.sampling.greedy and not _whole(draw)], self._from_top),
        ):
            if group:
                tokens = chooser(_rows(logits, [draws[i].row for i in group]), [draws[i] for i in group])
                for i, token in zip(group, tokens, strict=True):
                    chosen[i] = token
        return chosen

    # ------------------------------------------------------------------------------------ adjustments

    def _adjust(self, logits: torch.Tensor, draws: Sequence[Draw]) -> None:
        """Penalties, biases and forbidden tokens: a few entries per row, gathered and put back together."""
        rows, ids, divisors, shifts = [], [], [], []
        for draw in draws:
            touched = _adjustments(draw, self.vocab_size)
            if touched is not None:
                rows.append(np.full(len(touched[0]), draw.row, dtype=np.int64))
                ids.append(touched[0])
                divisors.append(touched[1])
                shifts.append(touched[2])
        if not rows:
            return
        device = logits.device
        where = (torch.from_numpy(np.concatenate(rows)).to(device), torch.from_numpy(np.concatenate(ids)).to(device))
        divisor = torch.from_numpy(np.concatenate(divisors)).to(device)
        values = logits[where]
        values = torch.where(values > 0, values / divisor, values * divisor)
        logits[where] = values + torch.from_numpy(np.concatenate(shifts)).to(device)

    # ------------------------------------------------------------------------------------- whole vocab

    def _from_all(self, logits: torch.Tensor, draws: Sequence[Draw]) -> list[int]:
        """No truncation: find the block in which the walk ends, then the token in the block. logits: [n, vocab]."""
        scaled = _scale(logits, draws)
        padding = -scaled.shape[1] % _BLOCK
        weights = torch.nn.functional.pad(scaled.exp_(), (0, padding)).view(len(draws), -1, _BLOCK)
        masses = weights.sum(dim=-1, dtype=torch.float64)  # [n, blocks]
        ends = masses.cumsum(dim=-1)
        _require_numbers(ends[:, -1])
        targets = _uniforms(draws, logits.device) * ends[:, -1]  # [n]
        blocks = _first_above(ends, targets, masses)
        row = torch.arange(len(draws), device=logits.device)
        before = ends[row, blocks] - masses[row, blocks]
        inside = weights[row, blocks].double()  # [n, _BLOCK]
        offsets = _first_above(inside.cumsum(dim=-1), targets - before, inside)
        tokens: list[int] = (blocks * _BLOCK + offsets).tolist()
        return tokens

    # ------------------------------------------------------------------------------------- truncated

    def _from_top(self, logits: torch.Tensor, draws: Sequence[Draw]) -> list[int]:
        """top_k, top_p, min_p: take enough candidates to know every kept token; more only for rows that need more."""
        size = self.vocab_size
        wanted = [min(draw.sampling.top_k, size) if draw.sampling.top_k > 0 else 0 for draw in draws]
        chosen = [0] * len(draws)
        left = list(range(len(draws)))
        count = min(size, max(_FIRST_CANDIDATES, 2 * max(wanted)))
        while left:
            rows = logits if len(left) == len(draws) else logits[left]
            some = [draws[i] for i in left]
            tokens, enough = self._among(rows, some, [wanted[i] for i in left], count)
            for i, token, known in zip(left, tokens, enough, strict=True):
                if known:
                    chosen[i] = token
            left = [i for i, known in zip(left, enough, strict=True) if not known]
            count = min(size, count * 8)
        return chosen

    def _among(
        self, logits: torch.Tensor, draws: Sequence[Draw], wanted: Sequence[int], count: int
    ) -> tuple[list[int], list[bool]]:
        """Draws from the `count` best tokens of each row; False for rows of which a kept token may be missing."""
        device = logits.device
        values, ids = _top(logits, count)  # [n, count], best first
        best = values[:, :1]
        _require_numbers(best)
        temperature = _column([draw.sampling.temperature for draw in draws], device)
        scaled = (values.double() - best.double()) / temperature  # [n, count], the best is 0
        kept_by_k = torch.tensor([k or self.vocab_size for k in wanted], device=device)[:, None]
        # The k-th value and all that tie with it.
        last = (kept_by_k.clamp(max=count) - 1).long()
        floor = torch.where(kept_by_k <= count, values.gather(1, last).double(), -torch.inf)
        weights = torch.where(values.double() >= floor, scaled.exp(), 0.0)
        # Without top_k the mass below the candidates counts too.
        mass = weights.sum(dim=-1, keepdim=True)
        open_rows = [i for i, k in enumerate(wanted) if not k]
        if open_rows:
            everything = _scale(_rows(logits, open_rows), [draws[i] for i in open_rows]).exp_()
            mass[open_rows] = everything.sum(dim=-1, keepdim=True, dtype=torch.float64)
        top_p = _column([draw.sampling.top_p for draw in draws], device)
        # The nucleus ends with the first token at which the mass reaches top_p.
        reached = weights.cumsum(dim=-1) >= top_p * mass * (1 - 1e-12)
        nucleus_end = torch.where(reached.any(dim=-1), reached.int().argmax(dim=-1), count - 1)
        nucleus_floor = values.gather(1, nucleus_end[:, None]).double()
        floor = torch.where(top_p < 1, torch.maximum(floor, nucleus_floor), floor)
        kept = (values.double() >= floor) & (scaled >= _column([draw.sampling.min_p for draw in draws], device).log())
        # Whatever ties with the last candidate may lie outside of them.
        enough = ~kept[:, -1] if count < self.vocab_size else torch.ones(len(draws), dtype=torch.bool, device=device)
        order = ids.argsort(dim=-1)
        walked = torch.where(kept, scaled.exp(), 0.0).gather(1, order)
        ends = walked.cumsum(dim=-1)
        places = _first_above(ends, _uniforms(draws, device) * ends[:, -1], walked)
        tokens = ids.gather(1, order).gather(1, places[:, None])[:, 0]
        return tokens.tolist(), enough.tolist()


def _whole(draw: Draw) -> bool:
    sampling = draw.sampling
    return sampling.top_k < 0 and sampling.top_p == 1.0 and sampling.min_p == 0.0


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


def _scale(logits: torch.Tensor, draws: Sequence[Draw]) -> torch.Tensor:
    """(logits − best) / temperature in a new tensor: nothing overflows, the best is 0."""
    temperature = torch.tensor(
        [draw.sampling.temperature for draw in draws], dtype=torch.float64, device=logits.device
    ).clamp(min=1e-30)  # smaller ones are 0 in float32
    return (logits - logits.max(dim=-1, keepdim=True).values).div_(temperature[:, None].float())


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
    if count * 4 > blocks:
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


def _adjustments(
    draw: Draw, vocab_size: int
) -> tuple[NDArray[np.int64], NDArray[np.float32], NDArray[np.float32]] | None:
    """(ids, divisors, shifts) of the tokens of which this row's logits change; None for most rows."""
    sampling = draw.sampling
    counted = sampling.frequency_penalty != 0.0 or sampling.presence_penalty != 0.0
    repeated = sampling.repetition_penalty != 1.0
    if not (counted or repeated or sampling.logit_bias or draw.forbidden):
        return None
    generated = np.fromiter(draw.counts.keys(), dtype=np.int64, count=len(draw.counts))
    parts = [np.fromiter(sampling.logit_bias, dtype=np.int64), np.fromiter(draw.forbidden, dtype=np.int64)]
    if counted or repeated:
        parts.append(generated)
    if repeated:
        parts.append(draw.prompt.astype(np.int64))
    ids = np.unique(np.concatenate(parts))
    if not len(ids):
        return None
    assert ids[-1] < vocab_size, "ids are checked when the request comes in"
    divisors = np.ones(len(ids), dtype=np.float32)
    shifts = np.zeros(len(ids), dtype=np.float32)
    if repeated:
        seen = np.isin(ids, draw.prompt) | np.isin(ids, generated)
        divisors[seen] = sampling.repetition_penalty
    if counted and len(generated):
        occurrences = np.fromiter(draw.counts.values(), dtype=np.float32, count=len(draw.counts))
        shifts[np.searchsorted(ids, generated)] -= (
            sampling.frequency_penalty * occurrences + sampling.presence_penalty
        ).astype(np.float32)
    for token, bias in sampling.logit_bias.items():
        shifts[np.searchsorted(ids, token)] += bias
    if draw.forbidden:
        shifts[np.searchsorted(ids, np.fromiter(draw.forbidden, dtype=np.int64))] = -np.inf
    return ids, divisors, shifts
