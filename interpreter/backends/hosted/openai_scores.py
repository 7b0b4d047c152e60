"""Log-probabilities of given choices, where the completion API tells those of the prompt (`echo`).

Each choice is a call of its own, sent as prompt + choice: not every server takes several prompts at once, and those
that have a prefix cache read the shared prompt once anyway. The tokens of a choice are those behind the prompt. A token
on the border belongs to the choice when it holds a character of it:

    prompt  |  choice
    [Ans][wer][: y][es]
              ^ token that begins before the border and ends behind it: counted
"""

from collections.abc import Sequence

from ....lang.errors import BackendError
from ....lang.protocol import ScoredChoice, Usage
from .failures import Provider
from .openai_constraints import Fields
from .openai_wire import Piece


def body(prompt: str, choice: str, model: str) -> Fields:
    """One token is generated, as not every server can generate none; nobody looks at it."""
    return {"model": model, "prompt": prompt + choice, "max_tokens": 1, "temperature": 0.0, "echo": True, "logprobs": 1}


def scored(piece: Piece, prompt: str, choice: str, provider: Provider) -> ScoredChoice:
    """The answer to such a call → the numbers of its choice.

    Raises:
        BackendError: log-probabilities are missing.
    """
    given = piece.choices[0].logprobs if piece.choices else None
    if given is None or given.tokens is None or given.token_logprobs is None:
        raise BackendError(
            f"{provider.name}: {provider.host} told no log-probabilities of the prompt, which scores are; "
            "OpenAI(..., profile=Profile(..., scores=False)) has the model choose by text"
        )
    values: list[float] = []
    offsets = given.text_offset or _offsets(given.tokens)
    for token, offset, value in zip(given.tokens, offsets, given.token_logprobs, strict=False):
        if offset + len(token) <= len(prompt) or offset >= len(prompt) + len(choice):
            continue
        if value is None:  # the first of all tokens: nothing stands before it
            raise BackendError(f"{provider.name} can score choices behind a prompt only; write some text before them")
        values.append(value)
    if not values:
        raise BackendError(f"{provider.name}: {provider.host} told no log-probabilities of the choice {choice!r}")
    return ScoredChoice((-1,) * len(values), tuple(values))


def usage(piece: Piece, bound: int) -> Usage:
    """What the call cost. `bound`: on the prompt's tokens, for a server that does not say."""
    counted = piece.usage
    if counted is None:
        return Usage(bound, 0, 1, 1)
    return Usage(counted.prompt_tokens, counted.cached_tokens, counted.completion_tokens or 0, 1)


def _offsets(tokens: Sequence[str]) -> list[int]:
    offsets, end = [], 0
    for token in tokens:
        offsets.append(end)
        end += len(token)
    return offsets
