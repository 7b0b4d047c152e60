"""Changes logits before a token is chosen: the interface for sampling parameters off the fast path, and the penalties.

Temperature, top_k, top_p and min_p are the fast path: every runner knows them, and may choose a token without returning
logits. Any other parameter is a LogitsProcessor, in PROCESSORS. A row to which one applies returns its logits, and the
sampler chooses its token. docs/add_a_parameter.md says how to add one.

Penalties. Repetition penalty comes first (it scales), then frequency and presence penalties and logit_bias (they
shift). Then tokens that may not end the text yet are forbidden.

A result that float32 cannot hold is computed again in float64, and written as one of the largest floats, in the order
of the exact results. Such logits are so far apart that the largest one wins with any noise, so only their order
matters.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from ...lang.errors import ParameterError, RequestError
from ...lang.sampling import SamplingParams
from ..core.image_token_ids import PICTURE_BASE
from .gumbel import SampleRequest

_LARGEST_SHIFT = 1e300  # in float64: a sum with a scaled logit stays finite
_LARGEST_SCALE = 1e250  # times or through it, a float32 stays finite in float64


class LogitsProcessor(Protocol):
    """Changes logits for one or more sampling parameters. `Penalties` is one."""

    def applies(self, sampling: SamplingParams) -> bool:
        """Returns whether rows with these parameters are changed; if so, no runner chooses their tokens."""

    def process(self, logits: torch.Tensor, requests: Sequence[SampleRequest]) -> Callable[[], None]:
        """Changes the rows of the requests in place and returns what undoes it. logits: float32 [L, vocab].

        Requests to which the processor does not apply are skipped.

        Raises:
            UmbelError: nothing can be drawn for a request; no row has changed then.
        """


class _Touched(NamedTuple):
    """The tokens of one row whose logits change, and their changes."""

    ids: NDArray[np.int64]
    divisors: NDArray[np.float64]
    shifts: NDArray[np.float64]
    forbidden: NDArray[np.bool_]


def apply_penalties(logits: torch.Tensor, requests: Sequence[SampleRequest]) -> Callable[[], None]:
    """Changes the rows of the requests in place and returns what undoes it. logits: [L, vocab].

    Only the changed entries are gathered and written, all rows at once.

    Raises:
        ParameterError: a penalty or a bias is no number; nothing has changed then.
        RequestError: a row in which every token is forbidden.
    """
    touched = [
        (request.row, of_row) for request in requests if (of_row := _of_row(request, logits.shape[1])) is not None
    ]
    if not touched:
        return _nothing
    device = logits.device
    rows = np.concatenate([np.full(len(of_row.ids), row, dtype=np.int64) for row, of_row in touched])
    ids, divisors, shifts, forbidden = (
        torch.from_numpy(np.concatenate(column)).to(device)
        for column in zip(*(of_row for _, of_row in touched), strict=True)
    )
    where = (torch.from_numpy(rows).to(device), ids)
    before = logits[where]
    after = _scaled(before, divisors.float()) + shifts.float()
    overflown = before.isfinite() & ~after.isfinite()
    if bool(overflown.any()):
        after[overflown] = _saturated(_scaled(before[overflown].double(), divisors[overflown]) + shifts[overflown])
    logits[where] = after.masked_fill(forbidden, -torch.inf)

    def restore() -> None:
        logits[where] = before

    return restore


class Penalties:
    """Repetition, frequency and presence penalties, logit_bias, and the tokens that min_tokens forbids."""

    def applies(self, sampling: SamplingParams) -> bool:
        return (
            sampling.frequency_penalty != 0.0
            or sampling.presence_penalty != 0.0
            or sampling.repetition_penalty != 1.0
            or bool(sampling.logit_bias)
        )

    def process(self, logits: torch.Tensor, requests: Sequence[SampleRequest]) -> Callable[[], None]:
        return apply_penalties(logits, requests)


PROCESSORS: tuple[LogitsProcessor, ...] = (Penalties(),)  # in the order in which they change logits


def changes_logits(sampling: SamplingParams) -> bool:
    """Returns whether a processor changes the logits of rows with these parameters before a token is drawn."""
    return any(processor.applies(sampling) for processor in PROCESSORS)


def _nothing() -> None:
    """Undoes nothing."""


def _scaled(values: torch.Tensor, divisors: torch.Tensor) -> torch.Tensor:
    return torch.where(values > 0, values / divisors, values * divisors)


def _saturated(values: torch.Tensor) -> torch.Tensor:
    """Converts to float32; values beyond its range become its largest floats, in order. values: float64 [n]."""
    rounded = values.float()
    largest = torch.tensor([torch.finfo(torch.float32).max], device=values.device).view(torch.int32)
    for sign in (1.0, -1.0):
        beyond = rounded == sign * torch.inf
        ordered, places = torch.unique(values[beyond] * sign, return_inverse=True)
        steps = (len(ordered) - 1 - places).int()  # floats of one sign are ordered like their bits
        rounded[beyond] = (largest - steps).view(torch.float32) * sign
    return rounded


def _of_row(request: SampleRequest, vocab_size: int) -> _Touched | None:
    """Returns the changes of one row; None for most rows."""
    sampling = request.sampling
    counted = sampling.frequency_penalty != 0.0 or sampling.presence_penalty != 0.0
    repeated = sampling.repetition_penalty != 1.0
    if not (counted or repeated or sampling.logit_bias or request.forbidden):
        return None
    _require_numbers(request)
    if len(request.forbidden) >= vocab_size:
        raise RequestError(
            f"no token can be chosen: all {vocab_size} tokens end the text, and min_tokens={sampling.min_tokens} "
            "forbids them; write fewer stop_token_ids or min_tokens=0"
        )
    generated = np.fromiter(request.counts.keys(), dtype=np.int64, count=len(request.counts))
    forbidden = np.fromiter(request.forbidden, dtype=np.int64)
    parts = [np.fromiter(sampling.logit_bias, dtype=np.int64), forbidden]
    if counted or repeated:
        parts.append(generated)
    if repeated:
        parts.append(request.prompt[request.prompt < PICTURE_BASE].astype(np.int64))
    ids = np.unique(np.concatenate(parts))
    if not len(ids):
        return None
    assert 0 <= ids[0] <= ids[-1] < vocab_size, "ids are checked when the request comes in"
    divisors = np.ones(len(ids))
    shifts = np.zeros(len(ids))
    if repeated:
        seen = np.isin(ids, request.prompt) | np.isin(ids, generated)
        divisors[seen] = min(max(sampling.repetition_penalty, 1 / _LARGEST_SCALE), _LARGEST_SCALE)
    with np.errstate(over="ignore"):
        if counted and len(generated):
            occurrences = np.fromiter(request.counts.values(), dtype=np.float64, count=len(request.counts))
            shifts[np.searchsorted(ids, generated)] -= (
                sampling.frequency_penalty * occurrences + sampling.presence_penalty
            )
        for token, bias in sampling.logit_bias.items():
            shifts[np.searchsorted(ids, token)] += bias
    return _Touched(ids, divisors, shifts.clip(-_LARGEST_SHIFT, _LARGEST_SHIFT), np.isin(ids, forbidden))


def _require_numbers(request: SampleRequest) -> None:
    sampling = request.sampling
    shifts = (sampling.frequency_penalty, sampling.presence_penalty, *sampling.logit_bias.values())
    if not all(map(math.isfinite, shifts)):
        raise ParameterError(
            f"frequency_penalty={sampling.frequency_penalty}, presence_penalty={sampling.presence_penalty} and the "
            "values of logit_bias are added to logits; write finite numbers"
        )
    if not 0.0 < sampling.repetition_penalty < math.inf:
        raise ParameterError(
            f"repetition_penalty={sampling.repetition_penalty} divides logits; write a number above 0, 1.0 for none"
        )
