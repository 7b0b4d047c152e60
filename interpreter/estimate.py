"""Estimates what a program costs before a model is asked: its body runs against answers that are made up.

A stand-in takes the place of the backend. It knows what the backend knows (template, capabilities, how prompts are
counted, prices) and answers every request at once with the longest answer that could come, so the sum of what the
requests could cost is an upper bound for a program that asks the same things whatever it is answered.
"""

import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import get_args

import msgspec

from ..lang import notebook
from ..lang.chat_template import ChatTemplate
from ..lang.errors import CapabilityError, UmbelError, shown
from ..lang.prompt import Generated, Part, Text
from ..lang.protocol import (
    Backend,
    Capabilities,
    Chunk,
    Completion,
    ConstraintKind,
    ConstraintSpec,
    Done,
    Final,
    FinishReason,
    GenRequest,
    Hint,
    Scored,
    ScoredChoice,
    ScoreRequest,
    TokenLogprob,
    Usage,
)
from . import loop
from .budget import NOTHING, PICODOLLARS, Charge, charge_at_most, prices, worst_charge_of
from .guarantees import expressions, reask_prompts

_TOKEN = " x"  # what the model is made to say


@dataclass(frozen=True, slots=True)
class Estimate:
    """Tells the most that a run may cost, if it asks what it asked of made-up answers; see `Program.estimate`.

    Attributes:
        calls: number of requests to the backend.
        prompt_tokens: of them, by the backend's own bound; none of them taken from a cache. Answers that are read again
            count as the tokens that they were. A budget has less to go by where only the model's provider has the
            tokenizer: there it counts their bytes, so it may need more room than this.
        completion_tokens: as many as `max_tokens` allows.
        dollars: by `umbel.prices`; 0 for a model that runs here, None for one without a price.

    Examples:
        >>> @ul.function
        ... def advise(s, topic):
        ...     s += topic
        ...     with s.fork(3) as tips:
        ...         tips += ul.gen("tip", max_tokens=16)
        >>> advise.estimate("Sleep well.")
        Estimate(calls=3, prompt_tokens=9, completion_tokens=48, dollars=0.0)
    """

    calls: int
    prompt_tokens: int
    completion_tokens: int
    dollars: float | None

    @property
    def total_tokens(self) -> int:
        """Prompt tokens and generated tokens."""
        return self.prompt_tokens + self.completion_tokens

    def _repr_html_(self) -> str:
        rows = [(notebook.escaped(name), notebook.escaped(shown(getattr(self, name)))) for name in self.__slots__]
        return notebook.folded("at most", notebook.table(rows), is_open=True)


