"""Models of the OpenAI dialect: OpenAI itself, Azure, and any server that speaks it (vLLM, SGLang, llama.cpp).

model = umbel.OpenAI("gpt-4.1-mini")                                     # OPENAI_API_KEY, or api_key=
local = umbel.OpenAI("Qwen/Qwen3-8B", base_url="http://127.0.0.1:8000/v1")

A start requests the server's list of models. It costs nothing: what is wrong shows before money is spent.
"""

import asyncio
import contextlib
import difflib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from os import PathLike
from typing import TYPE_CHECKING, Any, Unpack, cast, get_args

import msgspec

from .....lang import checks
from .....lang.chat_template import ChatTemplate, read_chat_template
from .....lang.errors import ParameterError, RequestError
from .....lang.protocol import Capabilities, Embedded, EmbedRequest
from .....lang.runtime_options import MAX_MODEL_LENGTH
from .. import conversation
from ..backend import ConnectionOptions
from ..errors import Provider
from ..session import Environment, Timeouts
from ..transport import (
    checked_address,
    checked_header_name,
    checked_headers,
    checked_key,
    http_library,
    open_client,
    secrets_of,
)
from . import profiles
from .dialect import OpenAIDialect
from .embeddings import embeddings
from .profiles import AskedMode, Profile

if TYPE_CHECKING:
    from openai import AsyncOpenAI


ADDRESS = "https://api.openai.com/v1"
_HOST = "api.openai.com"


@dataclass(frozen=True, slots=True)
class Azure:
    """An Azure resource."""

    endpoint: str
    api_version: str
    deployment: str | None


@dataclass(frozen=True, slots=True)
class Endpoint:
    """An address with what is sent there.

    Attributes:
        address: without a slash at its end.
        host: of the address.
        key: "" for a server that wants none.
        key_from: how users give it.
    """

    address: str
    host: str
    key: str
    key_from: str
    headers: Mapping[str, str]
    organization: str | None
    project: str | None
    azure: Azure | None

    def __repr__(self) -> str:
        return f"Endpoint({self.host!r})"

    @property
    def is_openai(self) -> bool:
        """True for OpenAI's own addresses, also regional ones such as eu.api.openai.com."""
        return self.host == _HOST or self.host.endswith(f".{_HOST}")

    @property
    def secrets(self) -> tuple[str, ...]:
        """The texts that messages must not contain."""
        return secrets_of(self.key, self.headers)

    def open(self, timeouts: Timeouts, concurrency: int, environment: Environment) -> "AsyncOpenAI":
        """Makes a client of the SDK that leaves retries to the session."""
        import openai  # late: a program may never call

        http = open_client(openai, timeouts, concurrency, environment.wire)
        # Any: the two constructors share these arguments and no type.
        common: dict[str, Any] = {
            "api_key": self.key or "none",  # the SDK wants one; servers without keys do not look at it
            "max_retries": 0,
            "http_client": http,
            "timeout": http.timeout,
            "default_headers": dict(self.headers),
            "organization": self.organization,
            "project": self.project,
        }
        if self.azure is None:
            return openai.AsyncOpenAI(base_url=self.address, **common)
        azure: dict[str, Any] = {"azure_endpoint": self.azure.endpoint, "api_version": self.azure.api_version}
        if self.azure.deployment is not None:
            azure["azure_deployment"] = self.azure.deployment
        return openai.AsyncAzureOpenAI(**azure, **common)


def plain_endpoint(base_url: str, api_key: str | None, default_headers: Mapping[str, str] | None) -> Endpoint:
    """Checks the address of a server that needs no key, and what is sent there.

    Raises:
        ParameterError: an address, a key or headers that are none.
    """
    headers = checked_headers(default_headers)
    key = checked_key("api_key", api_key) or ""
    address, host = checked_address("base_url", base_url, ADDRESS)
    found = Endpoint(address, host, key, "api_key=", headers, None, None, None)
    if not key and found.is_openai:
        raise ParameterError(f"base_url={base_url!r} needs a key; write api_key=...")
    return found


