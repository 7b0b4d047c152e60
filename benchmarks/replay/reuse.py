"""The best cache hit rate that any cache and any order could reach on the tokens of a run (Theorem 3.1).

`srt/simulator/optimum.py` counts it for one batch. A run has two phases: what ran before the measured one is in the
cache already, for the optimum as it was for the engine.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from umbel.lang.prompt import Text
from umbel.srt.simulator.optimum import optimal_cached_tokens
from umbel.srt.tokenizer.prompt import PromptEncoder

from .recorder import Call, Chosen, Generated

Tokens = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Asked:
    """One prompt as the engine got it, and the tokens it was answered with."""

    prompt: Tokens
    answer: Tokens = ()


def sequences_of(calls: Iterable[Call], encoder: PromptEncoder) -> list[Asked]:
    """The token ids of each call, as the gateway made them: the same encoder on the same parts.

    A call with several continuations has its prompt once for each, a select once for each choice.
    """
    result = []
    for call in calls:
        match call:
            case Generated(prompt=prompt, continuations=continuations):
                ids = tuple(encoder.encode(prompt))
                result += [Asked(ids, tokens) for tokens in continuations]
            case Chosen(prompt=prompt, choices=choices):
                result += [Asked(tuple(encoder.encode((*prompt, Text(choice))))) for choice in choices]
    return result


def prompt_tokens(sequences: Iterable[Asked]) -> int:
    return sum(len(sequence.prompt) for sequence in sequences)


def least_computed(sequences: Sequence[Asked], before: Sequence[Asked] = ()) -> int:
    """The fewest prompt tokens that must be computed for `sequences` when `before` is in the cache."""
    return _computed([*before, *sequences]) - _computed(before)


def _computed(sequences: Sequence[Asked]) -> int:
    prompts = [sequence.prompt for sequence in sequences]
    return prompt_tokens(sequences) - optimal_cached_tokens(prompts, [sequence.answer for sequence in sequences])
