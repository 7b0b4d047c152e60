"""List prices of some hosted models, as their providers gave them on the date below.

Standard requests, without discounts for batches and without surcharges for very long prompts or regions; what is
stored in a cache is stored for the shortest time on offer. A model whose price was not certain is not here;
`umbel.prices["model"] = umbel.Price(...)` adds it.
"""

from typing import Final

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
