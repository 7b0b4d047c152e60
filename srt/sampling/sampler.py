"""Chooses tokens from logits, for all rows of a step together, and computes their log-probabilities.

A row's token depends on its logits, its parameters and (seed, position), never on the rest of the batch; gumbel.py has
the definition. So a text is the same alone, in a batch, and after a retraction.

Order of operations on a row, each on the result of the one before:
repetition, frequency and presence penalties → logit_bias → tokens forbidden before min_tokens → temperature →
top_k → top_p (mass among what top_k kept) → min_p (relative to the best token). Tokens that tie with the last one
kept are kept too, so ties never depend on how a library sorts.

Log-probabilities are those of the model's own distribution: log-softmax of the logits as the model gave them, before
temperature, penalties, biases and truncation. So a number means the same whatever the sampling parameters are.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from ..core.batch import Chooser, Draws
from ..core.messages import IdLogprob
from .gumbel import SampleRequest, stack_draws
from .processors import PROCESSORS, LogitsProcessor
from .torch_sampler import TorchSampling


class Sampler:
    """Chooses tokens. Changes the rows of the logits it draws from in place: take log-probabilities before.

    Args:
        vocab_size: columns of the logits that are tokens; the rest is padding of the model and is never chosen.
        chooser: does the computation; None: in torch.
        processors: change logits first, in this order.
    """

    def __init__(
        self,
        vocab_size: int,
        chooser: Chooser | None = None,
        processors: Sequence[LogitsProcessor] = PROCESSORS,
    ) -> None:
        self.vocab_size = vocab_size
        self.chooser = chooser or TorchSampling()
        self._processors = processors

    def sample(self, logits: torch.Tensor, requests: Sequence[SampleRequest]) -> list[int]:
        """Chooses one token for each request. logits: float32 [L, vocab]; as they were before when this raises.

        Raises:
            LogitsError: the logits of a row are not numbers.
            ParameterError: nothing can be drawn with the sampling parameters of a row.
        """
        if not requests:
            return []
        draws = stack_draws(requests)
        undo: list[Callable[[], None]] = []
        try:
            for processor in self._processors:
                undo.append(processor.process(logits[:, : self.vocab_size], requests))
            tokens: list[int] = self.choose(logits, draws).tolist()
        except Exception:
            for restore in reversed(undo):
                restore()
            raise
        return tokens

    def choose(self, logits: torch.Tensor, draws: Draws) -> NDArray[np.int64]:
        """Chooses tokens for rows that no processor changes; `logits` stay unchanged."""
        return self.chooser.choose(logits[:, : self.vocab_size], draws)


@dataclass(frozen=True, slots=True)
class Wanted:
    """Asks one row of logits for the log-probability of `token` and of the `top` most likely tokens."""

    row: int
    token: int
    top: int = 0


def look_up(
    logits: torch.Tensor, wanted: Sequence[tuple[int, NDArray[np.int32]]], chooser: Chooser
) -> list[NDArray[np.float64]]:
    """Returns, for each (row, tokens), the log-probabilities of those tokens. logits: [_, vocab]."""
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
    """Returns an IdLogprob for each wanted token; reads every row once. logits: [_, vocab]."""
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
