"""A runner that takes its time: for tests of what others do meanwhile."""

import time
from collections.abc import Mapping

from ..core.batch import Batch, Logits, Runner


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
