"""Where requests go, and with which key: OpenAI, a server of its dialect, or an Azure deployment."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .....lang.errors import ParameterError
from ..credentials import checked_address, checked_headers, checked_key, secrets_of

if TYPE_CHECKING:
    import httpx2
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
        """Also its regional addresses, such as eu.api.openai.com."""
        return self.host == _HOST or self.host.endswith(f".{_HOST}")

    @property
    def secrets(self) -> tuple[str, ...]:
        """What messages must not say."""
        return secrets_of(self.key, self.headers)

    def open(self, http: "httpx2.AsyncClient") -> "AsyncOpenAI":
        """A client of the SDK that leaves retries to us."""
        import openai

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
    environment: Mapping[str, str],
) -> Endpoint:
    """Check what was given, and complete it from the environment.

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
        given_url = base_url if base_url is not None else environment.get("OPENAI_BASE_URL") or ADDRESS
        address, host = checked_address("base_url", given_url, ADDRESS)
        key = environment.get("OPENAI_API_KEY", "") if api_key is None else api_key
        if not key and (host == _HOST or host.endswith(f".{_HOST}")):
            raise ParameterError(
                "OpenAI() has no key; write api_key=..., set OPENAI_API_KEY, or give base_url= of a server without keys"
            )
        return Endpoint(address, host, key, "api_key= or OPENAI_API_KEY", headers, organization, project, None)
    if base_url is not None:
        raise ParameterError("base_url= and azure_endpoint= name two servers; give one of them")
    address, host = checked_address("azure_endpoint", azure_endpoint, "https://NAME.openai.azure.com")
    version = api_version or environment.get("OPENAI_API_VERSION", "")
    if not version:
        raise ParameterError("azure_endpoint= needs api_version='2024-10-21' or a later one, or OPENAI_API_VERSION")
    key = environment.get("AZURE_OPENAI_API_KEY", "") if api_key is None else api_key
    if not key:
        raise ParameterError("azure_endpoint= needs a key; write api_key=..., or set AZURE_OPENAI_API_KEY")
    azure = Azure(address, version, azure_deployment)
    return Endpoint(address, host, key, "api_key= or AZURE_OPENAI_API_KEY", headers, organization, project, azure)
