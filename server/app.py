"""Puts the server together: every endpoint of every dialect on one front, and the OpenAPI document of them.

The document is made of the structs that decode the bodies, so it lists what is really taken.
"""

import re
from collections.abc import Sequence
from typing import Any

import msgspec

from ..lang import __version__
from ..lang.status import Observable, RuntimeState
from . import caches, metrics, programs
from .anthropic import messages
from .errors import HttpError
from .front import Front
from .http import Application, Asked, Endpoint, Reply
from .native import generate, questions, runtime, runtime_messages
from .openai import chat, completions, models, responses
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
    """Answers 200 while requests are served, else 503 with the reason."""
    try:
        asked.front.check_open()
    except HttpError as error:
        return Reply({"status": error.code, "message": error.message}, error.status, error.headers)
    backend = asked.front.backend
    state = backend.health().state if isinstance(backend, Observable) else RuntimeState.READY
    if state is RuntimeState.READY:
        return Reply({"status": "ok"})
    headers = {"retry-after": str(asked.front.limits.retry_after)}
    return Reply({"status": state.value, "message": _NOT_READY[state]}, 503, headers)


async def version(asked: Asked[None]) -> Reply:
    """Returns umbel's version."""
    return Reply({"version": __version__})


async def describe(asked: Asked[None]) -> Reply:
    """Returns the OpenAPI document of this server."""
    return Reply(document(ENDPOINTS))


ENDPOINTS: tuple[Endpoint, ...] = (
    *completions.ENDPOINTS,
    *chat.ENDPOINTS,
    *responses.ENDPOINTS,
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
    Endpoint("GET", "/health", health, "Whether requests are served", answer=dict[str, str], public=True),
    Endpoint("GET", "/version", version, "umbel's version", answer=dict[str, str]),
    Endpoint("GET", "/openapi.json", describe, "This document", answer=dict[str, Any]),
)


def application(front: Front) -> Application:
    """Returns the ASGI application that serves a front."""
    return Application(front, ENDPOINTS)


# ------------------------------------------------------------------------------------- the OpenAPI document

_REF = "#/components/schemas/{name}"
_ERROR = {
    "type": "object",
    "properties": {"error": {"type": "object", "properties": {"message": {"type": "string"}}}},
}


# Any: JSON
def document(endpoints: Sequence[Endpoint]) -> dict[str, Any]:
    """Returns the OpenAPI 3.1 document of the endpoints."""
    types = [kind for each in endpoints for kind in (each.body, each.answer) if kind is not None]
    schemas, components = msgspec.json.schema_components(types, ref_template=_REF)
    found = iter(schemas)
    paths: dict[str, dict[str, Any]] = {}
    for endpoint in endpoints:
        body = next(found) if endpoint.body is not None else None
        answer = next(found) if endpoint.answer is not None else None
        paths.setdefault(_plain(endpoint.path), {})[endpoint.method.lower()] = _operation(endpoint, body, answer)
    return {
        "openapi": "3.1.0",
        "info": {"title": "umbel", "version": __version__},
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _plain(path: str) -> str:
    """A path without Starlette's types of parameters."""
    return re.sub(r"\{(\w+):\w+\}", r"{\1}", path)


def _operation(endpoint: Endpoint, body: Any, answer: Any) -> dict[str, Any]:
    good: dict[str, Any] = {"description": "The answer."}
    if answer is not None:
        good["content"] = {"application/json": {"schema": answer}}
    operation: dict[str, Any] = {
        "operationId": re.sub(r"\W+", "_", f"{endpoint.method} {_plain(endpoint.path)}").strip("_").lower(),
        "summary": endpoint.summary,
        "parameters": [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
            for name in re.findall(r"\{(\w+)", endpoint.path)
        ],
        "responses": {
            "200": good,
            "default": {"description": "An error.", "content": {"application/json": {"schema": _ERROR}}},
        },
        "security": [] if endpoint.public else [{"key": []}],
    }
    if body is not None:
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": body}}}
    elif endpoint.raw:
        binary = {"schema": {"type": "string", "format": "binary"}}
        operation["requestBody"] = {"required": True, "content": {"application/octet-stream": binary}}
    return operation
