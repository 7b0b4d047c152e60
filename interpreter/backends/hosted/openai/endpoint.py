"""Addresses and keys of OpenAI, of a server of its dialect, or of an Azure deployment, and the server's list of models.

The list costs nothing: what is wrong shows before money is spent.
"""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from .....lang.errors import ParameterError, RequestError
from ..credentials import checked_address, checked_headers, checked_key, secrets_of
from ..environment import Environment, Timeouts
from ..errors import Provider

if TYPE_CHECKING:
    from openai import AsyncOpenAI


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

        from ..transport import open_client

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

    def owner_of(self, model: str) -> str:
        return next(each.owned_by for each in self.models if each.id == model)

    def context_of(self, model: str) -> int | None:
        return next(each.max_model_len for each in self.models if each.id == model)


async def listed(client: "AsyncOpenAI", provider: Provider) -> Models | None:
    """Requests the list; None: the server has none. Raises the SDK's errors, and RequestError for a wrong address."""
    import openai

    from ..transport import http_library

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
