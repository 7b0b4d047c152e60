"""Spans of requests, with a provider that keeps them."""

import asyncio
import sys
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest

trace = pytest.importorskip("opentelemetry.trace")

from umbel.server import tracing  # noqa: E402  # after the skip
from umbel.server.tracing import RequestTracer, open_tracer  # noqa: E402

from .client import AsgiClient, served  # noqa: E402

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
COMPLETION = {"model": "oracle", "prompt": "a private text", "max_tokens": 5, "temperature": 0, "ignore_eos": True}


class KeptSpan(trace.NonRecordingSpan):  # type: ignore[misc]  # a module that may be missing
    """A span whose attributes can be read."""

    def __init__(self, name: str, parent: Any, kind: Any, attributes: Mapping[str, Any]) -> None:
        super().__init__(trace.INVALID_SPAN_CONTEXT)
        self.name, self.parent, self.kind = name, parent, kind
        self.attributes = dict(attributes)
        self.failed = False

    def set_attribute(self, key: str, value: Any) -> None:
        self.attributes[key] = value

    def set_status(self, status: Any, description: str | None = None) -> None:
        self.failed = status is trace.StatusCode.ERROR


class KeptSpans:
    """A tracer that keeps its spans."""

    def __init__(self) -> None:
        self.spans: list[KeptSpan] = []

    @contextmanager
    def start_as_current_span(self, name: str, context: Any, kind: Any, attributes: Mapping[str, Any]) -> Iterator[Any]:
        parent = trace.get_current_span(context).get_span_context()
        self.spans.append(KeptSpan(name, parent, kind, attributes))
        yield self.spans[-1]


def traced(scenario: Callable[[AsgiClient], Awaitable[None]]) -> list[KeptSpan]:
    tracer = KeptSpans()

    async def whole() -> None:
        async with served() as client:
            client.app.front.tracer = RequestTracer(tracer)
            await scenario(client)

    asyncio.run(asyncio.wait_for(whole(), 60))
    return tracer.spans


@pytest.mark.parametrize("stream", [False, True])
def test_a_span_has_tokens_and_times_and_no_text(stream: bool) -> None:
    async def scenario(client: AsgiClient) -> None:
        answer = await client.post(
            "/v1/completions", {**COMPLETION, "stream": stream}, traceparent=f"00-{TRACE}-{SPAN}-01"
        )
        assert answer.status == 200

    (span,) = traced(scenario)
    assert (span.name, span.kind) == ("POST /v1/completions", trace.SpanKind.SERVER)
    assert (f"{span.parent.trace_id:032x}", f"{span.parent.span_id:016x}") == (TRACE, SPAN)
    assert span.attributes["http.response.status_code"] == 200
    assert span.attributes["gen_ai.usage.input_tokens"] == len("a private text") + 1
    assert span.attributes["gen_ai.usage.output_tokens"] == 5
    assert span.attributes["umbel.cached_tokens"] == 0
    assert 0 <= span.attributes["umbel.queue_seconds"] <= span.attributes["umbel.time_to_first_token_seconds"]
    assert not any("private" in str(value) for value in span.attributes.values())
    assert not span.failed


def test_a_span_adds_up_the_prompts_of_one_request() -> None:
    async def scenario(client: AsgiClient) -> None:
        await client.post("/v1/completions", {**COMPLETION, "prompt": ["one", "two"]})

    (span,) = traced(scenario)
    assert span.attributes["gen_ai.usage.output_tokens"] == 10


@pytest.mark.parametrize("parent", ["", "00-zz-1-01", "x" * 3000])
def test_a_request_without_a_parent_begins_a_trace(parent: str) -> None:
    async def scenario(client: AsgiClient) -> None:
        assert (await client.get("/health", traceparent=parent)).status == 200

    (span,) = traced(scenario)
    assert not span.parent.is_valid
    assert "gen_ai.usage.input_tokens" not in span.attributes


def test_only_faults_of_the_server_are_errors_of_the_span() -> None:
    async def scenario(client: AsgiClient) -> None:
        assert (await client.post("/v1/completions", {"nothing": 1})).status == 400
        client.app.front.draining = True
        assert (await client.get("/health")).status == 503

    refused, stopping = traced(scenario)
    assert (refused.attributes["http.response.status_code"], refused.failed) == (400, False)
    assert (stopping.attributes["http.response.status_code"], stopping.failed) == (503, True)


def test_nothing_is_traced_without_a_provider(monkeypatch: pytest.MonkeyPatch) -> None:
    assert open_tracer() is None  # the API is there, and no provider
    monkeypatch.setattr(trace, "get_tracer_provider", trace.NoOpTracerProvider)  # any that is no proxy
    assert isinstance(open_tracer(), RequestTracer)
    monkeypatch.delitem(sys.modules, tracing.API)
    assert open_tracer() is None  # and nothing was imported to find out
    assert tracing.API not in sys.modules
