"""Spans of requests, where OpenTelemetry is set up: `opentelemetry-instrument umbel serve ...`.

    caller's span ── traceparent ──▶ span of the request: route, status, tokens, seconds in the engine

Nothing of OpenTelemetry is imported here before it is there: a provider of spans that was set up has imported its API,
and without a provider no request pays for spans. No attribute holds a text.
"""

import sys
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from starlette.types import Send

from ..lang.protocol import RequestTimes, Usage

API = "opentelemetry.trace"


@dataclass(slots=True)
class Tally:
    """Sums what one request over HTTP asked of the engine, which may be several generations."""

    usage: Usage = field(default_factory=Usage)
    queued: float | None = None
    first_token: float | None = None
    status: int | None = None  # of the answer; None for a client that left before

    def add(self, usage: Usage, times: RequestTimes | None) -> None:
        """Adds one generation. The times are those of the first to be admitted, and of the first token."""
        self.usage += usage
        if times is not None:
            self.queued = _least(self.queued, times.queued)
            self.first_token = _least(self.first_token, times.first_token)

    def attributes(self) -> Iterator[tuple[str, int | float]]:
        """Yields the attributes of the span, under the names of OpenTelemetry's conventions where it has some."""
        if self.status is not None:
            yield "http.response.status_code", self.status
        if self.usage.calls:
            yield "gen_ai.usage.input_tokens", self.usage.prompt_tokens
            yield "gen_ai.usage.output_tokens", self.usage.completion_tokens
            yield "umbel.cached_tokens", self.usage.cached_tokens
        if self.queued is not None:
            yield "umbel.queue_seconds", self.queued
        if self.first_token is not None:
            yield "umbel.time_to_first_token_seconds", self.first_token


_tally: ContextVar[Tally | None] = ContextVar("tally", default=None)


def note(usage: Usage, times: RequestTimes | None) -> None:
    """Adds a generation to the span of the request that runs in this context, if there is one."""
    tally = _tally.get()
    if tally is not None:
        tally.add(usage, times)


class RequestTracer:
    """Makes a span for each request.

    Args:
        tracer: makes spans.
    """

    def __init__(self, tracer: Any) -> None:  # Any: a Tracer of opentelemetry.trace, which may not be installed
        api, propagation = import_module(API), import_module(f"{API}.propagation.tracecontext")
        self._tracer = tracer
        self._kind = api.SpanKind.SERVER
        self._error = api.StatusCode.ERROR
        self._parent_of = propagation.TraceContextTextMapPropagator().extract

    @contextmanager
    def request(self, method: str, route: str, headers: Mapping[str, str], request_id: str) -> Iterator[Tally]:
        """Makes the span of a request while the block runs, below the one that its `traceparent` names."""
        carrier = {name: headers[name] for name in ("traceparent", "tracestate") if name in headers}
        attributes = {"http.request.method": method, "http.route": route, "umbel.request_id": request_id}
        tally = Tally()
        token = _tally.set(tally)
        try:
            with self._tracer.start_as_current_span(
                f"{method} {route}", self._parent_of(carrier), self._kind, attributes
            ) as span:
                try:
                    yield tally
                finally:
                    for name, value in tally.attributes():
                        span.set_attribute(name, value)
                    if tally.status is not None and tally.status >= 500:
                        span.set_status(self._error)
        finally:
            _tally.reset(token)


def status_noted(send: Send, tally: Tally) -> Send:
    """Returns a `send` of ASGI that notes the status of the answer."""

    # Any: messages of ASGI
    async def sending(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            tally.status = message["status"]
        await send(message)

    return sending


def open_tracer() -> RequestTracer | None:
    """Returns the tracer of the provider that is set up; None without one."""
    api = sys.modules.get(API)
    if api is None or isinstance(api.get_tracer_provider(), api.ProxyTracerProvider):
        return None
    return RequestTracer(api.get_tracer("umbel.server"))


def _least(one: float | None, other: float | None) -> float | None:
    return min((value for value in (one, other) if value is not None), default=None)
