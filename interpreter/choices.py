"""Which choice `select` takes: the three methods of SGLang, from log-probabilities per token.

    token_length_normalized               the highest mean log-probability per token
    greedy_token_selection                token by token, keeping the choices with the best token
    unconditional_likelihood_normalized   the highest mean of (given the prompt) - (without it)

A log-probability of exactly 0 is a certain token: it counts in every mean.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from ..lang.errors import BackendError
from ..lang.ops import ChoicesMethod
from ..lang.protocol import ScoredChoice


@dataclass(frozen=True, slots=True)
class Decision:
    """The chosen index, and the score by which each choice was compared."""

    index: int
    scores: tuple[float, ...]


def decide(method: ChoicesMethod, choices: Sequence[ScoredChoice]) -> Decision:
    """The best of scored choices; of equal ones the first.

    Raises:
        BackendError: the backend scored a choice without tokens or without what the method needs.
    """
    for index, choice in enumerate(choices):
        if not choice.logprobs or len(choice.logprobs) != len(choice.token_ids):
            raise BackendError(
                f"choice {index} came back with {len(choice.token_ids)} tokens and {len(choice.logprobs)} "
                "log-probabilities; a choice needs one for each of at least one token"
            )
    match method:
        case "token_length_normalized":
            return _highest([_mean(choice.logprobs) for choice in choices])
        case "greedy_token_selection":
            return _greedy(choices)
        case "unconditional_likelihood_normalized":
            return _highest([_gain(index, choice) for index, choice in enumerate(choices)])


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _highest(scores: list[float]) -> Decision:
    return Decision(scores.index(max(scores)), tuple(scores))


def _gain(index: int, choice: ScoredChoice) -> float:
    if len(choice.unconditional) != len(choice.logprobs):
        raise BackendError(
            f"choice {index} came back with {len(choice.unconditional)} unconditional log-probabilities for "
            f"{len(choice.logprobs)} tokens; this backend cannot serve unconditional_likelihood_normalized"
        )
    return _mean([given - alone for given, alone in zip(choice.logprobs, choice.unconditional, strict=True)])


def _greedy(choices: Sequence[ScoredChoice]) -> Decision:
    """Keep the choices whose token is the best at each place; one that has ended goes on with its own mean.

    The score of a choice is the number of places for which it was kept, so the chosen one has the highest.
    """
    length = max(len(choice.logprobs) for choice in choices)
    kept = list(range(len(choices)))
    scores = [0.0] * len(choices)
    for place in range(length):
        best = max(kept, key=lambda index: _padded(choices[index], place))
        kept = [index for index in kept if _same_token(choices[index], choices[best], place)]
        for index in kept:
            scores[index] += 1.0
        if len(kept) == 1:
            break
    return Decision(kept[0], tuple(scores))


def _padded(choice: ScoredChoice, place: int) -> float:
    return choice.logprobs[place] if place < len(choice.logprobs) else _mean(choice.logprobs)


def _same_token(choice: ScoredChoice, best: ScoredChoice, place: int) -> bool:
    """Choices kept so far share their tokens, so one token means one probability, whatever its rounding."""
    if place < min(len(choice.token_ids), len(best.token_ids)) and choice.token_ids[place] == best.token_ids[place]:
        return True
    return _padded(choice, place) == _padded(best, place)
