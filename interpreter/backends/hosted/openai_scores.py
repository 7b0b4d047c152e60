"""Log-probabilities of given choices, where the completion API tells those of the prompt (`echo`).

One call scores all choices: each is sent as prompt + choice, and its tokens are those behind the prompt. A token on the
border belongs to the choice when it holds a character of it:

    prompt  |  choice
    [Ans][wer][: y][es]
              ^ token that begins before the border and ends behind it: counted
"""

from collections.abc import Sequence

from ....lang.errors import BackendError
from ....lang.protocol import ScoredChoice, Usage
from .failures import Provider
from .openai_answers import Piece
from .openai_constraints import Fields


def body(prompt: str, choices: Sequence[str], model: str) -> Fields:
    """One token is generated for each, as not every server can generate none; nobody looks at it."""
    return {
        "model": model,
        "prompt": [prompt + choice for choice in choices],
        "max_tokens": 1,
        "temperature": 0.0,
        "echo": True,
        "logprobs": 1,
    }


def scored(piece: Piece, prompt: str, choices: Sequence[str], provider: Provider) -> tuple[ScoredChoice, ...]:
    """The answer to such a call → an entry for each choice, in order.

    Raises:
        BackendError: log-probabilities are missing.
    """
    by_index = {choice.index: choice for choice in piece.choices or ()}
    result = []
    for index, choice in enumerate(choices):
        given = by_index[index].logprobs if index in by_index else None
        if given is None or given.tokens is None or given.token_logprobs is None:
            raise BackendError(
                f"{provider.name}: {provider.host} told no log-probabilities of the prompt, which scores are; "
                "OpenAI(..., profile=Profile(..., scores=False)) has the model choose by text"
            )
        offsets = given.text_offset or _offsets(given.tokens)
        values = [
            value
            for token, offset, value in zip(given.tokens, offsets, given.token_logprobs, strict=False)
            if offset + len(token) > len(prompt) and offset < len(prompt) + len(choice)
        ]
        if not values or any(value is None for value in values):
            raise BackendError(f"{provider.name}: {provider.host} told no log-probabilities of the choice {choice!r}")
        result.append(ScoredChoice((-1,) * len(values), tuple(value for value in values if value is not None)))
    return tuple(result)


def usage(piece: Piece, bound: int) -> Usage:
    """What the call cost. `bound`: on the prompts' tokens, for a server that does not say."""
    counted = piece.usage
    if counted is None:
        return Usage(bound, 0, len(piece.choices or ()), 1)
    return Usage(counted.prompt_tokens, 0, counted.completion_tokens or 0, 1)


def _offsets(tokens: Sequence[str]) -> list[int]:
    offsets, end = [], 0
    for token in tokens:
        offsets.append(end)
        end += len(token)
    return offsets
