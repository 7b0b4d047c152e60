"""Providers with their own clients, used in the OpenAI dialect: a translator replaces the SDK's client.

Requests come as bodies of `/chat/completions`, and answers go back as its objects, so that planning, stops,
constraints, budgets and retries are those of `OpenAI`.
"""

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping
from typing import Any

from .constraint_params import Fields

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
