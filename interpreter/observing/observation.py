"""Turns observing on and off: `umbel.observe()` makes each run of this process a trace of OpenTelemetry.

    observe() ──► one Observation of the process ◄── Run.__init__ asks for it; None: the run pays nothing
                       │ open(run)
                       ▼
                  RunSpans (spans.py)

Nothing of OpenTelemetry is imported before `observe` is called.
"""

import threading
from types import TracebackType
from typing import TYPE_CHECKING, Self

from ...lang import __version__, checks
from ...lang.errors import MissingExtraError, ParameterError, ProgramError, shown

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer, TracerProvider

    from ..run import Run
    from .spans import RunSpans

_lock = threading.Lock()
current: "Observation | None" = None  # of this process; None where runs are not observed


def observe(tracer: "Tracer | TracerProvider | None" = None, *, content: bool = False) -> "Observation":
    """Makes a span of OpenTelemetry of every run that begins from now on, of its branches and of its calls.

    Names follow the semantic conventions of OpenTelemetry for generative AI; docs/frameworks.md lists them. Spans of a
    run are children of the span that is current where the run is started, and spans that the program's body makes are
    children of the run's. Requests of hosted backends and to servers of umbel carry `traceparent`.

    Args:
        tracer: makes the spans; a provider of tracers will do. None: that of the process.
        content: True puts prompts and answers into the spans. Without it no span has a text of the program; messages
            of errors may quote a value.

    Returns:
        The observation: its `stop()`, or the end of its `with` block, ends it. Runs that have begun are traced to
            their end.

    Raises:
        MissingExtraError: OpenTelemetry is not installed.
        ParameterError: a tracer that is none.
        ProgramError: runs are observed already.

    Examples:
        >>> from opentelemetry.sdk.trace import TracerProvider
        >>> from opentelemetry.sdk.trace.export import SimpleSpanProcessor
        >>> from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
        >>> provider, exporter = TracerProvider(), InMemorySpanExporter()
        >>> provider.add_span_processor(SimpleSpanProcessor(exporter))
        >>> @ul.function
        ... def capital(s, country):
        ...     s += country + ":" + ul.gen("city", max_tokens=4)
        >>> with ul.observe(provider):
        ...     capital.run("France").sync()
        >>> sorted(span.name for span in exporter.get_finished_spans())
        ['invoke_workflow capital', 'text_completion Echo']
    """
    switch = checks.switch("content", content)
    observation = Observation(_tracer_of(tracer), content=switch)
    global current
    with _lock:
        if current is not None:
            raise ProgramError("observe(): runs are observed already; call stop() of that observation first")
        current = observation
    return observation


class Observation:
    """Observes the runs of this process until it is stopped; made by `observe`.

    A context manager: leaving the block stops it.

    Args:
        tracer: makes the spans.
        content: whether spans have prompts and answers.

    Examples:
        >>> from opentelemetry.sdk.trace import TracerProvider
        >>> from opentelemetry.sdk.trace.export import SimpleSpanProcessor
        >>> from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
        >>> provider, exporter = TracerProvider(), InMemorySpanExporter()
        >>> provider.add_span_processor(SimpleSpanProcessor(exporter))
        >>> @ul.function
        ... def capital(s, country):
        ...     s += country + ":" + ul.gen("city", max_tokens=4)
        >>> observation = ul.observe(provider, content=True)  # as an application does when it starts
        >>> capital.run("France").sync()
        >>> observation.stop()  # and when it ends
        >>> capital.run("Italy").sync()
        >>> call, run = exporter.get_finished_spans()
        >>> call.attributes["gen_ai.input.messages"]
        '[{"role": "user", "parts": [{"type": "text", "content": "France:"}]}]'
    """

    def __init__(self, tracer: "Tracer", *, content: bool) -> None:
        self.tracer = tracer
        self.content = content

    def stop(self) -> None:
        """Ends observing: later runs make no spans. A second call does nothing."""
        global current
        with _lock:
            if current is self:
                current = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def open(self, run: "Run", program: str) -> "RunSpans | None":
        """Starts the span of a run, below the caller's current one; called by runs themselves.

        Args:
            run: that begins.
            program: name of its program.

        Returns:
            Its spans; None for an estimate, which asks no model.
        """
        if run.backend.capabilities.made_up:
            return None
        from .spans import RunSpans

        return RunSpans(self, run, program)


def trace_headers() -> dict[str, str]:
    """Returns the headers that name the current span to another process; none where runs are not observed."""
    if current is None:
        return {}
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    headers: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(headers)
    return headers


def _tracer_of(given: object) -> "Tracer":
    try:
        from opentelemetry import trace
    except ImportError as error:
        raise MissingExtraError(error.name or "opentelemetry", "otel") from None
    if given is None:
        return trace.get_tracer("umbel", __version__)
    if isinstance(given, trace.TracerProvider):
        return given.get_tracer("umbel", __version__)
    if isinstance(given, trace.Tracer):
        return given
    raise ParameterError(
        f"observe(tracer={shown(given)}) is neither a tracer nor a provider of tracers of OpenTelemetry; write "
        "observe() for the provider of the process"
    )
