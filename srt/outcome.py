"""What a step's logits say: the tokens that were chosen, and log-probabilities of tokens that were known."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..lang.errors import EngineError
from .batch import Logits, Pick, Picks
from .draw import Draw, Draws
from .engine_protocol import IdLogprob
from .logprobs import Wanted, describe
from .request import Generation, Request
from .sampler import Sampler
from .step_plan import PlannedRows, StepPlan


class Sampled(NamedTuple):
    """A new token; its log-probability when it was asked for."""

    token: int
    logprob: IdLogprob | None


@dataclass(frozen=True, slots=True)
class Outcome:
    """By number of the request. `known`: prompt or choice tokens that rows of this step predict, in order."""

    known: dict[int, list[IdLogprob]]
    sampled: dict[int, Sampled]


def read_outcome(logits: Logits, plan: StepPlan, picks: Picks | None, sampler: Sampler) -> Outcome:
    """picks: what the batch asked for. A row for which the runner gave no token is chosen from its logits here.

    Log-probabilities are the model's own: they are taken before the sampler adjusts rows.
    """
    known = _known(logits, plan, sampler)
    owners = [rows for rows in plan.planned if rows.end == rows.request.length and rows.request.samples]
    rows = np.array([planned.logits_of_last for planned in owners], dtype=np.int64)
    tokens = logits.tokens[rows]
    left = np.flatnonzero(tokens < 0)
    if picks is not None and len(left):
        picked = left[picks.kinds[rows[left]] != Pick.ALL]
        if len(picked):
            tokens[picked] = sampler.choose(logits.values, _draws(picks, rows[picked], logits))
            left = np.flatnonzero(tokens < 0)
    logprobs: dict[int, IdLogprob] = {}
    if len(left):
        some = left.tolist()
        chosen, logprobs = _sample([owners[i] for i in some], logits, sampler)
        tokens[left] = chosen
    return Outcome(
        known,
        {
            planned.request.number: Sampled(token, logprobs.get(planned.request.number))
            for planned, token in zip(owners, tokens.tolist(), strict=True)
        },
    )


def _draws(picks: Picks, rows: NDArray[np.int64], logits: Logits) -> Draws:
    """Rows that need no adjustment, as the runner was asked for them."""
    places = logits.places[rows]
    if places.min() < 0:
        raise _no_answer(int(rows[places.argmin()]))
    sampled = picks.kinds[rows] == Pick.SAMPLE
    return Draws(
        rows=places,
        inverse_temperatures=np.where(sampled, picks.inverse_temperatures[rows], 0.0),
        keys=picks.keys[rows],
        top_k=picks.top_k[rows],
        top_p=np.ones(len(rows)),
        min_p=picks.min_p[rows],
    )


def _sample(owners: Sequence[PlannedRows], logits: Logits, sampler: Sampler) -> tuple[list[int], dict[int, IdLogprob]]:
    """Tokens, and by number of the request the log-probabilities that were asked for."""
    draws = [_draw(rows, logits) for rows in owners]
    asked = [i for i, rows in enumerate(owners) if _wants_logprobs(rows.request)]
    values = logits.values
    unadjusted = values[[draws[i].row for i in asked]] if asked else values[:0]
    tokens = sampler.sample(values, draws)
    wanted = [Wanted(place, tokens[i], draws[i].sampling.top_logprobs) for place, i in enumerate(asked)]
    described = describe(unadjusted, wanted, sampler.chooser)
    return tokens, {owners[i].request.number: entry for i, entry in zip(asked, described, strict=True)}


def _known(logits: Logits, plan: StepPlan, sampler: Sampler) -> dict[int, list[IdLogprob]]:
    wanted: list[Wanted] = []
    shares: list[tuple[int, int]] = []  # (request, number of tokens)
    for rows in plan.planned:
        if rows.first_logit < rows.last_logit and rows.first_logit < rows.request.prompt_length - 1:
            own = _known_tokens(rows, logits)
            wanted.extend(own)
            shares.append((rows.request.number, len(own)))
    described = iter(describe(logits.values, wanted, sampler.chooser))
    return {number: [next(described) for _ in range(count)] for number, count in shares}


def _known_tokens(rows: PlannedRows, logits: Logits) -> list[Wanted]:
    """Rows that predict a token of the prompt or of a choice: row p − 1 gives the log-probability of token p."""
    request = rows.request
    top = request.job.sampling.top_logprobs if isinstance(request.job, Generation) else 0
    last = min(rows.last_logit, request.prompt_length - 1)
    tokens = request.tokens[rows.first_logit + 1 : last + 1].tolist()
    return [Wanted(_place(logits, rows.first_index + i), token, top) for i, token in enumerate(tokens)]


def _draw(rows: PlannedRows, logits: Logits) -> Draw:
    request = rows.request
    generation = request.job
    assert isinstance(generation, Generation), "only generations sample"
    early = request.generated < generation.sampling.min_tokens
    return Draw(
        row=_place(logits, rows.logits_of_last),
        sampling=generation.sampling,
        seed=generation.seed,
        position=request.length,
        counts=generation.counts,
        prompt=request.tokens[: request.prompt_length],
        forbidden=generation.ends if early else frozenset(),
    )


def _place(logits: Logits, row: int) -> int:
    place = int(logits.places[row])
    if place < 0:
        raise _no_answer(row)
    return place


def _no_answer(row: int) -> EngineError:
    return EngineError(f"the model gave neither logits nor a token for row {row} of the step's logits")


def _wants_logprobs(request: Request) -> bool:
    job = request.job
    return isinstance(job, Generation) and (job.sampling.logprobs or job.sampling.top_logprobs > 0)
