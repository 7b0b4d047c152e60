"""What a step's logits say: the tokens that were chosen, and log-probabilities of tokens that were known."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..lang.errors import EngineError
from .batch import Logits, Pick, Picks
from .choosing import questions
from .draw import Draw
from .engine_protocol import IdLogprob
from .logprobs import Wanted, describe, look_up
from .picks import allowed_of, bits_of, draws_of, forbidden_ends
from .request import Choosing, Generation, Request
from .sampler import Sampler
from .step_plan import PlannedRows


class Sampled(NamedTuple):
    """A new token, None when a constraint ends the text without one; its log-probability when it was asked for."""

    token: int | None
    logprob: IdLogprob | None


@dataclass(frozen=True, slots=True)
class Outcome:
    """By number of the request. `known`: prompt or choice tokens that rows of this step predict, in order; `forced`:
    likewise generated tokens that were appended before their rows ran; `asked`: what searches asked of the rows, in
    order."""

    known: dict[int, list[IdLogprob]]
    forced: dict[int, list[IdLogprob]]
    sampled: dict[int, Sampled]
    asked: dict[int, list[NDArray[np.float64]]]


def read_outcome(logits: Logits, planned: Sequence[PlannedRows], picks: Picks | None, sampler: Sampler) -> Outcome:
    """planned: rows of the step, of requests that have not ended. picks: what the batch asked for. A row for which the
    runner gave no token is chosen from its logits here.

    Log-probabilities are the model's own: they are taken before the sampler adjusts rows.
    """
    known, forced = _known(logits, planned, sampler)
    owners = [rows for rows in planned if rows.end == rows.request.length and rows.request.samples]
    rows = np.array([planned.logits_of_last for planned in owners], dtype=np.int64)
    tokens = logits.tokens[rows]
    left = np.flatnonzero(tokens < 0)
    if picks is not None and len(left):
        picked = left[picks.kinds[rows[left]] != Pick.ALL]
        if len(picked):
            places = np.array([_place(logits, row) for row in rows[picked].tolist()], dtype=np.int64)
            tokens[picked] = sampler.choose(logits.values, draws_of(picks, rows[picked], places, sampler.vocab_size))
            left = np.flatnonzero(tokens < 0)
    chosen = np.flatnonzero(tokens >= 0).tolist()
    sampled = _picked([owners[i] for i in chosen], tokens[chosen], logits, picks, sampler)
    if len(left):
        sampled.update(_sample([owners[i] for i in left.tolist()], logits, sampler))
    return Outcome(known, forced, sampled, _asked(logits, planned, sampler))


def _picked(
    owners: Sequence[PlannedRows], tokens: NDArray[np.int64], logits: Logits, picks: Picks | None, sampler: Sampler
) -> dict[int, Sampled]:
    """By number of the request its token, which is known, and its log-probability where the batch asked for both."""
    sampled = {
        rows.request.number: Sampled(_settled(rows.request, token), None)
        for rows, token in zip(owners, tokens.tolist(), strict=True)
    }
    described = picks.described if picks is not None else None
    if described is None or not described.any():
        return sampled
    wanted: dict[int, Wanted] = {}
    for rows in owners:
        job, token = rows.request.job, sampled[rows.request.number].token
        if described[rows.logits_of_last] and isinstance(job, Generation) and token is not None:
            wanted[rows.request.number] = Wanted(_place(logits, rows.logits_of_last), token, job.sampling.top_logprobs)
    for number, logprob in zip(wanted, describe(logits.values, list(wanted.values()), sampler.chooser), strict=True):
        sampled[number] = Sampled(sampled[number].token, logprob)
    return sampled


def _sample(owners: Sequence[PlannedRows], logits: Logits, sampler: Sampler) -> dict[int, Sampled]:
    """By number of the request a token, and its log-probability where it was asked for."""
    draws = [_draw(rows, logits, sampler.vocab_size) for rows in owners]
    asked = [i for i, rows in enumerate(owners) if _wants_logprobs(rows.request)]
    values = logits.values
    unadjusted = values[[draws[i].row for i in asked]] if asked else values[:0]
    sampled = sampler.sample(values, draws)
    tokens = [_settled(rows.request, token) for rows, token in zip(owners, sampled, strict=True)]
    wanted = [
        Wanted(place, token, draws[i].sampling.top_logprobs)
        for place, i in enumerate(asked)
        if (token := tokens[i]) is not None
    ]
    described = iter(describe(unadjusted, wanted, sampler.chooser))
    logprobs = {i: next(described) for i in asked if tokens[i] is not None}
    return {rows.request.number: Sampled(tokens[i], logprobs.get(i)) for i, rows in enumerate(owners)}


def _settled(request: Request, token: int) -> int | None:
    """What the request's constraint makes of a token that was sampled for it."""
    generation = request.job
    assert isinstance(generation, Generation), "only generations sample"
    if generation.cursor is None:
        return token
    return generation.cursor.settle(token, generation.length_limit - request.length)


