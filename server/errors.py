"""Turns errors into HTTP answers, in the shape of the dialect that was spoken.

The table below has a row for every error that a runtime can send; tests/server/test_errors.py fails for one without.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any, Literal

from ..lang.errors import (
    WIRE_ERRORS,
    BackendError,
    BudgetError,
    CancelledError,
    CapabilityError,
    ConnectionLostError,
    ConstraintError,
    ContextLengthError,
    DeadlineError,
    EngineError,
    GraphError,
    GuaranteeError,
    MissingExtraError,
    ModelError,
    OverloadedError,
    ParameterError,
    ProgramError,
    RequestError,
    ResultError,
    TemplateError,
    TraceError,
    UmbelError,
    VariableError,
)

Dialect = Literal["openai", "anthropic"]

RETRY = {"x-should-retry": "true"}  # both clients obey it before they look at the status
_NO_RETRY = {"x-should-retry": "false"}


class HttpError(Exception):
    """An answer with a status of 400 or more.

    Args:
        status: of the answer.
        message: for a person; says what to write instead.
        code: for a program, in OpenAI's words: "invalid_value", "model_not_found".
        param: the field that is wrong, as a path: "messages[0].content".
        headers: further headers of the answer.
    """

    def __init__(
        self,
        status: int,
        message: str,
        code: str = "invalid_value",
        *,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.headers = dict(headers or {})

    # Any: JSON of two dialects
    def shape(self, dialect: Dialect, request_id: str) -> dict[str, Any]:
        """Returns the error as JSON values: the body of an answer, or the data of a stream's error event."""
        if dialect == "anthropic":
            place = f"{self.param}: " if self.param and not self.message.startswith(self.param) else ""
            error = {"type": _anthropic_type(self.status), "message": place + self.message}
            return {"type": "error", "error": error, "request_id": request_id}
        kind = _openai_type(self.status)
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def _openai_type(status: int) -> str:
    if status == 429:
        return "rate_limit_error"
    return "server_error" if status >= 500 else "invalid_request_error"


_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def _anthropic_type(status: int) -> str:
    return _ANTHROPIC_TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")


# Error → status, code, headers. A deadline that passed would pass again: clients shall not try again.
_ANSWERS: dict[type[UmbelError], tuple[int, str, Mapping[str, str]]] = {
    ProgramError: (400, "invalid_program", {}),
    ParameterError: (400, "invalid_value", {}),
    VariableError: (400, "invalid_program", {}),
    TemplateError: (400, "invalid_value", {}),
    ConstraintError: (400, "invalid_schema", {}),
    TraceError: (400, "invalid_program", {}),
    GraphError: (400, "invalid_program", {}),
    CapabilityError: (400, "unsupported_parameter", {}),
    RequestError: (400, "invalid_value", {}),
    ContextLengthError: (400, "context_length_exceeded", {}),
    ResultError: (422, "invalid_result", {}),
    GuaranteeError: (422, "guarantee_failed", {}),
    BudgetError: (422, "budget_exhausted", {}),
    OverloadedError: (503, "overloaded", RETRY),
    EngineError: (503, "engine_error", RETRY),
    ConnectionLostError: (503, "engine_error", RETRY),
    DeadlineError: (504, "timeout", _NO_RETRY),
    CancelledError: (499, "cancelled", _NO_RETRY),
    ModelError: (500, "model_error", _NO_RETRY),
    MissingExtraError: (500, "model_error", _NO_RETRY),
    BackendError: (500, "backend_error", _NO_RETRY),
}
assert set(WIRE_ERRORS.values()) <= set(_ANSWERS), "each error of the wire has its answer"


FieldOf = Callable[[str], str | None]  # a parameter of the runtime → the field of the body that gave it


def http_error(error: Exception, retry_after: int = 1, field_of: FieldOf | None = None) -> HttpError:
    """Returns the answer to a request that ended with an error.

    An error that is none of ours is a defect: its text may hold anything and does not leave the server.

    Args:
        retry_after: seconds after which a client shall try again, where that may help.
        field_of: of the request's body; None for a request without one.
    """
    if isinstance(error, HttpError):
        return error
    for kind in type(error).__mro__:
        if kind in _ANSWERS:
            status, code, headers = _ANSWERS[kind]
            if headers is RETRY:
                headers = busy_headers(retry_after)
            param, message = _named_field(error, field_of)
            return HttpError(status, message, code, param=param, headers=headers)
    return HttpError(500, "the server failed; its log has the reason", "internal_error", headers=_NO_RETRY)


def busy_headers(retry_after: int) -> dict[str, str]:
    """Returns the headers of an answer after which the same request may do better."""
    return {"retry-after": str(retry_after), **RETRY}


def _named_field(error: Exception, field_of: FieldOf | None) -> tuple[str | None, str]:
    """Returns the field that an error is about, and its message, in which the field has the body's name.

    Messages begin with the runtime's name of a parameter, or with a path in it. One that names none is about the
    prompt.
    """
    message = str(error)
    if isinstance(error, BudgetError) and field_of is not None:
        return field_of("budget"), message
    if not isinstance(error, _OF_FIELDS):
        return None, message
    found = _NAMED.match(message)
    if field_of is None:
        return (found[0] if found else None), message
    field = field_of(found["name"]) if found else None
    if found is None or field is None:
        return (None if isinstance(error, ConstraintError) else field_of("prompt")), message
    if field == found["name"]:
        return found[0], message
    return field, field + re.sub(rf"\b{found['name']}=", f"{field}=", message[found.end("name") :])


_OF_FIELDS = (ParameterError, ConstraintError, TemplateError, RequestError)
_NAMED = re.compile(
    r"(?P<name>[a-z][a-z0-9_]*)(?:\[\d+\]|\.[a-z][a-z0-9_]*)*(?==| must | is | has | holds | '| \(|: )",
)
