"""Log-probabilities of the model's own distribution: log-softmax of the logits as the model gave them, before
temperature, penalties, biases and truncation. So a number means the same whatever the sampling parameters are.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .engine_protocol import IdLogprob


@dataclass(frozen=True, slots=True)
class Wanted:
    """Of one row of logits: the log-probability of `token`, and of the `top` most likely tokens."""

    row: int
    token: int
    top: int = 0


def log_normalisers(logits: torch.Tensor, rows: Sequence[int]) -> dict[int, float]:
    """row → log of the sum of exponentials, computed once per row."""
    unique = sorted(set(rows))
    if not unique:
        return {}
    chosen = logits if len(unique) == len(logits) else logits[torch.tensor(unique, device=logits.device)]
    return dict(zip(unique, torch.logsumexp(chosen.float(), dim=-1).tolist(), strict=True))


def top_alternatives(
    logits: torch.Tensor, rows: Sequence[tuple[int, int]], normalisers: dict[int, float]
) -> dict[int, tuple[tuple[int, float], ...]]:
    """row → its `count` most likely (token, log-probability), best first, ties by id. rows: (row, count)."""
    counts: dict[int, int] = {}
    for row, count in rows:
        counts[row] = max(count, counts.get(row, 0))
    counts = {row: count for row, count in counts.items() if count}
    if not counts:
        return {}
    unique = sorted(counts)
    most = min(max(counts.values()), logits.shape[1])
    top = logits[torch.tensor(unique, device=logits.device)].float().topk(most, dim=-1)
    result = {}
    for row, values, ids in zip(unique, top.values.tolist(), top.indices.tolist(), strict=True):
        pairs = sorted(zip(ids, values, strict=True), key=lambda pair: (-pair[1], pair[0]))[: counts[row]]
        result[row] = tuple((token, value - normalisers[row]) for token, value in pairs)
    return result


def token_logprobs(logits: torch.Tensor, wanted: Sequence[Wanted], normalisers: dict[int, float]) -> list[float]:
    """The log-probability of each wanted token."""
    if not wanted:
        return []
    rows = torch.tensor([want.row for want in wanted], device=logits.device)
    tokens = torch.tensor([want.token for want in wanted], device=logits.device)
    values: list[float] = logits[rows, tokens].tolist()
    return [value - normalisers[want.row] for value, want in zip(values, wanted, strict=True)]


def describe(logits: torch.Tensor, wanted: Sequence[Wanted]) -> list[IdLogprob]:
    """IdLogprob for each wanted token."""
    normalisers = log_normalisers(logits, [want.row for want in wanted])
    top = top_alternatives(logits, [(want.row, want.top) for want in wanted], normalisers)
    values = token_logprobs(logits, wanted, normalisers)
    return [
        IdLogprob(want.token, value, top.get(want.row, ())[: want.top])
        for want, value in zip(wanted, values, strict=True)
    ]
