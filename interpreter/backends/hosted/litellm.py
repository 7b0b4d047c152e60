"""Models behind LiteLLM's client, which speaks with many providers.

model = umbel.LiteLLM("mistral/mistral-large-latest")           # the provider's own environment variable has the key
"""

import importlib
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from typing import TYPE_CHECKING, Any, cast

from ....lang.errors import ParameterError, unknown_option
from .credentials import checked_key
from .lowered import Fields
from .openai.backend import OpenAI
from .openai.profiles import COMPATIBLE, Profile
from .surroundings import Surroundings
from .translated import Object, TranslatedStream, Translator

if TYPE_CHECKING:
    from openai import AsyncOpenAI

# Arguments of LiteLLM that are set here, and what to write instead of them in extra_body.
_OURS: Mapping[str, str] = {
    "api_base": "write base_url=",
    "api_key": "write api_key=",
    "base_url": "write base_url=",
    "drop_params": "leave it out: a parameter that a model does not take is refused, and never dropped",
    "extra_headers": "write default_headers=",
    "headers": "write default_headers=",
    "max_retries": "write max_retries= of LiteLLM()",
    "num_retries": "write max_retries= of LiteLLM()",
    "timeout": "write timeout= or first_byte_timeout= of LiteLLM()",
}


class LiteLLM(OpenAI):
    """A backend for one model of a provider that LiteLLM knows.

    Conversations, stops, budgets and retries are as of `OpenAI`; LiteLLM's own retries are off. What the model enforces
    of constraints LiteLLM does not say: they are validated here, and the model is asked again, unless `profile` says
    more.

    Args:
        model: LiteLLM's name of it, with its provider.
        api_key: the key; None: the provider's own environment variable.
        base_url: another server of the provider.
        profile: what the model can do, as of `OpenAI`.
        timeout, first_byte_timeout, idle_timeout, max_retries, max_concurrency, extra_body, default_headers: as of
            `OpenAI`; `extra_body` are further arguments of `litellm.acompletion`, none of those that are
            set here.
        surroundings: clock, sleep and chance, for tests.

    Raises:
        MissingExtraError: the `litellm` package is not installed.
        ParameterError: a wrong value or option.
    """

    PACKAGE = "litellm"
    EXTRA = "litellm"
    KIND = "litellm"

    def __init__(
        self,
        model: str,
        *,
        api_key: str | None = None,
        base_url: str | None = None,
        profile: Profile = COMPATIBLE,
        timeout: float = 600.0,
        first_byte_timeout: float | None = None,
        idle_timeout: float = 120.0,
        max_retries: int = 3,
        max_concurrency: int = 64,
        extra_body: Mapping[str, Any] | None = None,  # Any: JSON
        default_headers: Mapping[str, str] | None = None,
        surroundings: Surroundings | None = None,
        **unknown: object,
    ) -> None:
        if unknown:
            options = (name for name in LiteLLM.__init__.__annotations__ if name not in ("unknown", "return"))
            raise unknown_option("LiteLLM()", next(iter(unknown)), options)
        if not isinstance(profile, Profile) or not profile.chat:
            raise ParameterError(f"LiteLLM(profile={profile!r}): write a Profile(...) of a chat model")
        api_key = checked_key("api_key", api_key)
        super().__init__(
            model,
            api_key=api_key or "none",
            base_url="https://litellm" if base_url is None else base_url,
            mode="chat",
            profile=profile,
            timeout=timeout,
            first_byte_timeout=first_byte_timeout,
            idle_timeout=idle_timeout,
            max_retries=max_retries,
            max_concurrency=max_concurrency,
            extra_body=extra_body,
            default_headers=default_headers,
            surroundings=surroundings,
            environment={},
        )
        for name in sorted(self._extra.keys() & _OURS.keys()):
            raise ParameterError(f"LiteLLM(): extra_body sets {name!r}, which is set here; {_OURS[name]}")
        given: Fields = {"api_key": api_key, "base_url": base_url, "extra_headers": dict(default_headers or {})}
        self._given = {name: value for name, value in given.items() if value}

    def _client(self, concurrency: int) -> "AsyncOpenAI":
        # The line is typed by the SDK of OpenAI, of which it uses what a translator has.
        return cast("AsyncOpenAI", _LiteLLMClient({**self._given, "timeout": self._patience.silent}))


class _LiteLLMClient(Translator):
    """Calls of `litellm.acompletion`, whose answers have the form of OpenAI's. `given`: arguments of all of them."""

    def __init__(self, given: Fields) -> None:
        self._given = given

    async def whole(self, body: Fields) -> Object:
        return _plain(await self._asked(body))

    async def stream(self, body: Fields) -> AsyncIterator[Object]:
        return _objects(await self._asked(body))

    async def close(self) -> None:
        """LiteLLM keeps its connections for the whole process."""

    async def _asked(self, body: Fields) -> Any:  # Any: LiteLLM's own types
        library = importlib.import_module("litellm")
        return await library.acompletion(**body, **self._given, num_retries=0, max_retries=0, drop_params=False)


async def _objects(chunks: Any) -> AsyncGenerator[Object, None]:
    try:
        async for chunk in chunks:
            yield _plain(chunk)
    finally:
        await TranslatedStream(chunks).close()


def _plain(answer: Any) -> Object:
    plain: Object = answer.model_dump(exclude_none=True)
    return plain
