"""Decides for each row of logits in a step whether the runner returns all logits or only the chosen token.

The token is enough when nothing reads the other logits: no log-probabilities, no penalties, biases or forbidden
tokens, no top_p (its mass is a sum over the whole vocabulary) and no top_k larger than the output head searches.

An AsyncRunner chooses more tokens itself, because the next step can run ahead only of rows that the runner samples:
with top_p, with any top_k, and, where log-probabilities are wanted, it returns the logits as well.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...fsm.tokens.vocabulary import pack
from ...lang.sampling import SamplingParams
from ..core.batch import Allowed, Draws, LogitsError, RowNeed, RowRequests
from ..sampling.gumbel import Limits, draw_keys, gumbel
from ..sampling.processors import changes_logits
from .request import Generation, Request
from .step_plan import PlannedRows

MAX_SAMPLED_TOP_K = 256  # the largest top_k of a SAMPLE row, but for an AsyncRunner's


class StepRequests(NamedTuple):
    """Row requests of a step, and errors.

    `errors`: request number → why its row request could not be built. The row then returns its logits, and its request
    ends after the step.
    """

    row_requests: RowRequests | None  # None: all logits of every row
    errors: Mapping[int, Exception]


NO_REQUESTS = StepRequests(None, {})


class _Choice(NamedTuple):
    """Parameters of a row whose token the runner chooses."""

    described: bool
    allowed: Allowed | None
    limits: Limits | None  # None: the most likely token


def build_row_requests(planned: Sequence[PlannedRows], logit_rows: int, *, launched: bool = False) -> StepRequests:
    """Builds the requests of the step's `logit_rows` rows of logits. launched: they are for an AsyncRunner."""
    allowed: dict[int, Allowed] = {}
    errors: dict[int, Exception] = {}
    row_requests = RowRequests(
        kinds=np.full(logit_rows, RowNeed.LOGITS, dtype=np.uint8),
        inverse_temperatures=np.zeros(logit_rows),
        keys=np.zeros(logit_rows, dtype=np.uint64),
        top_k=np.zeros(logit_rows, dtype=np.int32),
        min_p=np.zeros(logit_rows),
        allowed=allowed,
        top_p=np.ones(logit_rows) if launched else None,
        described=np.zeros(logit_rows, dtype=np.bool_) if launched else None,
    )
    best: list[int] = []
    sampled: list[int] = []
    drawn: list[Limits] = []  # of each sampled row
    seeds: list[int] = []
    positions: list[int] = []
    for rows in planned:
        request = rows.request
        if rows.end < request.length or not request.samples:
            continue
        generation = request.job
        assert isinstance(generation, Generation), "only generations sample"
        try:
            choice = _choice_of(request, generation, launched=launched)
        except Exception as error:
            errors[request.number] = error
            continue
        if choice is None:
            continue
        if row_requests.described is not None and choice.described:
            row_requests.described[rows.logits_of_last] = True
        if choice.allowed is not None:
            allowed[rows.logits_of_last] = choice.allowed
        if choice.limits is None:
            best.append(rows.logits_of_last)
            continue
        sampled.append(rows.logits_of_last)
        drawn.append(choice.limits)
        seeds.append(generation.seed)
        positions.append(request.length)
    row_requests.kinds[best] = RowNeed.ARGMAX
    if sampled:
        row_requests.kinds[sampled] = RowNeed.SAMPLE
        inverse_temperatures, top_k, top_p, min_p = zip(*drawn, strict=True)
        row_requests.inverse_temperatures[sampled] = inverse_temperatures
        row_requests.keys[sampled] = draw_keys(seeds, positions)
        row_requests.top_k[sampled] = top_k
        row_requests.min_p[sampled] = min_p
        if row_requests.top_p is not None:
            row_requests.top_p[sampled] = top_p
    return StepRequests(row_requests, errors)


def _choice_of(request: Request, generation: Generation, *, launched: bool) -> _Choice | None:
    """Returns how the runner chooses the row's token; None: the row returns its logits."""
    sampling = generation.sampling
    if forbidden_ends(request, generation) or not (
        _chosen_alone(generation) if launched else needs_only_token(sampling)
    ):
        return None
    limits = None if sampling.temperature == 0.0 else Limits.of(sampling)
    return _Choice(generation.wants_logprobs, allowed_of(request, generation), limits)


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


def allowed_of(request: Request, generation: Generation) -> Allowed | None:
    """Returns the tokens that may come next; None: all, or the next token is already known.

    Before min_tokens, and when end-of-sequence is ignored, a constrained text ends only where no other token is
    allowed. Otherwise the tokens that end the text without being part of it are allowed, too.
    """
    cursor = generation.cursor
    if cursor is None or cursor.pending:
        return None
    early = request.generated < generation.sampling.min_tokens
    withheld = generation.ends if early else frozenset()
    if early or generation.sampling.ignore_eos:
        withheld |= cursor.eos_ids
    endings = None if early or generation.sampling.ignore_eos else cursor.endings
    if endings is not None:
        return Allowed(None, cursor.mask | endings)
    few = cursor.few
    if few is not None:
        others = few[~np.isin(few, list(withheld))] if withheld else few
        return Allowed(others if len(others) else few, None)
    bits = cursor.mask
    clear = [token for token in withheld if bits[token >> 5] >> np.uint32(token & 31) & np.uint32(1)]
    if clear:
        bits = bits & ~pack(np.array(clear, dtype=np.int32), len(bits))
    return Allowed(None, bits)


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


def forbidden_ends(request: Request, generation: Generation) -> frozenset[int]:
    """Returns the end tokens that are forbidden before min_tokens. For constrained texts see `allowed_of`."""
    early = request.generated < generation.sampling.min_tokens
    return generation.ends if early and generation.cursor is None else frozenset()


def needs_only_token(sampling: SamplingParams) -> bool:
    """Returns whether a row sampled with these parameters needs only its token."""
    narrow = sampling.temperature == 0.0 or (sampling.top_p == 1.0 and sampling.top_k <= MAX_SAMPLED_TOP_K)
    return narrow and not sampling.logprobs and sampling.top_logprobs == 0 and not changes_logits(sampling)


def _chosen_alone(generation: Generation) -> bool:
    """Returns whether an AsyncRunner can choose the token from the row's logits and the draw in the batch.

    A constraint may overrule a token, so log-probabilities of its texts are taken when the token is settled.
    """
    if generation.cursor is not None and generation.wants_logprobs:
        return False
    return not changes_logits(generation.sampling)
