"""Launched steps on a runner that waits: what an AsyncRunner owes its caller, made of `forward`.

For runners that compute beside the scheduler (threaded_runner.py), or as if they did (launched_oracle.py). Steps run in
the order of their launches.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from ..core.batch import Batch, Logits, Pick, Picks, Runner
from ..core.isolation import isolate
from ..sampling.sampler import Sampler
from ..scheduler.row_requests import MOST_PICKED, draws_of


class StepChain:
    """Runs steps one behind the other, and hands the tokens that one chooses to the next.

    Args:
        runner: computes. Its answers are valid until the next step runs.
    """

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._sampler = Sampler(runner.vocab_size, runner.chooser)
        # [L] of the last step; −1: not chosen there. 0 where that failed: the text has ended when this is noticed
        self._tokens = np.empty(0, dtype=np.int64)

    def run(self, batch: Batch) -> Logits:
        """As `Runner.forward`, for a batch that `AsyncRunner.launch` takes."""
        asked = batch.picks
        if batch.token_sources is not None:
            batch = replace(batch, token_ids=self.resolve(batch.token_ids, batch.token_sources), token_sources=None)
        if asked is not None:
            batch = replace(batch, picks=_narrowed(asked))
        logits = self._runner.forward(batch)
        if asked is not None:
            logits = self._chosen(logits, asked)
        self._tokens = logits.tokens.copy()
        self._tokens[list(logits.errors)] = 0
        return logits

    def resolve(self, token_ids: NDArray[np.int64], sources: NDArray[np.int64]) -> NDArray[np.int64]:
        """The rows' tokens: those that are given, and those that the last step has chosen. Both: [R]"""
        rows = np.flatnonzero(sources >= 0)
        resolved = token_ids.copy()
        resolved[rows] = self._tokens[sources[rows]]
        assert resolved[rows].min(initial=0) >= 0, "a row refers to a token that the step before did not choose"
        return resolved

    def _chosen(self, logits: Logits, asked: Picks) -> Logits:
        """Every pick that may be any token has one, or an error."""
        tokens, errors = logits.tokens.copy(), dict(logits.errors)
        left = (asked.kinds != Pick.ALL) & (tokens < 0)
        left[[*asked.allowed, *errors]] = False

        def choose(rows: Sequence[int]) -> list[int]:
            some = np.array(rows, dtype=np.int64)
            draws = draws_of(asked, some, logits.places[some], self._sampler.vocab_size)
            chosen: list[int] = self._sampler.choose(logits.values, replace(draws, masks=None)).tolist()
            return chosen

        rows = np.flatnonzero(left).tolist()
        for row, answer in zip(rows, isolate(rows, choose), strict=True):
            if isinstance(answer, Exception):
                errors[row] = answer
            else:
                tokens[row] = answer
        return Logits(logits.values, logits.places, tokens, errors)


def _narrowed(picks: Picks) -> Picks:
    """As it is asked of a runner that is no AsyncRunner: of other rows it is to give the logits."""
    wide = np.zeros(len(picks.kinds), dtype=np.bool_)
    if picks.described is not None:
        wide |= picks.described
    if picks.top_p is not None:
        wide |= (picks.kinds == Pick.SAMPLE) & ((picks.top_p < 1) | (picks.top_k > MOST_PICKED))
    kinds = np.where(wide, np.uint8(Pick.ALL), picks.kinds)
    return replace(picks, kinds=kinds, top_p=None, described=None)
