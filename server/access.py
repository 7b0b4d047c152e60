"""Decides who may ask what: API keys, the Host header, and the salt that keeps tenants apart.

Keys are compared by their SHA-256 digests, all of them, so that the time of a comparison tells nothing.
"""

import base64
import hashlib
import hmac
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..lang.checks import LONGEST_SALT
from ..lang.errors import ParameterError
from .errors import HttpError

_ADMIN = "admin"
UNNAMED = ""  # the name of every caller where no key is configured
_NAME = re.compile(r"[A-Za-z0-9_.@-]{1,64}")
_SALT = re.compile(f"[A-Za-z0-9_-]{{0,{LONGEST_SALT}}}")
_ADDRESS = re.compile(r"[0-9.]+|\[[0-9a-f:.]+\]")
LOCAL_NAME = "localhost"


@dataclass(frozen=True, slots=True)
class Caller:
    """The name of the key that a request came with, and whether it may administer the server."""

    name: str = UNNAMED
    admin: bool = False


class Access:
    """Checks keys and hosts, and derives salts.

    Args:
        keys: the name of each API key → the key. Without keys every caller is served, and none is kept from another but
            by the salt it sends.
        admin_key: opens the administrative routes; without one they do not exist, unless there are no keys at all and
            the server listens on loopback only.
        hosts: names that the Host header may have next to "localhost" and any address; "*" takes all. A page of the web
            reaches a server on this machine only under a name.
        secret: of the salts; processes that share a cache share it. None draws it.
        loopback: only programs on this machine reach the server.

    Raises:
        ParameterError: a name that is none or the admin's, an empty key, or one key under two names.
    """

    def __init__(
        self,
        keys: Mapping[str, str] | None = None,
        admin_key: str | None = None,
        hosts: Sequence[str] = (),
        secret: bytes | None = None,
        loopback: bool = True,
    ) -> None:
        self._callers: list[tuple[bytes, Caller]] = []
        for name, key in (keys or {}).items():
            if not _NAME.fullmatch(name):
                raise ParameterError(f"{name!r} names no key; write 1 to 64 of A-Z, a-z, 0-9 and _.@-")
            if name == _ADMIN and admin_key is not None:
                raise ParameterError(f"{name!r} is the name of the admin key; give the API key another one")
            self._add(key, Caller(name))
        if admin_key is not None:
            self._add(admin_key, Caller(_ADMIN, True))
        self.keyed = bool(keys)
        self._open = loopback and not self._callers  # all callers may administer
        self.administered = admin_key is not None or self._open
        self._hosts = None if "*" in hosts else frozenset(host.lower() for host in (LOCAL_NAME, *hosts))
        # Salts live as long as the cache, which ends with the runtime.
        self._secret = secrets.token_bytes(32) if secret is None else secret

    def caller(self, headers: Mapping[str, str]) -> Caller:
        """Returns who asks. Raises HttpError 401 for a missing or wrong key."""
        bearer = headers.get("authorization", "")
        given = bearer[7:].strip() if bearer[:7].lower() == "bearer " else ""
        other = headers.get("x-api-key", "")
        if given and other and given != other:
            raise _refused("Authorization and X-Api-Key give two keys; send one of them")
        digest = _digest(given or other)
        found = None
        for known, caller in self._callers:
            if hmac.compare_digest(known, digest):
                found = caller
        if found is not None:
            return found
        if self.keyed:
            missing = "no such API key; send yours" if given or other else "the request has no API key; send it"
            raise _refused(f"{missing} as 'Authorization: Bearer KEY' or 'X-Api-Key: KEY'")
        return Caller(admin=self._open)

    def check_host(self, host: str) -> None:
        """Raises HttpError 403 for a Host header with a name that is not served."""
        self._check_name("Host", host)

    def check_origin(self, origin: str | None) -> None:
        """Raises HttpError 403 for a request that a page of another site has sent: it needs no answer to do harm."""
        if origin is not None:
            self._check_name("Origin", origin.partition("://")[2] or origin)

    def _check_name(self, header: str, host: str) -> None:
        name = host.lower() if host.endswith("]") else host.lower().rsplit(":", 1)[0]
        if self._hosts is not None and name not in self._hosts and not _ADDRESS.fullmatch(name):
            raise HttpError(
                403, f"the {header} header names a host that is not served here; see --allow-host", "forbidden_host"
            )

    def salt(self, caller: Caller, asked: str | None) -> str:
        """Returns the namespace of the cache for a caller and the salt it sent.

        An HMAC over both, each with its length before it, so that ("a", "bc") and ("ab", "c") differ, as do an empty
        salt and none. Where no keys are configured and no salt is sent it is the one namespace of all.

        Raises:
            ParameterError: a salt that is none.
        """
        if asked is not None and not _SALT.fullmatch(asked):
            raise ParameterError(f"cache_salt must be at most {LONGEST_SALT} of A-Z, a-z, 0-9, _ and -")
        if asked is None and caller.name == UNNAMED:
            return ""
        name = caller.name.encode()
        framed = len(name).to_bytes(4) + name + (b"" if asked is None else b"\1" + asked.encode())
        digest = hmac.digest(self._secret, framed, "sha256")
        return base64.urlsafe_b64encode(digest).decode().rstrip("=")

    def signature(self, salt: str, text: str) -> str:
        """Signs a text of this server, for a caller with that salt that will send it back."""
        framed = b"signature" + len(salt).to_bytes(4) + salt.encode() + text.encode()
        return base64.urlsafe_b64encode(hmac.digest(self._secret, framed, "sha256")).decode()

    def _add(self, key: str, caller: Caller) -> None:
        if not key.strip() or not key.isascii() or any(ord(letter) < 33 for letter in key):
            raise ParameterError(f"the API key of {caller.name!r} is empty or has blanks in it")
        digest = _digest(key)
        if any(known == digest for known, _ in self._callers):
            raise ParameterError(f"the API key of {caller.name!r} is that of another name, too")
        self._callers.append((digest, caller))


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def _refused(message: str) -> HttpError:
    return HttpError(401, message, "invalid_api_key", headers={"www-authenticate": "Bearer"})
