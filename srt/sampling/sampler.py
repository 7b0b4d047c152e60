"""Logits → tokens, for all rows of a step together.

What a row gets depends on its logits, its parameters and (seed, position), never on the rest of the batch; draw.py
has the definition. So a text is the same alone, in a batch, and after a retraction.

Order of operations on a row, each on the result of the one before:
repetition, frequency and presence penalties → logit_bias → tokens forbidden before min_tokens → temperature →
top_k → top_p (mass among what top_k kept) → min_p (relative to the best token). Tokens that tie with the last one
kept are kept too, so ties never depend on how a library sorts.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from ..core.batch import Chooser, Draws
from .gumbel import SampleRequest, stack_draws
from .penalties import apply_penalties
from .torch_sampler import TorchSampling


class Sampler:
    """Chooses tokens. Adjusts the rows of the logits it draws from in place: take log-probabilities before.

    Args:
        vocab_size: columns of the logits that are tokens; the rest is padding of the model and is never chosen.
        chooser: who computes; None takes torch.
    """

    def __init__(self, vocab_size: int, chooser: Chooser | None = None) -> None:
        self.vocab_size = vocab_size
        self.chooser = chooser or TorchSampling()

    def sample(self, logits: torch.Tensor, draws: Sequence[SampleRequest]) -> list[int]:
        """One token for each draw. logits: float32 [L, vocab]; as they were before when this raises.

        Raises:
            LogitsError: the logits of a row are not numbers.
            ParameterError: a number among the sampling parameters of a row with which nothing can be drawn.
        """
        if not draws:
            return []
        columns = stack_draws(draws)
        restore = apply_penalties(logits[:, : self.vocab_size], draws)
        try:
            tokens: list[int] = self.choose(logits, columns).tolist()
        except Exception:
            restore()
            raise
        return tokens

    def choose(self, logits: torch.Tensor, draws: Draws) -> NDArray[np.int64]:
        """The same for rows that need no adjustment: nothing is written to."""
        return self.chooser.choose(logits[:, : self.vocab_size], draws)
