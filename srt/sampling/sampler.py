"""Chooses tokens from logits, for all rows of a step together, and computes their log-probabilities.

A row's token depends on its logits, its parameters and (seed, position), never on the rest of the batch; gumbel.py has
the definition. So a text is the same alone, in a batch, and after a retraction.

Order of operations on a row, each on the result of the one before:
repetition, frequency and presence penalties → logit_bias → tokens forbidden before min_tokens → temperature →
top_k → top_p (mass among what top_k kept) → min_p (relative to the best token). Tokens that tie with the last one
kept are kept too, so ties never depend on how a library sorts.

Log-probabilities are those of the model's own distribution: log-softmax of the logits as the model gave them, before
temperature, penalties, biases and truncation. So a number means the same whatever the sampling parameters are.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from ...fsm.tokens.vocabulary import pack
from ...lang.errors import ParameterError, RequestError
from ...lang.sampling import SamplingParams
from ..core.batch import PICTURE_BASE, Allowed, Chooser, Draws, LogitsError, RowNeed, RowRequests
from ..core.messages import IdLogprob
from .gumbel import SampleRequest, TorchSampling, gumbel, stack_draws

_LARGEST_SHIFT = 1e300  # in float64: a sum with a scaled logit stays finite
_LARGEST_SCALE = 1e250  # times or through it, a float32 stays finite in float64


class LogitsProcessor(Protocol):
    """Changes logits before a token is chosen, for sampling parameters off the fast path. `Penalties` is one.

    Temperature, top_k, top_p and min_p are the fast path: every runner knows them, and may choose a token without
    returning logits. Any other parameter is a LogitsProcessor, in PROCESSORS. A row to which one applies returns its
    logits, and the sampler chooses its token. docs/add_a_parameter.md says how to add one.
    """

    def applies(self, sampling: SamplingParams) -> bool:
        """Returns whether rows with these parameters are changed; if so, no runner chooses their tokens."""

    def process(self, logits: torch.Tensor, requests: Sequence[SampleRequest]) -> Callable[[], None]:
        """Changes the rows of the requests in place and returns what undoes it. logits: float32 [L, vocab].

        Requests to which the processor does not apply are skipped. A constraint's mask comes afterwards: a processor
        that removes tokens, or measures a row, reads `request.mask` and keeps a token that it allows.

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

    Repetition penalty comes first (it scales), then frequency and presence penalties and logit_bias (they shift). Then
    tokens that may not end the text yet are forbidden.

    A result that float32 cannot hold is computed again in float64, and written as one of the largest floats, in the
    order of the exact results. Such logits are so far apart that the largest one wins with any noise, so only their
    order matters.

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


class Sampler:
    """Chooses tokens. Changes the rows of the logits it draws from in place: take log-probabilities before.

    Args:
        vocab_size: columns of the logits that are tokens; the rest is padding of the model and is never chosen.
        chooser: does the computation; None: in torch.
        processors: change logits first, in this order.
    """

    def __init__(
        self,
        vocab_size: int,
        chooser: Chooser | None = None,
        processors: Sequence[LogitsProcessor] = PROCESSORS,
    ) -> None:
        self.vocab_size = vocab_size
        self.chooser = chooser or TorchSampling()
        self._processors = processors

    def sample(self, logits: torch.Tensor, requests: Sequence[SampleRequest]) -> list[int]:
        """Chooses one token for each request. logits: float32 [L, vocab]; as they were before when this raises.

        Raises:
            LogitsError: the logits of a row are not numbers.
            ParameterError: nothing can be drawn with the sampling parameters of a row.
        """
        if not requests:
            return []
        draws = stack_draws(requests)
        undo: list[Callable[[], None]] = []
        try:
            for processor in self._processors:
                undo.append(processor.process(logits[:, : self.vocab_size], requests))
            tokens: list[int] = self.choose(logits, draws).tolist()
        except Exception:
            for restore in reversed(undo):
                restore()
            raise
        return tokens

    def choose(self, logits: torch.Tensor, draws: Draws) -> NDArray[np.int64]:
        """Chooses tokens for rows that no processor changes; `logits` stay unchanged."""
        return self.chooser.choose(logits[:, : self.vocab_size], draws)


