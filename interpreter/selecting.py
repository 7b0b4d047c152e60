"""Runs a `select`: requests the backend's scores and takes a choice.

A backend that scores returns the log-probabilities of the choices. Any other one generates one of them: a `gen` whose
constraint is the list, which is enforced, or validated and asked for again (`guarantees.guarantee`).

    token_length_normalized               the highest mean log-probability per token
    greedy_token_selection                token by token, keeping the choices with the best token
    unconditional_likelihood_normalized   the highest mean of (given the prompt) - (without it)
    overshoot, exact                      the highest probability that the text goes on with it

A log-probability of exactly 0 is a certain token: it counts in every mean.

Every method gives a distribution too. It is exp(score), normalised over the choices; greedy_token_selection has one
for each token instead, normalised over the tokens that are left at its place.
"""

import json
import math
import secrets
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import accumulate
from typing import Any, NoReturn

from ..lang import ops
from ..lang.errors import BackendError, CapabilityError
from ..lang.ops import ChoicesMethod
from ..lang.protocol import (
    Capabilities,
    Chunk,
    ConstraintSpec,
    GenRequest,
    Origin,
    Scored,
    ScoredChoice,
    ScoreRequest,
)
from ..lang.sampling import SamplingParams
from .calls import Calls, OnChunk
from .guarantees.guarantee import Reply
from .position import Position
from .variables import Meta

# Answers a gen: `guarantee.ask`, or the speculator from text it has ahead.
Ask = Callable[[ops.Gen, GenRequest, OnChunk], Awaitable[Reply]]

# Tokens apart from those of a choice: for what a provider wraps it in, and for white space and quotes that models add.
_AROUND = 16


class GeneratedChoice(dict[str, Any]):
    """Facts about a generated choice. Reading a score, which was never known, raises CapabilityError."""

    _UNKNOWN = ("probabilities", "choice_scores", "normalized_prompt_logprobs", "input_token_logprobs",
                "unconditional_token_logprobs", "bounds", "mass", "evaluations")  # fmt: skip

    def __init__(self, facts: Meta, backend: str) -> None:
        super().__init__(facts)
        self._backend = backend

    def __missing__(self, key: str) -> NoReturn:
        if key not in self._UNKNOWN:
            raise KeyError(key)
        raise CapabilityError(
            f"{self._backend} generated this choice and scored none, so there is no {key!r}; "
            "run the program on a Runtime, which scores"
        )


async def choose(
    calls: Calls,
    capabilities: Capabilities,
    op: ops.Select,
    request_id: str,
    origin: Origin,
    position: Position,
    seed: int | None,
    ask: Ask,
) -> tuple[str, Meta]:
    """Returns the choice that is taken, and facts about it.

    Args:
        position: of the stream.
        seed: of the run; None draws one.
        ask: answers a choice that is generated.

    Raises:
        As `guarantee.ask`.
    """
    if not capabilities.score:
        return await _generated(capabilities, op, request_id, origin, position, seed, ask)
    parts, caching = position.marked() if capabilities.caching else (position.prompt.parts, None)
    scored = await calls.score(
        ScoreRequest(
            request_id,
            parts,
            op.choices,
            unconditional=op.method == "unconditional_likelihood_normalized",
            origin=origin,
            probability=op.method if op.method in ("overshoot", "exact") else "",
            caching=caching,
        )
    )
    draw = chance(seed, position.prompt.text, *op.choices) if op.temperature else 0.0
    decision = decide(op.method, scored.choices, op.temperature, draw)
    return op.choices[decision.index], _facts(scored, op, decision)


def generation_of(
    op: ops.Select, seed: int | None, capabilities: Capabilities, adapter: str = ""
) -> tuple[ops.Gen, SamplingParams]:
    """Builds the gen, and its sampling parameters, that replaces a select where the backend does not score."""
    constraint = ConstraintSpec("choices", json.dumps(op.choices, ensure_ascii=False))
    longest = max(len(choice.encode("utf-8", "surrogatepass")) for choice in op.choices)  # a token has at least a byte
    gen = ops.Gen(op.name, constraint=constraint, max_tries=op.max_tries, allow_best_effort=op.allow_best_effort)
    # The best choice is what is wanted at temperature 0; a model without temperatures gives its answer as it is.
    temperature = op.temperature if capabilities.temperature or op.temperature else SamplingParams().temperature
    most = longest + _AROUND + capabilities.thinking_tokens
    return gen, SamplingParams(max_tokens=most, temperature=temperature, seed=seed, adapter=adapter)


async def _generated(
    capabilities: Capabilities,
    op: ops.Select,
    request_id: str,
    origin: Origin,
    position: Position,
    seed: int | None,
    ask: Ask,
) -> tuple[str, Meta]:
    gen, sampling = generation_of(op, seed, capabilities, origin.adapter)
    request = GenRequest(request_id, position.prompt.parts, sampling, origin=origin, constraint=gen.constraint)
    reply = await ask(gen, request, _unheard)
    facts = reply.facts[0] | {"choices_method": "generated"}
    return reply.final.completions[0].text, GeneratedChoice(facts, capabilities.name)


