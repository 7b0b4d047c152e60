"""Spans of runs, as OpenTelemetry's SDK keeps them."""

import asyncio
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("opentelemetry.sdk.trace")

import umbel as ul
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from umbel.testing import FakeOpenAI


class Kept(SpanProcessor):
    """Keeps spans as they end. The run's own is the last of a run, and ends on the thread that ends its last work."""

    def __init__(self) -> None:
        self.spans: list[ReadableSpan] = []
        self._changed = threading.Condition()
        self.provider = TracerProvider()
        self.provider.add_span_processor(self)

    def on_end(self, span: ReadableSpan) -> None:
        with self._changed:
            self.spans.append(span)
            self._changed.notify_all()

    def wait_for(self, runs: int) -> None:
        """Waits until so many runs have ended."""
        with self._changed:
            assert self._changed.wait_for(lambda: self._runs() >= runs, 60)

    def _runs(self) -> int:
        return sum(span.name.startswith("invoke_workflow") for span in self.spans)

    def named(self, name: str) -> list[ReadableSpan]:
        return [span for span in self.spans if span.name == name]

    def one(self, name: str) -> ReadableSpan:
        (span,) = self.named(name)
        return span

    def parent(self, span: ReadableSpan) -> str | None:
        """The name of the span above; None for a root."""
        if span.parent is None:
            return None
        return next(each.name for each in self.spans if each.context.span_id == span.parent.span_id)


@pytest.fixture
def kept() -> Iterator[Kept]:
    made = Kept()
    with ul.observe(made.provider):
        yield made


