"""Makes the answer to a step: chooses tokens on the device, and keeps logits for the rows that want them.

Chosen tokens stay on the device for the rows of the next step, and are copied to the host, eight bytes each, after
the step. Only `Answer.result` waits for that copy.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from ...core.batch import Chooser, Draws, Logits, LogitsError, RowNeed, RowRequests, isolate
from ...sampling.sampler import draws_of
from .device import Accelerator, Mark, Staging


class DeviceChooser(Chooser, Protocol):
    """Chooses tokens without waiting. Implemented by `kernels.triton.sampling.TritonSampling`, in torch by
    `reference.ReferenceChooser`."""

    def choose_async(self, logits: torch.Tensor, draws: Draws) -> torch.Tensor:
        """Chooses one token for each draw, int64 [n] on the device; −1 where the logits of a row are not numbers.

        logits: float32 [_, vocab].
        """


@dataclass(frozen=True, slots=True, eq=False)
class ChosenTokens:
    """The tokens that a step has chosen, on the device. `places`: index of each logit row's token, −1 = none."""

    tokens: torch.Tensor  # int64 [n]; −1: the logits were not numbers, or no token could be chosen
    places: NDArray[np.int64]  # [L]


@dataclass(frozen=True, slots=True, eq=False)
class Answer:
    """Implements `batch.Pending`: tokens that are being copied to the host, and logits that stay on the device."""

    values: torch.Tensor  # float32 [F, vocab] on the device
    value_places: NDArray[np.int64]  # [L] index into values, −1 = none
    chosen: ChosenTokens
    errors: Mapping[int, Exception]  # logit row → why no token could be chosen
    host_tokens: torch.Tensor = field(repr=False)  # int64 [n] in pinned memory, full after the mark
    mark: Mark
    finished: Callable[[], None] = field(repr=False)  # called after the mark

    def result(self) -> Logits:
        """Waits for the step and returns its result."""
        self.mark.wait()
        self.finished()
        tokens = np.full(len(self.value_places), -1, dtype=np.int64)
        has_token = self.chosen.places >= 0
        tokens[has_token] = self.host_tokens.numpy()[self.chosen.places[has_token]]
        without = np.flatnonzero(has_token & (tokens < 0)).tolist()
        errors = {row: self.errors.get(row) or LogitsError() for row in without}
        return Logits(self.values, self.value_places, tokens, errors)


class Answers:
    """Chooses tokens on the device and starts their copies to the host."""

    def __init__(self, accelerator: Accelerator, chooser: DeviceChooser) -> None:
        self._accelerator = accelerator
        self._chooser = chooser
        self._staging = Staging(accelerator, 1 << 12)
        self.device_seconds = 0.0  # run time of the steps whose results were read

    def begin(self, logits: torch.Tensor, row_requests: RowRequests | None, *, began: Mark, kept: bool) -> Answer:
        """Enqueues the choice of tokens and their copies, and returns the pending answer.

        Args:
            logits: float32 [L, vocab] on the device.
            began: the mark before the step's work.
            kept: the logits' memory belongs to this step alone; otherwise rows that want logits get a copy.
        """
        count = len(logits)
        picked, whole = _wants(row_requests, count)
        tokens, errors = torch.empty(0, dtype=torch.int64, device=logits.device), dict[int, Exception]()
        if row_requests is not None and len(picked):
            tokens, errors = self._choose(logits, row_requests, picked)
        host_tokens = self._accelerator.host_buffer(tokens.nbytes).view(torch.int64)
        host_tokens.copy_(tokens, non_blocking=True)
        if not len(whole):
            values = logits[:0]
        elif len(whole) < count:
            values = logits.index_select(0, self._staging.send([whole])[0])
        else:
            values = logits if kept else logits.clone()
        mark = self._accelerator.mark()

        def finished() -> None:
            self.device_seconds += mark.seconds_since(began)

        return Answer(
            values=values,
            value_places=_places(whole, count),
            chosen=ChosenTokens(tokens, _places(picked, count)),
            errors=errors,
            host_tokens=host_tokens,
            mark=mark,
            finished=finished,
        )

    def _choose(
        self, logits: torch.Tensor, row_requests: RowRequests, picked: NDArray[np.int64]
    ) -> tuple[torch.Tensor, dict[int, Exception]]:
        """Chooses a token for each of the picked rows; −1 for those with an error."""

        def choose(rows: NDArray[np.int64]) -> torch.Tensor:
            return self._chooser.choose_async(logits, draws_of(row_requests, rows, rows, logits.shape[1]))

        try:
            return choose(picked), {}
        except Exception:
            rows = picked.tolist()
            answers = isolate(rows, lambda some: list(choose(np.array(some, dtype=np.int64))))
        none = torch.full((), -1, dtype=torch.int64, device=logits.device)
        errors = {row: answer for row, answer in zip(rows, answers, strict=True) if isinstance(answer, Exception)}
        return torch.stack([none if isinstance(answer, Exception) else answer for answer in answers]), errors


def _wants(row_requests: RowRequests | None, count: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Returns the logit rows that need a token, and those that need their logits."""
    if row_requests is None:
        return np.zeros(0, dtype=np.int64), np.arange(count)
    picked = row_requests.kinds != RowNeed.LOGITS
    whole = ~picked if row_requests.described is None else ~picked | row_requests.described
    return np.flatnonzero(picked), np.flatnonzero(whole)


def _places(rows: NDArray[np.int64], count: int) -> NDArray[np.int64]:
    places = np.full(count, -1, dtype=np.int64)
    places[rows] = np.arange(len(rows))
    return places