def endpoint(
    *,
    api_key: str | None,
    base_url: str | None,
    azure_endpoint: str | None,
    azure_deployment: str | None,
    api_version: str | None,
    organization: str | None,
    project: str | None,
    default_headers: Mapping[str, str] | None,
    environment: Environment,
) -> Endpoint:
    """Checks what was given, and completes it from the environment.

    Raises:
        ParameterError: no key where one is needed, an address that is none, or two that contradict.
    """
    headers = checked_headers(default_headers)
    api_key = checked_key("api_key", api_key)
    organization, project = checked_key("organization", organization), checked_key("project", project)
    azure_deployment = checked_key("azure_deployment", azure_deployment)
    api_version = checked_key("api_version", api_version)
    if azure_endpoint is None:
        if azure_deployment is not None or api_version is not None:
            raise ParameterError(
                "azure_deployment= and api_version= need azure_endpoint='https://NAME.openai.azure.com'"
            )
        given_url = base_url if base_url is not None else environment.variable("OPENAI_BASE_URL") or ADDRESS
        address, host = checked_address("base_url", given_url, ADDRESS)
        key = environment.variable("OPENAI_API_KEY") if api_key is None else api_key
        if not key and (host == _HOST or host.endswith(f".{_HOST}")):
            raise ParameterError(
                "OpenAI() has no key; write api_key=..., set OPENAI_API_KEY, or give base_url= of a server without keys"
            )
        return Endpoint(address, host, key, "api_key= or OPENAI_API_KEY", headers, organization, project, None)
    if base_url is not None:
        raise ParameterError("base_url= and azure_endpoint= name two servers; give one of them")
    address, host = checked_address("azure_endpoint", azure_endpoint, "https://NAME.openai.azure.com")
    version = api_version or environment.variable("OPENAI_API_VERSION")
    if not version:
        raise ParameterError("azure_endpoint= needs api_version='2024-10-21' or a later one, or OPENAI_API_VERSION")
    key = environment.variable("AZURE_OPENAI_API_KEY") if api_key is None else api_key
    if not key:
        raise ParameterError("azure_endpoint= needs a key; write api_key=..., or set AZURE_OPENAI_API_KEY")
    azure = Azure(address, version, azure_deployment)
    return Endpoint(address, host, key, "api_key= or AZURE_OPENAI_API_KEY", headers, organization, project, azure)


_NO_LIST = (403, 404, 405, 501)  # a key may be allowed to use models and not to list them
_MOST_NAMED = 8


class _Model(msgspec.Struct):
    id: str
    owned_by: str = ""
    max_model_len: int | None = None
    supported_parameters: list[str] | None = None  # of OpenRouter, with what stands below
    context_length: int | None = None
    pricing: dict[str, Any] | None = None  # dollars for one token, as texts
    architecture: dict[str, Any] | None = None


class _List(msgspec.Struct):
    data: list[_Model]


@dataclass(frozen=True, slots=True)
class Models:
    """A server's list of models. `server`: its header of that name."""

    models: tuple[_Model, ...]
    server: str

    def check(self, model: str, provider: Provider) -> None:
        """Raises RequestError when the server has no such model."""
        names = [each.id for each in self.models]
        if model in names:
            return
        near = difflib.get_close_matches(model, names, n=_MOST_NAMED, cutoff=0.4) or sorted(names)[:_MOST_NAMED]
        written = ", ".join(repr(name) for name in near) or "none at all"
        more = f" and {len(names) - len(near)} more" if len(names) > len(near) else ""
        raise RequestError(f"{provider.name}: {provider.host} has no model {model!r}; it has {written}{more}")

    def find(self, model: str) -> _Model | None:
        """Returns the entry of a model."""
        return next((each for each in self.models if each.id == model), None)

    def owner_of(self, model: str) -> str:
        return next(each.owned_by for each in self.models if each.id == model)

    def context_of(self, model: str) -> int | None:
        return next(each.max_model_len for each in self.models if each.id == model)


async def listed(client: "AsyncOpenAI", provider: Provider) -> Models | None:
    """Requests the list; None: the server has none. Raises the SDK's errors, and RequestError for a wrong address."""
    import openai

    try:
        response = await client.get("/models", cast_to=http_library(openai).Response)
    except Exception as error:
        if getattr(error, "status_code", None) not in _NO_LIST:
            raise
        return None
    try:
        found = msgspec.json.decode(response.content, type=_List)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        said = response.headers.get("content-type", "something unknown").split(";")[0]
        raise RequestError(
            f"{provider.name}: {provider.host} answers with {said} where a list of models was asked for; base_url must "
            "be the address of the API, which often ends in /v1"
        ) from None
    return Models(tuple(found.data), response.headers.get("server", ""))


