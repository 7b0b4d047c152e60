"""The spans of one run: the run, its branches, its calls.

    caller's span
    └─ invoke_workflow judge               the run; current in its body, so that spans of the body are below it
       ├─ text_completion gemma3-270m      a call: a request to the model
       ├─ branch 0.0_0                     a branch, by its path through the forks
       │  └─ text_completion gemma3-270m
       └─ branch 0.0_1

Each stream's task runs in a context in which the stream's span is current, so whatever asks the backend on its behalf
(tries, continuations, speculation, instrumented HTTP clients) finds its parent there, on any thread.

Names are those of OpenTelemetry's semantic conventions for generative AI where these have one, else `umbel.*`. Spans of
runs and branches end together, when the run has finished, at the time at which each has last worked.
"""

import asyncio
import contextlib
import contextvars
import json
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import Token
from typing import TYPE_CHECKING

from opentelemetry import context as otel
from opentelemetry.trace import Span, SpanKind, StatusCode, set_span_in_context

from ...lang.errors import CancelledError, CapabilityError
from ...lang.prompt import Part
from ...lang.protocol import Capabilities, Chunk, Final, GenRequest, Scored, ScoreRequest, Usage
from ...lang.sampling import SamplingParams
from ..backends.hosted import conversation
from ..cache_explain.history import text_of
from ..calls import Answer, Calls, OnChunk, Request

if TYPE_CHECKING:
    from ..journal.stored import StoredCalls
    from ..run import Run
    from .observation import Observation

Attribute = str | bool | int | float | list[str]

# First word of a backend's name → the provider's name in the conventions, where the two differ.
_PROVIDERS = {"runtime": "umbel", "gemini": "gcp.gemini", "vertexai": "gcp.vertex_ai"}


class RunSpans:
    """Makes the spans of one run.

    Args:
        observation: has the tracer.
        run: observed from its beginning.
        program: its name; "" for a run without one.

    Attributes:
        root: the span of the program's own stream, which is that of the run.
    """

    def __init__(self, observation: "Observation", run: "Run", program: str) -> None:
        self.tracer = observation.tracer
        self.content = observation.content
        self._run = run
        self._lock = threading.Lock()
        self._streams: list[StreamSpan] = []
        attributes: dict[str, Attribute] = {"gen_ai.operation.name": "invoke_workflow", "umbel.run_id": run.id}
        if program:
            attributes["gen_ai.workflow.name"] = program
        self.root = self._stream(f"invoke_workflow {program}".rstrip(), attributes)
        run.when_finished(self._end)

    def branch(self, parent: "StreamSpan", path: str) -> "StreamSpan":
        """Starts the span of a branch. Called in the parent's task. `path`: as of `Executor`."""
        return self._stream(f"branch {path}", {"umbel.branch": path}, parent)

    def attach(self) -> Token[otel.Context]:
        """Makes the run's span the current one, for the body. Returns what `detach` takes."""
        token: Token[otel.Context] = otel.attach(set_span_in_context(self.root.span))
        return token

    def detach(self, token: Token[otel.Context]) -> None:
        otel.detach(token)

    def calls(self, run: "Run") -> "ObservedCalls":
        """Returns what sends the requests of the run."""
        return ObservedCalls(run, self)

    @contextmanager
    def call(self, operation: str, capabilities: Capabilities) -> Iterator[Span]:
        """Makes the span of one request while the block runs, below that of its stream."""
        provider, _, named = capabilities.name.partition(" ")
        model = capabilities.model or named or provider
        attributes: dict[str, Attribute] = {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": _PROVIDERS.get(provider, provider.lower()),
            "gen_ai.request.model": model,
        }
        with self.tracer.start_as_current_span(
            f"{operation} {model}",
            kind=SpanKind.CLIENT,
            attributes=attributes,
            record_exception=False,
            set_status_on_exception=False,
        ) as span:
            try:
                yield span
            except asyncio.CancelledError:
                span.set_attribute("umbel.cancelled", True)
                raise
            except BaseException as error:
                _fail(span, error)
                raise

    @contextmanager
    def shipped(self, usage: Callable[[], Usage]) -> Iterator[None]:
        """Makes the span of a compiled program that the backend runs as a whole. `usage`: of it, read at the end."""
        with self.call("invoke_workflow", self._run.backend.capabilities) as span:
            try:
                yield
            finally:
                _note_usage(span, usage())

    def _stream(self, name: str, attributes: dict[str, Attribute], parent: "StreamSpan | None" = None) -> "StreamSpan":
        around = None if parent is None else set_span_in_context(parent.span)
        stream = StreamSpan(self.tracer.start_span(name, around, attributes=attributes))
        with self._lock:
            self._streams.append(stream)
        return stream

    def _end(self) -> None:
        """Ends all spans: the run has finished. Steps that are added to its state later make spans below ended ones."""
        root, cost = self.root, self._run.ledger.cost
        if self._run.reason is not None:
            root.fail(self._run.reason)
        root.worked()
        _note_sums(root.span, cost.usage)
        if cost.dollars is not None:
            root.span.set_attribute("umbel.dollars", float(cost.dollars))
        with self._lock:
            streams, self._streams = self._streams, []
        for stream in reversed(streams):
            stream.span.end(stream.last)


