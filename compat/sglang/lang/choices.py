"""`sglang.lang.choices`: the methods of `select`, as objects that a program can also call on numbers of its own."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ....interpreter.selecting import decide
from ....lang.errors import ParameterError
from ....lang.ops import ChoicesMethod
from ....lang.protocol import ScoredChoice

Token = tuple[float | None, int, str | None]  # logarithm of its probability, id, text


@dataclass(frozen=True)
class ChoicesDecision:
    """The choice that was taken, and the facts by which it was."""

    decision: str
    meta_info: dict[str, Any] | None = None  # Any: lists of numbers and of tokens


class ChoicesSamplingMethod(str):
    """A method of `select`: its name here, which `select` takes, and a function of log-probabilities."""

    __slots__ = ()

    @property
    def requires_unconditional_logprobs(self) -> bool:
        return self == "unconditional_likelihood_normalized"

    def __call__(
        self,
        *,
        choices: Sequence[str],
        normalized_prompt_logprobs: Sequence[float] | None = None,
        input_token_logprobs: Sequence[Sequence[Token]],
        output_token_logprobs: Sequence[Sequence[Token]] | None = None,
        unconditional_token_logprobs: Sequence[Sequence[Token]] | None = None,
    ) -> ChoicesDecision:
        """The best choice by log-probabilities that the program has.

        Args:
            normalized_prompt_logprobs: the mean of each choice; None: of its tokens.
            input_token_logprobs: the tokens of each choice.
            output_token_logprobs: passed on with the facts.
            unconditional_token_logprobs: the same tokens without the prompt.

        Raises:
            ParameterError: lists of different lengths, or the method needs numbers that are not given.
        """
        if self.requires_unconditional_logprobs and unconditional_token_logprobs is None:
            raise ParameterError(f"{self} compares with texts without the prompt; give unconditional_token_logprobs=")
        alone = unconditional_token_logprobs or [()] * len(choices)
        if not len(choices) == len(input_token_logprobs) == len(alone) or not choices:
            raise ParameterError("choices and log-probabilities must be lists of one length, one entry for each choice")
        scored = [_scored(tokens, others) for tokens, others in zip(input_token_logprobs, alone, strict=True)]
        decided = decide(_NAMES[str(self)], scored)
        means = [sum(choice.logprobs) / len(choice.logprobs) for choice in scored]
        given = list(means if normalized_prompt_logprobs is None else normalized_prompt_logprobs)
        if self == "token_length_normalized" and normalized_prompt_logprobs is not None:
            index = given.index(max(given))
        else:
            index = decided.index
        facts = {
            "normalized_prompt_logprobs": given,
            "input_token_logprobs": input_token_logprobs,
            "output_token_logprobs": output_token_logprobs,
            "choice_scores": decided.scores,
        }
        return ChoicesDecision(choices[index], facts)


def _scored(tokens: Sequence[Token], alone: Sequence[Token]) -> ScoredChoice:
    if not tokens:
        raise ParameterError("a choice needs the log-probability of at least one token")
    return ScoredChoice(
        tuple(token for _, token, *_ in tokens),
        tuple(value or 0.0 for value, *_ in tokens),
        tuple(value or 0.0 for value, *_ in alone),
    )


token_length_normalized = ChoicesSamplingMethod("token_length_normalized")
greedy_token_selection = ChoicesSamplingMethod("greedy_token_selection")
unconditional_likelihood_normalized = ChoicesSamplingMethod("unconditional_likelihood_normalized")

_NAMES: dict[str, ChoicesMethod] = {
    "token_length_normalized": "token_length_normalized",
    "greedy_token_selection": "greedy_token_selection",
    "unconditional_likelihood_normalized": "unconditional_likelihood_normalized",
}


def method_of(given: str | None) -> Any:  # Any: a ChoicesMethod, or a wrong name, which `select` refuses
    """A method as our own `select` takes it: an object here, or its name."""
    return str(given) if isinstance(given, ChoicesSamplingMethod) else given
