"""The oracle as an AsyncRunner: the fake of a runner that does not wait for its steps.

It resolves rows whose token is still being chosen by itself, and checks the histories behind them as it checks all
others. With a virtual clock its steps take time: they run one after the other from their launch, and who asks for an
answer waits for it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ..core.batch import Batch, Logits
from ..core.clock import VirtualClock
from ..runners.step_chain import StepChain
from ..scheduler.request import COMING
from .oracle import OracleRunner

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
        expected: as OracleRunner's. Asked when a step is launched; tokens may be COMING.
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
        """One step, behind the one that was computed last. truth: of each sequence the tokens; one may be COMING."""
        if truth is not None and batch.token_sources is not None:
            token_ids = self._chain.resolve(batch.token_ids, batch.token_sources)
            last_rows = np.cumsum(batch.query_lengths) - 1
            for tokens, row in zip(truth, last_rows.tolist(), strict=True):
                if tokens[-1] == COMING:
                    tokens[-1] = token_ids[row]
        self.oracle.expected = None if truth is None else lambda: truth
        return self._chain.run(batch)

    def facts(self) -> Mapping[str, str | int | float]:
        return self.oracle.facts()

    def clear(self) -> None:
        self.oracle.clear()
