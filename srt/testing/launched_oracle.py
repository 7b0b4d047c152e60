"""The oracle as an AsyncRunner: the fake of a runner that does not wait for its steps.

It resolves rows whose token is still being chosen, and checks their histories like all others. With a virtual clock its
steps take time: they run one after the other from their launch, and `result` waits.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ..core.batch import Batch, Logits, PagePart, RowNeed, RowRequests, Runner, SavedPages, isolate
from ..core.instruments import VirtualClock
from ..sampling.sampler import Sampler, draws_of
from ..scheduler.request import PENDING_TOKEN
from ..scheduler.step import MAX_SAMPLED_TOP_K
from .oracle import OraclePages, OracleRunner


class StepChain:
    """Runs steps one after the other, and passes the tokens chosen by one to the next.

    Args:
        runner: runs the steps. Its results are valid until the next step runs.
    """

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._sampler = Sampler(runner.vocab_size, runner.chooser)
        # [L] of the last step; −1: not chosen there. 0 after an error: the text has ended before it is used
        self._tokens = np.empty(0, dtype=np.int64)

    def run(self, batch: Batch) -> Logits:
        """Runs one step, as `Runner.forward`, for a batch of `AsyncRunner.launch`."""
        asked = batch.row_requests
        if batch.token_sources is not None:
            batch = replace(batch, token_ids=self.resolve(batch.token_ids, batch.token_sources), token_sources=None)
        if asked is not None:
            batch = replace(batch, row_requests=_narrowed(asked))
        logits = self._runner.forward(batch)
        if asked is not None:
            rows = np.flatnonzero((asked.kinds != RowNeed.LOGITS) & (asked.kinds != RowNeed.LATER))
            logits = self._chosen(logits, rows, asked.take(rows))
        self._keep(logits)
        return logits

    def choose(self, logits: Logits, rows: NDArray[np.int64], asked: RowRequests) -> Logits:
        """Chooses tokens of further rows of the last step, whose result is `logits`. See `LaunchedStep.choose`."""
        logits = self._chosen(logits, rows, asked)
        self._keep(logits)
        return logits

    def _keep(self, logits: Logits) -> None:
        self._tokens = logits.tokens.copy()
        self._tokens[list(logits.errors)] = 0

    def resolve(self, token_ids: NDArray[np.int64], sources: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns the rows' tokens: those given, and those that the last step has chosen. Both: [R]"""
        rows = np.flatnonzero(sources >= 0)
        resolved = token_ids.copy()
        resolved[rows] = self._tokens[sources[rows]]
        assert resolved[rows].min(initial=0) >= 0, "a row refers to a token that the step before did not choose"
        return resolved

    def _chosen(self, logits: Logits, rows: NDArray[np.int64], asked: RowRequests) -> Logits:
        """Chooses the tokens of those of `rows` that have none yet. asked: one entry for each of them."""
        tokens, errors = logits.tokens.copy(), dict(logits.errors)

        def choose(some: Sequence[int]) -> list[int]:
            picked = np.array(some, dtype=np.int64)
            draws = draws_of(asked, picked, logits.places[rows[picked]], self._sampler.vocab_size)
            chosen: list[int] = self._sampler.choose(logits.values, draws).tolist()
            return chosen

        left = [index for index, row in enumerate(rows.tolist()) if tokens[row] < 0 and row not in errors]
        for index, answer in zip(left, isolate(left, choose), strict=True):
            if isinstance(answer, Exception):
                errors[int(rows[index])] = answer
            else:
                tokens[rows[index]] = answer
        return replace(logits, tokens=tokens, errors=errors)


def _narrowed(row_requests: RowRequests) -> RowRequests:
    """Narrows requests to those of a plain Runner: the other rows get logits."""
    wide = row_requests.kinds == RowNeed.LATER
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
    """A step of the oracle, as a `batch.LaunchedStep`."""

    oracle: "LaunchedOracle"
    batch: Batch
    truth: Truth | None
    ends: float  # on the clock
    answer: Logits | Exception | None = None
    late: tuple[NDArray[np.int64], RowRequests] | None = None

    def choose(self, rows: NDArray[np.int64], row_requests: RowRequests) -> None:
        assert self.late is None, "called at most once"
        self.late = rows, row_requests
        if isinstance(self.answer, Logits):
            self.answer = self.oracle.chain.choose(self.answer, rows, row_requests)

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
                if self.late is not None:
                    self.answer = self.oracle.chain.choose(self.answer, *self.late)
            except Exception as error:
                self.answer = error


