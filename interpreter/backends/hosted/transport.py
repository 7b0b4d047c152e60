"""Opens the HTTP client under a provider's SDK, and checks addresses, keys and headers before anything is sent.

The client: no redirects, no decompression bombs, no endless answers, no long silence. The SDK gets an `AsyncClient` of
ours, so all of this holds for every request that it makes. Which HTTP library the client comes from is the SDK's
choice: openai 2 is written for httpx, openai 3 and anthropic for its successor httpx2. Both have the classes and
attributes that are used here, under the same names.

The checks never show a key. A character that no header can hold (a newline, half of a surrogate pair) would fail in the
library under the SDK, whose message may quote the key.
"""

import asyncio
import importlib
import re
import zlib
from collections.abc import AsyncIterator, Callable, Mapping
from functools import cache
from types import ModuleType
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from ....lang import checks
from ....lang.errors import BackendError, ParameterError, RequestError, shown
from ...observing.observation import trace_headers

if TYPE_CHECKING:
    import httpx2

    from .session import Timeouts


_MOST_HEADERS = 100
_MOST_CHARACTERS = 8192  # of a key, an address, or the value of a header; servers take no more
_NAME = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]{1,256}")
_VALUE = re.compile(r"[\x21-\x7e](?:[\x20-\x7e\t]*[\x21-\x7e])?")  # printable ASCII, no blanks around it
_SHORTEST_SECRET = 8  # characters; the letters of shorter ones stand in ordinary words


def checked_key(name: str, given: object) -> str | None:
    """Checks a key or an account. None, and the empty string, mean none.

    Raises:
        ParameterError: anything else. The message does not show it.
    """
    if given is None:
        return None
    if not isinstance(given, str):
        raise ParameterError(f"{name} must be a string, got {type(given).__name__}")
    key = checks.plain(given)
    if key and (len(key) > _MOST_CHARACTERS or not _VALUE.fullmatch(key)):
        raise ParameterError(
            f"{name} has {len(key)} characters, of which some cannot stand in a header; write printable ASCII, without "
            "a newline at its end"
        )
    return key


def checked_headers(given: object, parameter: str = "default_headers") -> dict[str, str]:
    """Checks the headers of every request.

    Args:
        given: by the user.
        parameter: its name, for messages.

    Raises:
        ParameterError: names or values that no header has. The message shows no value, as it may be a key.
    """
    if given is None:
        return {}
    wanted = "a dict of names to texts, such as {'x-team': 'blue'}"
    headers = checks.entries(parameter, given, _MOST_HEADERS, wanted)
    for name, value in headers.items():
        if not isinstance(name, str) or not isinstance(value, str) or not _NAME.fullmatch(name):
            raise ParameterError(f"{parameter} must be {wanted}; {shown(name)} names no text")
        if len(checks.plain(value)) > _MOST_CHARACTERS or not _VALUE.fullmatch(value):
            raise ParameterError(f"{parameter}: the value of {shown(name)} is not printable ASCII")
    return {checks.plain(name): checks.plain(value) for name, value in headers.items()}


def checked_header_name(parameter: str, given: object) -> str | None:
    """Checks the name of a header. None means none. Raises ParameterError for anything that is no such name."""
    if given is None:
        return None
    if not isinstance(given, str) or not _NAME.fullmatch(given):
        raise ParameterError(f"{parameter}={shown(given)} is no name of a header; write one such as 'X-Routing-Key'")
    return checks.plain(given)


def checked_address(name: str, given: object, example: str) -> tuple[str, str]:
    """Checks an address. Returns it without a trailing slash, and its host.

    Raises:
        ParameterError: no valid address, or one with more parts, which is not shown: a key may be part of it.
    """
    address = checks.plain(given) if isinstance(given, str) else ""
    if not _VALUE.fullmatch(address) or len(address) > _MOST_CHARACTERS:
        raise ParameterError(f"{name}={shown(given)} is no address; write one such as {example!r}")
    if any(mark in address for mark in "@?#"):
        raise ParameterError(f"{name} must be an address alone; keys go into api_key=, all else into default_headers=")
    try:
        parts = urlsplit(address)
        host, _ = parts.hostname, parts.port
    except ValueError:
        raise ParameterError(f"{name}={shown(address)} is no address; write one such as {example!r}") from None
    if parts.scheme not in ("http", "https") or not host:
        raise ParameterError(f"{name}={shown(address)} must name a host behind https:// or http://, as in {example!r}")
    return address.rstrip("/"), host


def secrets_of(key: str, headers: Mapping[str, str]) -> tuple[str, ...]:
    """Returns the texts that messages must not contain. Headers may hold keys as well."""
    return tuple(secret for secret in (key, *headers.values()) if len(secret) >= _SHORTEST_SECRET)


MOST_BYTES = (
    64 << 20
)  # of one answer, decompressed; the longest we may ask for, 2^20 tokens with log-probabilities, fits
_ANSWERED = "umbel.answered"  # extension of a request whose answer has begun


