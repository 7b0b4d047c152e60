"""Converts errors of a hosted provider into ours.

Both SDKs have the same tree of exceptions, read here by shape.

    401, 403                      RequestError: the key was refused
    404                           RequestError: no such model or address
    400, 422 about a parameter    CapabilityError naming it; about anything else RequestError, and ContextLengthError
                                  where the prompt is too long
    429, 503, 529                 again, then OverloadedError     (429 for lack of credit: RequestError, not again)
    408, 409, other 5xx           again, then EngineError
    no connection, no first byte  again, then ConnectionLostError
    anything after that           ConnectionLostError or BackendError, never again

Messages are made anew: an SDK's exception holds the request, and the request holds the key.
"""

import email.utils
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from ....lang.errors import (
    BackendError,
    CapabilityError,
    ConnectionLostError,
    ContextLengthError,
    EngineError,
    OverloadedError,
    RequestError,
    UmbelError,
)

_MOST_SAID = 400  # characters of a provider's own words
_KEY_LIKE = re.compile(r"(?i)\b(?:sk-|bearer\s+)[\w*.-]{4,}")
_NO_CREDIT = ("insufficient_quota", "billing_hard_limit_reached", "billing_error")
_OVERLOADED = ("rate_limit", "overloaded", "429", "503", "529")
_FAILED = ("server_error", "api_error", "internal", "500", "502", "504")
_NOT_OFFERED = ("unsupported_parameter", "unsupported_value", "unknown_parameter", "unsupported_content_type")
_SAYS_NOT_OFFERED = re.compile(
    r"(?i)(?:not|n't|no longer) support|unsupported|unrecognized request argument|extra inputs are not permitted"
)


class Transient(Exception):
    """An attempt failed before the first byte of its answer, and may succeed later.

    Args:
        error: what to raise when it is not tried again.
        reason: for counters: "429", "503", "connect", "timeout", ...
        retry_after: seconds to wait, as the server says; None when it does not.
    """

    def __init__(self, error: UmbelError, reason: str, retry_after: float | None = None) -> None:
        super().__init__(str(error))
        self.error, self.reason, self.retry_after = error, reason, retry_after


