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
`Ledger.cost` is replaced as a whole on the streams' loop, so other threads read it at any time.
"""

import asyncio
import contextlib
import time
from collections import deque
from dataclasses import dataclass

from ...lang import checks
from ...lang.cost import Cost, Speculation
from ...lang.errors import BudgetError, ParameterError
from ...lang.programs import ProgramBudget
from ...lang.prompt import Part
from ...lang.protocol import Backend, GenRequest, ScoreRequest, Usage
from . import charges
from .charges import NOTHING, PICODOLLARS, Charge, each
from .prices import Price, prices

MOST_TOKENS = 10**15  # of a budget, and calls; beyond it sums are no whole numbers of a float any more
MOST_DOLLARS = 1e12


@dataclass(frozen=True, slots=True)
class Budget:
    """Limits of one run, or of one batch. They include branches, speculation and repeated requests; a program that the
    body starts with `.run(...)` is a run of its own.

    Args:
        tokens: of prompts and of what is generated, cached or not.
        calls: of the backend.
        dollars: by `umbel.prices`.
        seconds: from the beginning of the run. Like `timeout`, but ends in BudgetError.

    What a call can cost is known only within bounds: its prompt counts with `Backend.tokens_at_most`, which for hosted
    models may be as much as its bytes, and its answer with `max_tokens`. So programs get further with a `max_tokens`
    that is near what they need. A call that failed, or was left, before its first piece of text is not charged; one
    left later is charged its prompt and the pieces that came.

    Raises:
        ParameterError: no limit at all, or one that is not above 0 and up to 10**15 tokens or calls, 10**12 dollars,
            10**9 seconds.
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
            read, written = each(price)
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
                more = "one more does" if charge.calls == 1 else f"{charge.calls} more do"
                return BudgetError(
                    f"{spent.calls} calls have been made, and {more} not fit {budget}; raise calls to "
                    f"{spent.calls + charge.calls}"
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
            return charges.NOTHING
        price = self.price
        if price is None and self._allowance.budget.dollars is not None:
            raise BudgetError(
                f"{self._allowance.budget} needs the price of {self._backend.capabilities.model!r}, which umbel.prices "
                f"does not have; write umbel.prices[{self._backend.capabilities.model!r}] = umbel.Price(input, output) "
                "in dollars per million tokens"
            )
        held = charges.worst_of(self._backend, request, price)
        await self._allowance.reserve(held)
        return held

    def settle(self, held: Charge, usage: Usage) -> None:
        """Ends a call, and charges its usage."""
        price = self.price
        self.cost += Cost(usage, None if price is None else price.dollars(usage))
        if self._allowance is not None:
            self._allowance.settle(held, charges.of_usage(usage, price))

    def settle_unfinished(self, held: Charge, generated: int) -> None:
        """Ends a call that was left, or failed, after `generated` tokens; the provider does not report its usage.

        The run's cost has only reported usage. Its budget is charged the most that the call may have cost: nothing
        before the first token, since refused requests are free, then the prompt and the tokens that came."""
        if self._allowance is None:
            return
        cost = charges.at_most(held.prompt_tokens, generated, held.calls, self.price) if generated else charges.NOTHING
        self._allowance.settle(held, cost)

    # -------------------------------------------------------------------------------- calls that others make

    def hold_rest(self) -> tuple[Charge, ProgramBudget | None]:
        """Holds the rest of the budget until `settle_rest`. Returns it, and the limits for the gateway that makes the
        calls. Such calls cost no dollars: runtimes make them."""
        if self._allowance is None:
            return charges.NOTHING, None
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
            self._allowance.settle(held, charges.of_usage(usage, self.price))

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
