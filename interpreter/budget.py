"""Budgets: limits on the cost of a run. No call begins that could exceed one.

    program.run(question, budget=umbel.Budget(tokens=10_000, dollars=0.02))
    program.run_batch(questions, budget=umbel.Budget(dollars=5))      # of all of them together

A call in flight holds the most that it can cost; at its end it is charged its actual cost:

    0                                                   limit
    |────────── spent ──────────|──── held ────|── free ──|
                                 calls in flight

A call that exceeds the free part waits for calls in flight, which mostly cost less than they hold; one that would not
fit even if they cost nothing ends with BudgetError. Waiting calls are served in order of arrival.

The user gives a `Budget`; an `Allowance` is the rest of it for a run or a batch; a `Ledger` holds the cost of one run.
A `Charge` is the upper bound or the actual cost of a call, in every unit of a budget.
`Ledger.cost` is replaced as a whole on the streams' loop, so other threads read it at any time.

Dollars come from `prices`, a table that users edit:

    umbel.prices["my-model"] = umbel.Price(0.1, 0.4)
    umbel.prices["gpt-4o"].cached_input

The table begins with the list prices that providers gave on `DATE`: standard requests, without discounts for batches
and without surcharges for very long prompts or regions. A model whose price was not certain is not there. Providers
change their prices: a budget in dollars is as good as the table.
"""

import asyncio
import contextlib
import re
import time
from collections import deque
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Final

from ..lang import checks
from ..lang.errors import BudgetError, ParameterError, shown
from ..lang.programs import ProgramBudget
from ..lang.prompt import Part, Text
from ..lang.protocol import Backend, Cost, GenRequest, ScoreRequest, Speculation, Usage

DATE: Final = "2026-11-22"

# name → (input, output, cached input, cache write, long cache write), dollars per million tokens; see Price
PRICES: Final[dict[str, tuple[float, float, float | None, float | None, float | None]]] = {
    "gpt-4o": (2.5, 10.0, 1.25, None, None),
    "gpt-4o-2024-05-13": (5.0, 15.0, None, None, None),  # the first one was dearer
    "gpt-4o-mini": (0.15, 0.6, 0.075, None, None),
    "gpt-4.1": (2.0, 8.0, 0.5, None, None),
    "gpt-4.1-mini": (0.4, 1.6, 0.1, None, None),
    "gpt-4.1-nano": (0.1, 0.4, 0.025, None, None),
    "gpt-5": (1.25, 10.0, 0.125, None, None),
    "gpt-5-mini": (0.25, 2.0, 0.025, None, None),
    "gpt-5-nano": (0.05, 0.4, 0.005, None, None),
    "gpt-5.4": (2.5, 15.0, 0.25, None, None),
    "gpt-5.4-mini": (0.75, 4.5, 0.075, None, None),
    "gpt-5.4-nano": (0.2, 1.25, 0.02, None, None),
    "claude-opus-4-1": (15.0, 75.0, 1.5, 18.75, 30.0),
    "claude-opus-4-5": (5.0, 25.0, 0.5, 6.25, 10.0),
    "claude-opus-4-6": (5.0, 25.0, 0.5, 6.25, 10.0),
    "claude-opus-4-7": (5.0, 25.0, 0.5, 6.25, 10.0),
    "claude-opus-4-8": (5.0, 25.0, 0.5, 6.25, 10.0),
    "claude-opus-5": (5.0, 25.0, 0.5, 6.25, 10.0),
    "claude-sonnet-4-5": (3.0, 15.0, 0.3, 3.75, 6.0),
    "claude-sonnet-4-6": (3.0, 15.0, 0.3, 3.75, 6.0),
    "claude-haiku-4-5": (1.0, 5.0, 0.1, 1.25, 2.0),
}

# What may stand after a name of the table: dates and snapshots of the same model. A bare prefix would be wrong as
# often as right: gpt-4o is no price of gpt-4o-mini, nor claude-opus-4 one of claude-opus-4-5.
_VERSION = re.compile(r"[-@](\d{4}-\d{2}-\d{2}|\d{8}|\d{6}|\d{4}|latest)")