def _unheard(chunk: Chunk) -> None:
    """Drops a chunk: a choice has no pieces."""


def _facts(scored: Scored, op: ops.Select, decision: "Decision") -> Meta:
    """Describes a scored `select`: the score and the probability of each choice, and those of its tokens."""
    facts: Meta = {
        "id": scored.id,
        "prompt_tokens": scored.usage.prompt_tokens,
        "cached_tokens": scored.usage.cached_tokens,
        "completion_tokens": scored.usage.completion_tokens,
        "choices_method": op.method,
        "choice_scores": dict(zip(op.choices, decision.scores, strict=True)),
        "probabilities": dict(zip(op.choices, decision.probabilities, strict=True)),
        "normalized_prompt_logprobs": [sum(c.logprobs) / len(c.logprobs) for c in scored.choices],
        "input_token_logprobs": [
            [(logprob, token, None) for logprob, token in zip(choice.logprobs, choice.token_ids, strict=True)]
            for choice in scored.choices
        ],
        "unconditional_token_logprobs": [list(choice.unconditional) for choice in scored.choices],
    }
    if decision.bounds:
        facts["bounds"] = dict(zip(op.choices, decision.bounds, strict=True))
        facts["mass"] = dict(zip(op.choices, decision.mass, strict=True))
        facts["evaluations"] = scored.evaluations
    return facts


# -------------------------------------------------------------------------------- the choice that is taken


@dataclass(frozen=True, slots=True)
class Decision:
    """The chosen index, and the score and the probability of each choice.

    `probabilities`: normalised over the choices, at temperature 1. `bounds` of them and `mass`, the bounds of the
    probability among all texts, come with "exact".
    """

    index: int
    scores: tuple[float, ...]
    probabilities: tuple[float, ...]
    bounds: tuple[tuple[float, float], ...] = ()
    mass: tuple[tuple[float, float], ...] = ()


def decide(
    method: ChoicesMethod, choices: Sequence[ScoredChoice], temperature: float = 0.0, chance: float = 0.0
) -> Decision:
    """Takes the best of scored choices, the first of equal ones; or draws one.

    Args:
        temperature: 0 takes the best; above 0 it draws from probabilities ** (1 / temperature).
        chance: the random number for the draw, from 0 to 1 (excluded); see `chance`.

    Raises:
        BackendError: the backend scored a choice without tokens or without what the method needs.
    """
    for index, choice in enumerate(choices):
        if not choice.logprobs or len(choice.logprobs) != len(choice.token_ids):
            raise BackendError(
                f"choice {index} came back with {len(choice.token_ids)} tokens and {len(choice.logprobs)} "
                "log-probabilities; a choice needs one for each of at least one token"
            )
    bounds: tuple[tuple[float, float], ...] = ()
    mass: tuple[tuple[float, float], ...] = ()
    match method:
        case "token_length_normalized":
            scores = [_mean(choice.logprobs) for choice in choices]
        case "greedy_token_selection":
            scores = _greedy(choices)
        case "unconditional_likelihood_normalized":
            scores = [_gain(index, choice) for index, choice in enumerate(choices)]
        case "overshoot":
            scores = [_lower(index, choice) for index, choice in enumerate(choices)]
        case "exact":
            logs = [_within(index, choice) for index, choice in enumerate(choices)]
            scores = [_middle(lower, upper) for lower, upper in logs]
            bounds = _bounds(logs)
            mass = tuple((math.exp(lower), math.exp(upper)) for lower, upper in logs)
    if method == "greedy_token_selection":
        probabilities = _greedy_distribution(choices, 1.0)
        drawn_from = _greedy_distribution(choices, temperature) if temperature else probabilities
    else:
        probabilities = _softmax(scores)
        drawn_from = _softmax([score / temperature for score in scores]) if temperature else probabilities
    index = _drawn(drawn_from, chance) if temperature else scores.index(max(scores))
    return Decision(index, tuple(scores), tuple(probabilities), bounds, mass)


def chance(seed: int | None, *texts: str) -> float:
    """Returns a number from 0 to 1 (excluded): equal for equal seed and texts; random without a seed."""
    if seed is None:
        return secrets.randbits(53) / 2**53
    digest = sha256()
    for part in (str(seed), *texts):
        data = part.encode("utf-8", "surrogatepass")
        digest.update(len(data).to_bytes(8, "little") + data)
    return (int.from_bytes(digest.digest()[:8], "little") >> 11) / 2**53


# ------------------------------------------------------------------------------------------ scores


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _gain(index: int, choice: ScoredChoice) -> float:
    if len(choice.unconditional) != len(choice.logprobs):
        raise BackendError(
            f"choice {index} came back with {len(choice.unconditional)} unconditional log-probabilities for "
            f"{len(choice.logprobs)} tokens; this backend cannot serve unconditional_likelihood_normalized"
        )
    return _mean([given - alone for given, alone in zip(choice.logprobs, choice.unconditional, strict=True)])


