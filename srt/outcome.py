"""What a step's logits say: the tokens that were sampled, and log-probabilities of tokens that were known."""

from dataclasses import dataclass

import torch

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


def read_outcome(logits: torch.Tensor, plan: StepPlan, sampler: Sampler) -> Outcome:
    """logits: [L, vocab]. Log-probabilities are the model's own: they are taken before the sampler adjusts rows."""
    known = _known(logits, plan)
    owners = [rows for rows in plan.planned if rows.end == rows.request.length and rows.request.samples]
    draws = [_draw(rows) for rows in owners]
    asked = [i for i, rows in enumerate(owners) if _wants_logprobs(rows.request)]
    unadjusted = logits[torch.tensor([draws[i].row for i in asked], device=logits.device)] if asked else logits[:0]
    tokens = sampler.sample(logits, draws)
    wanted = [Wanted(place, tokens[i], draws[i].sampling.top_logprobs) for place, i in enumerate(asked)]
    logprobs = dict(zip(asked, describe(unadjusted, wanted), strict=True))
    return Outcome(
        known,
        {
            rows.request.number: Sampled(token, logprobs.get(i))
            for i, (rows, token) in enumerate(zip(owners, tokens, strict=True))
        },
    )


def _known(logits: torch.Tensor, plan: StepPlan) -> dict[int, list[IdLogprob]]:
    wanted: list[Wanted] = []
    shares: list[tuple[int, int]] = []  # (request, number of tokens)
    for rows in plan.planned:
        own = _known_tokens(rows)
        if own:
            wanted.extend(own)
            shares.append((rows.request.number, len(own)))
    described = iter(describe(logits, wanted))
    return {number: [next(described) for _ in range(count)] for number, count in shares}


def _known_tokens(rows: PlannedRows) -> list[Wanted]:
    """Rows that predict a token of the prompt or of a choice: row p − 1 gives the log-probability of token p."""
    request = rows.request
    top = request.job.sampling.top_logprobs if isinstance(request.job, Generation) else 0
    last = min(rows.last_logit, request.prompt_length - 1)
    tokens = request.tokens[rows.first_logit + 1 : last + 1].tolist() if rows.first_logit < last else []
    return [Wanted(rows.first_index + i, token, top) for i, token in enumerate(tokens)]


def _draw(rows: PlannedRows) -> Draw:
    request = rows.request
    generation = request.job
    assert isinstance(generation, Generation), "only generations sample"
    early = request.generated < generation.sampling.min_tokens
    return Draw(
        row=rows.first_index + rows.end - 1 - rows.first_logit,
        sampling=generation.sampling,
        seed=generation.seed,
        position=request.length,
        counts=generation.counts,
        prompt=request.tokens[: request.prompt_length],
        forbidden=generation.ends if early else frozenset(),
    )


def _wants_logprobs(request: Request) -> bool:
    job = request.job
    return isinstance(job, Generation) and (job.sampling.logprobs or job.sampling.top_logprobs > 0)
