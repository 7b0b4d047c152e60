"""Steps in a thread: any runner as an AsyncRunner, so that the scheduler plans while a CPU computes."""

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

from ...lang.errors import ParameterError
from ..core.batch import Batch, Logits, Runner
from .step_chain import StepChain


class _PendingFuture:
    """A `batch.Pending` of the thread."""

    def __init__(self, future: Future[Logits]) -> None:
        self._future = future

    def result(self) -> Logits:
        return self._future.result()


class ThreadedRunner:
    """An `batch.AsyncRunner`. One thread runs the steps of another runner, in the order in which they were launched.

    Logits that the scheduler samples from itself are sampled in torch: a runner's own chooser may share its threads and
    buffers with the step that runs at the same time.

    Raises:
        ParameterError: the runner takes pictures, which come and go in the scheduler's thread.
    """

    chooser = None
    pictures = None

    def __init__(self, runner: Runner) -> None:
        if runner.pictures is not None:
            raise ParameterError(
                'overlap=True: steps of a model that takes pictures cannot run in a thread; write overlap="auto"'
            )
        self._runner = runner
        self._chain = StepChain(runner)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="steps")
        self.vocab_size = runner.vocab_size
        self.context_length = runner.context_length
        self.num_slots = runner.num_slots
        self.trie_walk = runner.trie_walk

    def forward(self, batch: Batch) -> Logits:
        return self.launch(batch).result()

    def launch(self, batch: Batch) -> _PendingFuture:
        own = replace(batch, slots=tuple(slots.copy() for slots in batch.slots))  # else they are views of sequences
        return _PendingFuture(self._thread.submit(self._run, own))

    def facts(self) -> Mapping[str, str | int | float]:
        return self._runner.facts()

    def clear(self) -> None:
        self._runner.clear()

    def close(self) -> None:
        """Waits for the steps that were launched, and ends the thread."""
        self._thread.shutdown()

    def _run(self, batch: Batch) -> Logits:
        """Logits lie in a buffer that the next step overwrites, and that may begin before these are read."""
        logits = self._chain.run(batch)
        return replace(logits, values=logits.values.clone()) if len(logits.values) else logits