class StandIn:
    """Replaces a backend: answers with made-up text and sends nothing, except in `start`.

    Args:
        backend: what the program would run on.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._cost = NOTHING

    def estimate(self) -> Estimate:
        """Returns the estimate of the requests so far."""
        cost, known = self._cost, prices.find(self._backend.capabilities.model) is not None
        dollars = cost.picodollars / PICODOLLARS if known else None
        return Estimate(cost.calls, cost.prompt_tokens, cost.completion_tokens, dollars)

    # -------------------------------------------------------------------------------- the Backend protocol

    @property
    def capabilities(self) -> Capabilities:
        """The backend's capabilities, with three changes: no hints or speculation; constraints that would be validated
        count as enforced; generated text keeps its tokens, so that it is counted by them."""
        known = self._backend.capabilities
        constraints = get_args(ConstraintKind) if known.asks_again else known.constraints
        return msgspec.structs.replace(
            known, hint=False, speculation=False, token_ids=True, constraints=constraints, made_up=True
        )

    @property
    def chat_template(self) -> ChatTemplate:
        return self._backend.chat_template

    async def start(self) -> None:
        if not loop.has_started(self._backend):
            await self._backend.start()
            loop.note_started(self._backend)

    async def generate(self, request: GenRequest) -> AsyncIterator[Chunk | Final]:
        cost = self._charged(request)
        completion = _made_up(request)
        if request.stream:
            for index in range(request.sampling.n):
                yield Chunk(request.id, index, completion.text, completion.token_ids, completion.logprobs)
        asked_from = request.sampling.prompt_logprobs_from
        prompt_logprobs = _logprobs(request, 0 if asked_from is None else max(0, cost.prompt_tokens - asked_from))
        yield Final(request.id, (completion,) * request.sampling.n, _usage(cost), prompt_logprobs)

    async def score(self, request: ScoreRequest) -> Scored:
        """Scores the first choice as the most probable one."""
        cost = self._charged(request)
        choices = [
            ScoredChoice(
                (index,),
                (-1.0 - index,),
                (-1.0,) if request.unconditional else (),
                -1.0 - index if request.probability else None,
                -1.0 - index if request.probability == "exact" else None,
            )
            for index in range(len(request.choices))
        ]
        return Scored(request.id, tuple(choices), _usage(cost))

    def hint(self, hint: Hint) -> None:
        raise AssertionError("a backend without the capability is given no hints")

    def tokens_at_most(self, prompt: tuple[Part, ...]) -> int:
        """Counts made-up text by its declared tokens, and the rest by the backend."""
        said = sum(len(part.token_ids) for part in prompt if isinstance(part, Generated))
        return said + self._backend.tokens_at_most(tuple(part for part in prompt if not isinstance(part, Generated)))

    def enforces(self, constraint: ConstraintSpec) -> bool:
        """Returns whether the backend enforces the constraint, or would be asked again."""
        return self._backend.capabilities.asks_again or self._enforced(constraint)

    async def control(self, verb: str) -> Done:
        raise CapabilityError(f"estimate() asks no backend for {verb!r}; leave it out of the program's body")

    async def close(self) -> None:
        return

    # -------------------------------------------------------------------------------- how

    def _enforced(self, constraint: ConstraintSpec) -> bool:
        enforces = getattr(self._backend, "enforces", None)
        return enforces is None or bool(enforces(constraint))

    def _charged(self, request: GenRequest | ScoreRequest) -> Charge:
        """Adds the request's largest cost to the estimate, and returns it."""
        price = prices.find(self._backend.capabilities.model)
        cost = worst_charge_of(self, request, price)
        if isinstance(request, GenRequest) and request.constraint is not None:
            shown = self._shown_to_model(request.constraint)
            cost = charge_at_most(cost.prompt_tokens + shown, cost.completion_tokens, cost.calls, price)
        self._cost += cost
        return cost

    def _shown_to_model(self, constraint: ConstraintSpec) -> int:
        """Returns the tokens of the instructions about a validated constraint."""
        if constraint.kind in self._backend.capabilities.constraints and self._enforced(constraint):
            return 0
        longest = max(reask_prompts.note(constraint, ""), reask_prompts.note(constraint, "x" * 1000), key=len)
        return self._backend.tokens_at_most((Text(longest),))


def _usage(cost: Charge) -> Usage:
    return Usage(cost.prompt_tokens, 0, cost.completion_tokens, cost.calls)


def _made_up(request: GenRequest) -> Completion:
    """Makes an answer that counts as `max_tokens` tokens, whatever its text is."""
    constraint, tokens = request.constraint, request.sampling.max_tokens
    return Completion(
        text=_TOKEN * tokens if constraint is None else _satisfying(constraint, tokens),
        token_ids=(0,) * tokens,
        kept=tokens,
        tail="",
        finish_reason=FinishReason.LENGTH if constraint is None else FinishReason.STOP,
        logprobs=_logprobs(request, tokens),
        guarantee="" if constraint is None else "enforced",
    )


def _logprobs(request: GenRequest, tokens: int) -> tuple[TokenLogprob, ...]:
    sampling = request.sampling
    if not (sampling.logprobs or sampling.top_logprobs):
        return ()
    return (TokenLogprob(0, _TOKEN, -1.0, ((0, _TOKEN, -1.0),) * sampling.top_logprobs),) * tokens


def _satisfying(constraint: ConstraintSpec, tokens: int) -> str:
    """Makes a text that satisfies the constraint; any text if no engine here can."""
    if constraint.kind == "choices":
        return _choices(constraint)[0]
    if constraint.kind == "lark" or constraint.kind == "gbnf" or constraint.kind == "tools":
        return _TOKEN * tokens
    try:
        return expressions.shortest(constraint.kind, constraint.source)
    except UmbelError:  # the backend may read what is too much for us
        return _TOKEN * tokens


def _choices(constraint: ConstraintSpec) -> list[str]:
    choices: list[str] = json.loads(constraint.source)
    return choices
