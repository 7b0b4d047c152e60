"""Checks addresses, keys and headers before anything is sent; never shows them.

A character that no header can hold (a newline, half of a surrogate pair) would fail in the library under the provider's
SDK, whose message may quote the key.
"""

import re
from collections.abc import Mapping
from urllib.parse import urlsplit

from ....lang import checks
from ....lang.errors import ParameterError, shown

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


def checked_headers(given: object) -> dict[str, str]:
    """Checks the headers of every request.

    Raises:
        ParameterError: names or values that no header has. The message shows no value, as it may be a key.
    """
    if given is None:
        return {}
    wanted = "a dict of names to texts, such as {'x-team': 'blue'}"
    headers = checks.entries("default_headers", given, _MOST_HEADERS, wanted)
    for name, value in headers.items():
        if not isinstance(name, str) or not isinstance(value, str) or not _NAME.fullmatch(name):
            raise ParameterError(f"default_headers must be {wanted}; {shown(name)} names no text")
        if len(checks.plain(value)) > _MOST_CHARACTERS or not _VALUE.fullmatch(value):
            raise ParameterError(f"default_headers: the value of {shown(name)} is not printable ASCII")
    return {checks.plain(name): checks.plain(value) for name, value in headers.items()}


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
