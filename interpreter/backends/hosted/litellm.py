"""Models of many providers, through LiteLLM's client.

model = umbel.LiteLLM("mistral/mistral-large-latest")           # the provider's own environment variable has the key
"""

import importlib
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
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
    """A backend for one model of a provider that LiteLLM knows.

    Conversations, stops, budgets and retries are as of `OpenAI`; LiteLLM's own retries are off. LiteLLM does not report
    which constraints a model enforces: they are validated here, and the model is asked again, unless `profile` says
    more.

    Args:
        model: LiteLLM's name of it, with its provider.
        api_key: the key; None: the provider's own environment variable.
        base_url: another server of the provider.
        profile: what the model can do, as of `OpenAI`.
        extra_body: further arguments of `litellm.acompletion`, none of those that are set here.
        default_headers: sent with every request.
        options: as of `CallOptions`.

    Raises:
        MissingExtraError: the `litellm` package is not installed.
        ParameterError: a wrong value or option.
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

    def open_client(self) -> Translator:
        return _LiteLLMClient({**self._given, "timeout": self._timeouts.silent})


class _LiteLLMClient(Translator):
    """Calls of `litellm.acompletion`, whose answers have the form of OpenAI's. `given`: arguments of all of them."""

    def __init__(self, given: Fields) -> None:
        self._given = given

    async def whole(self, body: Fields) -> Object:
        return _plain(await self._asked(body))

    async def stream(self, body: Fields) -> AsyncIterator[Object]:
        return _objects(await self._asked(body))

    async def close(self) -> None:
        """Does nothing: LiteLLM keeps its connections for the whole process."""

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
