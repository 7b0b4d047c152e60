"""Scores given choices, where the completion API returns log-probabilities of the prompt (`echo`).

Each choice is a call of its own, sent as prompt + choice: not every server takes several prompts at once, and those
that have a prefix cache read the shared prompt once anyway. The tokens of a choice are those after the prompt. A token
on the border belongs to the choice when it holds a character of it:

    prompt  |  choice
    [Ans][wer][: y][es]
              ^ token that begins before the border and ends after it: counted
"""

import asyncio
import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from .....lang.errors import BackendError
from .....lang.prompt import Part, Text
from .....lang.protocol import GenRequest, Scored, ScoredChoice, ScoreRequest, TokenLogprob, Usage
from ..constraint_params import Fields
from ..errors import Provider
from ..session import Session
from .answers import Client
from .requests import OpenAIPlanner
from .wire import Logprobs, Piece, parsed

if TYPE_CHECKING:
    pass


async def score(
    session: Session[Client],
    planner: OpenAIPlanner,
    request: ScoreRequest,
    deadline: float,
    tokens_at_most: Callable[[tuple[Part, ...]], int],
) -> Scored:
    """Scores all choices of a request, each by a call.

    Raises:
        CapabilityError: the prompt holds images.
        BackendError: log-probabilities are missing, or a call failed.
    """
    prompt = planner.text(request.prompt)

    async def one(choice: str) -> tuple[ScoredChoice, Usage]:
        body = _body(prompt, choice, planner)
        async with session.slot(deadline) as client:
            data = await session.retried(lambda: client.post("/completions", cast_to=object, body=body), deadline)
        piece = parsed(data, session.provider)
        bound = tokens_at_most((Text(prompt + choice),))
        return _scored(piece, prompt, choice, session.provider), _usage(piece, bound)

    tasks = [asyncio.create_task(one(choice)) for choice in request.choices]
    try:
        scores = await asyncio.gather(*tasks)
    finally:  # when one fails the others are of no use
        for task in tasks:
            task.cancel()
    return Scored(request.id, tuple(choice for choice, _ in scores), sum((cost for _, cost in scores), Usage()))


async def of_prompt(
    session: Session[Client],
    planner: OpenAIPlanner,
    request: GenRequest,
    deadline: float,
    tokens_at_most: Callable[[tuple[Part, ...]], int],
) -> tuple[tuple[TokenLogprob, ...], Usage]:
    """Returns log-probabilities of the prompt's tokens, from the requested one on; 0.0 for the first of all.

    Raises:
        CapabilityError: the prompt holds images.
        BackendError: log-probabilities are missing, or the call failed.
    """
    prompt = planner.text(request.prompt)
    body = _body(prompt, "", planner)
    async with session.slot(deadline) as client:
        data = await session.retried(lambda: client.post("/completions", cast_to=object, body=body), deadline)
    piece = parsed(data, session.provider)
    given = _told(piece, session.provider)
    tokens = [
        TokenLogprob(_name_of(token), token, value or 0.0)
        for token, offset, value in _placed(given)
        if offset < len(prompt)
    ]
    start = request.sampling.prompt_logprobs_from or 0
    return tuple(tokens[start:]), _usage(piece, tokens_at_most(request.prompt))


def _body(prompt: str, choice: str, planner: OpenAIPlanner) -> Fields:
    """Writes the body. One token is generated and ignored, as not every server can generate none."""
    asked = {"prompt": prompt + choice, "max_tokens": 1, "temperature": 0.0, "echo": True, "logprobs": 1}
    return {"model": planner.model, **asked, **planner.extra}


def _scored(piece: Piece, prompt: str, choice: str, provider: Provider) -> ScoredChoice:
    """Reads the scores of a choice from the answer.

    Raises:
        BackendError: log-probabilities are missing.
    """
    names: list[int] = []
    values: list[float] = []
    for token, offset, value in _placed(_told(piece, provider)):
        if offset + len(token) <= len(prompt) or offset >= len(prompt) + len(choice):
            continue
        if value is None:  # the first of all tokens: it has no predecessor
            raise BackendError(f"{provider.name} can score choices behind a prompt only; write some text before them")
        names.append(_name_of(token))
        values.append(value)
    if not values:
        raise BackendError(f"{provider.name}: {provider.host} told no log-probabilities of the choice {choice!r}")
    return ScoredChoice(tuple(names), tuple(values))


def _told(piece: Piece, provider: Provider) -> Logprobs:
    given = piece.choices[0].logprobs if piece.choices else None
    if not isinstance(given, Logprobs) or given.tokens is None or given.token_logprobs is None:
        raise BackendError(
            f"{provider.name}: {provider.host} told no log-probabilities of the prompt, which scores are; "
            "OpenAI(..., profile=Profile(..., scores=False)) has the model choose by text"
        )
    return given


def _placed(given: Logprobs) -> Iterable[tuple[str, int, float | None]]:
    """Yields tokens, the characters at which they begin, and their log-probabilities."""
    tokens = given.tokens or []
    return zip(tokens, given.text_offset or _offsets(tokens), given.token_logprobs or [], strict=False)


def _name_of(token: str) -> int:
    """Returns a substitute below 0 for a token id, which this API does not return: equal for equal texts."""
    return -1 - zlib.crc32(token.encode("utf-8", "surrogatepass"))


def _usage(piece: Piece, bound: int) -> Usage:
    """Returns the usage of a call. `bound`: on the prompt's tokens, for a server that does not report it."""
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