def _lower(index: int, choice: ScoredChoice) -> float:
    if choice.lower is None:
        raise BackendError(f"choice {index} came back without its probability; this backend cannot serve it")
    return choice.lower


def _within(index: int, choice: ScoredChoice) -> tuple[float, float]:
    lower = _lower(index, choice)
    if choice.upper is None:
        raise BackendError(f"choice {index} came back without an upper bound; this backend cannot serve exact")
    return lower, max(lower, choice.upper)


def _greedy(choices: Sequence[ScoredChoice]) -> list[float]:
    """Keeps the choices with the best token at each position; a choice that has ended goes on with its own mean.

    A choice's score is the number of positions at which it was kept. The first choice kept to the end has the highest
    score and is taken.
    """
    length = max(len(choice.logprobs) for choice in choices)
    kept = list(range(len(choices)))
    scores = [0.0] * len(choices)
    for place in range(length):
        best = max(kept, key=lambda index: _padded(choices[index], place))
        kept = [index for index in kept if _same_token(choices[index], choices[best], place)]
        for index in kept:
            scores[index] += 1.0
        if len(kept) == 1:
            break
    return scores


def _padded(choice: ScoredChoice, place: int) -> float:
    return choice.logprobs[place] if place < len(choice.logprobs) else _mean(choice.logprobs)


def _same_token(choice: ScoredChoice, best: ScoredChoice, place: int) -> bool:
    """Compares the tokens at `place`. Kept choices share their prefix, so equal tokens are equally probable."""
    if place < min(len(choice.token_ids), len(best.token_ids)) and choice.token_ids[place] == best.token_ids[place]:
        return True
    return _padded(choice, place) == _padded(best, place)


# ------------------------------------------------------------------------------------------ distributions


def _softmax(logs: Sequence[float]) -> list[float]:
    """Returns exp, normalised; uniform where every entry is -inf."""
    most = max(logs)
    if most == -math.inf:
        return [1 / len(logs)] * len(logs)
    weights = [math.exp(value - most) for value in logs]
    total = sum(weights)
    return [weight / total for weight in weights]


def _greedy_distribution(choices: Sequence[ScoredChoice], temperature: float) -> list[float]:
    """Multiplies token probabilities, each position normalised over the tokens of the choices that are left. As in
    `_greedy`, a choice that has ended goes on with its own mean."""
    shares = [1.0] * len(choices)
    groups = [list(range(len(choices)))]  # choices with the same tokens so far
    for place in range(max(len(choice.logprobs) for choice in choices)):
        following = []
        for group in groups:
            parts = _parts(choices, group, place)
            logs = [_padded(choices[part[0]], place) / temperature for part in parts]
            for part, share in zip(parts, _softmax(logs), strict=True):
                for index in part:
                    shares[index] *= share
                if len(part) > 1:
                    following.append(part)
        groups = following
    total = sum(shares)  # of choices with the same tokens, each has the share of all
    return [share / total for share in shares]


def _parts(choices: Sequence[ScoredChoice], group: Sequence[int], place: int) -> list[list[int]]:
    """Splits the group by the next token; a choice that has ended is a part of its own."""
    parts: dict[tuple[bool, int], list[int]] = {}
    for index in group:
        ids = choices[index].token_ids
        key = (True, ids[place]) if place < len(ids) else (False, index)
        parts.setdefault(key, []).append(index)
    return list(parts.values())


def _middle(lower: float, upper: float) -> float:
    """log((exp(lower) + exp(upper)) / 2)"""
    if upper == -math.inf:
        return upper
    return upper + math.log((1 + math.exp(lower - upper)) / 2)


def _bounds(logs: Sequence[tuple[float, float]]) -> tuple[tuple[float, float], ...]:
    """Bounds each share of the total: its least against the others' most, and the other way round."""
    most = max(upper for _, upper in logs)
    if most == -math.inf:
        return ((0.0, 1.0),) * len(logs)
    pairs = [(math.exp(lower - most), math.exp(upper - most)) for lower, upper in logs]
    all_lower, all_upper = sum(lower for lower, _ in pairs), sum(upper for _, upper in pairs)
    return tuple((_share(lower, all_upper - upper), _share(upper, all_lower - lower)) for lower, upper in pairs)


def _share(own: float, others: float) -> float:
    return own / (own + max(others, 0.0)) if own > 0.0 else 0.0


def _drawn(probabilities: Sequence[float], chance: float) -> int:
    """Samples an index by inverting the cumulative probabilities at `chance`."""
    last = max(index for index, share in enumerate(probabilities) if share > 0)
    reached = list(accumulate(probabilities))
    return next((index for index in range(last) if chance * reached[-1] < reached[index]), last)