_THIS_MACHINE = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True, slots=True)
class Provider:
    """A provider, for messages.

    Attributes:
        name: of the backend: "openai gpt-4o".
        host: where requests go.
        key_from: how the user gives the key: "api_key= or OPENAI_API_KEY".
        secrets: texts that no message may contain.
        address: where requests go, as it was given; "" for the provider's own.
    """

    name: str
    host: str
    key_from: str
    secrets: tuple[str, ...]
    address: str = ""

    def __repr__(self) -> str:
        return f"Provider({self.name!r}, {self.host!r})"

    def scrub(self, text: str) -> str:
        """Removes keys from a provider's message and shortens it."""
        for secret in self.secrets:
            text = text.replace(secret, "[key]")
        return _KEY_LIKE.sub("[key]", text)[:_MOST_SAID]

    def failure(self, error: Exception, *, answered: bool) -> UmbelError | Transient:
        """Converts an exception of the SDK, or of the library under it.

        Args:
            answered: the answer had begun. Nothing is tried again then.
        """
        ours = next((each for each in _causes(error) if isinstance(each, UmbelError)), None)
        if ours is not None:  # of the transport; an SDK may have wrapped it as one about the connection
            return type(ours)(str(ours))
        status = getattr(error, "status_code", None)
        if isinstance(status, int) and status >= 300:
            response = getattr(error, "response", None)
            headers = getattr(response, "headers", {})
            return self._of_status(status, headers, getattr(error, "body", None))
        body = getattr(error, "body", None)
        if body is not None:
            return self.of_event(body)
        return self._of_connection(error, answered)

    def of_event(self, body: object) -> UmbelError:
        """Converts an error inside an answer. `body`: its `error` object.

        Even where no text has come yet it is not tried again: the model may have been at work, and be paid for.
        """
        said, code = _said(body), _code(body)
        message = f"{self.name}: {self.host} broke its answer off with an error: {self.scrub(said)}"
        if any(word in code for word in _OVERLOADED):
            return OverloadedError(message)
        if any(word in code for word in _FAILED):
            return EngineError(message)
        return BackendError(message)

    # -------------------------------------------------------------------------------- how

    def _of_status(self, status: int, headers: Mapping[str, str], body: object) -> UmbelError | Transient:
        said, code = self.scrub(_said(body)), _code(body)
        asked_wait = retry_after(headers)
        match status:
            case 401 | 403:
                return RequestError(
                    f"{self.name}: {self.host} refused the key ({status}: {said}); check {self.key_from}, and that the "
                    "key may use this model"
                )
            case 404:
                return RequestError(
                    f"{self.name}: {self.host} has no such model or address (404: {said}); check the model's name and "
                    "base_url"
                )
            case 400 | 422:
                return self._of_refusal(status, said, code, body)
            case 429 if any(word in code for word in _NO_CREDIT):
                return RequestError(f"{self.name}: the account at {self.host} has no credit left ({said})")
            case 429 | 503 | 529:
                problem: UmbelError = OverloadedError(
                    f"{self.name}: {self.host} is overloaded or limits its rate ({status}: {said})"
                )
                return Transient(problem, str(status), asked_wait)
            case 408 | 409:
                return Transient(self._failed(status, said), str(status), asked_wait)
            case _ if status >= 500:
                return Transient(self._failed(status, said), str(status), asked_wait)
            case _:
                return RequestError(f"{self.name}: {self.host} refused the request ({status}: {said})")

    def _failed(self, status: int, said: str) -> EngineError:
        return EngineError(f"{self.name}: {self.host} failed ({status}: {said})")

    def _of_refusal(self, status: int, said: str, code: str, body: object) -> UmbelError:
        parameter = body.get("param") if isinstance(body, dict) else None
        named = f"{parameter!r} " if isinstance(parameter, str) and parameter else "a parameter "
        if any(word in code for word in _NOT_OFFERED) or _SAYS_NOT_OFFERED.search(said):
            return CapabilityError(
                f"{self.name}: {self.host} does not offer {named}of this request ({status}: {said}); leave it out, or "
                "use a model that has it"
            )
        refused = ContextLengthError if "context_length" in code else RequestError
        return refused(f"{self.name}: {self.host} refused the request ({status}: {said})")

    def _of_connection(self, error: Exception, answered: bool) -> UmbelError | Transient:
        names = {type(each).__name__ for each in _causes(error)}
        if "DecodingError" in names or isinstance(error, ValueError | RecursionError):  # the latter of deep JSON
            return BackendError(f"{self.name}: {self.host} sent what is no answer of this API")
        if names & {"UnsupportedProtocol", "InvalidURL", "LocalProtocolError"}:
            return RequestError(f"{self.name}: no request can be sent to {self.host}; check base_url")
        slow = any("Timeout" in name for name in names)
        if answered:
            how = "was silent for too long in the middle of its answer" if slow else "closed it before its end"
            return ConnectionLostError(f"{self.name}: an answer of {self.host} ended too early: the server {how}")
        if "ConnectTimeout" in names:
            return Transient(ConnectionLostError(f"{self.name}: no connection to {self._where} in time"), "connect")
        if slow:
            return Transient(
                ConnectionLostError(f"{self.name}: {self.host} did not begin an answer within first_byte_timeout"),
                "timeout",
            )
        check = "check base_url, and that the server runs" if self.host in _THIS_MACHINE else "check base_url"
        lost = ConnectionLostError(f"{self.name}: no connection to {self._where}, or it was lost; {check}")
        return Transient(lost, "connect")

    @property
    def _where(self) -> str:
        """The host with its port. Not the path, of which a key may be part."""
        parts = urlsplit(self.address)
        return f"{parts.scheme}://{parts.netloc}" if parts.netloc else self.host


def _causes(error: BaseException) -> list[BaseException]:
    """Returns an error and its causes, at most a few."""
    chain: list[BaseException] = []
    each: BaseException | None = error
    while each is not None and len(chain) < 8:
        chain.append(each)
        each = each.__cause__ or each.__context__
    return chain


def _said(body: Any) -> str:  # Any: whatever a server puts there
    """Returns the message of an error's body."""
    if isinstance(body, dict):
        inner = body.get("error", body)
        message = inner.get("message") if isinstance(inner, dict) else inner
        detail = message or body.get("detail") or body.get("message") or body
        return str(detail)
    text = str(body or "no reason given")
    return "a page of HTML" if text.lstrip().startswith("<") else text


def _code(body: Any) -> str:  # Any: whatever a server puts there
    """Joins type and code of an error's body, to search for words."""
    if not isinstance(body, dict):
        return ""
    inner = body.get("error", body)
    if not isinstance(inner, dict):
        return ""
    return f"{inner.get('type') or ''} {inner.get('code') or ''}".lower()


def retry_after(headers: Mapping[str, str], now: Callable[[], float] = time.time) -> float | None:
    """Returns the seconds a response asks to wait: `retry-after-ms`, or Retry-After as a number or an HTTP date.

    A date is compared with the response's own Date, so that clocks that differ do no harm; without one with ours.
    """
    milliseconds = _number(headers.get("retry-after-ms"))
    if milliseconds is not None:
        return milliseconds / 1000
    given = headers.get("retry-after")
    seconds = _number(given)
    if seconds is not None or given is None:
        return seconds
    moment = _date(given)
    if moment is None:
        return None
    sent = _date(headers.get("date"))
    return max(0.0, moment - (now() if sent is None else sent))


def _number(text: str | None) -> float | None:
    try:
        value = float(text or "")
    except ValueError:
        return None
    return value if 0.0 <= value < float("inf") else None


def _date(text: str | None) -> float | None:
    try:
        return email.utils.parsedate_to_datetime(text or "").timestamp()
    except (ValueError, OverflowError):
        return None