class StreamSpan:
    """The span of one stream.

    Attributes:
        context: in which the span is current; tasks of the stream run in it.
        last: when the stream has last worked, in nanoseconds since 1970.
    """

    __slots__ = ("_failed", "context", "last", "span")

    def __init__(self, span: Span) -> None:
        self.span = span
        self.context = contextvars.copy_context()
        self.context.run(otel.attach, set_span_in_context(span))
        self.last = time.time_ns()
        self._failed = False

    def worked(self) -> None:
        """Notes that the stream has run its steps so far."""
        self.last = time.time_ns()

    def fail(self, error: BaseException) -> None:
        """Records the error that the stream failed with; only the first one counts."""
        self.worked()
        if not self._failed:
            self._failed = True
            _fail(self.span, error)


class ObservedCalls(Calls):
    """Sends the requests of one run, as `Calls` does, each with a span.

    Args:
        run: has the backend and the ledger.
        spans: of the run.
    """

    __slots__ = ("_read", "_spans")

    def __init__(self, run: "Run", spans: RunSpans) -> None:
        super().__init__(run)
        self._spans = spans
        self._read: set[str] = set()  # calls that the journal has answered, until their spans say so

    async def generate(self, request: GenRequest, on_chunk: OnChunk) -> Final:
        capabilities = self.backend.capabilities
        if request.sampling.n > capabilities.most_n:
            return await super().generate(request, on_chunk)  # comes back here for each continuation
        with self._spans.call("chat" if capabilities.converses else "text_completion", capabilities) as span:
            self._describe(span, request)
            span.set_attributes(dict(_sampling(request.sampling)))
            if request.stream:
                span.set_attribute("gen_ai.request.stream", True)
            if request.constraint is not None:
                json_is_asked = request.constraint.kind.startswith("json")
                span.set_attribute("gen_ai.output.type", "json" if json_is_asked else "text")
            final = await super().generate(request, _timed(span, on_chunk) if request.stream else on_chunk)
            reasons = [completion.finish_reason.value for completion in final.completions]
            span.set_attribute("gen_ai.response.finish_reasons", reasons)
            self._note_cost(span, request.id, final.usage)
            if final.times is not None:
                span.set_attribute("umbel.queue_seconds", final.times.queued)
            if self._spans.content:
                texts = [completion.text for completion in final.completions]
                span.set_attribute(
                    "gen_ai.output.messages", _messages((("assistant", text) for text in texts), reasons)
                )
            return final

    async def score(self, request: ScoreRequest) -> Scored:
        with self._spans.call("score", self.backend.capabilities) as span:
            self._describe(span, request)
            span.set_attribute("gen_ai.request.choice.count", len(request.choices))
            scored = await super().score(request)
            self._note_cost(span, request.id, scored.usage)
            return scored

    def _recorded(self, stored: "StoredCalls", request: Request, kind: type[Answer]) -> Answer | None:
        known = super()._recorded(stored, request, kind)
        if known is not None:
            self._read.add(request.id)
        return known

    def _note_cost(self, span: Span, request_id: str, usage: Usage) -> None:
        """Notes the tokens of a call. One that was read from a journal has cost none in this run."""
        if request_id in self._read:
            self._read.discard(request_id)
            span.set_attribute("umbel.journal.read", True)
        else:
            _note_usage(span, usage)

    def _describe(self, span: Span, request: GenRequest | ScoreRequest) -> None:
        """Notes what a request is for."""
        span.set_attribute("umbel.request_id", request.id)
        found = self._run.log.intent_of(request.id)
        if found is not None:
            intent, _ = found
            span.set_attributes({"umbel.operation": intent.kind, "umbel.place": intent.place})
            if intent.name:
                span.set_attribute("umbel.variable", intent.name)
        if self._spans.content:
            span.set_attribute("gen_ai.input.messages", _messages(self._asked(request.prompt)))

    def _asked(self, prompt: tuple[Part, ...]) -> list[tuple[str, str]]:
        """Returns the role and text of each message of a prompt; of one that no chat request can say, all of it."""
        capabilities = self._run.backend.capabilities
        if capabilities.converses:
            with contextlib.suppress(CapabilityError):
                said = conversation.read_beginning(prompt, capabilities.name)
                if isinstance(said, conversation.Conversation):
                    begun = [("assistant", conversation.text_of(said.begun))] if said.begun else []
                    return [*((turn.role, turn.text) for turn in said.turns), *begun]
        return [("user", "".join(map(text_of, prompt)))]