MOST_PRICE = 1e9  # per million tokens
_PRICE = "dollars per million tokens, such as umbel.Price(0.15, 0.6)"


@dataclass(frozen=True, slots=True)
class Price:
    """Holds the price of a model, in dollars per million tokens: a value of the table `umbel.prices`.

    Args:
        input: of prompt tokens.
        output: of generated tokens.
        cached_input: of prompt tokens that the provider had cached; None: as `input`.
        cache_write: of prompt tokens that the provider charged for storing; None: as `input`.
        long_cache_write: of those that it stores for longer than its shortest time; None: as `cache_write`.

    Raises:
        ParameterError: not a number from 0 to a billion.

    Examples:
        >>> price = ul.Price(input=0.15, output=0.6, cached_input=0.075)
        >>> usage = ul.Usage(prompt_tokens=2_000_000, cached_tokens=1_000_000, completion_tokens=100_000)
        >>> round(price.dollars(usage), 3)  # 1 million at 0.15, 1 million at 0.075, 0.1 million at 0.6
        0.285
    """

    input: float
    output: float
    cached_input: float | None = None
    cache_write: float | None = None
    long_cache_write: float | None = None

    def __post_init__(self) -> None:
        for name in ("input", "output", "cached_input", "cache_write", "long_cache_write"):
            value = getattr(self, name)
            if value is None and name not in ("input", "output"):
                continue
            object.__setattr__(self, name, checks.number(f"Price: {name}", value, 0, MOST_PRICE, _PRICE))

    def dollars(self, usage: Usage) -> float:
        """Returns the price of tokens, in dollars.

        Args:
            usage: the tokens.
        """
        cached = self.input if self.cached_input is None else self.cached_input
        stored = self.input if self.cache_write is None else self.cache_write
        long = stored if self.long_cache_write is None else self.long_cache_write
        plain = usage.prompt_tokens - usage.cached_tokens - usage.cache_write_tokens
        millions = (
            plain * self.input
            + usage.cached_tokens * cached
            + (usage.cache_write_tokens - usage.long_write_tokens) * stored
            + usage.long_write_tokens * long
            + usage.completion_tokens * self.output
        )
        return millions / 1e6

    @property
    def dearest_input(self) -> float:
        """The highest price of prompt tokens, stored or not, in dollars per million."""
        return max(self.input, self.cache_write or 0.0, self.long_cache_write or 0.0)


FREE = Price(0.0, 0.0)


class PriceTable(MutableMapping[str, Price]):
    """Maps names of models to prices: the class of `umbel.prices`, which budgets and costs in dollars go by.

    It is a dict that is edited: `ul.prices["my-model"] = ul.Price(0.1, 0.4)`. It begins with the list prices of some
    hosted models, of the day that `umbel.interpreter.budget.DATE` says: standard requests, without discounts for
    batches. A model that is not in it has no price: its cost in dollars is None, and a budget in dollars refuses it.

    Args:
        prices: that it begins with, by name; None: none.

    Examples:
        >>> ul.prices["my-model"] = ul.Price(0.1, 0.4)
        >>> ul.prices["my-model"].output
        0.4
        >>> ul.prices.find("my-model-2026-01-31")  # a dated version
        Price(input=0.1, output=0.4, cached_input=None, cache_write=None, long_cache_write=None)
        >>> del ul.prices["my-model"]
        >>> print(ul.prices.find("my-model"))
        None
    """

    def __init__(self, prices: Mapping[str, Price] | None = None) -> None:
        self._prices = dict(prices or {})

    def find(self, model: str) -> Price | None:
        """Returns the price under exactly this name, else under the longest name that it is a dated version of
        ("gpt-4o" for "gpt-4o-2024-08-06"), else None. A model without a name runs here and costs nothing.

        Args:
            model: its name; "" for one that runs here.

        Raises:
            ParameterError: what is no text.
        """
        if not isinstance(model, str):
            raise ParameterError(f"prices.find({shown(model)}): model: write the name of one, such as 'my-model'")
        model = checks.plain(model)
        if not model:
            return FREE
        if len(model) > checks.LONGEST_PATH:  # every beginning of the name is looked up below
            return None
        exact = self._prices.get(model)
        if exact is not None:
            return exact
        for end in range(len(model) - 1, 0, -1):
            price = self._prices.get(model[:end])
            if price is not None and _VERSION.fullmatch(model, end):
                return price
        return None

    def __getitem__(self, model: str) -> Price:
        return self._prices[model]

    def __setitem__(self, model: str, price: Price) -> None:
        """Raises ParameterError for a name that is no text, or a price that is no Price."""
        if not isinstance(model, str) or not checks.plain(model):
            raise ParameterError(f"prices[{shown(model)}]; write the name of a model, such as prices['my-model']")
        if not isinstance(price, Price):
            raise ParameterError(
                f"prices[{shown(model)}] = {shown(price)}; write prices[{shown(model)}] = umbel.Price(input, output) "
                "in dollars per million tokens"
            )
        self._prices[checks.plain(model)] = price

    def __delitem__(self, model: str) -> None:
        del self._prices[model]

    def __iter__(self) -> Iterator[str]:
        return iter(self._prices)

    def __len__(self) -> int:
        return len(self._prices)

    def __repr__(self) -> str:
        return f"<prices of {len(self)} models>"