_MOST_SECONDS_FOR_MODELS = 30.0  # that a start waits for the list of models
_MOST_SECONDS_FOR_TOKENIZER = 10.0  # and for a tokenizer, whose package may have to fetch a file


class OpenAI(OpenAIDialect["AsyncOpenAI"]):
    """Runs programs on one model of OpenAI, of Azure, or of a server that speaks OpenAI's dialect.

    **Roles** become the messages of a chat request, in the program's order. An assistant turn that has begun is
    continued where the server can; else the model is asked to go on. Text outside of roles is for completion models;
    a chat model is asked to continue it, with a warning.

    **Constraints** are enforced by what the server has (strict structured outputs and others, see `Profile`); all else
    is validated when the text is complete, and the model is asked again. Sampling parameters that a server does not
    take are refused, never left out.

    **Stops** beyond what a server takes are found here: the answer is streamed, and its connection closed at the stop.
    The server does not report the usage of such a call; `usage` holds bounds then.

    Args:
        model: its name, such as "gpt-4.1-mini"; of an Azure deployment without `azure_deployment`, the deployment's.
        api_key: the key; None: the environment's OPENAI_API_KEY (AZURE_OPENAI_API_KEY for Azure).
        base_url: the address of another server, which often ends in /v1; None: the environment's OPENAI_BASE_URL, or
            OpenAI's own.
        mode: "chat", "completion", or "auto": chat where the model has it, unless a chat_template is given.
        chat_template: how roles are written in completion mode: Jinja source, the name of a format such as "chatml",
            the path of a file with Jinja source, or a ChatTemplate.
        profile: what the server can do: "auto" asks it who it is; "openai", "umbel", "vllm", "sglang",
            "llama.cpp", "llama-cpp-python" or "compatible" say so; a Profile says it in detail.
        azure_endpoint: the address of an Azure resource.
        azure_deployment: the name of a deployment in it; None: the model's.
        api_version: the version of Azure's API.
        organization: id of the organization at OpenAI that pays.
        project: id of the project at OpenAI that pays.
        extra_body: fields added to every request, as the server understands them.
        routing_key_header: the name of a header, such as "X-SMG-Routing-Key", that carries a key which the calls of one
            fork have in common, so that a gateway between sends them to one server; None sends none.
        options: timeouts, retries and further settings of calls, as of `ConnectionOptions`.

    Raises:
        MissingExtraError: the `openai` package is not installed.
        ParameterError: no key, or a wrong value or option.
        TemplateError: the chat template does not compile.

    Examples:
        A fake plays the provider here. With a key, leave `base_url` out.

        >>> from umbel.testing import FakeOpenAI
        >>> @ul.function
        ... def capital(s, country):
        ...     s += ul.user(f"What is the capital of {country}?")
        ...     s += ul.assistant(ul.gen("city", max_tokens=8))
        >>> with FakeOpenAI({"France": "Paris"}) as server:
        ...     model = ul.OpenAI("gpt-4o-mini", base_url=server.base_url, api_key=server.api_key)
        ...     capital.run("France", backend=model)["city"]
        'Paris'
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
        routing_key_header: str | None = None,
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
            Provider(
                name,
                self._endpoint.host,
                self._endpoint.key_from,
                self._endpoint.secrets,
                self._endpoint.address,
            ),
            options,
            profile=self._first_profile(profile, model),
            mode="completion" if mode == "auto" and chat_template is not None else mode,
            written_with=None if chat_template is None else read_chat_template(chat_template, name=name),
            extra_body=extra_body,
        )
        self._session.routing_key_header = checked_header_name("routing_key_header", routing_key_header)

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
                    self._count = await asyncio.to_thread(conversation.token_counter, self.model)

    @property
    def capabilities(self) -> Capabilities:
        return msgspec.structs.replace(super().capabilities, embeds=True)

    async def embed(self, request: EmbedRequest) -> Embedded:
        """Computes the embeddings of a request; `umbel.embed` is the call for programs.

        Raises:
            CapabilityError: a text is more than text.
            RequestError: the model makes no embeddings, or none of so many dimensions.
        """
        self._calls += 1
        return await embeddings(self._session, self._provider, self.model, request, self._extra)

    def open_client(self) -> "AsyncOpenAI":
        return self._endpoint.open(self._timeouts, self._concurrency, self._environment)

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