def said(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


@ul.function
def judge(s: ul.State, essay: str) -> None:
    s += f"Essay: {essay}\n"
    forks = s.fork(2)
    forks += lambda i: f"Side {i}:" + ul.gen("side", max_tokens=8, temperature=0)
    forks.join()
    s += "Good?" + ul.select("good", choices=[" yes", " no"])


def names(kept: Kept) -> list[tuple[str, str | None]]:
    return sorted(((span.name, kept.parent(span)) for span in kept.spans), key=str)


TREE = [
    ("branch 0.0_0", "invoke_workflow judge"),
    ("branch 0.0_1", "invoke_workflow judge"),
    ("invoke_workflow judge", None),
    ("score Echo", "invoke_workflow judge"),
    ("text_completion Echo", "branch 0.0_0"),
    ("text_completion Echo", "branch 0.0_1"),
]


@pytest.mark.parametrize("compiled", [False, True])
def test_calls_are_below_their_branches_and_these_below_the_run(kept: Kept, compiled: bool) -> None:
    program = judge.compile() if compiled else judge
    state = program.run(essay="Venice.", backend=ul.Echo())
    state.text()
    kept.wait_for(runs=1)
    assert names(kept) == TREE
    run = said(kept.one("invoke_workflow judge"))
    assert run["gen_ai.operation.name"] == "invoke_workflow"
    assert run["gen_ai.workflow.name"] == "judge"
    assert (run["umbel.calls"], run["umbel.input_tokens"]) == (3, state.cost.usage.prompt_tokens)


def test_a_call_has_the_attributes_of_the_conventions_and_no_text(kept: Kept) -> None:
    state = judge.run(essay="Venice.", backend=ul.Echo())
    state.text()
    kept.wait_for(runs=1)
    calls = kept.named("text_completion Echo")
    attributes = said(calls[0])
    assert attributes["gen_ai.provider.name"] == "echo"
    assert attributes["gen_ai.request.model"] == "Echo"
    assert (attributes["gen_ai.request.max_tokens"], attributes["gen_ai.request.temperature"]) == (8, 0)
    assert attributes["gen_ai.response.finish_reasons"] in (("stop",), ("length",))
    assert (attributes["umbel.operation"], attributes["umbel.variable"]) == ("gen", "side")
    summed = [
        sum(said(span)[f"gen_ai.usage.{kind}"] for span in (*calls, kept.one("score Echo")))
        for kind in ("input_tokens", "output_tokens", "cache_read.input_tokens")
    ]
    usage = state.cost.usage
    assert summed == [usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens]
    assert not [value for span in kept.spans for value in said(span).values() if "Venice" in str(value)]


def test_content_is_kept_when_it_is_asked_for() -> None:
    made = Kept()
    with ul.observe(made.provider, content=True):
        judge.run(essay="Venice.", backend=ul.Echo()).text()
    made.wait_for(runs=1)
    call = said(next(span for span in made.named("text_completion Echo") if made.parent(span) == "branch 0.0_1"))
    (asked,), (answered,) = (json.loads(call[f"gen_ai.{way}.messages"]) for way in ("input", "output"))
    assert (asked["role"], asked["parts"][0]["content"]) == ("user", "Essay: Venice.\nSide 1:")
    assert answered["role"] == "assistant"
    assert answered["parts"] == [{"type": "text", "content": "Essay: Venice.\nSide 1:"}]  # Echo says it again


def test_content_of_a_chat_has_the_roles_of_its_turns() -> None:
    @ul.function
    def ask(s: ul.State, text: str) -> None:
        s += ul.system("Be kind.") + ul.user(text) + ul.assistant("It is " + ul.gen("answer", max_tokens=8))
        s += ul.user("Sure?") + ul.assistant(ul.gen("sure", max_tokens=8))

    made = Kept()
    with FakeOpenAI(["Paris.", "Yes."]) as server, ul.observe(made.provider, content=True):
        backend = ul.OpenAI("gpt-4o", base_url=server.base_url, api_key=server.api_key)
        ask.run(text="Capital of France?", backend=backend).sync()
    made.wait_for(runs=1)
    spans = [span for span in made.spans if span.name.startswith("chat")]
    asked = json.loads(said(spans[-1])["gen_ai.input.messages"])
    assert [(each["role"], each["parts"][0]["content"]) for each in asked] == [
        ("system", "Be kind."),
        ("user", "Capital of France?"),
        ("assistant", "It is Paris."),
        ("user", "Sure?"),
    ]


def test_halves_of_characters_are_written_as_escapes() -> None:
    @ul.function
    def odd(s: ul.State) -> None:
        s += "hi \ud83d" + ul.gen("answer", max_tokens=8)
        raise ValueError(s["answer"])

    made = Kept()
    with ul.observe(made.provider, content=True), pytest.raises(ValueError):
        odd.run(backend=ul.Echo(lambda prompt: "\udc00"))
    made.wait_for(runs=1)
    for span in made.spans:
        for event in span.events:
            said_there = [
                span.status.description or "",
                *map(str, said(span).values()),
                *map(str, event.attributes.values()),
            ]
            "".join(said_there).encode()
    assert "\\udc00" in made.one("invoke_workflow odd").status.description
    assert "\\ud83d" in said(made.one("text_completion Echo"))["gen_ai.input.messages"]


def test_a_run_is_below_the_callers_span_and_the_body_below_the_run(kept: Kept) -> None:
    tracer = kept.provider.get_tracer("app")

    @ul.function
    def outer(s: ul.State) -> None:
        with tracer.start_as_current_span("own"):
            judge.run(essay="Rome.", backend=ul.Echo()).text()

    with tracer.start_as_current_span("caller"):
        outer.run(backend=ul.Echo())
    kept.wait_for(runs=2)
    parents = dict(names(kept))
    assert parents["invoke_workflow outer"] == "caller"
    assert parents["own"] == "invoke_workflow outer"
    assert parents["invoke_workflow judge"] == "own"
    assert len({span.context.trace_id for span in kept.spans}) == 1


@ul.function
async def ask(s: ul.AsyncState, word: str) -> None:
    s += word + ul.gen("answer", max_tokens=4)
    await s["answer"]


def test_async_runs_of_two_tasks_stay_apart(kept: Kept) -> None:
    tracer = kept.provider.get_tracer("app")

    async def one(name: str) -> None:
        with tracer.start_as_current_span(name):
            await ask.run_async(word=name, backend=ul.Echo())

    async def both() -> None:
        await asyncio.gather(one("a"), one("b"))

    asyncio.run(both())
    kept.wait_for(runs=2)
    traces = {
        kept.one(name).context.trace_id: sorted(
            span.name for span in kept.spans if span.context.trace_id == kept.one(name).context.trace_id
        )
        for name in ("a", "b")
    }
    assert list(traces.values()) == [
        ["a", "invoke_workflow ask", "text_completion Echo"],
        ["b", "invoke_workflow ask", "text_completion Echo"],
    ]


def test_every_run_of_a_batch_is_below_the_caller(kept: Kept) -> None:
    with kept.provider.get_tracer("app").start_as_current_span("caller"):
        states = judge.run_batch([{"essay": str(number)} for number in range(5)], backend=ul.Echo(), num_threads=3)
    assert len(states) == 5
    kept.wait_for(runs=5)
    runs = kept.named("invoke_workflow judge")
    assert [kept.parent(run) for run in runs] == ["caller"] * 5
    assert len(kept.named("text_completion Echo")) == 10


def test_an_error_is_the_status_of_its_call_and_of_its_run(kept: Kept) -> None:
    @ul.function
    def fails(s: ul.State) -> None:
        s += "Hello" + ul.gen("answer", max_tokens=4)
        assert s["answer"]

    backend = ul.Echo(faults=ul.FailCall(1, ul.BackendError("the lights went out")))
    with pytest.raises(ul.BackendError):
        fails.run(backend=backend)
    kept.wait_for(runs=1)
    for name in ("text_completion Echo", "invoke_workflow fails"):
        span = kept.one(name)
        assert span.status.status_code is trace.StatusCode.ERROR
        assert said(span)["error.type"] == "BackendError"
        assert [event.name for event in span.events] == ["exception"]


def test_a_cancelled_branch_is_no_error(kept: Kept) -> None:
    @ul.function
    def first(s: ul.State) -> None:
        s += "Go"
        forks = s.fork(2)
        forks[0] += ul.gen("a", max_tokens=4)
        gate.wait_for(1)
        forks[0].cancel()
        forks[1] += "done"

    gate = ul.Gate()
    first.run(backend=ul.Echo(gate=gate), timeout=60)
    kept.wait_for(runs=1)
    call = kept.one("text_completion Echo")
    assert (said(call)["umbel.cancelled"], call.status.status_code) == (True, trace.StatusCode.UNSET)
    branch = kept.one("branch 0.0_0")
    assert said(branch)["umbel.cancelled"] is True
    assert branch.status.status_code is trace.StatusCode.UNSET
    assert "umbel.cancelled" not in said(kept.one("branch 0.0_1"))


def test_calls_that_a_journal_answers_are_marked_and_cost_nothing(kept: Kept, tmp_path: Path) -> None:
    for _ in range(2):
        judge.run(essay="Venice.", backend=ul.Echo(), journal=tmp_path / "run.jsonl")
    kept.wait_for(runs=2)
    made, read = said(kept.named("score Echo")[0]), said(kept.named("score Echo")[1])
    assert "umbel.journal.read" not in made
    assert "gen_ai.usage.input_tokens" in made
    assert read["umbel.journal.read"] is True
    assert "gen_ai.usage.input_tokens" not in read
    assert said(kept.named("invoke_workflow judge")[1])["umbel.calls"] == 0


def test_nothing_is_observed_after_stop_and_only_once_at_a_time() -> None:
    made = Kept()
    observation = ul.observe(made.provider.get_tracer("mine"))
    with pytest.raises(ul.ProgramError, match="observed already"):
        ul.observe(made.provider)
    observation.stop()
    observation.stop()
    state = judge.run(essay="Venice.", backend=ul.Echo())
    state.text()
    assert made.spans == []


def test_what_is_no_tracer_is_refused() -> None:
    with pytest.raises(ul.ParameterError, match="neither a tracer nor a provider"):
        ul.observe("http://localhost:4317")  # type: ignore[arg-type]


def test_an_estimate_makes_no_spans(kept: Kept) -> None:
    judge.estimate(essay="Venice.", backend=ul.Echo())
    assert kept.spans == []


def test_a_request_to_a_provider_names_the_span_of_its_call(kept: Kept) -> None:
    @ul.function
    def capital(s: ul.State) -> None:
        s += ul.user("Capital of France?") + ul.assistant(ul.gen("answer", max_tokens=8))

    with FakeOpenAI({"France?": "Paris."}) as server:
        backend = ul.OpenAI("gpt-4o", base_url=server.base_url, api_key=server.api_key)
        assert capital.run(backend=backend)["answer"] == "Paris."
        call = kept.one("chat gpt-4o")
        assert said(call)["gen_ai.provider.name"] == "openai"
        ids = f"{call.context.trace_id:032x}-{call.context.span_id:016x}"
        assert server.requests[0].headers["traceparent"].startswith(f"00-{ids}-")


def test_a_stream_says_when_its_first_chunk_came(kept: Kept) -> None:
    state = ask_slowly.run(backend=ul.Echo(), stream=True)
    assert "".join(state.text_iter()).startswith("Hello")
    call = said(kept.one("text_completion Echo"))
    assert call["gen_ai.request.stream"] is True
    assert call["gen_ai.response.time_to_first_chunk"] >= 0


@ul.function
def ask_slowly(s: ul.State) -> None:
    s += "Hello" + ul.gen("answer", max_tokens=4)


# -------------------------------------------------------------------------------------- shipped programs


@pytest.fixture(scope="module")
def runtime() -> Iterator[ul.Runtime]:
    with ul.Runtime(model="oracle", debug={"step_delay": 0.002}) as runtime:
        yield runtime


@ul.function(temperature=0, ignore_eos=True)
def endless(s: ul.State) -> None:
    s += "on" + ul.gen("a", max_tokens=2000) + ul.gen("b", max_tokens=2000)


@pytest.mark.processes
def test_a_program_that_a_runtime_runs_is_one_call_with_the_usage_of_all(kept: Kept, runtime: ul.Runtime) -> None:
    state = judge.compile(server=True).run(essay="Venice.", backend=runtime)
    state.text()
    kept.wait_for(runs=2)  # the program's and the call's
    assert names(kept) == [("invoke_workflow judge", None), ("invoke_workflow oracle", "invoke_workflow judge")]
    call, run = said(kept.one("invoke_workflow oracle")), said(kept.one("invoke_workflow judge"))
    assert call["gen_ai.provider.name"] == "umbel"
    assert call["gen_ai.usage.input_tokens"] == run["umbel.input_tokens"] == state.usage.prompt_tokens > 0
    assert call["gen_ai.usage.output_tokens"] == run["umbel.output_tokens"] == state.usage.completion_tokens > 0
    assert run["umbel.calls"] == state.usage.calls == 3


@pytest.mark.processes
def test_a_program_that_a_runtime_runs_and_that_is_cancelled_has_not_failed(kept: Kept, runtime: ul.Runtime) -> None:
    state = endless.compile(server=True).run(backend=runtime, stream=True)
    next(state.text_iter("a"))
    state.cancel()
    kept.wait_for(runs=2)
    for name in ("invoke_workflow oracle", "invoke_workflow endless"):
        span = kept.one(name)
        assert said(span)["umbel.cancelled"] is True
        assert span.status.status_code is trace.StatusCode.UNSET


@pytest.mark.processes
def test_a_program_that_a_runtime_runs_and_that_is_late_has_failed(kept: Kept, runtime: ul.Runtime) -> None:
    state = endless.compile(server=True).run(backend=runtime, timeout=0.3)
    with pytest.raises(ul.DeadlineError):
        state["b"]
    kept.wait_for(runs=2)
    run, call = kept.one("invoke_workflow endless"), kept.one("invoke_workflow oracle")
    assert run.status.status_code is trace.StatusCode.ERROR
    assert said(run)["error.type"] == "DeadlineError"
    # The runtime ends it, or this side does.
    assert said(call).get("umbel.cancelled") is True or said(call)["error.type"] == "DeadlineError"
