"""Budgets: bounds on what a run costs. No call begins that could go beyond one.

    program.run(question, budget=umbel.Budget(tokens=10_000, dollars=0.02))
    program.run_batch(questions, budget=umbel.Budget(dollars=5))      # of all of them together

A call holds the most that it can cost while it is in flight, and is charged what it did cost:

    0                                                   limit
    |────────── spent ──────────|──── held ────|── free ──|
                                 calls in flight

A call that does not fit what is free waits for those in flight, which mostly cost less than they hold; one that would
not fit even if they cost nothing ends with BudgetError. Calls that wait go on in the order in which they came.

A `Budget` is what the user gives, an `Allowance` what is left of it for a run or a batch, a `Ledger` what one run has
cost. `Ledger.cost` is replaced as a whole on the streams' loop, so other threads read it at any time.
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
    """Limits of one run, or of one batch. Branches are inside, and speculation, and what is asked again; a program that
    the body starts with `.run(...)` is a run of its own.

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
    """The part of a budget that is left. Its seconds begin when it is made; all else is used on the streams' loop."""

    __slots__ = ("_held", "_spent", "_waiting", "budget", "ends")

    def __init__(self, budget: Budget) -> None:
        self.budget = budget
        self.ends = None if budget.seconds is None else time.monotonic() + budget.seconds
        self._spent = NOTHING
        self._held = NOTHING
        self._waiting: deque[tuple[Charge, asyncio.Future[None]]] = deque()

    async def reserve(self, charge: Charge) -> None:
        """Wait until the budget has room for a call that costs at most `charge`, and take it. `settle` ends it.

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
        """The end of a call that held `held`: it did cost `cost`."""
        self._held -= held
        self._spent += cost
        self._serve()

    def hold_rest(self) -> Charge:
        """Take all that is free: for calls that a gateway makes, which is told so. `settle` ends it."""
        budget, used = self.budget, self._spent + self._held
        rest = Charge(
            prompt_tokens=0 if budget.tokens is None else max(0, budget.tokens - used.tokens),
            calls=0 if budget.calls is None else max(0, budget.calls - used.calls),
        )
        self._held += rest
        return rest

    def late(self) -> BudgetError:
        """The error for a run that took too long."""
        return BudgetError(f"the run did not end within the seconds of its {self.budget}; raise seconds")

    def affordable(self, prompt_tokens: int, price: Price | None) -> int | None:
        """Says how many tokens a call with such a prompt may generate without waiting; None: as many as it likes."""
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
        """Let those that wait go on, as far as there is room."""
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
        """The limit that this sum is above, or None."""
        budget = self.budget
        if budget.tokens is not None and sum_.tokens > budget.tokens:
            return "tokens"
        if budget.calls is not None and sum_.calls > budget.calls:
            return "calls"
        if budget.dollars is not None and sum_.picodollars > round(budget.dollars * PICODOLLARS):
            return "dollars"
        return None

    def _refusal(self, charge: Charge) -> BudgetError | None:
        """The error of a call for which there will be no room, whatever those in flight cost."""
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
    """All of a budget, from now on; None for no budget."""
    return None if budget is None else Allowance(budget)


class Ledger:
    """Of one run.

    Args:
        backend: whose model has the price.
        allowance: of the run, or of the batch that it is part of; None: no limits.
    """

    __slots__ = ("_allowance", "_backend", "cost")

    def __init__(self, backend: Backend, allowance: Allowance | None) -> None:
        self.cost = Cost()
        self._backend = backend
        self._allowance = allowance

    @property
    def price(self) -> Price | None:
        """Of the model, as the table is now; None: not known."""
        return prices.find(self._backend.capabilities.model)

    @property
    def limited(self) -> bool:
        """Whether there is a budget."""
        return self._allowance is not None

    # -------------------------------------------------------------------------------- before and after a call

    async def reserve(self, request: GenRequest | ScoreRequest) -> Charge:
        """Wait until the budget has room for `request`; what the call holds until `settle`.

        Raises:
            BudgetError: it will have none, or it is in dollars and the model has no price.
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
        """A call has ended, and this is what it cost."""
        price = self.price
        self.cost += Cost(usage, None if price is None else price.dollars(usage))
        if self._allowance is not None:
            self._allowance.settle(held, charges.of_usage(usage, price))

    def settle_unfinished(self, held: Charge, generated: int) -> None:
        """A call was left, or failed, when so many tokens had come; the provider does not say what it cost.

        The run's cost has only what is known. Its budget is charged what the call must have cost at most: nothing
        before the first token, since requests that are refused cost nothing, then the prompt and what came."""
        if self._allowance is None:
            return
        cost = charges.at_most(held.prompt_tokens, generated, held.calls, self.price) if generated else charges.NOTHING
        self._allowance.settle(held, cost)

    # -------------------------------------------------------------------------------- calls that others make

    def hold_rest(self) -> tuple[Charge, ProgramBudget | None]:
        """All that is left of the budget, held until `settle_rest`, and what of it whoever makes the calls has to
        know. Such calls cost no dollars: runtimes make them."""
        if self._allowance is None:
            return charges.NOTHING, None
        budget, rest = self._allowance.budget, self._allowance.hold_rest()
        if budget.tokens is None and budget.calls is None:
            return rest, None
        return rest, ProgramBudget(
            None if budget.tokens is None else rest.prompt_tokens, None if budget.calls is None else rest.calls
        )

    def note_others(self, before: Cost, usage: Usage) -> None:
        """Those calls have taken so much up to now; `before` is what the run had cost when they began."""
        price = self.price
        self.cost = before + Cost(usage, None if price is None else price.dollars(usage))

    def settle_rest(self, held: Charge, usage: Usage) -> None:
        """They are over, and this is what they took."""
        if self._allowance is not None:
            self._allowance.settle(held, charges.of_usage(usage, self.price))

    # -------------------------------------------------------------------------------- speculation

    def affordable_tokens(self, prompt: tuple[Part, ...]) -> int | None:
        """Says how many tokens a call with this prompt may generate without waiting; None: as many as it likes."""
        if self._allowance is None:
            return None
        return self._allowance.affordable(self._backend.tokens_at_most(prompt), self.price)

    def note(self, speculation: Speculation) -> None:
        """Add what speculation did."""
        price = self.price
        saved = None
        if price is not None:
            gain = speculation.input_tokens_saved * price.input - speculation.output_tokens_wasted * price.output
            saved = gain / 1e6
        self.cost += Cost(speculation=speculation, dollars_saved=saved)
