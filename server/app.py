"""Puts the server together: every endpoint of every dialect on one front, and the OpenAPI document of them.

The document is made of the structs that decode the bodies, so it lists what is really taken.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from ..lang import __version__
from ..lang.status import RuntimeState
from . import caches, metrics, programs
from .anthropic import messages
from .errors import Dialect, HttpError
from .front import Front
from .http import JSON, Application, Asked, Endpoint, Reply, present
from .native import generate, questions, runtime, runtime_messages
from .openai import chat, completions, embeddings, models, responses
from .ui import page

# The log has the cause; the route is open to all.
_NOT_READY = {
    RuntimeState.STOPPED: "the runtime is not started",
    RuntimeState.STARTING: "the runtime starts",
    RuntimeState.RESTARTING: "the engine ended or hung, and another one starts; requests wait for it",
    RuntimeState.FAILED: "the engine could not be started again; restart the server",
    RuntimeState.BROKEN: "the gateway ended or hung, and another one is started",
}


async def health(asked: Asked[None]) -> Reply:
    """Answers 200 while requests are served, by one of several engines at least, else 503 with the reason."""
    try:
        asked.front.check_open()
    except HttpError as error:
        return Reply({"status": error.code, "message": error.message}, error.status, error.headers)
    found = asked.front.health()
    state = found.state
    replicas = {"replicas": list(found.replicas)} if found.replicas else {}
    if state is RuntimeState.READY:
        return Reply({"status": "ok", **replicas})
    headers = {"retry-after": str(asked.front.limits.retry_after)}
    return Reply({"status": state.value, "message": _NOT_READY[state], **replicas}, 503, headers)


async def version(asked: Asked[None]) -> Reply:
    """Returns umbel's version."""
    return Reply({"version": __version__})


async def describe(asked: Asked[None]) -> Reply:
    """Returns the OpenAPI document of this server."""
    return Reply(document(present(ENDPOINTS, asked.front.access)))


ENDPOINTS: tuple[Endpoint, ...] = (
    *completions.ENDPOINTS,
    *chat.ENDPOINTS,
    *responses.ENDPOINTS,
    *embeddings.ENDPOINTS,
    *models.ENDPOINTS,
    *messages.ENDPOINTS,
    *programs.ENDPOINTS,
    *caches.ENDPOINTS,
    *generate.ENDPOINTS,
    *questions.ENDPOINTS,
    *runtime.ENDPOINTS,
    *metrics.ENDPOINTS,
    *runtime_messages.ENDPOINTS,
    *page.ENDPOINTS,
    Endpoint(
        "GET",
        "/health",
        health,
        "Whether requests are served",
        answer=dict[str, str],
        statuses=(200, 503),
        public=True,
    ),
    Endpoint("GET", "/version", version, "umbel's version", answer=dict[str, str]),
    Endpoint("GET", "/openapi.json", describe, "This document", answer=dict[str, Any]),
)


def application(front: Front) -> Application:
    """Returns the ASGI application that serves a front."""
    return Application(front, ENDPOINTS)


# ------------------------------------------------------------------------------------- the OpenAPI document

_REF = "#/components/schemas/{name}"
_TEXT = {"type": "string"}
# Errors by their dialect. Answers to requests with a header `anthropic-version` have Anthropic's shape on all routes.
_ERRORS: Mapping[Dialect, Any] = {
    "openai": {
        "title": "Error",
        "type": "object",
        "properties": {
            "error": {
                "type": "object",
                "properties": {
                    "message": _TEXT,
                    "type": _TEXT,
                    "param": {"type": ["string", "null"], "description": "The field that is wrong, as a path."},
                    "code": _TEXT,
                },
                "required": ["message", "type", "param", "code"],
                "additionalProperties": False,
            }
        },
        "required": ["error"],
    },
    "anthropic": {
        "title": "AnthropicError",
        "type": "object",
        "properties": {
            "type": {"enum": ["error"]},
            "error": {
                "type": "object",
                "properties": {"type": _TEXT, "message": _TEXT},
                "required": ["type", "message"],
                "additionalProperties": False,
            },
            "request_id": _TEXT,
        },
        "required": ["type", "error", "request_id"],
        "additionalProperties": False,
    },
}
_MEANINGS = {
    200: "The answer.",
    201: "The answer; something new is kept.",
    400: "A field is wrong, or what it asks for is not offered.",
    401: "The key is missing or wrong.",
    403: "The Host or Origin header names another host, or the route takes the admin key.",
    404: "No such model, program or cache.",
    409: "There is no room for more programs.",
    413: "The body is too large.",
    422: "The run ended with an error of its program or of its budget.",
    503: "The model is being loaded, the server is stopping, or too many requests run; try again.",
    504: "The deadline of the request has passed.",
}


# Any: JSON
def document(endpoints: Sequence[Endpoint]) -> dict[str, Any]:
    """Returns the OpenAPI 3.1 document of the endpoints."""
    types = [kind for each in endpoints for kind in (each.body, each.answer, *each.query.values()) if kind is not None]
    schemas, components = msgspec.json.schema_components(types, ref_template=_REF)
    found = iter(schemas)
    paths: dict[str, dict[str, Any]] = {}
    for endpoint in endpoints:
        body = next(found) if endpoint.body is not None else None
        answer = next(found) if endpoint.answer is not None else None
        operation = _operation(endpoint, body, answer)
        operation["parameters"] += [
            {"name": name, "in": "query", "required": False, "schema": next(found)} for name in endpoint.query
        ]
        paths.setdefault(_plain(endpoint.path), {})[endpoint.method.lower()] = operation
    return {
        "openapi": "3.1.0",
        "info": {"title": "umbel", "version": __version__},
        "paths": paths,
        "components": {
            "schemas": components | {error["title"]: error for error in _ERRORS.values()},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _plain(path: str) -> str:
    """Returns a path without Starlette's types of parameters."""
    return re.sub(r"\{(\w+):\w+\}", r"{\1}", path)


def _operation(endpoint: Endpoint, body: Any, answer: Any) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "operationId": re.sub(r"\W+", "_", f"{endpoint.method} {_plain(endpoint.path)}").strip("_").lower(),
        "summary": endpoint.summary,
        "parameters": [
            {"name": name, "in": "path", "required": True, "schema": _TEXT}
            for name in re.findall(r"\{(\w+)", endpoint.path)
        ],
        "responses": _responses(endpoint, answer),
        "security": [] if endpoint.public else [{"key": []}],
    }
    if body is not None:
        operation["requestBody"] = {"required": True, "content": {JSON: {"schema": body}}}
    elif endpoint.raw:
        binary = {"schema": {"type": "string", "format": "binary"}}
        operation["requestBody"] = {"required": True, "content": {"application/octet-stream": binary}}
    return operation


def _responses(endpoint: Endpoint, answer: Any) -> dict[str, Any]:
    """Returns the statuses of an operation, each with what it means and the shapes of its answers."""
    good = {media: {"schema": answer if media == JSON else _TEXT} for media in endpoint.media}
    error = {JSON: {"schema": {"$ref": _REF.format(name=_ERRORS[endpoint.dialect]["title"])}}}
    errors = {403, *endpoint.errors}
    if not endpoint.public:
        errors.add(401)
    if endpoint.body is not None or endpoint.raw:
        errors |= {400, 413, 503}
    return {
        **{str(status): {"description": _MEANINGS[status], "content": good} for status in endpoint.statuses},
        **{str(status): {"description": _MEANINGS[status], "content": error} for status in sorted(errors)},
        "default": {"description": "Another error.", "content": error},
    }