prices = PriceTable({model: Price(*row) for model, row in PRICES.items()})
"""Prices of models by name, which costs and budgets in dollars go by: a `PriceTable`, to be edited."""

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


def charge_of_usage(usage: Usage, price: Price | None) -> Charge:
    """Returns the actual cost of a call."""
    dollars = (price or FREE).dollars(usage)
    return Charge(usage.prompt_tokens, usage.completion_tokens, usage.calls, round(dollars * PICODOLLARS))


def charge_at_most(prompt_tokens: int, completion_tokens: int, calls: int, price: Price | None) -> Charge:
    """Returns the cost of calls if nothing is cached and the whole prompt is stored."""
    read, written = picodollars_each(price)
    return Charge(prompt_tokens, completion_tokens, calls, prompt_tokens * read + completion_tokens * written)


def picodollars_each(price: Price | None) -> tuple[int, int]:
    """Returns the most a prompt token and a generated token cost, in picodollars."""
    price = price or FREE
    return round(price.dearest_input * PICODOLLARS / 1e6), round(price.output * PICODOLLARS / 1e6)


def worst_charge_of(backend: Backend, request: GenRequest | ScoreRequest, price: Price | None) -> Charge:
    """Returns the most that a request can cost."""
    hosted = backend.capabilities.model != ""
    if isinstance(request, GenRequest):
        sampling, prompt = request.sampling, backend.tokens_at_most(request.prompt)
        answer = sampling.max_tokens
        if hosted and request.constraint is not None:  # providers may show it to the model
            prompt += _AROUND_CONSTRAINT + len(request.constraint.source.encode("utf-8", "surrogatepass"))
            answer += backend.capabilities.wrapping_tokens
        return charge_at_most(prompt, sampling.n * answer, 1, price)
    choices = [(Text(choice),) for choice in request.choices]
    if hosted:  # it reads the prompt again for every choice, and writes a token
        prompts = sum(backend.tokens_at_most((*request.prompt, *choice)) for choice in choices)
        written = calls = len(choices)
    else:
        prompts = backend.tokens_at_most(request.prompt) + sum(map(backend.tokens_at_most, choices))
        written, calls = 0, 1
    twice = 2 if request.unconditional else 1  # the choices are scored without their prompt, too
    return charge_at_most(twice * prompts, twice * written, calls, price)


MOST_TOKENS = 10**15  # of a budget, and calls; beyond it sums are no whole numbers of a float any more
MOST_DOLLARS = 1e12