class LaunchedPages:
    """Implements `batch.PagePort`: what is launched before a copy runs before it, as in the stream of a device."""

    def __init__(self, launched: "LaunchedOracle") -> None:
        self._launched = launched
        self._pages = OraclePages(launched.oracle)
        self.layout = self._pages.layout
        self.bytes_per_token = self._pages.bytes_per_token

    def save(self, slots: NDArray[np.int32], part: PagePart) -> SavedPages:
        self._launched.run_all()
        return self._pages.save(slots, part)

    def load(self, slots: NDArray[np.int32], payloads: Sequence[NDArray[np.uint8]], part: PagePart) -> None:
        self._launched.run_all()
        self._pages.load(slots, payloads, part)


class LaunchedOracle:
    """Implements `batch.AsyncRunner` on an OracleRunner.

    Args:
        oracle: its `expected` is replaced.
        expected: as OracleRunner's. Called when a step is launched; one token of each may be PENDING_TOKEN.
        computes: when a step reads and writes its keys, always after the step before it.
        clock, seconds: duration of a step, which begins when it is launched and the one before it has run.
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
        self.num_states = oracle.num_states
        self.window_pool = oracle.window_pool
        self.pictures = oracle.pictures
        self.pages = None if oracle.num_states else LaunchedPages(self)
        self.chain = StepChain(oracle)
        self._computes = computes
        self._clock = clock
        self._seconds = seconds
        self._free = 0.0  # on the clock: end of all launched steps
        self._launched: list[_Launched] = []  # oldest first: those that may not have run

    def forward(self, batch: Batch) -> Logits:
        return self.launch(batch).result()

    def launch(self, batch: Batch) -> _Launched:
        truth = None if self.expected is None else [tokens.copy() for tokens in self.expected()]
        now = 0.0 if self._clock is None else self._clock.now()
        self._free = max(now, self._free) + self._seconds
        own = replace(batch, slots=tuple(slots.copy() for slots in batch.slots))  # else they are views of sequences
        launched = _Launched(self, own, truth, self._free)
        self._launched = [step for step in self._launched if step.answer is None] + [launched]
        if self._computes == "when launched":
            launched.compute()
        return launched

    def run_all(self) -> None:
        """Runs the steps that were launched."""
        for step in self._launched:
            step.compute()
        self._launched.clear()

    def wait(self, until: float) -> None:
        if self._clock is not None:
            self._clock.advance(max(0.0, until - self._clock.now()))

    def compute(self, batch: Batch, truth: Truth | None) -> Logits:
        """Computes the next step. truth: the tokens of each sequence; one may be PENDING_TOKEN."""
        if truth is not None and batch.token_sources is not None:
            token_ids = self.chain.resolve(batch.token_ids, batch.token_sources)
            last_rows = np.cumsum(batch.query_lengths) - 1
            for tokens, row in zip(truth, last_rows.tolist(), strict=True):
                for place in np.flatnonzero(tokens == PENDING_TOKEN).tolist():
                    tokens[place] = token_ids[row - (len(tokens) - 1 - place)]
        self.oracle.expected = None if truth is None else lambda: truth
        return self.chain.run(batch)

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
        self.num_states = runner.num_states
        self.window_pool = runner.window_pool
        self.chooser = runner.chooser
        self.trie_walk = runner.trie_walk
        self.pictures = runner.pictures
        self.pages = runner.pages

    def forward(self, batch: Batch) -> Logits:
        time.sleep(self._seconds)
        return self._runner.forward(batch)

    def facts(self) -> Mapping[str, str | int | float]:
        return self._runner.facts()

    def clear(self) -> None:
        self._runner.clear()
