"""Log-probabilities of the model's own distribution: log-softmax of the logits as the model gave them, before
temperature, penalties, biases and truncation. So a number means the same whatever the sampling parameters are.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from ..core.batch import Chooser
from ..core.messages import IdLogprob


@dataclass(frozen=True, slots=True)
class Wanted:
    """Of one row of logits: the log-probability of `token`, and of the `top` most likely tokens."""

    row: int
    token: int
    top: int = 0


def look_up(
    logits: torch.Tensor, wanted: Sequence[tuple[int, NDArray[np.int32]]], chooser: Chooser
) -> list[NDArray[np.float64]]:
    """Of each (row, tokens) the log-probabilities of those tokens. logits: [_, vocab]."""
    if not wanted:
        return []
    rows, places = np.unique(np.array([row for row, _ in wanted], dtype=np.int64), return_inverse=True)
    counts = [len(tokens) for _, tokens in wanted]
    tokens = np.concatenate([tokens for _, tokens in wanted]).astype(np.int64)
    where = (np.repeat(rows[places], counts), tokens)
    values = logits[tuple(torch.from_numpy(index).to(logits.device) for index in where)].double().cpu().numpy()
    logprobs = values - np.repeat(chooser.summarise(logits, rows, 0).normalisers[places], counts)
    return np.split(logprobs, np.cumsum(counts)[:-1])


def describe(logits: torch.Tensor, wanted: Sequence[Wanted], chooser: Chooser) -> list[IdLogprob]:
    """IdLogprob for each wanted token. Every row is read once, whatever is wanted of it. logits: [_, vocab]."""
    if not wanted:
        return []
    rows, places = np.unique(np.array([want.row for want in wanted], dtype=np.int64), return_inverse=True)
    most = max(want.top for want in wanted)
    summary = chooser.summarise(logits, rows, most)
    own = torch.tensor([want.token for want in wanted], device=logits.device)
    values = logits[torch.from_numpy(rows[places]).to(logits.device), own].double().cpu().numpy()
    logprobs = (values - summary.normalisers[places]).tolist()
    tokens = summary.top_tokens.tolist()
    alternatives = (summary.top_logits - summary.normalisers[:, None]).tolist()
    return [
        IdLogprob(
            want.token, logprob, tuple(zip(tokens[place][: want.top], alternatives[place][: want.top], strict=True))
        )
        for want, logprob, place in zip(wanted, logprobs, places.tolist(), strict=True)
    ]
