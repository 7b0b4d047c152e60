"""Answers of servers of the OpenAI dialect, as types. Fields that are not used are not read."""

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

from .....lang.errors import BackendError
from .....lang.protocol import TokenLogprob
from ..errors import Provider

_Count = Annotated[int, msgspec.Meta(ge=0)]


class Details(msgspec.Struct):
    cached_tokens: _Count | None = None


class Counted(msgspec.Struct):
    prompt_tokens: _Count = 0
    completion_tokens: _Count | None = 0
    prompt_tokens_details: Details | None = None
    prompt_cache_hit_tokens: _Count | None = None  # DeepSeek's name of it

    @property
    def cached_tokens(self) -> int:
        details = self.prompt_tokens_details
        cached = (details.cached_tokens if details is not None else None) or self.prompt_cache_hit_tokens or 0
        return min(cached, self.prompt_tokens)


class _Alternative(msgspec.Struct):
    token: str
    logprob: float


class _Token(_Alternative):
    top_logprobs: list[_Alternative] | None = None


class Logprobs(msgspec.Struct):
    """Log-probabilities: `content` of the chat API, the lists of the completion API."""

    content: list[_Token] | None = None
    tokens: list[str] | None = None
    token_logprobs: list[float | None] | None = None
    top_logprobs: list[dict[str, float] | None] | None = None
    text_offset: list[int] | None = None


class _Said(msgspec.Struct):
    content: str | None = None
    refusal: str | None = None


class Choice(msgspec.Struct):
    index: _Count = 0
    message: _Said | None = None  # of a whole answer
    delta: _Said | None = None  # of an event
    text: str | None = None  # of the completion API, both
    finish_reason: str | None = None
    logprobs: Logprobs | tuple[TokenLogprob, ...] | None = None
    stop_reason: str | int | None = None  # of vLLM: the stop that matched


class Piece(msgspec.Struct):
    """A whole answer, or one event of a stream."""

    choices: list[Choice] | None = None
    usage: Counted | None = None
    error: Any = None  # Any: whatever a server puts there


def parsed(data: object, provider: Provider) -> Piece:
    """Parses JSON of a server as a piece.

    Raises:
        BackendError: it is no piece.
    """
    if not isinstance(data, Mapping):
        raise BackendError(
            f"{provider.name}: {provider.host} sent what is no answer of this API: {provider.scrub(str(data))[:80]!r}; "
            "check base_url"
        )
    try:
        return msgspec.convert(data, Piece, strict=True)
    except (msgspec.ValidationError, RecursionError) as error:
        raise BackendError(f"{provider.name}: {provider.host} sent what is no answer of this API: {error}") from None


def logprobs_of(given: Logprobs | tuple[TokenLogprob, ...] | None) -> tuple[TokenLogprob, ...]:
    """Reads log-probabilities. This API returns no token ids: they are -1."""
    if given is None:
        return ()
    if isinstance(given, tuple):
        return given
    if given.content is not None:
        return tuple(
            TokenLogprob(
                -1, each.token, each.logprob, tuple((-1, top.token, top.logprob) for top in each.top_logprobs or ())
            )
            for each in given.content
        )
    tokens, values = given.tokens or [], given.token_logprobs or []
    tops = given.top_logprobs or [None] * len(tokens)
    return tuple(
        TokenLogprob(-1, token, 0.0 if value is None else value, _ranked(top))
        for token, value, top in zip(tokens, values, tops, strict=False)
    )


def _ranked(top: dict[str, float] | None) -> tuple[tuple[int, str, float], ...]:
    ranked = sorted((top or {}).items(), key=lambda each: -each[1])
    return tuple((-1, token, value) for token, value in ranked)
