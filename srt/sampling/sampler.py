"""Chooses tokens from logits, for all rows of a step together, and computes their log-probabilities.

    logits, float32 [rows, vocab]
        │
      processors     repetition, frequency and presence penalties → logit_bias → tokens forbidden before min_tokens
        │            only rows with such a parameter; undone where a row cannot be drawn from
      mask           tokens that a constraint forbids
        │
      draw           temperature → top_k → top_p (mass among what top_k kept) → min_p (relative to the best token)
        │            → the race: the largest of logit / temperature + noise. A `Chooser` does it: `TorchSampling`, the
        │            CPU's kernels, or Triton's; they give the same tokens
      tokens

Each operation on a row is on the result of the one before. Tokens that tie with the last one kept are kept too, so ties
never depend on how a library sorts. Log-probabilities are those of the model's own distribution: log-softmax of the
logits as the model gave them, before temperature, penalties, biases and truncation. So a number means the same whatever
the sampling parameters are.

**The draw** is by the Gumbel-max method. The score of a token is

    score(token) = logit · (1 / temperature) + g(seed, position, token)        in float64

and the token with the largest score is chosen, of equal ones the first. With independent standard Gumbel noise g this
gives every token the probability softmax(logits / temperature)[token]. top_k, top_p and min_p remove tokens before the
draw. The noise of the remaining ones is the same, so they win in proportion to their probabilities.

The noise is a function of (seed, position, token) only, and a row's token depends on its logits, its parameters and
(seed, position), never on the rest of the batch. So a text is the same alone, in a batch, and after a retraction. And a
kernel can compute logits in pieces: a token whose scaled logit plus `LARGEST_NOISE` stays below the best score so far
cannot win, and needs neither its noise nor its exact logit.

    key   = mix(mix(seed) ^ position)              64 bits, one for a draw; mix is splitmix64
    h     = token ^ low half of key                32 bits from here on, all arithmetic wraps around
    h     = (h ^ h >> 17) · 0xed5ad4bb
    h     = (h ^ h >> 11) + high half of key
    h     = h · 0xac4c1b51
    h     = (h ^ h >> 15) · 0x31848bab
    h     = h ^ h >> 14                            Wellons's triple32, with the other half of the key inside
    g     = −log(−log1p(−(h + ½) · 2⁻³²))          float64: small h is large noise

Two libraries may round a logarithm differently in its last bit. Scores are compared in float64, where that decides
nothing but ties closer than 10⁻¹⁵. `kernels/cpu/source/noise.h` is the same in C++, and the last part of
`kernels/triton/sampling.py` in Triton.

The file goes from the whole to its parts: the sampler, log-probabilities, processors, requests as columns, the noise,
and the draw in torch.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from ...fsm.tokens.vocabulary import pack
from ...lang.errors import ParameterError, RequestError
from ...lang.sampling import SamplingParams
from ..core.batch import PICTURE_BASE, Allowed, Chooser, Draws, LogitsError, RowNeed, RowRequests, Summary
from ..core.messages import IdLogprob

LARGEST_NOISE = 22.8739  # of h = 0, rounded up: −log(−log1p(−2⁻³³)) = 22.87385…
SMALLEST_NOISE = -3.13  # of the largest h, rounded down: −log(33 · log 2) = −3.12999…


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """Requests one token from a row of logits.

    `counts` are the generated tokens with their occurrences, `prompt` the prompt's tokens (for the repetition
    penalty), `forbidden` the tokens that may not be chosen now. `position` is that of the new token.
    """

    row: int  # of the logits
    sampling: SamplingParams
    seed: int
    position: int
    counts: Mapping[int, int]
    prompt: NDArray[np.int32]
    forbidden: frozenset[int] = frozenset()
    mask: NDArray[np.uint32] | None = None  # as in Draws


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


# ------------------------------------------------------------------------------------------ log-probabilities


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


# ------------------------------------------------------------------------------------------ penalties and biases


_LARGEST_SHIFT = 1e300  # in float64: a sum with a scaled logit stays finite
_LARGEST_SCALE = 1e250  # times or through it, a float32 stays finite in float64


def changes_logits(sampling: SamplingParams) -> bool:
    """Returns whether a processor changes the logits of rows with these parameters before a token is drawn."""
    return any(processor.applies(sampling) for processor in PROCESSORS)


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


class _Touched(NamedTuple):
    """The tokens of one row whose logits change, and their changes."""

    ids: NDArray[np.int64]
    divisors: NDArray[np.float64]
    shifts: NDArray[np.float64]
    forbidden: NDArray[np.bool_]


def _of_row(request: SampleRequest, vocab_size: int) -> _Touched | None:
    """Returns the changes of one row; None for most rows."""
    sampling = request.sampling
    counted = sampling.frequency_penalty != 0.0 or sampling.presence_penalty != 0.0
    repeated = sampling.repetition_penalty != 1.0
    if not (counted or repeated or sampling.logit_bias or request.forbidden):
        return None
    _require_finite(request)
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


def _require_finite(request: SampleRequest) -> None:
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


# ------------------------------------------------------------------------------------------ what is drawn


_LARGEST_INT32 = 2**31 - 1


class Limits(NamedTuple):
    """The sampling parameters that a draw uses, as numbers that fit the columns of Draws."""

    inverse_temperature: float
    top_k: int  # 0 = all
    top_p: float
    min_p: float

    @classmethod
    def of(cls, sampling: SamplingParams) -> "Limits":
        """Reads the sampling parameters. A top_k larger than any vocabulary keeps all tokens.

        Raises:
            ParameterError: a number with which nothing can be drawn.
        """
        temperature, top_p, min_p, top_k = sampling.temperature, sampling.top_p, sampling.min_p, sampling.top_k
        if not (0.0 <= temperature < math.inf and 0.0 < top_p <= 1.0 and 0.0 <= min_p <= 1.0):
            raise ParameterError(
                f"temperature={temperature}, top_p={top_p}, min_p={min_p}: no token can be drawn; write a temperature "
                "of at least 0, a top_p above 0 and up to 1, a min_p from 0 to 1"
            )
        if not isinstance(top_k, int):
            raise ParameterError(f"top_k={top_k!r} is no number of tokens; write an integer, -1 for all tokens")
        kept = 0 if top_k > _LARGEST_INT32 else max(top_k, 0)
        return cls(inverse_temperature(temperature), kept, top_p, min_p)


def inverse_temperature(temperature: float) -> float:
    """Returns 1 / temperature; 0 for temperature 0; finite for the smallest ones, where the best token wins anyway."""
    return 1.0 / max(temperature, 1e-30) if temperature else 0.0


def stack_draws(draws: Sequence[SampleRequest]) -> Draws:
    """Returns the draws column by column. Raises ParameterError for parameters with which nothing can be drawn."""
    limits = [Limits.of(draw.sampling) for draw in draws]
    return Draws(
        rows=np.array([draw.row for draw in draws], dtype=np.int64),
        inverse_temperatures=np.array([limit.inverse_temperature for limit in limits], dtype=np.float64),
        keys=draw_keys([draw.seed for draw in draws], [draw.position for draw in draws]),
        top_k=np.array([limit.top_k for limit in limits], dtype=np.int32),
        top_p=np.array([limit.top_p for limit in limits], dtype=np.float64),
        min_p=np.array([limit.min_p for limit in limits], dtype=np.float64),
        masks=[draw.mask for draw in draws] if any(draw.mask is not None for draw in draws) else None,
    )


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


# ------------------------------------------------------------------------------------------ noise


_MASK = (1 << 64) - 1


def draw_key(seed: int, position: int) -> int:
    """Hashes (seed, position) to 64 bits."""
    return _mix(_mix(seed) ^ (position & _MASK))


def draw_keys(seeds: Sequence[int], positions: Sequence[int]) -> NDArray[np.uint64]:
    """Returns `draw_key` of each seed and position."""
    bits = np.array([seed & _MASK for seed in seeds], dtype=np.uint64)
    return _mix_all(_mix_all(bits) ^ np.array(positions, dtype=np.uint64))


def gumbel(keys: NDArray[np.uint64], tokens: NDArray[np.integer]) -> NDArray[np.float64]:
    """Returns the noise of each token under its key. keys and tokens: shapes that broadcast."""
    hashed = token_hash(keys, tokens).astype(np.float64)
    return -np.log(-np.log1p((hashed + 0.5) * -(2.0**-32)))


def token_hash(keys: NDArray[np.uint64], tokens: NDArray[np.integer]) -> NDArray[np.uint32]:
    """Returns h of the definition above. Under one key it differs for any two tokens."""
    low, high = keys.astype(np.uint32), (keys >> np.uint64(32)).astype(np.uint32)
    h = np.bitwise_xor(tokens.astype(np.uint32), low)
    with np.errstate(over="ignore"):
        h = (h ^ (h >> np.uint32(17))) * np.uint32(0xED5AD4BB)
        h = (h ^ (h >> np.uint32(11))) + high
        h = h * np.uint32(0xAC4C1B51)
        h = (h ^ (h >> np.uint32(15))) * np.uint32(0x31848BAB)
    hashed: NDArray[np.uint32] = h ^ (h >> np.uint32(14))
    return hashed


def _mix(value: int) -> int:
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def _mix_all(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: NDArray[np.uint64] = values ^ (values >> np.uint64(31))
    return mixed


# ------------------------------------------------------------------------------------------ the draw in torch


_BLOCK = 128  # tokens whose maximum is taken first; divides the vocabularies of Llama, Qwen and Gemma
_NUCLEUS = 64  # tokens among which a nucleus is looked for first
_ROWS = 16  # rows of whole-vocabulary work at once: 16 MiB at 262,144 tokens
_BIN_SHIFT = 16  # of the bits of a weight: sign, exponent and 7 bits of the fraction stay
_ALL = np.uint32(0xFFFFFFFF)  # a word of a mask that allows its 32 tokens
_FEW_WORDS = 4  # where at most one word in so many forbids a token, the forbidden tokens are listed
_ROUNDING = 1e-6  # of a mass that is summed in float32


class TorchSampling:
    """Implements `batch.Chooser` in torch, from full logits, on any device: the kernels' reference.

    A vocabulary has up to 262,144 tokens, and nothing here sorts it. The best token or the top of a row comes from the
    maxima of blocks, then from the few blocks that can contain it. A wider nucleus (top_p) comes from a histogram over
    the leading bits of the weights; only the decisive bin is sorted. Passes over whole rows write to one buffer that is
    kept: allocating that size costs more than the arithmetic.
    """

    def __init__(self) -> None:
        self._weights = torch.empty(0)  # [_ROWS, vocab], made when it is needed

    def choose(self, logits: torch.Tensor, draws: Draws) -> NDArray[np.int64]:
        """Chooses one token for each draw. logits: [_, vocab]."""
        tokens = np.zeros(len(draws), dtype=np.int64)
        greedy = draws.inverse_temperatures == 0
        for group, choose in ((np.flatnonzero(greedy), self._best), (np.flatnonzero(~greedy), self._race)):
            for first in range(0, len(group), _ROWS):
                some = group[first : first + _ROWS]
                rows = _allowed(_rows(logits, draws.rows[some]), draws, some)
                tokens[some] = choose(rows, draws, some)
        return tokens

    def summarise(self, logits: torch.Tensor, rows: NDArray[np.int64], top: int) -> Summary:
        """Computes log-normalisers of rows and their `top` largest logits."""
        chosen = _rows(logits, rows).float()
        normalisers = torch.logsumexp(chosen.double() if chosen.shape[1] < 4096 else chosen, dim=-1)
        _require_numbers(normalisers)
        top = min(top, logits.shape[1])
        top_tokens = np.empty((len(rows), top), dtype=np.int32)
        top_logits = np.empty((len(rows), top), dtype=np.float32)
        if top:
            least = _kth_largest(chosen, np.full(len(rows), top))
            places, tokens = (chosen >= least[:, None]).nonzero(as_tuple=True)
            values = chosen[places, tokens].cpu().numpy()
            ids, owners = tokens.cpu().numpy(), places.cpu().numpy()
            order = np.lexsort((ids, -values, owners))
            firsts = np.searchsorted(owners[order], np.arange(len(rows)))
            kept = order[(firsts[:, None] + np.arange(top)).ravel()]
            top_tokens[:], top_logits[:] = ids[kept].reshape(-1, top), values[kept].reshape(-1, top)
        return Summary(normalisers.double().cpu().numpy(), top_tokens, top_logits)

    # ------------------------------------------------------------------------------------- the most likely

    def _best(self, logits: torch.Tensor, draws: Draws, some: NDArray[np.int64]) -> NDArray[np.int64]:
        return _best(logits)[1].cpu().numpy()

    # ------------------------------------------------------------------------------------- the race

    def _race(self, logits: torch.Tensor, draws: Draws, some: NDArray[np.int64]) -> NDArray[np.int64]:
        """Chooses the token with the largest score among those that the limits keep. logits: [n, vocab]."""
        best, winners = _best(logits)
        inverse, keys = draws.inverse_temperatures[some], draws.keys[some]
        top = best.double().cpu().numpy()
        own = gumbel(keys, winners.cpu().numpy())  # the best token's noise: no token wins with less than its score
        possible = logits >= self._floors(logits, best, draws, some)[:, None]
        for row in range(len(some)):  # row by row it stays in the caches
            possible[row] &= _may_win(logits[row], best[row], float(inverse[row]), int(keys[row]), float(own[row]))
        places, ids = (index.cpu().numpy() for index in possible.nonzero(as_tuple=True))
        values = logits[possible].double().cpu().numpy()
        with np.errstate(divide="ignore"):
            kept = (values - top[places]) * inverse[places] >= np.log(draws.min_p[some][places])
        scores = np.where(kept, values * inverse[places] + gumbel(keys[places], ids), -np.inf)
        return _first_largest(places, ids, scores, len(some))

    def _floors(self, logits: torch.Tensor, best: torch.Tensor, draws: Draws, some: NDArray[np.int64]) -> torch.Tensor:
        """Returns the smallest logit of each row that top_k and top_p keep: [n]."""
        floors = torch.full((len(some),), torch.finfo(torch.float32).min, device=logits.device)
        top_k, top_p = draws.top_k[some], draws.top_p[some]
        limited = np.flatnonzero((top_k > 0) & (top_k < logits.shape[1]))
        if len(limited):
            floors[limited] = _kth_largest(_rows(logits, limited), top_k[limited])
        nuclei = np.flatnonzero(top_p < 1)
        if len(nuclei):
            ends = self._nucleus_ends(
                _rows(logits, nuclei),
                best[nuclei],
                floors[nuclei],
                draws.inverse_temperatures[some][nuclei],
                top_p[nuclei],
            )
            floors[nuclei] = torch.maximum(floors[nuclei], ends)
        return floors

    def _nucleus_ends(
        self,
        logits: torch.Tensor,
        best: torch.Tensor,
        floors: torch.Tensor,
        inverse: NDArray[np.float64],
        top_p: NDArray[np.float64],
    ) -> torch.Tensor:
        """Returns the logit at which the mass, summed from the best token down, reaches top_p: [n].

        top_p is a share of the mass at or above the row's floor.
        """
        scale = torch.from_numpy(inverse).to(logits.device)[:, None]
        weights = self._weigh(logits, best, scale.float())
        weights.masked_fill_(logits < floors[:, None], 0.0)
        wanted = torch.from_numpy(top_p * (1 - _ROUNDING)).to(logits.device)[:, None] * _mass(weights)
        top = _top(logits, min(_NUCLEUS, logits.shape[1]))[0]
        known = torch.exp((top.double() - best[:, None]) * scale)
        known.masked_fill_(top < floors[:, None], 0.0)
        reached = known.cumsum(dim=-1) >= wanted
        ends = top.gather(1, reached.int().max(dim=-1, keepdim=True).indices)[:, 0]
        for row in (~reached[:, -1]).nonzero()[:, 0].tolist():
            ends[row] = _nucleus_end(logits[row], weights[row], wanted[row, 0])
        return ends

    def _weigh(self, logits: torch.Tensor, best: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        """Computes exp((logits − best) · scale) in the kept buffer; the best token's is 1: [n, vocab]."""
        if self._weights.shape != (_ROWS, logits.shape[1]) or self._weights.device != logits.device:
            self._weights = torch.zeros((_ROWS, logits.shape[1]), device=logits.device)
        weights = self._weights[: len(logits)]
        torch.sub(logits, best[:, None], out=weights)
        return weights.mul_(scale).exp_()