_ByRequest = dict[int, list[IdLogprob]]


def _known(logits: Logits, planned: Sequence[PlannedRows], sampler: Sampler) -> tuple[_ByRequest, _ByRequest]:
    """Tokens of prompts and choices, and generated ones that were known before their rows ran."""
    wanted: list[Wanted] = []
    shares: list[tuple[_ByRequest, int, int]] = []  # (where they go, request, number of tokens)
    known: _ByRequest = {}
    forced: _ByRequest = {}
    for rows in planned:
        request = rows.request
        if rows.first_logit >= min(rows.last_logit, request.length - 1) or isinstance(request.job, Choosing):
            continue
        if rows.first_logit < request.prompt_length - 1:
            own = _known_tokens(rows, logits, rows.first_logit, min(rows.last_logit, request.prompt_length - 1))
            wanted.extend(own)
            shares.append((known, request.number, len(own)))
        if (done := _described(request)) is not None:
            first = max(rows.first_logit, request.prompt_length - 1 + done)
            own = _known_tokens(rows, logits, first, min(rows.last_logit, request.length - 1))
            wanted.extend(own)
            shares.append((forced, request.number, len(own)))
    described = iter(describe(logits.values, wanted, sampler.chooser))
    for where, number, count in shares:
        where[number] = [next(described) for _ in range(count)]
    return known, forced


def _asked(logits: Logits, planned: Sequence[PlannedRows], sampler: Sampler) -> dict[int, list[NDArray[np.float64]]]:
    """By number of the request, for each of its rows the log-probabilities that a search asks for."""
    asking = [rows for rows in planned if isinstance(rows.request.job, Choosing)]
    wanted = [
        (_place(logits, rows.first_index + row - rows.first_logit), ids)
        for rows in asking
        for row, ids in enumerate(questions(rows.request, rows.first_logit, rows.last_logit), rows.first_logit)
    ]
    found = iter(look_up(logits.values, wanted, sampler.chooser))
    return {rows.request.number: [next(found) for _ in range(rows.last_logit - rows.first_logit)] for rows in asking}


def _described(request: Request) -> int | None:
    """How many generated tokens have their log-probability; None when none is to have one."""
    return len(request.job.logprobs) if isinstance(request.job, Generation) and request.job.wants_logprobs else None


def _known_tokens(rows: PlannedRows, logits: Logits, first: int, last: int) -> list[Wanted]:
    """Rows [first, last) predict tokens that are known: row p − 1 gives the log-probability of token p."""
    request = rows.request
    top = request.job.sampling.top_logprobs if isinstance(request.job, Generation) else 0
    tokens = request.tokens[first + 1 : last + 1].tolist()
    index = rows.first_index - rows.first_logit
    return [Wanted(_place(logits, index + row), token, top) for row, token in enumerate(tokens, first)]


def _draw(rows: PlannedRows, logits: Logits, vocab_size: int) -> Draw:
    request = rows.request
    generation = request.job
    assert isinstance(generation, Generation), "only generations sample"
    return Draw(
        row=_place(logits, rows.logits_of_last),
        sampling=generation.sampling,
        seed=generation.seed,
        position=request.length,
        counts=generation.counts,
        prompt=request.tokens[: request.prompt_length],
        forbidden=forbidden_ends(request, generation),
        mask=bits_of(allowed_of(request, generation), vocab_size),
    )


def _place(logits: Logits, row: int) -> int:
    place = int(logits.places[row])
    if place < 0:
        raise _no_answer(row)
    return place


def _no_answer(row: int) -> EngineError:
    return EngineError(f"the model gave neither logits nor a token for row {row} of the step's logits")


def _wants_logprobs(request: Request) -> bool:
    return isinstance(request.job, Generation) and request.job.wants_logprobs
