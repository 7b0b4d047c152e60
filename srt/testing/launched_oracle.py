"""The oracle as an AsyncRunner: the fake of a runner that does not wait for its steps.

It resolves rows whose token is still being chosen by itself, and checks the histories behind them as it checks all
others. With a virtual clock its steps take time: they run one after the other from their launch, and who asks for an
answer waits for it.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ..core.batch import Batch, Logits, RowNeed, RowRequests, Runner
from ..core.clock import VirtualClock
from ..core.isolation import isolate
from ..sampling.sampler import Sampler
from ..scheduler.request import PENDING_TOKEN
from ..scheduler.row_requests import MAX_SAMPLED_TOP_K, draws_of
from .oracle import OracleRunner


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
        asked = batch.row_requests
        if batch.token_sources is not None:
            batch = replace(batch, token_ids=self.resolve(batch.token_ids, batch.token_sources), token_sources=None)
        if asked is not None:
            batch = replace(batch, row_requests=_narrowed(asked))
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

    def _chosen(self, logits: Logits, asked: RowRequests) -> Logits:
        """Every pick that may be any token has one, or an error."""
        tokens, errors = logits.tokens.copy(), dict(logits.errors)
        left = (asked.kinds != RowNeed.LOGITS) & (tokens < 0)
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


def _narrowed(row_requests: RowRequests) -> RowRequests:
    """As it is asked of a runner that is no AsyncRunner: of other rows it is to give the logits."""
    wide = np.zeros(len(row_requests.kinds), dtype=np.bool_)
    if row_requests.described is not None:
        wide |= row_requests.described
    if row_requests.top_p is not None:
        wide |= (row_requests.kinds == RowNeed.SAMPLE) & (
            (row_requests.top_p < 1) | (row_requests.top_k > MAX_SAMPLED_TOP_K)
        )
    kinds = np.where(wide, np.uint8(RowNeed.LOGITS), row_requests.kinds)
    return replace(row_requests, kinds=kinds, top_p=None, described=None)


Truth = Sequence[NDArray[np.int32]]
Computes = Literal["when launched", "when asked"]


@dataclass(slots=True, eq=False)
class _Launched:
    """A `batch.Pending` of the oracle."""

    oracle: "LaunchedOracle"
    batch: Batch
    truth: Truth | None
    ends: float  # on the clock
    answer: Logits | Exception | None = None

    def result(self) -> Logits:
        self.oracle.wait(self.ends)
        self.compute()
        if isinstance(self.answer, Logits):
            return self.answer
        assert self.answer is not None, "it has been computed"
        raise self.answer

    def compute(self) -> None:
        if self.answer is None:
            try:
                self.answer = self.oracle.compute(self.batch, self.truth)
            except Exception as error:
                self.answer = error


class LaunchedOracle:
    """An `batch.AsyncRunner` on an OracleRunner.

    Args:
        oracle: its `expected` is ours from now on.
        expected: as OracleRunner's. Asked when a step is launched; tokens may be PENDING_TOKEN.
        computes: what a step writes and reads happens then, but never before the step in front of it.
        clock, seconds: how long a step runs; a step begins when it is launched and the one before it has run.
    """

    chooser = None
    trie_walk = None

    def __init__(
        self,
        oracle: OracleRunner,
        *,
        expected: Callable[[], Truth] | None = None,
        computes: Computes = "when asked",
        clock: VirtualClock | None = None,
        seconds: float = 0.0,
    ) -> None:
        self.oracle = oracle
        self.expected = expected
        self.model = oracle.model
        self.vocab_size = oracle.vocab_size
        self.context_length = oracle.context_length
        self.num_slots = oracle.num_slots
        self.pictures = oracle.pictures
        self._chain = StepChain(oracle)
        self._computes = computes
        self._clock = clock
        self._seconds = seconds
        self._free = 0.0  # on the clock: when all that was launched has run

    def forward(self, batch: Batch) -> Logits:
        return self.launch(batch).result()

    def launch(self, batch: Batch) -> _Launched:
        truth = None if self.expected is None else [tokens.copy() for tokens in self.expected()]
        now = 0.0 if self._clock is None else self._clock.now()
        self._free = max(now, self._free) + self._seconds
        own = replace(batch, slots=tuple(slots.copy() for slots in batch.slots))  # else they are views of sequences
        launched = _Launched(self, own, truth, self._free)
        if self._computes == "when launched":
            launched.compute()
        return launched

    def wait(self, until: float) -> None:
        if self._clock is not None:
            self._clock.advance(max(0.0, until - self._clock.now()))

    def compute(self, batch: Batch, truth: Truth | None) -> Logits:
        """Computes one step, after the one that was computed last. truth: of each sequence the tokens; the last one may
        be PENDING_TOKEN."""
        if truth is not None and batch.token_sources is not None:
            token_ids = self._chain.resolve(batch.token_ids, batch.token_sources)
            last_rows = np.cumsum(batch.query_lengths) - 1
            for tokens, row in zip(truth, last_rows.tolist(), strict=True):
                if tokens[-1] == PENDING_TOKEN:
                    tokens[-1] = token_ids[row]
        self.oracle.expected = None if truth is None else lambda: truth
        return self._chain.run(batch)

    def facts(self) -> Mapping[str, str | int | float]:
        return self.oracle.facts()

    def clear(self) -> None:
        self.oracle.clear()


class Slowed:
    """Sleeps before every step of another runner. A `batch.Runner`."""

    def __init__(self, runner: Runner, seconds: float) -> None:
        self._runner = runner
        self._seconds = seconds
        self.vocab_size = runner.vocab_size
        self.context_length = runner.context_length
        self.num_slots = runner.num_slots
        self.chooser = runner.chooser
        self.trie_walk = runner.trie_walk
        self.pictures = runner.pictures

    def forward(self, batch: Batch) -> Logits:
        time.sleep(self._seconds)
        return self._runner.forward(batch)

    def facts(self) -> Mapping[str, str | int | float]:
        return self._runner.facts()

    def clear(self) -> None:
        self._runner.clear()
