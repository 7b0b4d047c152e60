"""Models of the OpenAI dialect: OpenAI itself, Azure, and any server that speaks it (vLLM, SGLang, llama.cpp).

model = umbel.OpenAI("gpt-4.1-mini")                                     # OPENAI_API_KEY, or api_key=
local = umbel.OpenAI("Qwen/Qwen3-8B", base_url="http://127.0.0.1:8000/v1")
"""

import asyncio
import contextlib
from collections.abc import Mapping
from dataclasses import replace
from os import PathLike
from typing import TYPE_CHECKING, Any, Unpack, cast, get_args

from .....lang import checks
from .....lang.chat_template import ChatTemplate, read_chat_template
from .....lang.errors import ParameterError
from .....lang.runtime_options import MAX_MODEL_LENGTH
from .. import content
from ..backend import ConnectionOptions
from ..errors import Provider
from . import profiles
from .constraints import AskedMode
from .dialect import OpenAIDialect
from .endpoint import endpoint, listed
from .profiles import Profile

if TYPE_CHECKING:
    from openai import AsyncOpenAI


_MOST_SECONDS_FOR_MODELS = 30.0  # that a start waits for the list of models
_MOST_SECONDS_FOR_TOKENIZER = 10.0  # and for a tokenizer, whose package may have to fetch a file


class OpenAI(OpenAIDialect["AsyncOpenAI"]):
    """A backend for one model.

    **Roles** become the messages of a chat request, in the program's order. An assistant turn that has begun is
    continued where the server can; else the model is asked to go on. Text outside of roles is for completion models;
    a chat model is asked to continue it, with a warning.

    **Constraints** are enforced by what the server has (strict structured outputs and others, see `Profile`); all else
    is validated when the text is complete, and the model is asked again. Sampling parameters that a server does not
    take are refused, never left out.

    **Stops** beyond what a server takes are found here: the answer is streamed, and its connection closed at the stop.
    The server does not report the usage of such a call; `usage` holds bounds then.

    Args:
        model: its name; of an Azure deployment without `azure_deployment`, the deployment's.
        api_key: the key; None: the environment's OPENAI_API_KEY (AZURE_OPENAI_API_KEY for Azure).
        base_url: another server; None: the environment's OPENAI_BASE_URL, or OpenAI's own.
        mode: "chat", "completion", or "auto": chat where the model has it.
        chat_template: how roles are written in completion mode: Jinja source, the name of a format such as "chatml",
            the path of a file with Jinja source, or a ChatTemplate.
        profile: what the server can do: "auto" asks it who it is; "openai", "vllm", "sglang", "llama.cpp",
            "llama-cpp-python" or "compatible" say so; a Profile says it in detail.
        azure_endpoint, azure_deployment, api_version: an Azure resource.
        organization, project: at OpenAI, for accounting.
        extra_body: fields added to every request, as the server understands them.
        options: as of `ConnectionOptions`.

    Raises:
        MissingExtraError: the `openai` package is not installed.
        ParameterError: no key, or a wrong value or option.
        TemplateError: the chat template does not compile.
    """

    KIND = PACKAGE = EXTRA = "openai"

    def __init__(
        self,
        model: str,
        *,
        api_key: str | None = None,
        base_url: str | None = None,
        mode: AskedMode = "auto",
        chat_template: str | PathLike[str] | ChatTemplate | None = None,
        profile: str | Profile = "auto",
        azure_endpoint: str | None = None,
        azure_deployment: str | None = None,
        api_version: str | None = None,
        organization: str | None = None,
        project: str | None = None,
        extra_body: Mapping[str, Any] | None = None,  # Any: JSON
        **options: Unpack[ConnectionOptions],
    ) -> None:
        environment = self.check_options(options)
        self.require_package()
        named = f"{type(self).__name__}(): model"
        model = checks.text(named, model, MAX_MODEL_LENGTH, "the name of a model, such as 'gpt-4.1-mini'")
        mode = cast(AskedMode, checks.one_of("mode", mode, get_args(AskedMode)))
        if mode == "chat" and chat_template is not None:
            raise ParameterError("chat_template= is for mode='completion'; a chat API has the model's own")
        self._endpoint = endpoint(
            api_key=api_key,
            base_url=base_url,
            azure_endpoint=azure_endpoint,
            azure_deployment=azure_deployment,
            api_version=api_version,
            organization=organization,
            project=project,
            default_headers=options.get("default_headers"),
            environment=environment,
        )
        name = f"openai {model}"
        detects = isinstance(profile, str) and checks.plain(profile) == "auto"
        self._detects = detects and not self._endpoint.is_openai and self._endpoint.azure is None
        super().__init__(
            model,
            Provider(name, self._endpoint.host, self._endpoint.key_from, self._endpoint.secrets),
            options,
            profile=self._first_profile(profile, model),
            mode="completion" if mode == "auto" and chat_template is not None else mode,
            written_with=None if chat_template is None else read_chat_template(chat_template, name=name),
            extra_body=extra_body,
        )

    def _first_profile(self, given: str | Profile, model: str) -> Profile:
        if isinstance(given, Profile):
            return given
        if not isinstance(given, str) or checks.plain(given) != "auto":
            return profiles.named(checks.plain_value(given), model)
        return profiles.COMPATIBLE if self._detects else profiles.of_model(model)

    async def prepare(self) -> None:
        """Requests the server's list of models, once and free of charge: identifies the server, checks key and model.

        A server without a list is used unchecked.

        Raises:
            RequestError: the address, the key or the model is wrong.
            CapabilityError: the model does not have the mode that was asked for.
            ConnectionLostError: no server there.
        """
        await super().prepare()
        if self._endpoint.azure is None:
            await self._ask_models()
        if self._endpoint.is_openai:
            with contextlib.suppress(TimeoutError):  # bytes are a bound as well
                async with asyncio.timeout(_MOST_SECONDS_FOR_TOKENIZER):
                    self._count = await asyncio.to_thread(content.token_counter, self.model)

    def open_client(self) -> "AsyncOpenAI":
        return self._endpoint.open(self._timeouts, self._concurrency, self._environment)

    async def close_client(self, client: "AsyncOpenAI") -> None:
        await client.close()

    async def _ask_models(self) -> None:
        deadline = self._session.deadline(_MOST_SECONDS_FOR_MODELS)
        async with self._session.slot(deadline) as client:
            models = await self._session.retried(lambda: listed(client, self._provider), deadline)
        if models is None:
            return
        models.check(self.model, self._provider)
        profile = self._planner.profile
        if self._detects:
            profile = profiles.of_owner(models.owner_of(self.model), self.model, models.server)
            if self._asked_mode == "completion":
                profile = replace(profile, completion=True)  # the user knows; the list does not say
        self.use_profile(profile, models.context_of(self.model))
