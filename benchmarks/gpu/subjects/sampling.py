"""Tokens chosen among logits. What needs msgspec: what a draw is, is said in the language."""

from collections.abc import Iterator
from functools import partial

import numpy as np
import torch
from umbel.srt.core.batch import Draws
from umbel.srt.kernels.triton.sampling import DeviceDraws, TritonSampling
from umbel.srt.sampling.sampler import draw_keys

from ..figures import Unit
from .batches import normal
from .sizes import Sizes
from .subject import Subject

GROUP = "sampling"
MUST, STRETCH = 50.0, 75.0  # % of bandwidth, one read of the logits counted: two reads, and one with a small pass
# What requests ask for: greedy, a race of all tokens, and of those that limits leave.
WISHES = {
    "the most likely token": {"temperature": 0.0},
    "a draw": {"temperature": 1.0},
    "a draw of top_k 50": {"temperature": 1.0, "top_k": 50},
    "a draw of top_p 0.9": {"temperature": 0.7, "top_p": 0.9},
    "a draw of min_p 0.05": {"temperature": 1.0, "min_p": 0.05},
    "a draw of top_k 20, top_p 0.8": {"temperature": 0.7, "top_k": 20, "top_p": 0.8},
}


def sampling_subjects(sizes: Sizes, device: torch.device) -> Iterator[Subject]:
    logits = 3 * normal(sizes.draws, sizes.vocab, device=device)
    sampling = TritonSampling()
    for name, wish in WISHES.items():
        columns = DeviceDraws.of(draws(sizes.draws, **wish), device)
        yield Subject(
            group=GROUP,
            name=f"{name}, {sizes.draws} rows of {sizes.vocab}",
            unit=Unit.BANDWIDTH,
            work=partial(sampling.choose_sent, logits, columns),
            size=logits.nbytes,
            must=MUST,
            stretch=STRETCH,
            beside=None if wish["temperature"] else partial(torch.argmax, logits, dim=-1),
            note="one read of the logits is 100 %" + ("" if wish["temperature"] else "; beside: torch"),
        )


def draws(count: int, *, temperature: float, top_k: float = 0, top_p: float = 1.0, min_p: float = 0.0) -> Draws:
    """One for each row, each with a seed of its own."""
    return Draws(
        rows=np.arange(count),
        inverse_temperatures=np.full(count, 1 / temperature if temperature else 0.0),
        keys=draw_keys(list(range(count)), [7] * count),
        top_k=np.full(count, top_k, dtype=np.int32),
        top_p=np.full(count, top_p),
        min_p=np.full(count, min_p),
    )
