"""A device that computes nothing and takes its time: to measure what surrounds one.

    debug={"pretend_step": 0.005}     the model's tokenizer and constraints, no weights; a step takes 5 ms

What a GPU waits for is above its kernels: plans, masks, processes. On a machine without one, steps of this runner stand
for those of a GPU: they run one after the other from their launch, and the host sleeps until a step has ended. Tokens
are chosen by a hash of sequence and position, under masks among those that are allowed. A step is back to back with the
one before it if it was launched, and that one's late rows were chosen, before that one's forward pass had ended.
"""

import time
from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from ...fsm.tokens.masks import Walk
from ..core.batch import Allowed, Batch, Draws, Logits, RowNeed, RowRequests, StepTimes, Summary, WindowPool

_PRIMES = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9)


class _Chooser:
    """Chooses from logits that are all equal."""

    def choose(self, logits: torch.Tensor, draws: Draws) -> NDArray[np.int64]:
        return np.array([_first(None if draws.masks is None else draws.masks[i]) for i in range(len(draws))])

    def summarise(self, logits: torch.Tensor, rows: NDArray[np.int64], top: int) -> Summary:
        shape = (len(rows), top)
        tokens = np.broadcast_to(np.arange(top, dtype=np.int32), shape)
        return Summary(np.full(len(rows), np.log(logits.shape[1])), tokens, np.zeros(shape, dtype=np.float32))


def _first(mask: NDArray[np.uint32] | None) -> int:
    return 0 if mask is None else _allowed_token(Allowed(None, mask), 0)


def _allowed_token(allowed: Allowed, number: int) -> int:
    """Returns one of the allowed tokens, by a number."""
    if allowed.few is not None:
        return int(allowed.few[number % len(allowed.few)])
    assert allowed.bits is not None, "tokens are few, or in a mask"
    words = np.flatnonzero(allowed.bits)
    word = int(words[number % len(words)])
    bits = int(allowed.bits[word])
    places = [bit for bit in range(32) if bits >> bit & 1]
    return word * 32 + places[number // len(words) % len(places)]


class PretendedStep:
    """Implements `batch.LaunchedStep`."""

    def __init__(self, device: "PretendedDevice", batch: Batch, ends: float, idle: float) -> None:
        self._device = device
        self._idle = idle
        self._forward_ends = ends
        asked = batch.row_requests
        self._numbers = _numbers(batch)
        self.ends = ends
        count = len(batch.logit_rows)
        self._tokens = np.full(count, -1, dtype=np.int64)
        kinds = np.full(count, RowNeed.LOGITS) if asked is None else asked.kinds
        self._whole = kinds == RowNeed.LOGITS
        if asked is not None and asked.described is not None:
            self._whole |= asked.described
        picked = np.flatnonzero((kinds == RowNeed.ARGMAX) | (kinds == RowNeed.SAMPLE))
        self._pick(picked, {} if asked is None else asked.allowed)

    def _pick(self, rows: NDArray[np.int64], allowed: dict[int, Allowed]) -> None:
        words = self._device.words
        self._tokens[rows] = words[(self._numbers[rows] % np.uint64(len(words))).astype(np.int64)]
        for row, tokens in allowed.items():
            self._tokens[row] = _allowed_token(tokens, int(self._numbers[row]))

    def choose(self, rows: NDArray[np.int64], row_requests: RowRequests) -> None:
        places = rows.tolist()
        self._pick(rows, {places[index]: tokens for index, tokens in row_requests.allowed.items()})
        self.ends = self._device.chosen(self.ends)

    def times(self) -> StepTimes:
        """See `TimedStep.times`. A choice takes no time."""
        return StepTimes(self._idle, self._device.seconds, self.ends - self._forward_ends, 0.0)

    def result(self) -> Logits:
        self._device.wait(self.ends)
        places = np.full(len(self._tokens), -1, dtype=np.int64)
        whole = np.flatnonzero(self._whole)
        places[whole] = np.arange(len(whole))
        values = self._device.logits.expand(len(whole), -1)
        return Logits(values, places, self._tokens)


def _numbers(batch: Batch) -> NDArray[np.uint64]:
    """Returns a number for each logit row: a hash of its sequence and position."""
    sequences = np.zeros(len(batch.query_lengths), dtype=np.uint64)
    if batch.sequences is not None:
        sequences = batch.sequences.astype(np.uint64)
    with np.errstate(over="ignore"):
        mixed = np.repeat(sequences, batch.query_lengths) * _PRIMES[0] + batch.positions.astype(np.uint64)
        mixed = (mixed ^ (mixed >> np.uint64(31))) * _PRIMES[1]
    return (mixed ^ (mixed >> np.uint64(29)))[batch.logit_rows]


class PretendedDevice:
    """Implements `batch.AsyncRunner`.

    Args:
        seconds: of a step.
        words: the tokens that it says.
        trie_walk: walks tries of tokens for masks.
        clock, sleep: the time; tests have their own.
    """

    num_states = 0
    window_pool: WindowPool | None = None
    pictures = None
    pages = None

    def __init__(
        self,
        seconds: float,
        words: Sequence[int],
        *,
        vocab_size: int,
        context_length: int,
        num_slots: int,
        trie_walk: Walk | None,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.words = np.array(words, dtype=np.int64)
        self.vocab_size = vocab_size
        self.context_length = context_length
        self.num_slots = num_slots
        self.trie_walk = trie_walk
        self.chooser = _Chooser()
        self.logits = torch.zeros(1, vocab_size)  # of every row
        self.seconds = seconds  # of a step
        self._clock = clock
        self._sleep = sleep
        self._free = 0.0  # on the clock: the end of all that was launched
        self._late = False  # the step that runs chose later than its forward pass ended
        self._steps = 0
        self._back_to_back = 0

    def launch(self, batch: Batch) -> PretendedStep:
        now = self._clock()
        self._steps += 1
        self._back_to_back += now <= self._free and not self._late
        idle = max(0.0, now - self._free) if self._steps > 1 else 0.0
        self._free = max(now, self._free) + self.seconds
        self._late = False
        return PretendedStep(self, batch, self._free, idle)

    def chosen(self, ends: float) -> float:
        """Returns when a step ends whose late rows are chosen now. ends: of its forward pass."""
        now = self._clock()
        self._late = now > ends
        self._free = max(now, ends)
        return self._free

    def wait(self, until: float) -> None:
        """Sleeps until a time on the clock."""
        if (left := until - self._clock()) > 0:
            self._sleep(left)

    def time_steps(self) -> None:
        """Does nothing: times are always known."""

    def forward(self, batch: Batch) -> Logits:
        return self.launch(batch).result()

    def facts(self) -> dict[str, str | int | float]:
        return {"kernels": "pretended", "device_steps": self._steps, "back_to_back_steps": self._back_to_back}

    def clear(self) -> None:
        """Does nothing: there are no keys."""