@dataclass(frozen=True, slots=True)
class Wanted:
    """Asks one row of logits for the log-probability of `token` and of the `top` most likely tokens."""

    row: int
    token: int
    top: int = 0


def look_up(
    logits: torch.Tensor, wanted: Sequence[tuple[int, NDArray[np.int32]]], chooser: Chooser
) -> list[NDArray[np.float64]]:
    """Returns, for each (row, tokens), the log-probabilities of those tokens. logits: [_, vocab]."""
    if not wanted:
        return []
    rows, places = np.unique(np.array([row for row, _ in wanted], dtype=np.int64), return_inverse=True)
    counts = [len(tokens) for _, tokens in wanted]
    tokens = np.concatenate([tokens for _, tokens in wanted]).astype(np.int64)
    where = (np.repeat(rows[places], counts), tokens)
    values = logits[tuple(torch.from_numpy(index).to(logits.device) for index in where)].double().cpu().numpy()
    logprobs = values - np.repeat(chooser.summarise(logits, rows, 0).normalisers[places], counts)
    return np.split(logprobs, np.cumsum(counts)[:-1])


def describe(logits: torch.Tensor, wanted: Sequence[Wanted], chooser: Chooser) -> list[IdLogprob]:
    """Returns an IdLogprob for each wanted token; reads every row once. logits: [_, vocab]."""
    if not wanted:
        return []
    rows, places = np.unique(np.array([want.row for want in wanted], dtype=np.int64), return_inverse=True)
    most = max(want.top for want in wanted)
    summary = chooser.summarise(logits, rows, most)
    own = torch.tensor([want.token for want in wanted], device=logits.device)
    values = logits[torch.from_numpy(rows[places]).to(logits.device), own].double().cpu().numpy()
    logprobs = (values - summary.normalisers[places]).tolist()
    tokens = summary.top_tokens.tolist()
    alternatives = (summary.top_logits - summary.normalisers[:, None]).tolist()
    return [
        IdLogprob(
            want.token, logprob, tuple(zip(tokens[place][: want.top], alternatives[place][: want.top], strict=True))
        )
        for want, logprob, place in zip(wanted, logprobs, places.tolist(), strict=True)
    ]


def draws_of(row_requests: RowRequests, rows: NDArray[np.integer], places: NDArray[np.int64], vocab_size: int) -> Draws:
    """Returns the draws of some of the rows that need a token. places: [n], where their logits are."""
    sampled = row_requests.kinds[rows] == RowNeed.SAMPLE
    ones = np.ones(len(rows))
    return Draws(
        rows=places,
        inverse_temperatures=np.where(sampled, row_requests.inverse_temperatures[rows], 0.0),
        keys=row_requests.keys[rows],
        top_k=row_requests.top_k[rows],
        top_p=ones if row_requests.top_p is None else np.where(sampled, row_requests.top_p[rows], ones),
        min_p=row_requests.min_p[rows],
        masks=[bits_of(row_requests.allowed.get(row), vocab_size) for row in rows.tolist()]
        if row_requests.allowed
        else None,
    )


def bits_of(allowed: Allowed | None, vocab_size: int) -> NDArray[np.uint32] | None:
    """Returns the allowed tokens as a mask."""
    if allowed is None or allowed.few is None:
        return None if allowed is None else allowed.bits
    return pack(allowed.few, -(-vocab_size // 32))


def choose_few(logits: NDArray[np.float32], tokens: NDArray[np.int32], row_requests: RowRequests, row: int) -> int:
    """Chooses among `tokens` for a row, by the definition of a draw. logits: those of `tokens`.

    Raises:
        LogitsError: a logit is not a number.
    """
    values = logits.astype(np.float64)
    if not np.isfinite(values).all():
        raise LogitsError
    if row_requests.kinds[row] == RowNeed.ARGMAX:
        return int(tokens[values.argmax()])
    scale, top_k, min_p = row_requests.inverse_temperatures[row], int(row_requests.top_k[row]), row_requests.min_p[row]
    scores = values * scale + gumbel(row_requests.keys[row : row + 1], tokens)
    if 0 < top_k < len(values):
        scores[values < np.partition(values, -top_k)[-top_k]] = -np.inf
    if min_p > 0:
        scores[(values - values.max()) * scale < np.log(min_p)] = -np.inf
    return int(tokens[scores.argmax()])