@dataclass(frozen=True, slots=True)
class Budget:
    """Limits the cost of one run, or of one batch: no call begins that could exceed a limit; BudgetError is raised.

    Limits include branches, speculation and repeated requests; a program that the body starts with `.run(...)` is a run
    of its own. Each is None, no limit, unless it is given.

    What a call can cost is known only within bounds: its prompt counts with `Backend.tokens_at_most`, which for hosted
    models may be as much as its bytes, and its answer with `max_tokens`. So programs get further with a `max_tokens`
    that is near what they need. A call that failed, or was left, before its first piece of text is not charged; one
    left later is charged its prompt and the pieces that came.

    Args:
        tokens: number of tokens of prompts and of what is generated, cached or not.
        calls: number of calls of the backend.
        dollars: by `umbel.prices`.
        seconds: from the beginning of the run. Like `timeout`, but ends in BudgetError.

    Raises:
        ParameterError: no limit at all, or one that is not above 0 and up to `10**15` tokens or calls, `10**12`
            dollars, `10**9` seconds.

    Examples:
        >>> @ul.function
        ... def tell(s, topic):
        ...     s += topic
        ...     for part in ("beginning", "end"):
        ...         s += ul.gen(part, max_tokens=8)
        ...         print(s[part])
        >>> model = ul.Echo([" Once.", " So it was."])
        >>> try:
        ...     tell.run("A tale:", budget=ul.Budget(calls=1), backend=model)
        ... except ul.BudgetError as error:
        ...     print(error)
        ...     print(error.state.usage.calls)
         Once.
        1 call has been made, and one more does not fit Budget(calls=1); raise calls to 2
        1
    """

    tokens: int | None = None
    calls: int | None = None
    dollars: float | None = None
    seconds: float | None = None

    def __post_init__(self) -> None:
        for name, most in (("tokens", MOST_TOKENS), ("calls", MOST_TOKENS)):
            value = getattr(self, name)
            if value is not None:
                remedy = f"an integer from 1 to {most}, or None for no limit"
                object.__setattr__(self, name, checks.integer(f"Budget: {name}", value, 1, most, remedy))
        for name, largest in (("dollars", MOST_DOLLARS), ("seconds", checks.LONGEST_SECONDS)):
            value = getattr(self, name)
            if value is not None:
                remedy = f"a number above 0 and up to {largest:g}, or None for no limit"
                checks.seconds(f"Budget: {name}", value, 0.0, largest, remedy)
                object.__setattr__(self, name, checks.plain_number(value))
        if self.tokens is self.calls is self.dollars is self.seconds is None:
            raise ParameterError("Budget() limits nothing; write for example Budget(tokens=10_000)")

    def __str__(self) -> str:
        given = ((name, getattr(self, name)) for name in ("tokens", "calls", "dollars", "seconds"))
        return f"Budget({', '.join(f'{name}={value!r}' for name, value in given if value is not None)})"


