"""The ledger of one run: what its calls have cost, and what its budget still allows.

Written on the streams' loop. `cost` is replaced as a whole, so other threads may read it at any time.
"""

from ...lang.cost import Cost, Speculation
from ...lang.errors import BudgetError
from ...lang.programs import ProgramBudget
from ...lang.prompt import Part
from ...lang.protocol import Backend, GenRequest, ScoreRequest, Usage
from . import charges
from .budget import Allowance
from .charges import Charge
from .prices import Price, prices


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

    async def hold(self, request: GenRequest | ScoreRequest) -> Charge:
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
        await self._allowance.hold(held)
        return held

    def settle(self, held: Charge, usage: Usage) -> None:
        """A call has ended, and this is what it cost."""
        price = self.price
        self.cost += Cost(usage, None if price is None else price.dollars(usage))
        if self._allowance is not None:
            self._allowance.settle(held, charges.of_usage(usage, price))

    def settle_unfinished(self, held: Charge, generated: int) -> None:
        """A call was left, or failed, when so many tokens had come; what it cost nobody says.

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
        """How many tokens a call with this prompt may generate without waiting; None: as many as it likes."""
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
