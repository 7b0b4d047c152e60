"""Prices of models: dollars per million tokens, by the name of the model, in a table that users edit.

    umbel.prices["my-model"] = umbel.Price(0.1, 0.4)
    umbel.prices["gpt-4o"].cached_input

The table begins with the list prices that providers gave on `DATE`: standard requests, without discounts for batches
and without surcharges for very long prompts or regions; what is stored in a cache is stored for the shortest time on
offer. A model whose price was not certain is not there. Providers change their prices: a budget in dollars is as good
as the table.
"""

import re
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Final

from ...lang import checks
from ...lang.errors import ParameterError, shown
from ...lang.protocol import Usage

DATE: Final = "2026-11-22"

# name → (input, output, cached input, cache write), dollars per million tokens; see prices.Price
PRICES: Final[dict[str, tuple[float, float, float | None, float | None]]] = {
    "gpt-4o": (2.5, 10.0, 1.25, None),
    "gpt-4o-2024-05-13": (5.0, 15.0, None, None),  # the first one was dearer
    "gpt-4o-mini": (0.15, 0.6, 0.075, None),
    "gpt-4.1": (2.0, 8.0, 0.5, None),
    "gpt-4.1-mini": (0.4, 1.6, 0.1, None),
    "gpt-4.1-nano": (0.1, 0.4, 0.025, None),
    "gpt-5": (1.25, 10.0, 0.125, None),
    "gpt-5-mini": (0.25, 2.0, 0.025, None),
    "gpt-5-nano": (0.05, 0.4, 0.005, None),
    "gpt-5.4": (2.5, 15.0, 0.25, None),
    "gpt-5.4-mini": (0.75, 4.5, 0.075, None),
    "gpt-5.4-nano": (0.2, 1.25, 0.02, None),
    "claude-opus-4-1": (15.0, 75.0, 1.5, 18.75),
    "claude-opus-4-5": (5.0, 25.0, 0.5, 6.25),
    "claude-opus-4-6": (5.0, 25.0, 0.5, 6.25),
    "claude-opus-4-7": (5.0, 25.0, 0.5, 6.25),
    "claude-opus-4-8": (5.0, 25.0, 0.5, 6.25),
    "claude-opus-5": (5.0, 25.0, 0.5, 6.25),
    "claude-sonnet-4-5": (3.0, 15.0, 0.3, 3.75),
    "claude-sonnet-4-6": (3.0, 15.0, 0.3, 3.75),
    "claude-haiku-4-5": (1.0, 5.0, 0.1, 1.25),
}

# What may stand after a name of the table: dates and snapshots of the same model. A bare prefix would be wrong as
# often as right: gpt-4o is no price of gpt-4o-mini, nor claude-opus-4 one of claude-opus-4-5.
_VERSION = re.compile(r"[-@](\d{4}-\d{2}-\d{2}|\d{8}|\d{6}|\d{4}|latest)")

MOST_DOLLARS = 1e9  # per million tokens
_PRICE = "dollars per million tokens, such as umbel.Price(0.15, 0.6)"


@dataclass(frozen=True, slots=True)
class Price:
    """Dollars per million tokens.

    Args:
        input: of prompt tokens.
        output: of generated tokens.
        cached_input: of prompt tokens that the provider had cached; None: as `input`.
        cache_write: of prompt tokens that the provider charged for storing; None: as `input`.

    Raises:
        ParameterError: not a number from 0 to a billion.
    """

    input: float
    output: float
    cached_input: float | None = None
    cache_write: float | None = None

    def __post_init__(self) -> None:
        for name in ("input", "output", "cached_input", "cache_write"):
            value = getattr(self, name)
            if value is None and name.startswith("cache"):
                continue
            object.__setattr__(self, name, checks.number(f"Price: {name}", value, 0, MOST_DOLLARS, _PRICE))

    def dollars(self, usage: Usage) -> float:
        """Returns the price of these tokens, in dollars."""
        cached = self.input if self.cached_input is None else self.cached_input
        stored = self.input if self.cache_write is None else self.cache_write
        plain = usage.prompt_tokens - usage.cached_tokens - usage.cache_write_tokens
        millions = (
            plain * self.input
            + usage.cached_tokens * cached
            + usage.cache_write_tokens * stored
            + usage.completion_tokens * self.output
        )
        return millions / 1e6

    @property
    def dearest_input(self) -> float:
        """The higher price of a prompt token, stored or not."""
        return max(self.input, self.cache_write or 0.0)


FREE = Price(0.0, 0.0)


class PriceTable(MutableMapping[str, Price]):
    """Names of models → prices. `find` also knows dated versions of a name."""

    def __init__(self, prices: Mapping[str, Price] | None = None) -> None:
        self._prices = dict(prices or {})

    def find(self, model: str) -> Price | None:
        """Returns the price under exactly this name, else under the longest name that it is a dated version of
        ("gpt-4o" for "gpt-4o-2024-08-06"), else None. A model without a name runs here and costs nothing."""
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
