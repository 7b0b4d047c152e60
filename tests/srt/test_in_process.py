"""The runtime in one process: requests against the oracle, whose keys cannot lie."""

import asyncio
import threading
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from typing import Any

import msgspec
import pytest
from umbel.lang.errors import BackendError, ContextLengthError, DeadlineError, EngineError, ParameterError, RequestError
from umbel.lang.prompt import Generated, Text
from umbel.lang.protocol import Chunk, Final, FinishReason, GenRequest, Hint, Origin, ScoreRequest
from umbel.lang.runtime_options import RuntimeOptions
from umbel.lang.sampling import SamplingParams
from umbel.lang.status import RuntimeState
from umbel.srt import in_process, launch
from umbel.srt.core.instruments import FailAt, VirtualClock
from umbel.srt.gateway.gateway import Gateway
from umbel.srt.in_process import LocalBackend

from .. import conformance

ORACLE_OPTIONS = RuntimeOptions(model="oracle")
GREEDY = SamplingParams(max_tokens=12, temperature=0.0)


def run(backend: LocalBackend, scenario: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        await backend.start()
        try:
            await asyncio.wait_for(scenario(), 30)
        finally:
            await backend.close()

    asyncio.run(bounded())


async def final_of(backend: LocalBackend, request: GenRequest) -> Final:
    async with aclosing(backend.generate(request)) as events:
        async for event in events:
            if isinstance(event, Final):
                return event
    raise AssertionError("no ending")


def request(label: str, text: str = "hello", sampling: SamplingParams = GREEDY, *, stream: bool = False) -> GenRequest:
    return GenRequest(label, (Text(text),), sampling, stream)


@pytest.mark.filterwarnings("ignore::umbel.lang.chat_template.TemplateWarning")
@pytest.mark.parametrize("case", conformance.CASES, ids=conformance.name_of)
@pytest.mark.sampled(4)
def test_it_conforms_as_a_backend(case: conformance.Case) -> None:
    conformance.check(case, LocalBackend)


def test_it_says_that_it_has_not_started() -> None:
    backend = LocalBackend()
    with pytest.raises(BackendError, match="not started"):
        _ = backend.chat_template


@pytest.mark.parametrize("pool", [40, 8000])
def test_its_context_is_no_longer_than_its_pool(pool: int) -> None:
    backend = LocalBackend(pool_tokens=pool, context_length=500)

    async def scenario() -> None:
        await backend.start()
        longest = backend.capabilities.max_context
        assert longest == min(pool, 500)
        too_long = request("a", "x" * longest)  # and BOS
        with pytest.raises(ContextLengthError, match="shorten it"):
            async for _ in backend.generate(too_long):
                pass

    run(backend, scenario)


def test_chunks_add_up_to_the_final_text() -> None:
    backend = LocalBackend()

    async def scenario() -> None:
        async with aclosing(backend.generate(request("a", stream=True))) as stream:
            events = [event async for event in stream]
        *chunks, final = events
        assert isinstance(final, Final)
        assert "".join(chunk.text for chunk in chunks if isinstance(chunk, Chunk)) == final.completions[0].text
        assert final.completions[0].finish_reason is FinishReason.LENGTH

    run(backend, scenario)


def test_generated_parts_are_reused_to_the_last_computed_token() -> None:
    backend = LocalBackend()

    async def scenario() -> None:
        first = (await final_of(backend, request("a"))).completions[0]
        parts = (Text("hello"), Generated(first.text, first.token_ids[: first.kept]), Text(first.tail + " and"))
        second = await final_of(backend, GenRequest("b", parts, GREEDY))
        # The key of the last generated token was never computed.
        assert second.usage.cached_tokens == len("hello") + 1 + first.kept - 1

    run(backend, scenario)


def test_a_prompt_of_ids_is_answered_as_its_text_is() -> None:
    backend = LocalBackend(clock=VirtualClock())  # for equal times
    sampling = SamplingParams(max_tokens=4, temperature=0.0, prompt_logprobs_from=0, top_logprobs=2)
    bos = 256

    async def scenario() -> None:
        text = await final_of(backend, request("text", "hello", sampling))
        assert [each.token_id for each in text.prompt_logprobs] == [*b"hello"]
        for ids in ((*b"hello",), (bos, *b"hello")):
            assert await final_of(backend, GenRequest("text", (Generated("", ids),), sampling)) == text
        with pytest.raises(ParameterError, match="prompt: token 999 is outside the vocabulary; write 0 to 271"):
            await final_of(backend, GenRequest("x", (Generated("", (bos, 999)),), sampling))

    run(backend, scenario)


def test_an_aborted_request_ends_with_its_text_so_far() -> None:
    backend = LocalBackend()
    endless = SamplingParams(max_tokens=100_000, temperature=0.0, ignore_eos=True)

    async def scenario() -> None:
        async with aclosing(backend.generate(request("a", sampling=endless, stream=True))) as events:
            first = await anext(events)
            assert isinstance(first, Chunk)
            assert backend.abort("a")
            rest = [event async for event in events]
        (completion,) = rest[-1].completions
        assert completion.finish_reason is FinishReason.ABORT
        assert completion.text == first.text + "".join(event.text for event in rest[:-1])
        assert not backend.abort("a"), "it has ended"

    run(backend, scenario)


def test_a_hint_computes_the_prefix_before_it_is_asked_for() -> None:
    backend = LocalBackend()

    async def scenario() -> None:
        backend.hint(Hint("h", (Text("a shared prefix"),)))
        while backend.engine.scheduler.counters["forward_rows"] < 16:
            await asyncio.sleep(0)
        first = await final_of(backend, request("a", "a shared prefix!"))
        computed = backend.engine.scheduler.counters["computed_prompt_tokens"]
        assert (first.usage.prompt_tokens, first.usage.cached_tokens) == (computed, 0), "once, for this call"
        again = await final_of(backend, request("b", "a shared prefix?"))
        assert again.usage.cached_tokens >= 14

    run(backend, scenario)


def test_a_fork_computes_its_prefix_once() -> None:
    backend = LocalBackend()

    async def scenario() -> None:
        prefix = "the same long beginning. " * 4
        requests = [request(str(index), prefix + letter) for index, letter in enumerate("bcdfghjk")]
        await asyncio.gather(*(final_of(backend, each) for each in requests))
        scheduler = backend.engine.scheduler
        unique = scheduler.kv.cache.total_tokens - 8 * (GREEDY.max_tokens - 1)
        assert scheduler.counters["computed_prompt_tokens"] == unique

    run(backend, scenario)


def test_select_scores_every_choice_from_one_prompt() -> None:
    backend = LocalBackend()

    async def scenario() -> None:
        scored = await backend.score(ScoreRequest("s", (Text("is it "),), ("yes", "no"), unconditional=True))
        assert [len(choice.logprobs) for choice in scored.choices] == [
            len(choice.token_ids) for choice in scored.choices
        ]
        assert [len(choice.unconditional) for choice in scored.choices] == [2, 2]  # "es" is one token
        assert all(logprob < 0 for choice in scored.choices for logprob in choice.logprobs)

    run(backend, scenario)


def test_flush_cache_forgets_and_info_counts() -> None:
    backend = LocalBackend()

    async def scenario() -> None:
        assert (await final_of(backend, request("a"))).usage.cached_tokens == 0
        assert (await final_of(backend, request("b"))).usage.cached_tokens == 5
        await backend.control("flush_cache")
        assert (await final_of(backend, request("c"))).usage.cached_tokens == 0
        info = (await backend.control("info")).result
        assert (info["model"], info["finished"], info["gateway_finished"]) == ("oracle", 3.0, 4)

    run(backend, scenario)


def test_the_status_is_read_between_two_steps() -> None:
    backend = LocalBackend()

    async def scenario() -> None:
        assert backend.health().healthy
        events = backend.generate(request("a", sampling=SamplingParams(max_tokens=2000, ignore_eos=True), stream=True))
        await anext(events)
        status = await backend.status()
        assert (status.running, status.in_flight, status.generation, status.engine) == (1, 1, 1, "ready")
        assert status.pool.cached >= len("hello")
        assert status.pool.free + status.pool.cached <= status.pool.total  # the rest is the request's own
        await events.aclose()
        later = await backend.status()
        assert later.counters["prompt_tokens"] == status.counters["prompt_tokens"] == len("hello") + 1
        assert all(later.counters[name] >= count for name, count in status.counters.items())

    assert backend.health().state is RuntimeState.STOPPED
    run(backend, scenario)
    with pytest.raises(BackendError, match="not started"):
        asyncio.run(backend.status())


def test_a_survey_shows_the_tree_and_no_text_unless_asked() -> None:
    backend = LocalBackend()

    async def scenario() -> None:
        origins = (Origin(), Origin(salt="tenant-a"), Origin(salt="tenant-b"))
        for number, origin in enumerate(origins):
            await final_of(backend, GenRequest(str(number), (Text("the same text"),), GREEDY, origin=origin))
        backend.hint(Hint("pinned", (Text("the same text, pinned"),), pin=60.0))
        while backend.engine.scheduler.counters["pins_placed"] < 1:
            await asyncio.sleep(0)
        survey = await backend.survey()
        assert sum(node.tokens for node in survey.nodes) == survey.pool.cached
        assert survey.total_nodes == len(survey.nodes)
        assert len({node.salt for node in survey.nodes}) == len(origins)
        assert {node.pins for node in survey.nodes} == {0, 1}
        assert all(node.text == "" for node in survey.nodes)
        assert b"tenant" not in msgspec.msgpack.encode(survey)
        told = await backend.survey(most=2, text=5)
        assert len(told.nodes) == 2
        assert told.total_nodes == survey.total_nodes
        assert {len(node.text) for node in told.nodes} <= set(range(1, 6))
        assert "the same" in "".join(node.text for node in (await backend.survey(text=200)).nodes)

    run(backend, scenario)


def test_an_engine_that_ended_is_not_healthy() -> None:
    backend = LocalBackend(debug={"check_every_step": False})

    async def scenario() -> None:
        def crash() -> None:
            raise OSError("no memory")

        backend.engine.scheduler.step = crash  # type: ignore[assignment, method-assign]
        with pytest.raises(EngineError):
            await final_of(backend, request("a"))
        assert backend.health().state is RuntimeState.FAILED
        assert "no memory" in (await backend.status()).engine_cause

    run(backend, scenario)


def test_closing_the_iterator_stops_the_computation() -> None:
    backend = LocalBackend()

    async def scenario() -> None:
        events = backend.generate(request("a", sampling=SamplingParams(max_tokens=2000, ignore_eos=True), stream=True))
        await anext(events)
        await events.aclose()
        scheduler = backend.engine.scheduler
        while not scheduler.idle:
            await asyncio.sleep(0)
        assert scheduler.counters["aborted"] == 1
        assert scheduler.counters["completion_tokens"] < 10

    run(backend, scenario)


def test_a_deadline_on_the_injected_clock_ends_the_request() -> None:
    clock = VirtualClock()
    backend = LocalBackend(clock=clock)

    async def scenario() -> None:
        forever = SamplingParams(max_tokens=3000, ignore_eos=True, temperature=0.0)
        events = backend.generate(GenRequest("a", (Text("x"),), forever, True, Origin(timeout=1.0)))
        await anext(events)
        clock.advance(1.5)
        with pytest.raises(DeadlineError):
            async for _ in events:
                pass

    run(backend, scenario)


@pytest.mark.parametrize(
    "point", ["gateway.tokenize", "gateway.send", "engine.plan", "engine.forward", "engine.sample"]
)
def test_a_failing_step_fails_its_request_and_the_next_one_works(point: str) -> None:
    backend = LocalBackend(faults=FailAt(point, 1, RuntimeError("on purpose")))

    async def scenario() -> None:
        with pytest.raises(BackendError):
            await final_of(backend, request("a"))
        assert (await final_of(backend, request("b"))).completions[0].text

    run(backend, scenario)


def test_errors_of_the_request_are_typed() -> None:
    backend = LocalBackend(context_length=20)

    async def scenario() -> None:
        with pytest.raises(RequestError, match="holds 20"):
            await final_of(backend, request("a", "x" * 30))
        with pytest.raises(ParameterError, match="unknown control verb"):
            await backend.control("reboot")

    run(backend, scenario)


def test_it_serves_one_loop_after_another() -> None:
    backend = LocalBackend()
    texts = []

    async def once() -> None:
        texts.append((await final_of(backend, request("same"))).completions[0].text)

    asyncio.run(once())
    asyncio.run(once())
    assert texts[0] == texts[1]


def test_closing_ends_what_waits() -> None:
    backend = LocalBackend()

    async def scenario() -> None:
        await backend.start()
        forever = SamplingParams(max_tokens=3000, ignore_eos=True)
        events = backend.generate(request("a", sampling=forever, stream=True))
        await anext(events)
        await backend.close()
        with pytest.raises(BackendError, match="closed"):
            async for _ in events:
                pass

    asyncio.run(scenario())


def test_seeds_drawn_from_a_seeded_backend_repeat() -> None:
    def text() -> str:
        texts = []
        backend = LocalBackend(seed=11)

        async def scenario() -> None:
            texts.append(
                (await final_of(backend, request("a", sampling=SamplingParams(max_tokens=30)))).completions[0].text
            )

        run(backend, scenario)
        return texts[0]

    assert text() == text()


def test_callers_that_come_together_open_one_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """A real model is opened in a thread; here the oracle stands in for it."""
    opened: list[RuntimeOptions] = []

    def open_once(options: RuntimeOptions, **rest: Any) -> Any:  # Any: passed on as it is
        opened.append(options)
        return launch.open_engine(RuntimeOptions(model="oracle"), **rest)

    monkeypatch.setattr(in_process, "open_engine", open_once)
    monkeypatch.setattr(in_process, "open_tokenizer", lambda _: launch.open_tokenizer(RuntimeOptions(model="oracle")))

    async def many() -> list[Final]:
        backend = LocalBackend("default")
        finals = await asyncio.gather(*(final_of(backend, request(str(label))) for label in range(8)))
        await backend.close()
        return list(finals)

    assert len(asyncio.run(many())) == 8
    assert len(opened) == 1


def test_a_caller_that_comes_while_the_model_is_opened_waits_for_all_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second caller starts when the engine is there and the gateway is not."""
    half_open, others_have_come = threading.Event(), threading.Event()

    def gateway_in_time(*arguments: Any, **options: Any) -> Gateway:  # Any: passed on as it is
        half_open.set()
        assert others_have_come.wait(30)
        return Gateway(*arguments, **options)

    monkeypatch.setattr(in_process, "open_engine", lambda _, **rest: launch.open_engine(ORACLE_OPTIONS, **rest))
    monkeypatch.setattr(in_process, "open_tokenizer", lambda _: launch.open_tokenizer(ORACLE_OPTIONS))
    monkeypatch.setattr(in_process, "Gateway", gateway_in_time)

    async def two() -> list[Final]:
        backend = LocalBackend("default")
        first = asyncio.create_task(final_of(backend, request("1")))
        await asyncio.to_thread(half_open.wait, 30)
        second = asyncio.create_task(final_of(backend, request("2")))
        await asyncio.sleep(0)  # it has asked whether the backend is there
        others_have_come.set()
        finals = [await first, await second]
        await backend.close()
        return finals

    assert len(asyncio.run(two())) == 2


def test_what_was_tokenized_before_gives_the_same_answers_for_less_work() -> None:
    head = "The umbel sings of many cities, and of the sea. " * 40

    def told(*, incremental: bool) -> tuple[list[str], dict[str, Any]]:  # Any: facts
        backend = LocalBackend(incremental_tokenization=incremental)
        texts: list[str] = []
        facts: dict[str, Any] = {}

        async def scenario() -> None:
            prompt: tuple[Text | Generated, ...] = (Text(head),)
            for number in range(6):
                final = await final_of(backend, GenRequest(f"g{number}", prompt, GREEDY))
                (completion,) = final.completions
                texts.append(completion.text)
                prompt = (*prompt, Generated(completion.text, completion.token_ids), Text(f"\nTurn {number}: go on."))
            scored = await backend.score(ScoreRequest("s", prompt, (" yes", " no", " the end")))
            texts.append(str([choice.logprobs for choice in scored.choices]))
            facts.update((await backend.control("info")).result)

        run(backend, scenario)
        return texts, facts

    again, saved = told(incremental=True)
    anew, whole = told(incremental=False)
    assert again == anew
    assert whole["gateway_reused_characters"] == 0
    assert saved["gateway_tokenized_characters"] < whole["gateway_tokenized_characters"] / 4