class Allowance:
    """The rest of a budget. Its seconds begin when it is made; all else is used on the streams' loop."""

    __slots__ = ("_held", "_spent", "_waiting", "budget", "ends")

    def __init__(self, budget: Budget) -> None:
        self.budget = budget
        self.ends = None if budget.seconds is None else time.monotonic() + budget.seconds
        self._spent = NOTHING
        self._held = NOTHING
        self._waiting: deque[tuple[Charge, asyncio.Future[None]]] = deque()

    async def reserve(self, charge: Charge) -> None:
        """Waits until the budget has room for a call that costs at most `charge`, and holds it until `settle`.

        Raises:
            BudgetError: there will be no such room.
        """
        refusal = self._refusal(charge)
        if refusal is not None:
            raise refusal
        if not self._waiting and self._fits(charge):
            self._held += charge
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((charge, turn))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled() and turn.exception() is None:  # granted, and then cancelled
                self.settle(charge, NOTHING)
            else:
                with contextlib.suppress(ValueError):
                    self._waiting.remove((charge, turn))
                self._serve()  # those after it may fit
            raise

    def settle(self, held: Charge, cost: Charge) -> None:
        """Ends a call: releases `held` and charges `cost`."""
        self._held -= held
        self._spent += cost
        self._serve()

    def hold_rest(self) -> Charge:
        """Holds all of the free budget, for calls made by a gateway, until `settle`."""
        budget, used = self.budget, self._spent + self._held
        rest = Charge(
            prompt_tokens=0 if budget.tokens is None else max(0, budget.tokens - used.tokens),
            calls=0 if budget.calls is None else max(0, budget.calls - used.calls),
        )
        self._held += rest
        return rest

    def late(self) -> BudgetError:
        """Returns the error for a run that took too long."""
        return BudgetError(f"the run did not end within the seconds of its {self.budget}; raise seconds")

    def affordable(self, prompt_tokens: int, price: Price | None) -> int | None:
        """Returns the number of tokens a call with such a prompt may generate without waiting; None: no limit."""
        budget, used = self.budget, self._spent + self._held
        if budget.calls is not None and used.calls >= budget.calls:
            return 0
        most: list[int] = []
        if budget.tokens is not None:
            most.append(budget.tokens - used.tokens - prompt_tokens)
        if budget.dollars is not None:
            read, written = picodollars_each(price)
            left = round(budget.dollars * PICODOLLARS) - used.picodollars - prompt_tokens * read
            if written or left < 0:
                most.append(left // max(1, written))
        return max(0, min(most)) if most else None

    # -------------------------------------------------------------------------------- how

    def _serve(self) -> None:
        """Admits waiting calls in order while there is room."""
        while self._waiting:
            charge, turn = self._waiting[0]
            if not turn.done():
                refusal = self._refusal(charge)
                if refusal is not None:
                    turn.set_exception(refusal)
                elif self._fits(charge):
                    self._held += charge
                    turn.set_result(None)
                else:
                    return
            self._waiting.popleft()

    def _fits(self, charge: Charge) -> bool:
        return self._over(self._spent + self._held + charge) is None

    def _over(self, sum_: Charge) -> str | None:
        """Returns the limit that this sum exceeds, or None."""
        budget = self.budget
        if budget.tokens is not None and sum_.tokens > budget.tokens:
            return "tokens"
        if budget.calls is not None and sum_.calls > budget.calls:
            return "calls"
        if budget.dollars is not None and sum_.picodollars > round(budget.dollars * PICODOLLARS):
            return "dollars"
        return None

    def _refusal(self, charge: Charge) -> BudgetError | None:
        """Returns the error of a call that cannot fit, even if calls in flight cost nothing; else None."""
        spent, budget = self._spent, self.budget
        match self._over(spent + charge):
            case "tokens":
                assert budget.tokens is not None, "a limit that is not there is not passed"
                return BudgetError(
                    f"a call that may take {charge.tokens} tokens (at most {charge.prompt_tokens} of its prompt, "
                    f"{charge.completion_tokens} generated) does not fit the {max(0, budget.tokens - spent.tokens)} "
                    f"left of {budget}; raise tokens to {spent.tokens + charge.tokens}, or lower max_tokens"
                )
            case "calls":
                made = "1 call has" if spent.calls == 1 else f"{spent.calls} calls have"
                more = "one more does" if charge.calls == 1 else f"{charge.calls} more do"
                return BudgetError(
                    f"{made} been made, and {more} not fit {budget}; raise calls to {spent.calls + charge.calls}"
                )
            case "dollars":
                assert budget.dollars is not None, "a limit that is not there is not passed"
                left = max(0.0, budget.dollars - spent.picodollars / PICODOLLARS)
                needed = (spent.picodollars + charge.picodollars) / PICODOLLARS
                return BudgetError(
                    f"a call that may cost ${charge.picodollars / PICODOLLARS:.6f} (at most {charge.prompt_tokens} "
                    f"tokens of its prompt, {charge.completion_tokens} generated) does not fit the ${left:.6f} left "
                    f"of {budget}; raise dollars to {needed:.6f}, or lower max_tokens"
                )
        return None


def allowance_of(budget: Budget | None) -> Allowance | None:
    """Starts an allowance of the whole budget; None for no budget."""
    return None if budget is None else Allowance(budget)


class Ledger:
    """The cost of one run, charged to its budget.

    Args:
        backend: its model has the price.
        allowance: of the run, or of the batch that it is part of; None: no limits.
    """

    __slots__ = ("_allowance", "_backend", "cost")

    def __init__(self, backend: Backend, allowance: Allowance | None) -> None:
        self.cost = Cost()
        self._backend = backend
        self._allowance = allowance

    @property
    def price(self) -> Price | None:
        """The model's current price; None: not known."""
        return prices.find(self._backend.capabilities.model)

    @property
    def limited(self) -> bool:
        """True if there is a budget."""
        return self._allowance is not None

    # -------------------------------------------------------------------------------- before and after a call

    async def reserve(self, request: GenRequest | ScoreRequest) -> Charge:
        """Waits until the budget has room for `request`. Returns the charge held until `settle`.

        Raises:
            BudgetError: there will be no room, or the budget is in dollars and the model has no price.
        """
        if self._allowance is None:
            return NOTHING
        price = self.price
        if price is None and self._allowance.budget.dollars is not None:
            raise BudgetError(
                f"{self._allowance.budget} needs the price of {self._backend.capabilities.model!r}, which umbel.prices "
                f"does not have; write umbel.prices[{self._backend.capabilities.model!r}] = umbel.Price(input, output) "
                "in dollars per million tokens"
            )
        held = worst_charge_of(self._backend, request, price)
        await self._allowance.reserve(held)
        return held

    def settle(self, held: Charge, usage: Usage) -> None:
        """Ends a call, and charges its usage."""
        price = self.price
        self.cost += Cost(usage, None if price is None else price.dollars(usage))
        if self._allowance is not None:
            self._allowance.settle(held, charge_of_usage(usage, price))

    def note_read(self, usage: Usage, dollars: float | None) -> None:
        """Adds a call that a journal answered, with what it has cost when it was made: now it costs nothing."""
        self.cost += Cost(read=usage, dollars_read=dollars)

    def settle_unfinished(self, held: Charge, generated: int) -> None:
        """Ends a call that was left, or failed, after `generated` tokens; the provider does not report its usage.

        The run's cost has only reported usage. Its budget is charged the most that the call may have cost: nothing
        before the first token, since refused requests are free, then the prompt and the tokens that came."""
        if self._allowance is None:
            return
        cost = charge_at_most(held.prompt_tokens, generated, held.calls, self.price) if generated else NOTHING
        self._allowance.settle(held, cost)

    def cancelled(self, tokens: int) -> None:
        """Counts a call that was cancelled, or that a cancelled branch does not make, with the tokens that it could
        still have generated."""
        self.cost += Cost(cancelled_calls=1, tokens_saved=tokens)

    # -------------------------------------------------------------------------------- calls that others make

    def hold_rest(self) -> tuple[Charge, ProgramBudget | None]:
        """Holds the rest of the budget until `settle_rest`. Returns it, and the limits for the gateway that makes the
        calls. Such calls cost no dollars: runtimes make them."""
        if self._allowance is None:
            return NOTHING, None
        budget, rest = self._allowance.budget, self._allowance.hold_rest()
        if budget.tokens is None and budget.calls is None:
            return rest, None
        return rest, ProgramBudget(
            None if budget.tokens is None else rest.prompt_tokens, None if budget.calls is None else rest.calls
        )

    def note_others(self, before: Cost, usage: Usage) -> None:
        """Updates the cost by the gateway's calls so far; `before` is the run's cost when they began."""
        price = self.price
        self.cost = before + Cost(usage, None if price is None else price.dollars(usage))

    def settle_rest(self, held: Charge, usage: Usage) -> None:
        """Ends the gateway's calls, and charges their usage."""
        if self._allowance is not None:
            self._allowance.settle(held, charge_of_usage(usage, self.price))

    # -------------------------------------------------------------------------------- speculation

    def affordable_tokens(self, prompt: tuple[Part, ...]) -> int | None:
        """Returns the number of tokens a call with this prompt may generate without waiting; None: no limit."""
        if self._allowance is None:
            return None
        return self._allowance.affordable(self._backend.tokens_at_most(prompt), self.price)

    def note(self, speculation: Speculation) -> None:
        """Adds the counts of speculation."""
        price = self.price
        saved = None
        if price is not None:
            gain = speculation.input_tokens_saved * price.input - speculation.output_tokens_wasted * price.output
            saved = gain / 1e6
        self.cost += Cost(speculation=speculation, dollars_saved=saved)