def http_library(sdk: ModuleType) -> ModuleType:
    """Returns the HTTP library of a provider's SDK: the one whose client its own client derives from."""
    lineage = sdk.DefaultAsyncHttpxClient.__mro__
    base = next(each for each in lineage if each.__name__ == "AsyncClient")
    return importlib.import_module(base.__module__.partition(".")[0])


def open_client(
    sdk: ModuleType, timeouts: "Timeouts", concurrency: int, wire: "httpx2.AsyncBaseTransport | None" = None
) -> "httpx2.AsyncClient":
    """Opens a client for one event loop.

    Args:
        sdk: the provider's, which will send its requests through the client.
        concurrency: connections at most; waiting for one takes part of the call's own time, not of a timeout's.
        wire: used instead of the network.
    """

    http = http_library(sdk)

    async def guard(response: "httpx2.Response") -> None:
        _refuse_redirect(response)
        response.request.extensions[_ANSWERED] = response.status_code < 300
        assert isinstance(response.stream, http.AsyncByteStream), "an asynchronous client reads asynchronously"
        response.stream = _bounded(http)(response.stream, _decoder(response), response.request, timeouts.idle)

    async def name_span(request: "httpx2.Request") -> None:
        if named := trace_headers():
            request.headers.update(named)

    client: httpx2.AsyncClient = http.AsyncClient(
        timeout=http.Timeout(timeouts.silent, connect=timeouts.connect, pool=None),
        limits=http.Limits(max_connections=concurrency, max_keepalive_connections=concurrency),
        follow_redirects=False,
        headers={"accept-encoding": "identity"},
        event_hooks={"request": [name_span], "response": [guard]},
        transport=wire,
    )
    return client


def answered(request: object) -> bool:
    """Returns whether the answer of a request has begun: after that it is not sent again."""
    return getattr(request, "extensions", {}).get(_ANSWERED) is True


def _refuse_redirect(response: "httpx2.Response") -> None:
    """Refuses redirects: a request carries a key, which is for its own address only."""
    if not response.has_redirect_location:
        return
    here = response.request.url
    there = here.join(response.headers["location"])
    raise RequestError(
        f"{here.host} redirects to {there.host} ({response.status_code}), and redirects are not followed, as the key "
        f"would go with them; write base_url={str(there.copy_with(query=None))!r} if that is the server you mean"
    )


class _Plain:
    """Passes bytes through."""

    def decode(self, data: bytes, most: int) -> bytes:
        return data[:most]


class _Inflating:
    """Decompresses gzip or deflate, never more than requested at once."""

    def __init__(self) -> None:
        self._inflate = zlib.decompressobj(zlib.MAX_WBITS | 32)  # finds out which of both it is

    def decode(self, data: bytes, most: int) -> bytes:
        return self._inflate.decompress(data, most)


def _decoder(response: "httpx2.Response") -> _Plain | _Inflating:
    """Returns the decoder of a response: proxies compress although identity was requested."""
    encoding = response.headers.pop("content-encoding", "identity").strip().lower()
    match encoding:
        case "identity" | "":
            return _Plain()
        case "gzip" | "x-gzip" | "deflate":
            response.headers.pop("content-length", None)
            return _Inflating()
        case _:
            raise BackendError(
                f"{response.request.url.host} sent an answer in the encoding {encoding!r} where none was asked for"
            )


@cache
def _bounded(http: ModuleType) -> Callable[..., "httpx2.AsyncByteStream"]:
    """Makes the byte-stream class of one HTTP library, bounded in size and in silence."""

    base: Any = http.AsyncByteStream  # Any: which library it is, is known when the SDK is

    class Bounded(base):  # type: ignore[misc]
        def __init__(
            self,
            stream: "httpx2.AsyncByteStream",
            decoder: _Plain | _Inflating,
            request: "httpx2.Request",
            idle: float,
        ) -> None:
            self._stream, self._decoder, self._request, self._idle = stream, decoder, request, idle

        async def __aiter__(self) -> AsyncIterator[bytes]:
            left = MOST_BYTES
            pieces = aiter(self._stream)
            while True:
                try:
                    async with asyncio.timeout(self._idle):
                        raw = await anext(pieces, None)
                except TimeoutError:
                    raise http.ReadTimeout(f"silent for {self._idle:g} s", request=self._request) from None
                if raw is None:
                    return
                try:
                    data = self._decoder.decode(raw, left + 1)
                except zlib.error as error:
                    raise http.DecodingError(f"broken compression: {error}", request=self._request) from None
                left -= len(data)
                if left < 0:
                    raise BackendError(
                        f"{self._request.url.host} sent more than {MOST_BYTES >> 20} MiB as one answer; it was cut off"
                    )
                if data:
                    yield data

        async def aclose(self) -> None:
            await self._stream.aclose()

    return Bounded
