"""Types answers of the OpenAI dialect, and translates providers' own clients into it.

A `Translator` stands in for OpenAI's SDK: requests come to it as bodies of `/chat/completions`, and answers go back as
its objects, so that planning, stops, constraints, budgets and retries are those of `OpenAI`. Fields of answers that are
not used are not read.
"""

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping
from typing import Annotated, Any

import msgspec

from .....lang.errors import BackendError
from .....lang.protocol import TokenLogprob, Usage
from ..constraint_params import Fields
from ..errors import Provider

_Count = Annotated[int, msgspec.Meta(ge=0)]


class Details(msgspec.Struct):
    cached_tokens: _Count | None = None
    cache_write_tokens: _Count | None = None
    cache_read_input_tokens: _Count | None = None  # of servers that reuse more than they charge as read


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

    @property
    def usage(self) -> Usage:
        """The usage of one call."""
        details = self.prompt_tokens_details or Details()
        cached = self.cached_tokens
        told = details.cache_read_input_tokens
        written = min(details.cache_write_tokens or 0, self.prompt_tokens - cached)
        read = cached if told is None else min(told, self.prompt_tokens - written)
        return Usage(self.prompt_tokens, cached, self.completion_tokens or 0, 1, written, cache_read_tokens=read)


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


class Called(msgspec.Struct):
    name: str | None = None
    arguments: str | None = None


class _OfGoogle(msgspec.Struct):
    thought_signature: str = ""


class _ExtraContent(msgspec.Struct):
    google: _OfGoogle | None = None


class SaidCall(msgspec.Struct):
    """A call of a tool, or a piece of one; `index` tells whose."""

    index: _Count | None = None
    function: Called | None = None
    extra_content: _ExtraContent | None = None  # of Gemini models

    @property
    def signature(self) -> str:
        """The text that goes back with the call; "" where there is none."""
        extra = self.extra_content
        return "" if extra is None or extra.google is None else extra.google.thought_signature


class _Said(msgspec.Struct):
    content: str | None = None
    refusal: str | None = None
    tool_calls: list[SaidCall] | None = None
    reasoning: str | None = None  # of OpenRouter, and of vLLM
    reasoning_content: str | None = None  # of SGLang, of llama.cpp, and of vLLM before 0.12

    @property
    def thoughts(self) -> str:
        return self.reasoning or self.reasoning_content or ""


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


Object = dict[str, Any]  # Any: JSON


class ProviderError(OSError):
    """A provider refused a request, or failed. The attributes are those of an SDK's exception.

    Args:
        status: of HTTP.
        message: in the provider's words.
        headers: of its answer.
    """

    def __init__(self, status: int, message: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.status_code, self.body = status, {"error": {"message": message}}
        self.response = Response(headers or {})


class Response:
    """The headers of an HTTP response."""

    def __init__(self, headers: Mapping[str, str]) -> None:
        self.headers = headers


class TranslatedStream:
    """Objects of a streamed answer."""

    response = Response({})

    def __init__(self, objects: AsyncIterator[Object]) -> None:
        self._objects = objects

    def __aiter__(self) -> AsyncIterator[object]:
        return self

    async def __anext__(self) -> object:
        return await anext(self._objects)

    async def close(self) -> None:
        close = getattr(self._objects, "aclose", None)
        if close is not None:
            await close()


class Translator(ABC):
    """A client of a provider that is asked in the OpenAI dialect."""

    async def post(self, path: str, *, cast_to: type[object], body: Fields) -> object:
        """Requests a whole answer."""
        return await self.whole(body)

    @abstractmethod
    async def whole(self, body: Fields) -> Object:
        """Answers a body of `/chat/completions`. Raises ProviderError, or what the provider's client raises."""

    @abstractmethod
    async def stream(self, body: Fields) -> AsyncIterator[Object]:
        """Answers a body as a stream of objects, once the answer has begun."""

    @abstractmethod
    async def close(self) -> None:
        """Closes the connections that it owns."""
