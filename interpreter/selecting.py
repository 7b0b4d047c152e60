"""Runs a `select`: requests the backend's scores and takes a choice.

A backend that scores returns the log-probabilities of the choices. Any other one generates one of them: a `gen` whose
constraint is the list, which is enforced, or validated and asked for again (`guarantees.reask`).
"""

import json
from collections.abc import Awaitable, Callable
from typing import Any, NoReturn

from ..lang import ops
from ..lang.errors import CapabilityError
from ..lang.protocol import Capabilities, Chunk, ConstraintSpec, GenRequest, Origin, ScoreRequest
from ..lang.sampling import SamplingParams
from . import choices, meta
from .calls import Calls, OnChunk
from .guarantees.reask import Reply
from .position import Position
from .variables import Meta

# Answers a gen: `reask.ask`, or the speculator from text it has ahead.
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
        As `reask.ask`.
    """
    if not capabilities.score:
        return await _generated(capabilities, op, request_id, origin, position, seed, ask)
    scored = await calls.score(
        ScoreRequest(
            request_id,
            position.prompt.parts,
            op.choices,
            unconditional=op.method == "unconditional_likelihood_normalized",
            origin=origin,
            probability=op.method if op.method in ("overshoot", "exact") else "",
        )
    )
    chance = choices.chance(seed, position.prompt.text, *op.choices) if op.temperature else 0.0
    decision = choices.decide(op.method, scored.choices, op.temperature, chance)
    return op.choices[decision.index], meta.of_select(scored, op, decision)


def generation_of(op: ops.Select, seed: int | None, capabilities: Capabilities) -> tuple[ops.Gen, SamplingParams]:
    """Builds the gen, and its sampling parameters, that replaces a select where the backend does not score."""
    constraint = ConstraintSpec("choices", json.dumps(op.choices, ensure_ascii=False))
    longest = max(len(choice.encode("utf-8", "surrogatepass")) for choice in op.choices)  # a token has at least a byte
    gen = ops.Gen(op.name, constraint=constraint, max_tries=op.max_tries, allow_best_effort=op.allow_best_effort)
    # The best choice is what is wanted at temperature 0; a model without temperatures gives its answer as it is.
    temperature = op.temperature if capabilities.temperature or op.temperature else SamplingParams().temperature
    most = longest + _AROUND + capabilities.thinking_tokens
    return gen, SamplingParams(max_tokens=most, temperature=temperature, seed=seed)


async def _generated(
    capabilities: Capabilities,
    op: ops.Select,
    request_id: str,
    origin: Origin,
    position: Position,
    seed: int | None,
    ask: Ask,
) -> tuple[str, Meta]:
    gen, sampling = generation_of(op, seed, capabilities)
    request = GenRequest(request_id, position.prompt.parts, sampling, origin=origin, constraint=gen.constraint)
    reply = await ask(gen, request, _unheard)
    facts = reply.facts[0] | {"choices_method": "generated"}
    return reply.final.completions[0].text, GeneratedChoice(facts, capabilities.name)


def _unheard(chunk: Chunk) -> None:
    """Drops a chunk: a choice has no pieces."""
