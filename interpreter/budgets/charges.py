"""Charges: the upper bound and the actual cost of a call, in every unit of a budget."""

from dataclasses import dataclass

from ...lang.prompt import Text
from ...lang.protocol import Backend, GenRequest, ScoreRequest, Usage
from .prices import FREE, Price

_AROUND_CONSTRAINT = 64  # tokens apart from the bytes of a schema, of which a provider makes fewer tokens
PICODOLLARS = 10**12  # of a dollar; whole numbers, so that what is held and given back leaves no rest


@dataclass(frozen=True, slots=True)
class Charge:
    """The charge of one call, or the sum of several. `picodollars` are 0 where no price is known."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    calls: int = 0
    picodollars: int = 0

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens

    def __add__(self, other: "Charge") -> "Charge":
        return Charge(
            self.prompt_tokens + other.prompt_tokens,
            self.completion_tokens + other.completion_tokens,
            self.calls + other.calls,
            self.picodollars + other.picodollars,
        )

    def __sub__(self, other: "Charge") -> "Charge":
        return Charge(
            self.prompt_tokens - other.prompt_tokens,
            self.completion_tokens - other.completion_tokens,
            self.calls - other.calls,
            self.picodollars - other.picodollars,
        )


NOTHING = Charge()


def of_usage(usage: Usage, price: Price | None) -> Charge:
    """Returns the actual cost of a call."""
    dollars = (price or FREE).dollars(usage)
    return Charge(usage.prompt_tokens, usage.completion_tokens, usage.calls, round(dollars * PICODOLLARS))


def at_most(prompt_tokens: int, completion_tokens: int, calls: int, price: Price | None) -> Charge:
    """Returns the cost of calls if nothing is cached and the whole prompt is stored."""
    read, written = each(price)
    return Charge(prompt_tokens, completion_tokens, calls, prompt_tokens * read + completion_tokens * written)


def each(price: Price | None) -> tuple[int, int]:
    """Returns the most a prompt token and a generated token cost, in picodollars."""
    price = price or FREE
    return round(price.dearest_input * PICODOLLARS / 1e6), round(price.output * PICODOLLARS / 1e6)


def worst_of(backend: Backend, request: GenRequest | ScoreRequest, price: Price | None) -> Charge:
    """Returns the most that a request can cost."""
    hosted = backend.capabilities.model != ""
    if isinstance(request, GenRequest):
        sampling, prompt = request.sampling, backend.tokens_at_most(request.prompt)
        answer = sampling.max_tokens
        if hosted and request.constraint is not None:  # providers may show it to the model
            prompt += _AROUND_CONSTRAINT + len(request.constraint.source.encode("utf-8", "surrogatepass"))
            answer += backend.capabilities.wrapping_tokens
        return at_most(prompt, sampling.n * answer, 1, price)
    choices = [(Text(choice),) for choice in request.choices]
    if hosted:  # it reads the prompt again for every choice, and writes a token
        prompts = sum(backend.tokens_at_most((*request.prompt, *choice)) for choice in choices)
        written = calls = len(choices)
    else:
        prompts = backend.tokens_at_most(request.prompt) + sum(map(backend.tokens_at_most, choices))
        written, calls = 0, 1
    twice = 2 if request.unconditional else 1  # the choices are scored without their prompt, too
    return at_most(twice * prompts, twice * written, calls, price)