def _sampling(sampling: SamplingParams) -> Iterator[tuple[str, Attribute]]:
    """Yields the parameters of a request; those that are as they usually are, are left out, but for two."""
    yield "gen_ai.request.max_tokens", sampling.max_tokens
    yield "gen_ai.request.temperature", sampling.temperature
    usual = SamplingParams()
    for name in ("top_p", "top_k", "frequency_penalty", "presence_penalty", "seed"):
        value = getattr(sampling, name)
        if value != getattr(usual, name):
            yield f"gen_ai.request.{name}", value
    if sampling.n > 1:
        yield "gen_ai.request.choice.count", sampling.n
    if sampling.stop:
        yield "gen_ai.request.stop_sequences", list(sampling.stop)


def _timed(span: Span, on_chunk: OnChunk) -> OnChunk:
    """Returns an `on_chunk` that notes on the span after how many seconds the first chunk came."""
    began = time.perf_counter()
    waiting = True

    def noted(chunk: Chunk) -> None:
        nonlocal waiting
        if waiting:
            waiting = False
            span.set_attribute("gen_ai.response.time_to_first_chunk", time.perf_counter() - began)
        on_chunk(chunk)

    return noted


def _note_usage(span: Span, usage: Usage) -> None:
    span.set_attributes(
        {
            "gen_ai.usage.input_tokens": usage.prompt_tokens,
            "gen_ai.usage.output_tokens": usage.completion_tokens,
            "gen_ai.usage.cache_read.input_tokens": usage.cached_tokens,
        }
    )
    if usage.cache_write_tokens:
        span.set_attribute("gen_ai.usage.cache_creation.input_tokens", usage.cache_write_tokens)


def _note_sums(span: Span, usage: Usage) -> None:
    """Notes the sums of a run, under names of our own, so that a sum of `gen_ai.usage` counts each call once."""
    span.set_attributes(
        {
            "umbel.calls": usage.calls,
            "umbel.input_tokens": usage.prompt_tokens,
            "umbel.output_tokens": usage.completion_tokens,
            "umbel.cached_tokens": usage.cached_tokens,
        }
    )


def _fail(span: Span, error: BaseException) -> None:
    """Records an error; a cancellation is none."""
    if isinstance(error, CancelledError | asyncio.CancelledError):
        span.set_attribute("umbel.cancelled", True)
        return
    span.set_attribute("error.type", type(error).__qualname__)
    told, trace = _unicode(str(error)), _unicode("".join(traceback.format_exception(error)))
    span.record_exception(error, {"exception.message": told, "exception.stacktrace": trace})
    span.set_status(StatusCode.ERROR, f"{type(error).__name__}: {told}")


def _messages(said: Iterable[tuple[str, str]], reasons: list[str] | None = None) -> str:
    """Writes roles and texts as messages of the conventions: JSON."""
    return _unicode(
        json.dumps(
            [
                {
                    "role": role,
                    "parts": [{"type": "text", "content": text}],
                    **({} if reasons is None else {"finish_reason": reasons[index]}),
                }
                for index, (role, text) in enumerate(said)
            ],
            ensure_ascii=False,
        )
    )


def _unicode(text: str) -> str:
    """Writes halves of surrogate pairs as escapes: exporters refuse them, with all spans of the same export."""
    return text.encode("utf-8", "backslashreplace").decode()
