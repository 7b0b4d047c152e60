"""Costs of a run: tokens, calls, dollars, and what speculation saved of them.

    state = program.run(question)
    state.cost.usage.total_tokens, state.cost.dollars

    states = program.run_batch(questions)
    whole = sum((state.cost for state in states), umbel.Cost())

Costs are values: one that was read does not change any more, and they add up.
"""

import msgspec

from .protocol import Usage


class Speculation(msgspec.Struct, frozen=True, omit_defaults=True):
    """Savings and waste of speculation: requesting more text than a `gen` needs.

    Attributes:
        calls_saved: calls that were not made, since the text was there already, less those that were made in vain.
        input_tokens_saved: prompt tokens of those calls; estimated from the text where a provider counts none.
        output_tokens_wasted: generated tokens after the `gen` that asked for them, of which no variable was made.
        tokens_speculated: generated tokens beyond what the `gen` itself needed.
        hits, misses: how many gens were answered from text at hand, and how many found some that did not fit.
    """

    calls_saved: int = 0
    input_tokens_saved: int = 0
    output_tokens_wasted: int = 0
    tokens_speculated: int = 0
    hits: int = 0
    misses: int = 0

    def __add__(self, other: "Speculation") -> "Speculation":
        return Speculation(
            self.calls_saved + other.calls_saved,
            self.input_tokens_saved + other.input_tokens_saved,
            self.output_tokens_wasted + other.output_tokens_wasted,
            self.tokens_speculated + other.tokens_speculated,
            self.hits + other.hits,
            self.misses + other.misses,
        )


class Cost(msgspec.Struct, frozen=True, omit_defaults=True):
    """The cost of a run so far, or of several runs added up.

    Attributes:
        usage: tokens and calls.
        dollars: by `umbel.prices`, 0 for a model that runs here; None when a call went to a model without a price.
        speculation: what `num_api_spec_tokens` and `speculate` did.
        dollars_saved: by speculation: its saved prompt tokens at their full price less its wasted tokens, so below 0
            where it did not pay; None as for `dollars`.
    """

    usage: Usage = Usage()
    dollars: float | None = 0.0
    speculation: Speculation = Speculation()
    dollars_saved: float | None = 0.0

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(
            self.usage + other.usage,
            _sum(self.dollars, other.dollars),
            self.speculation + other.speculation,
            _sum(self.dollars_saved, other.dollars_saved),
        )


def _sum(one: float | None, other: float | None) -> float | None:
    return None if one is None or other is None else one + other
