"""Models of many providers, through LiteLLM's client.

model = umbel.LiteLLM("mistral/mistral-large-latest")           # the provider's own environment variable has the key
"""

import asyncio
import importlib
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from dataclasses import replace
from typing import Any, Unpack

from ....lang import checks
from ....lang.errors import ParameterError
from ....lang.runtime_options import MAX_MODEL_LENGTH
from .backend import CallOptions
from .constraint_params import Fields
from .errors import Provider
from .openai.dialect import TranslatedBackend, checked_chat_profile
from .openai.profiles import COMPATIBLE, Profile
from .openai.wire import Object, TranslatedStream, Translator
from .transport import checked_address, checked_headers, checked_key, secrets_of

_EXAMPLE = "https://models.example.com/v1"

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


class LiteLLM(TranslatedBackend):
    """Runs programs on one model of a provider that LiteLLM knows.

    Conversations, stops, budgets and retries are as of `OpenAI`; LiteLLM's own retries are off. LiteLLM does not report
    which constraints a model enforces: they are validated here, and the model is asked again, unless `profile` says
    more. Its table of models says whether one calls tools: then they travel in the fields of OpenAI.

    Args:
        model: LiteLLM's name of it, with its provider, such as "mistral/mistral-large-latest".
        api_key: the key; None: the provider's own environment variable.
        base_url: the address of another server of the provider; None: the provider's own.
        profile: what the model can do, as of `OpenAI`.
        extra_body: further arguments of `litellm.acompletion`, none of those that are set here.
        default_headers: name → value of headers that are sent with every request.
        options: timeouts, retries and further settings of calls, as of `CallOptions`.

    Raises:
        MissingExtraError: the `litellm` package is not installed.
        ParameterError: a wrong value or option.

    Examples:
        A fake plays the provider here. With the provider's key, leave `base_url` out.

        >>> from umbel.testing import FakeOpenAI
        >>> @ul.function
        ... def capital(s, country):
        ...     s += ul.user(f"What is the capital of {country}?")
        ...     s += ul.assistant(ul.gen("city", max_tokens=8))
        >>> with FakeOpenAI({"France": "Paris"}) as server:  # doctest: +SKIP
        ...     model = ul.LiteLLM("openai/gpt-4o-mini", base_url=server.base_url, api_key=server.api_key)
        ...     capital.run("France", backend=model)["city"]
        'Paris'
    """

    KIND = PACKAGE = EXTRA = "litellm"

    def __init__(
        self,
        model: str,
        *,
        api_key: str | None = None,
        base_url: str | None = None,
        profile: Profile = COMPATIBLE,
        extra_body: Mapping[str, Any] | None = None,  # Any: JSON
        default_headers: Mapping[str, str] | None = None,
        **options: Unpack[CallOptions],
    ) -> None:
        self.check_options(options)
        self.require_package()
        profile = checked_chat_profile("LiteLLM", profile)
        model = checks.text("LiteLLM(): model", model, MAX_MODEL_LENGTH, "a name such as 'mistral/mistral-small'")
        api_key, headers = checked_key("api_key", api_key), checked_headers(default_headers)
        host = "litellm" if base_url is None else checked_address("base_url", base_url, _EXAMPLE)[1]
        key_from = "api_key= or the provider's environment variable"
        provider = Provider(f"litellm {model}", host, key_from, secrets_of(api_key or "", headers))
        super().__init__(model, provider, options, profile=profile, extra_body=extra_body)
        for name in sorted(self._extra.keys() & _OURS.keys()):
            raise ParameterError(f"LiteLLM(): extra_body sets {name!r}, which is set here; {_OURS[name]}")
        given: Fields = {"api_key": api_key, "base_url": base_url, "extra_headers": headers}
        self._given = {name: value for name, value in given.items() if value}
        self._takes_parallel = True

    async def prepare(self) -> None:
        """Looks the model up in LiteLLM's table: whether it calls tools. Sends nothing."""
        await super().prepare()
        library = importlib.import_module("litellm")
        taken = await asyncio.to_thread(_parameters_of, library, self.model)
        self._takes_parallel = "parallel_tool_calls" in taken
        profile = self._planner.profile
        if {"tools", "tool_choice"} <= taken and library.supports_function_calling(model=self.model):
            self.use_profile(replace(profile, tools=True), None)

    def open_client(self) -> Translator:
        dropped = frozenset() if self._takes_parallel else frozenset({"parallel_tool_calls"})
        return _LiteLLMClient({**self._given, "timeout": self._timeouts.silent}, dropped)


def _parameters_of(library: Any, model: str) -> frozenset[str]:  # Any: a module without types
    """Returns the names of OpenAI's parameters that LiteLLM takes for a model; none for one that it does not know."""
    try:
        return frozenset(library.get_supported_openai_params(model=model) or ())
    except Exception:  # of a name without a provider, which the first call refuses with LiteLLM's own words
        return frozenset()


class _LiteLLMClient(Translator):
    """Calls of `litellm.acompletion`, whose answers have the form of OpenAI's.

    Args:
        given: arguments of all calls.
        dropped: fields that the model does not take, and that are not needed: of several calls the first one is read.
    """

    def __init__(self, given: Fields, dropped: frozenset[str]) -> None:
        self._given, self._dropped = given, dropped

    async def whole(self, body: Fields) -> Object:
        return _plain(await self._asked(body))

    async def stream(self, body: Fields) -> AsyncIterator[Object]:
        return _objects(await self._asked(body))

    async def close(self) -> None:
        """Does nothing: LiteLLM keeps its connections for the whole process."""

    async def _asked(self, body: Fields) -> Any:  # Any: LiteLLM's own types
        library = importlib.import_module("litellm")
        body = {name: value for name, value in body.items() if name not in self._dropped}
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
