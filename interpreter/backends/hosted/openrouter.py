"""Models of many providers through OpenRouter, which routes each request to one that takes it.

model = umbel.OpenRouter("mistralai/mistral-small-3.2-24b-instruct")    # OPENROUTER_API_KEY, or api_key=

A start requests OpenRouter's list of models, which says what each takes and costs. Requests ask for providers that take
every parameter (`require_parameters`): without it, one that does not would drop a constraint in silence.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Unpack

from ....lang import checks
from ....lang.errors import ParameterError
from ....lang.runtime_options import MAX_MODEL_LENGTH
from ...budget import Price, prices
from .backend import ConnectionOptions
from .errors import Provider
from .openai.backend import Endpoint, listed
from .openai.dialect import OpenAIDialect, checked_chat_profile
from .openai.profiles import BASIC, Profile
from .transport import checked_address, checked_headers, checked_key

if TYPE_CHECKING:
    from openai import AsyncOpenAI

ADDRESS = "https://openrouter.ai/api/v1"

# Before the list of models is known, and for one that the list says nothing about: nothing is enforced.
MODEST = Profile("openrouter", completion=False, n=1, images=True, always=frozenset({"temperature", "top_p"}))
_SAMPLING = BASIC | {"top_k", "min_p", "repetition_penalty"}
_THINKING_TOKENS = 4096
_VARIANT = re.compile(r":(nitro|floor|online|exacto)$")  # routes of a model that the list does not name
_MOST_FIELDS = 64
_MOST_SECONDS_FOR_MODELS = 30.0
_ROUTING = "a dict such as {'order': ['mistral'], 'data_collection': 'deny'}"
_REASONING = "a dict such as {'effort': 'low'} or {'max_tokens': 512}"


class OpenRouter(OpenAIDialect["AsyncOpenAI"]):
    """Runs programs on one model at OpenRouter.

    Conversations, stops, budgets and retries are as of `OpenAI`. Choices and JSON schemas in OpenAI's strict subset are
    enforced where the list of models names `structured_outputs` for the model; all else is validated here, and the
    model is asked again. The model's price comes from the list, where `umbel.prices` has none under its name.

    Args:
        model: its name, with its provider's, such as "openai/gpt-4o-mini".
        api_key: the key; None: the environment's OPENROUTER_API_KEY.
        base_url: the address of another server of this API; None: OpenRouter's.
        provider: how requests are routed, in OpenRouter's words (order, only, ignore, sort, data_collection, ...).
            `require_parameters` is True where it does not say otherwise; with False nothing counts as enforced.
        reasoning: how much the model thinks, in OpenRouter's words (effort, max_tokens, enabled, exclude).
        app_url: the address of your application, which OpenRouter may list.
        app_name: the name of your application.
        profile: what the model can do, as of `OpenAI`; None: what the list says.
        extra_body: fields added to every request, none of those above.
        options: timeouts, retries and further settings of calls, as of `ConnectionOptions`.

    Raises:
        MissingExtraError: the `openai` package is not installed.
        ParameterError: no key, or a wrong value or option.

    Examples:
        A fake plays the provider here. With a key, leave `base_url` out.

        >>> from umbel.testing import OPENROUTER, FakeOpenAI
        >>> @ul.function
        ... def capital(s, country):
        ...     s += ul.user(f"What is the capital of {country}?")
        ...     s += ul.assistant(ul.gen("city", max_tokens=8))
        >>> name = "openai/gpt-4o-mini"
        >>> with FakeOpenAI({"France": "Paris"}, models=[name], features=OPENROUTER) as server:
        ...     model = ul.OpenRouter(name, base_url=server.base_url, api_key=server.api_key)
        ...     capital.run("France", backend=model)["city"]
        'Paris'
    """

    KIND = "openrouter"
    PACKAGE = EXTRA = "openai"

    def __init__(
        self,
        model: str,
        *,
        api_key: str | None = None,
        base_url: str | None = None,
        provider: Mapping[str, Any] | None = None,  # Any: JSON
        reasoning: Mapping[str, Any] | None = None,  # Any: JSON
        app_url: str | None = None,
        app_name: str | None = None,
        profile: Profile | None = None,
        extra_body: Mapping[str, Any] | None = None,  # Any: JSON
        **options: Unpack[ConnectionOptions],
    ) -> None:
        environment = self.check_options(options)
        self.require_package()
        model = checks.text("OpenRouter(): model", model, MAX_MODEL_LENGTH, "a name such as 'openai/gpt-4o-mini'")
        address, host = checked_address("base_url", ADDRESS if base_url is None else base_url, ADDRESS)
        key = checked_key("api_key", api_key) or environment.variable("OPENROUTER_API_KEY")
        if not key:
            raise ParameterError("OpenRouter() has no key; write api_key=..., or set OPENROUTER_API_KEY")
        headers = checked_headers(options.get("default_headers"))
        headers |= checked_headers(_named({"HTTP-Referer": ("app_url", app_url), "X-Title": ("app_name", app_name)}))
        self._endpoint = Endpoint(address, host, key, "api_key= or OPENROUTER_API_KEY", headers, None, None, None)
        self._routing = {"require_parameters": True} | _checked_fields("provider", provider, _ROUTING)
        checks.switch("provider['require_parameters']", self._routing["require_parameters"])
        self._reasoning = _checked_fields("reasoning", reasoning, _REASONING)
        ours = {"provider": self._routing} | ({"reasoning": self._reasoning} if self._reasoning else {})
        checks.instance("extra_body", extra_body, Mapping | None)
        for name in sorted(ours.keys() & (extra_body or {}).keys()):
            raise ParameterError(f"OpenRouter(): extra_body sets {name!r}; write {name}= instead")
        self._knows = profile is not None
        super().__init__(
            model,
            Provider(f"openrouter {model}", host, self._endpoint.key_from, self._endpoint.secrets),
            options,
            profile=MODEST if profile is None else checked_chat_profile("OpenRouter", profile),
            extra_body={**(extra_body or {}), **ours},
        )

    async def prepare(self) -> None:
        """Requests the list of models, once and free of charge: what the model takes, and its price.

        Raises:
            RequestError: the address or the model is wrong.
            ConnectionLostError: no server there.
        """
        await super().prepare()
        deadline = self._session.deadline(_MOST_SECONDS_FOR_MODELS)
        async with self._session.slot(deadline) as client:
            models = await self._session.retried(lambda: listed(client, self._provider), deadline)
        if models is None:
            return
        name = self.model if models.find(self.model) is not None else _VARIANT.sub("", self.model)
        models.check(name, self._provider)
        entry = models.find(name)
        assert entry is not None, "it was looked up above"
        if entry.pricing is not None and prices.find(self.model) is None:
            price = _price(entry.pricing)
            if price is not None:
                prices[self.model] = price
        if not self._knows and entry.supported_parameters is not None:
            inputs = (entry.architecture or {}).get("input_modalities") or ("text", "image")
            profile = self._profile_of(frozenset(entry.supported_parameters), images="image" in inputs)
            self.use_profile(profile, entry.context_length)

    def _profile_of(self, supported: frozenset[str], *, images: bool) -> Profile:
        """Returns what a model can do, by the parameters that some provider of it takes."""
        enforces = "structured_outputs" in supported and self._routing["require_parameters"]
        thinks = "reasoning" in supported and self._reasoning.get("enabled") is not False
        sampling = _SAMPLING & supported
        return replace(
            MODEST,
            schemas="strict" if enforces else "",
            choices="enum" if enforces else "",
            sampling=sampling,
            always=MODEST.always & sampling,
            stops=4 if "stop" in supported else 0,
            top_logprobs=20 if {"logprobs", "top_logprobs"} <= supported else -1,
            images=images,
            tools={"tools", "tool_choice"} <= supported,
            thinking_tokens=_THINKING_TOKENS if thinks else 0,
        )

    def open_client(self) -> "AsyncOpenAI":
        return self._endpoint.open(self._timeouts, self._concurrency, self._environment)


def _named(given: Mapping[str, tuple[str, str | None]]) -> dict[str, str]:
    """Returns headers → values. Raises ParameterError for a value that is no text."""
    return {
        header: checks.text(f"OpenRouter(): {name}", value, 1024, "a text")
        for header, (name, value) in given.items()
        if value is not None
    }


def _checked_fields(name: str, given: object, wanted: str) -> dict[str, Any]:
    """Checks fields that go out as they are. Raises ParameterError for anything but a dict with texts as keys."""
    if given is None:
        return {}
    fields = checks.entries(f"OpenRouter(): {name}", given, _MOST_FIELDS, wanted)
    try:
        json.dumps(fields, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ParameterError(f"OpenRouter(): {name} must be JSON: {error}; write {wanted}") from None
    if not all(isinstance(key, str) for key in fields):
        raise ParameterError(f"OpenRouter(): {name} must be {wanted}")
    return dict(fields)


def _price(pricing: Mapping[str, Any]) -> Price | None:
    """Reads a price, from dollars for one token to dollars for a million; None where there is no fixed one."""
    try:
        told = {
            key: float(pricing[key]) * 1e6 for key in ("prompt", "completion", "input_cache_read") if key in pricing
        }
        return Price(told["prompt"], told["completion"], told.get("input_cache_read"))
    except (KeyError, TypeError, ValueError, ParameterError):  # "-1": it depends on where the request goes
        return None
