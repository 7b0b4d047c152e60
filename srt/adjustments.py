"""Penalties, biases and forbidden tokens: what is done to logits before a token is chosen.

Repetition penalty first (it scales), then frequency and presence penalties and logit_bias (they shift), then tokens
that may not end the text yet are ruled out.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from .draw import Draw
from .pictures.numbers import PICTURE_BASE


def adjust(logits: torch.Tensor, draws: Sequence[Draw]) -> None:
    """Changes the rows of the draws in place: a few entries per row, gathered and put back together. [L, vocab]"""
    rows, ids, divisors, shifts = [], [], [], []
    for draw in draws:
        touched = _of_row(draw, logits.shape[1])
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


def _of_row(draw: Draw, vocab_size: int) -> tuple[NDArray[np.int64], NDArray[np.float32], NDArray[np.float32]] | None:
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
        parts.append(draw.prompt[draw.prompt < PICTURE_BASE].astype(np.int64))
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
