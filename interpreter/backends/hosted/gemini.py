"""Gemini models at the Gemini API, by Google's own client.

model = umbel.Gemini("gemini-2.5-flash")                                 # GEMINI_API_KEY, or api_key=
"""

from collections.abc import Mapping
from typing import Any, Unpack

from ....lang import checks
from ....lang.errors import ParameterError
from ....lang.runtime_options import MAX_MODEL_LENGTH
from .backend import CallOptions
from .constraint_params import Fields
from .errors import Provider
from .openai.dialect import checked_chat_profile
from .openai.profiles import Profile
from .transport import checked_address, checked_key, secrets_of
from .vertexai import GEMINI, GoogleModel, check_client

_HOST = "generativelanguage.googleapis.com"


class Gemini(GoogleModel):
    """Runs programs on one model at the Gemini API. What it does and enforces is as of `VertexAI`.

    Args:
        model: its name, such as "gemini-2.5-flash".
        api_key: the key; None: the environment's GEMINI_API_KEY, else GOOGLE_API_KEY.
        base_url: the address of another server of this API; None: Google's.
        safety_settings: category → threshold, such as {"HARM_CATEGORY_HARASSMENT": "BLOCK_NONE"}.
        thinking_budget: tokens that the model may think, out of max_tokens: 0 for none, -1 or None for its own choice.
        include_thoughts: asks for summaries of what the model thinks, which `separate_reasoning` gives to programs.
        profile: what the model can do, as of `OpenAI`.
        client: a `google.genai.Client` that is used as it is, and left open; None: one is made.
        options: timeouts, retries and further settings of calls, as of `CallOptions`.

    Raises:
        MissingExtraError: the `google-genai` package is not installed, and no client is given.
        ParameterError: no key, or a wrong value or option.

    Examples:
        A fake plays the provider here. With a key, leave `base_url` out.

        >>> from umbel.testing import FakeGemini
        >>> @ul.function
        ... def capital(s, country):
        ...     s += ul.user(f"What is the capital of {country}?")
        ...     s += ul.assistant(ul.gen("city", max_tokens=8))
        >>> with FakeGemini({"France": "Paris"}) as server:
        ...     model = ul.Gemini("gemini-2.5-flash", base_url=server.base_url, api_key=server.api_key)
        ...     capital.run("France", backend=model)["city"]
        'Paris'
    """

    KIND = EXTRA = "gemini"

    def __init__(
        self,
        model: str,
        *,
        api_key: str | None = None,
        base_url: str | None = None,
        safety_settings: Mapping[str, str] | None = None,
        thinking_budget: int | None = None,
        include_thoughts: bool = False,
        profile: Profile = GEMINI,
        client: Any = None,  # Any: google.genai.Client, an optional package's
        **options: Unpack[CallOptions],
    ) -> None:
        environment = self.check_options(options)
        check_client("Gemini", client)
        api_key = checked_key("api_key", api_key)
        key = api_key or environment.variable("GEMINI_API_KEY") or environment.variable("GOOGLE_API_KEY")
        if client is None and not key:
            raise ParameterError("Gemini() has no key; write api_key=..., or set GEMINI_API_KEY or GOOGLE_API_KEY")
        where: Fields = {"api_key": key, "vertexai": False}
        address, host = "", _HOST
        if base_url is not None:
            address, host = checked_address("base_url", base_url, f"https://{_HOST}")
            where["http_options"] = {"base_url": address}
        if client is None:
            self.require_package()
        profile = checked_chat_profile("Gemini", profile)
        model = checks.text("Gemini(): model", model, MAX_MODEL_LENGTH, "a name such as 'gemini-2.5-flash'")
        key_from = "api_key=, GEMINI_API_KEY or GOOGLE_API_KEY"
        super().__init__(
            model,
            Provider(f"gemini {model}", host, key_from, secrets_of(key, {}), address),
            options,
            where=where,
            profile=profile,
            safety_settings=safety_settings,
            thinking_budget=thinking_budget,
            include_thoughts=include_thoughts,
            client=client,
        )
