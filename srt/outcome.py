"""What a step's logits say: the tokens that were sampled, and log-probabilities of tokens that were known."""

from dataclasses import dataclass

import torch

from ..lang.errors import EngineError
from .batch import Logits
from .draw import Draw
from .engine_protocol import IdLogprob
from .logprobs import Wanted, describe
from .request import Generation, Request
from .sampler import Sampler
from .step_plan import PlannedRows, StepPlan


@dataclass(frozen=True, slots=True)
class Sampled:
    """A new token; its log-probability when it was asked for."""

    token: int
    logprob: IdLogprob | None


@dataclass(frozen=True, slots=True)
class Outcome:
    """By number of the request. `known`: prompt or choice tokens that rows of this step predict, in order."""

    known: dict[int, list[IdLogprob]]
    sampled: dict[int, Sampled]


def read_outcome(logits: Logits, plan: StepPlan, sampler: Sampler) -> Outcome:
    """Log-probabilities are the model's own: they are taken before the sampler adjusts rows."""
    known = _known(logits, plan)
    owners = [rows for rows in plan.planned if rows.end == rows.request.length and rows.request.samples]
    tokens = logits.tokens[[rows.logits_of_last for rows in owners]].tolist()
    left = [i for i, token in enumerate(tokens) if token < 0]  # the runner gave their logits instead
    draws = [_draw(owners[i], logits) for i in left]
    asked = [place for place, i in enumerate(left) if _wants_logprobs(owners[i].request)]
    values = logits.values
    rows_asked = torch.tensor([draws[place].row for place in asked], dtype=torch.int64, device=values.device)
    unadjusted = values[rows_asked]
    chosen = sampler.sample(values, draws)
    wanted = [Wanted(row, chosen[place], draws[place].sampling.top_logprobs) for row, place in enumerate(asked)]
    for i, token in zip(left, chosen, strict=True):
        tokens[i] = token
    logprobs = dict(zip((left[place] for place in asked), describe(unadjusted, wanted), strict=True))
    return Outcome(
        known,
        {
            rows.request.number: Sampled(token, logprobs.get(i))
            for i, (rows, token) in enumerate(zip(owners, tokens, strict=True))
        },
    )


def _known(logits: Logits, plan: StepPlan) -> dict[int, list[IdLogprob]]:
    wanted: list[Wanted] = []
    shares: list[tuple[int, int]] = []  # (request, number of tokens)
    for rows in plan.planned:
        own = _known_tokens(rows, logits)
        if own:
            wanted.extend(own)
            shares.append((rows.request.number, len(own)))
    described = iter(describe(logits.values, wanted))
    return {number: [next(described) for _ in range(count)] for number, count in shares}


def _known_tokens(rows: PlannedRows, logits: Logits) -> list[Wanted]:
    """Rows that predict a token of the prompt or of a choice: row p − 1 gives the log-probability of token p."""
    request = rows.request
    top = request.job.sampling.top_logprobs if isinstance(request.job, Generation) else 0
    last = min(rows.last_logit, request.prompt_length - 1)
    tokens = request.tokens[rows.first_logit + 1 : last + 1].tolist() if rows.first_logit < last else []
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
        raise EngineError(f"the model gave neither logits nor a token for row {row} of the step's logits")
    return place


def _wants_logprobs(request: Request) -> bool:
    job = request.job
    return isinstance(job, Generation) and (job.sampling.logprobs or job.sampling.top_logprobs > 0)