def _best(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the largest logit of each row and its token, the first of equal ones."""
    rows, size = logits.shape
    if size % _BLOCK:
        values, tokens = logits.max(dim=-1)
        _require_numbers(values)
        return values, tokens
    blocks = logits.view(rows, -1, _BLOCK)
    values, block = blocks.amax(dim=-1).max(dim=-1)
    _require_numbers(values)
    inside = blocks[torch.arange(rows, device=logits.device), block].max(dim=-1).indices
    return values, block * _BLOCK + inside


def _may_win(logits: torch.Tensor, best: torch.Tensor, inverse: float, key: int, noise: float) -> torch.Tensor:
    """Returns a mask of tokens whose score may reach the best token's, whose noise is known. logits: [vocab].

    Noise of at least x has a hash of at most exp(−x) · 2³². Here hashes lose their last 8 bits, and an exponential in
    float32 may be a little too large, never too small.
    """
    needed = logits.sub(best).mul_(inverse).sub_(noise)  # minus the noise that is needed
    hashes = _leading_hash_bits(key, torch.arange(len(logits), dtype=torch.int32, device=logits.device))
    return hashes <= needed.exp_().mul_(2.0**24 * 1.0001).add_(1)


def _leading_hash_bits(key: int, tokens: torch.Tensor) -> torch.Tensor:
    """Computes `token_hash` without its last 8 bits, in signed 32-bit arithmetic. tokens: int32, overwritten."""
    low, high = np.array([key], dtype=np.uint64).view(np.int32).tolist()  # little-endian, as all of torch's machines
    h = tokens.bitwise_xor_(low)
    h = _mixed(h, 17).mul_(0xED5AD4BB - 2**32)
    h = _mixed(h, 11).add_(high)
    h = h.mul_(0xAC4C1B51 - 2**32)
    h = _mixed(h, 15).mul_(0x31848BAB)
    return _mixed(h, 14).bitwise_right_shift_(8).bitwise_and_(0xFFFFFF)


def _mixed(h: torch.Tensor, shift: int) -> torch.Tensor:
    """Computes h ^ (h >> shift), unsigned."""
    return h.bitwise_xor_((h >> shift).bitwise_and_((1 << (32 - shift)) - 1))


def _kth_largest(logits: torch.Tensor, counts: NDArray[np.integer]) -> torch.Tensor:
    """Returns the counts[row]-th largest logit of each row."""
    least = torch.empty(len(logits), device=logits.device)
    for count in np.unique(counts).tolist():
        same = np.flatnonzero(counts == count)
        least[same] = _top(_rows(logits, same), count)[0][:, -1]
    return least


def _nucleus_end(logits: torch.Tensor, weights: torch.Tensor, wanted: torch.Tensor) -> float:
    """Returns the logit at which the mass, summed from the largest weight down, reaches `wanted`.

    weights: [vocab], 0 to 1.

    The bits of floats that are not negative are ordered like the floats, so their leading bits are bins in order.
    """
    bins = weights.view(torch.int32) >> _BIN_SHIFT
    mass = torch.bincount(bins, weights=weights.double()).flip(0).cumsum(0)  # from the highest bin down
    above = int(torch.searchsorted(mass, wanted))
    if above >= len(mass):
        return float(torch.finfo(torch.float32).min)  # rounding: the whole row does not reach it
    inside = bins == len(mass) - 1 - above
    ordered, order = logits[inside].sort(descending=True)
    before = mass[above - 1] if above else mass.new_zeros(())
    reached = int(torch.searchsorted(weights[inside][order].double().cumsum(0) + before, wanted))
    return float(ordered[min(reached, len(ordered) - 1)])


def _mass(weights: torch.Tensor) -> torch.Tensor:
    """Sums rows to [n, 1] in float64, exactly enough to find where a nucleus ends."""
    size = weights.shape[1]
    if size % _BLOCK:
        return weights.sum(dim=-1, keepdim=True, dtype=torch.float64)
    return weights.view(len(weights), -1, _BLOCK).sum(dim=-1).double().sum(dim=-1, keepdim=True)


def _allowed(logits: torch.Tensor, draws: Draws, some: NDArray[np.int64]) -> torch.Tensor:
    """Returns the rows with −∞ where a mask forbids a token; copies only if there is a mask."""
    if draws.masks is None or all(draws.masks[i] is None for i in some):
        return logits
    logits = logits.clone()
    for row, i in enumerate(some):
        mask = draws.masks[i]
        if mask is not None:
            _forbid(logits[row], mask)
    return logits


def _forbid(row: torch.Tensor, mask: NDArray[np.uint32]) -> None:
    """Writes −∞ where a mask forbids a token. In free text it forbids few, and most of its words none."""
    words = np.flatnonzero(mask != _ALL)
    if _FEW_WORDS * len(words) > len(mask):
        bits = np.unpackbits(mask.view(np.uint8), bitorder="little")[: len(row)]
        row.masked_fill_(torch.from_numpy(bits == 0).to(row.device), -torch.inf)
        return
    bits = np.unpackbits(mask[words].view(np.uint8), bitorder="little").reshape(-1, 32)
    places, bit = np.nonzero(bits == 0)
    tokens = words[places] * 32 + bit
    row.index_fill_(0, torch.from_numpy(tokens[: np.searchsorted(tokens, len(row))]).to(row.device), -torch.inf)


def _rows(logits: torch.Tensor, rows: NDArray[np.integer]) -> torch.Tensor:
    """Returns the rows, without a copy when they are an interval."""
    if len(rows) and int(rows[-1]) - int(rows[0]) == len(rows) - 1 and bool((np.diff(rows) == 1).all()):
        return logits[int(rows[0]) : int(rows[-1]) + 1]
    return logits[torch.from_numpy(rows.astype(np.int64)).to(logits.device)]


def _require_numbers(values: torch.Tensor) -> None:
    """Raises LogitsError if a value is not finite: a NaN would silently choose an arbitrary token."""
    if not bool(values.isfinite().all()):
        raise LogitsError


def _first_largest(
    rows: NDArray[np.int64], tokens: NDArray[np.int64], scores: NDArray[np.float64], count: int
) -> NDArray[np.int64]:
    """Returns the token with the largest score of each of `count` rows, of equal ones the first. rows: ascending."""
    edges = np.searchsorted(rows, np.arange(count + 1)).tolist()
    return np.array(
        [tokens[first + int(scores[first:last].argmax())] for first, last in pairwise(edges)],
        dtype=np.int64,
    )


def _top(logits: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the `count` largest values of each row, best first, and their ids.

    They lie in the `count` blocks with the largest maxima.
    """
    rows, size = logits.shape
    blocks = size // _BLOCK
    if count * 2 > blocks:
        top = logits.topk(count, dim=-1)
        return top.values, top.indices
    body = logits[:, : blocks * _BLOCK].reshape(rows, blocks, _BLOCK)  # a view
    best_blocks = body.amax(dim=-1).topk(count, dim=-1).indices  # [n, count]
    values = body.gather(1, best_blocks[:, :, None].expand(-1, -1, _BLOCK)).flatten(1)
    within = torch.arange(_BLOCK, device=logits.device)
    ids = (best_blocks[:, :, None] * _BLOCK + within).flatten(1)
    rest = torch.arange(blocks * _BLOCK, size, device=logits.device)
    values = torch.cat([values, logits[:, blocks * _BLOCK :]], dim=1)
    ids = torch.cat([ids, rest.expand(rows, -1)], dim=1)
    top = values.topk(count, dim=-1)
    return top.values, ids.gather(1, top.indices)
