"""What every backend has to do, as functions that take one. Run by the tests of each backend:

    @pytest.mark.parametrize("case", conformance.CASES, ids=conformance.name_of)
    def test_conforms(case): conformance.check(case, make_backend)

A case is a coroutine function over a started backend. It skips what the backend's capabilities do not offer.
The cases say nothing about the text that is generated, so they hold for a model as for a script; greedy
generation is assumed to repeat itself.
"""

import asyncio
import math
import re
from collections.abc import Awaitable, Callable

import msgspec
import pytest
from umbel.interpreter import loop
from umbel.lang.caching import CacheMark, Caching
from umbel.lang.errors import CapabilityError, ConstraintError, UmbelError
from umbel.lang.prompt import Generated, Text
from umbel.lang.protocol import (
    Backend,
    CacheKeeping,
    Chunk,
    ConstraintSpec,
    CreateCache,
    DeleteCache,
    Done,
    ExtendCache,
    Final,
    FinishReason,
    GenRequest,
    Hint,
    Origin,
    Pinning,
    ReadCaches,
    Scored,
    ScoreRequest,
)
from umbel.lang.sampling import SamplingParams
from umbel.lang.status import EngineState, Observable

Case = Callable[[Backend], Awaitable[None]]

PATIENCE = 120.0  # seconds for one case; a model on a busy machine needs some
PROMPT = (Text("Once upon a time there was a fox who lived near the river and"),)
GREEDY = SamplingParams(max_tokens=8, temperature=0.0)

_ids = iter(range(1, 1_000_000))


def check(case: Case, make: Callable[[], Backend]) -> None:
    """Run one case on a fresh backend, on the loop on which the interpreter calls it."""

    async def run() -> None:
        backend = make()
        try:
            await backend.start()
            await case(backend)
        finally:
            await backend.close()

    loop.streams.run(run(), PATIENCE)


def name_of(case: Case) -> str:
    return getattr(case, "__name__", repr(case))


def request(
    prompt: tuple[Text | Generated, ...] = PROMPT,
    sampling: SamplingParams = GREEDY,
    *,
    stream: bool = False,
    origin: Origin | None = None,
) -> GenRequest:
    return GenRequest(f"case-{next(_ids)}", prompt, sampling, stream, origin or Origin(program_id="conformance"))


def endless(backend: Backend, max_tokens: int) -> SamplingParams:
    """Greedy generation past the end of the text, where the backend can."""
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=backend.capabilities.token_ids)


async def generate(backend: Backend, asked: GenRequest) -> tuple[list[Chunk], Final]:
    """Chunks and the one Final, which comes last."""
    chunks: list[Chunk] = []
    final: Final | None = None
    async for event in backend.generate(asked):
        assert final is None, "nothing comes after the end"
        assert event.id == asked.id
        if isinstance(event, Final):
            final = event
        else:
            chunks.append(event)
    assert final is not None, "a request ends with Final or raises"
    return chunks, final


# ------------------------------------------------------------------------------------------------ cases


async def start_can_be_repeated(backend: Backend) -> None:
    await asyncio.gather(backend.start(), backend.start())
    assert backend.capabilities.name


async def a_request_ends_with_one_final(backend: Backend) -> None:
    chunks, final = await generate(backend, request())
    assert chunks == []
    (completion,) = final.completions
    assert final.usage.calls == 1
    assert final.usage.prompt_tokens > 0
    assert 0 <= final.usage.completion_tokens <= 8
    if backend.capabilities.token_ids:
        assert final.usage.completion_tokens == len(completion.token_ids)
    assert completion.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
    assert 0 <= completion.kept <= len(completion.token_ids)
    assert completion.text.endswith(completion.tail)


async def chunks_add_up_to_the_text(backend: Backend) -> None:
    n = min(2, backend.capabilities.most_n)
    sampling = SamplingParams(max_tokens=12, temperature=0.0, n=n)
    chunks, final = await generate(backend, request(sampling=sampling, stream=True))
    assert len(final.completions) == n
    for index, completion in enumerate(final.completions):
        assert "".join(chunk.text for chunk in chunks if chunk.index == index) == completion.text
        assert "\ufffd" not in completion.text[:-1]


async def greedy_repeats_itself(backend: Backend) -> None:
    _, first = await generate(backend, request())
    _, second = await generate(backend, request())
    assert first.completions == second.completions


async def max_tokens_zero_generates_nothing(backend: Backend) -> None:
    _, final = await generate(backend, request(sampling=SamplingParams(max_tokens=0)))
    assert final.completions[0].text == ""
    assert final.usage.completion_tokens == 0
    assert final.usage.prompt_tokens > 0 or final.usage.calls == 0


async def max_tokens_is_a_limit(backend: Backend) -> None:
    _, final = await generate(backend, request(sampling=endless(backend, 3)))
    assert final.usage.completion_tokens <= 3
    if backend.capabilities.token_ids:
        assert len(final.completions[0].token_ids) == 3
        assert final.completions[0].finish_reason is FinishReason.LENGTH


async def a_stop_string_is_not_part_of_the_text(backend: Backend) -> None:
    _, whole = await generate(backend, request())
    text = whole.completions[0].text
    stop = next((text[i : i + 2] for i in range(2, len(text) - 2)), None)
    if stop is None:
        return  # too short a text to stop inside
    sampling = SamplingParams(max_tokens=8, temperature=0.0, stop=(stop,))
    chunks, stopped = await generate(backend, request(sampling=sampling, stream=True))
    completion = stopped.completions[0]
    assert completion.text == text[: text.index(stop)]
    assert completion.matched_stop == stop or (backend.capabilities.model and completion.matched_stop is None)
    assert "".join(chunk.text for chunk in chunks) == completion.text


async def n_gives_so_many_continuations(backend: Backend) -> None:
    n = min(3, backend.capabilities.most_n)
    _, final = await generate(backend, request(sampling=SamplingParams(max_tokens=4, n=n)))
    assert len(final.completions) == n
    if n < 3:
        with pytest.raises(CapabilityError, match="one continuation"):
            await generate(backend, request(sampling=SamplingParams(max_tokens=4, n=3)))


async def a_seed_repeats_itself(backend: Backend) -> None:
    sampling = SamplingParams(max_tokens=8, temperature=1.0, seed=7)
    try:
        _, first = await generate(backend, request(sampling=sampling))
    except CapabilityError as refused:
        if "seed" not in str(refused):
            raise
        pytest.skip("the backend takes no seed")
    _, second = await generate(backend, request(sampling=sampling))
    assert first.completions[0].text == second.completions[0].text


async def an_early_close_aborts(backend: Backend) -> None:
    asked = request(sampling=endless(backend, 200), stream=True)
    events = backend.generate(asked)
    await anext(events)
    await events.aclose()  # type: ignore[attr-defined]  # an async generator, as its protocol says by words
    _, final = await generate(backend, request())  # the backend serves on
    assert final.completions


async def a_cancelled_request_leaves_the_backend_well(backend: Backend) -> None:
    long = request(sampling=endless(backend, 200))
    task = asyncio.create_task(generate(backend, long))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    _, final = await generate(backend, request())
    assert final.completions


async def many_at_once_do_not_mix(backend: Backend) -> None:
    prompts = [(Text(f"Number {number}: "),) for number in range(8)]
    alone = [(await generate(backend, request(prompt)))[1].completions[0].text for prompt in prompts[:2]]
    together = await asyncio.gather(*(generate(backend, request(prompt)) for prompt in prompts))
    assert len(together) == 8
    assert len({final.id for _, final in together}) == 8
    assert [final.completions[0].text for _, final in together[:2]] == alone


async def generated_tokens_can_be_sent_back(backend: Backend) -> None:
    if not backend.capabilities.token_ids:
        return
    _, final = await generate(backend, request())
    completion = final.completions[0]
    if not completion.kept:
        return
    text = completion.text[: len(completion.text) - len(completion.tail)]
    prompt = (*PROMPT, Generated(text, completion.token_ids[: completion.kept]), Text(" And"))
    _, following = await generate(backend, request(prompt))
    assert following.usage.prompt_tokens > final.usage.prompt_tokens
    assert following.usage.cached_tokens <= following.usage.prompt_tokens


async def usage_counts_what_was_cached(backend: Backend) -> None:
    """0 is 0. A backend without a prefix cache says 0 twice; one with it says all but the last token, and a provider
    what it likes."""
    _, first = await generate(backend, request((Text("A prefix that nobody has sent before: 8312 "),)))
    _, second = await generate(backend, request((Text("A prefix that nobody has sent before: 8312 "),)))
    assert first.usage.prompt_tokens == second.usage.prompt_tokens
    assert first.usage.cached_tokens < first.usage.prompt_tokens
    assert second.usage.cached_tokens in (0, second.usage.prompt_tokens - 1) or backend.capabilities.model
    assert second.usage.cached_tokens + second.usage.cache_write_tokens <= second.usage.prompt_tokens


async def marks_keep_what_lies_before_them(backend: Backend) -> None:
    """The same text with marks and without; what one request has created, the next one reads, by marks or by name."""
    if not backend.capabilities.caching:
        return
    salt = Origin(salt=f"marked-{next(_ids)}")
    prompt = (*PROMPT, Text(" once more, said the river."))
    caching = Caching((CacheMark(1),), minimum=4)
    plain, first, second = [
        (await generate(backend, msgspec.structs.replace(request(prompt), origin=salt, caching=each)))[1]
        for each in (None, caching, caching)
    ]
    assert plain.caching is None
    assert first.completions[0].text == second.completions[0].text == plain.completions[0].text
    assert first.caching is not None
    assert second.caching is not None
    created = first.caching.created
    assert created > 4
    assert (first.caching.read, first.usage.cache_write_tokens) == (0, created)
    assert (second.caching.read, second.caching.created, second.usage.cache_write_tokens) == (created, 0, 0)
    assert (first.usage.cache_read_tokens, second.usage.cache_read_tokens) == (0, created)
    if backend.capabilities.score:
        score = ScoreRequest("score", prompt, (" yes", " no"), origin=salt, caching=caching)
        other = msgspec.structs.replace(score, origin=Origin(salt=f"marked-{next(_ids)}"))
        for scored, figures in ((await backend.score(score), (created, 0)), (await backend.score(other), (0, created))):
            assert scored.caching is not None
            assert (scored.caching.read, scored.caching.created) == figures
            assert (scored.usage.cache_read_tokens, scored.usage.cache_write_tokens) == figures
    if not isinstance(backend, CacheKeeping):
        return
    made = await backend.caches(CreateCache("make", "a fox", prompt, 60.0, 4, b"kept", salt))
    assert made.caching is not None
    assert (made.caching.read, made.usage.cache_write_tokens) == (created, made.caching.created)
    (extended,) = (await backend.caches(ExtendCache("extend", "a fox", 3600.0, salt))).caches
    (found,) = (await backend.caches(ReadCaches("read", "a fox", salt))).caches
    assert (found.ttl, found.record, found.tokens) == (3600.0, b"kept", extended.tokens)
    assert (await backend.caches(ReadCaches("theirs", origin=Origin(salt="another")))).caches == ()
    assert len((await backend.caches(DeleteCache("delete", "a fox", salt))).caches) == 1
    assert (await backend.caches(ReadCaches("all", origin=salt))).caches == ()


async def log_probabilities_belong_to_the_tokens(backend: Backend) -> None:
    if not backend.capabilities.logprobs:
        return
    ours = backend.capabilities.token_ids  # providers tell no ids, and nothing about prompts
    sampling = SamplingParams(
        max_tokens=5, temperature=0.0, logprobs=True, top_logprobs=2, prompt_logprobs_from=0 if ours else None
    )
    _, final = await generate(backend, request(sampling=sampling))
    completion = final.completions[0]
    if ours:
        assert [token.token_id for token in completion.logprobs] == list(completion.token_ids)
        assert final.prompt_logprobs
    else:
        assert "".join(token.text for token in completion.logprobs) == completion.text
    for token in completion.logprobs:
        assert token.logprob <= 1e-6
        assert len(token.top) == 2
        assert token.top[0][2] >= token.top[1][2]
        if token.data:  # hosted backends say none
            assert token.data.decode("utf-8", "replace") == token.text
            assert [data.decode("utf-8", "replace") for data in token.top_data] == [text for _, text, _ in token.top]
        assert token.logprob <= token.top[0][2] + 1e-6


async def choices_are_scored_in_order(backend: Backend) -> None:
    if not backend.capabilities.score:
        return
    choices = (" yes", " no", " perhaps not")
    asked = ScoreRequest(f"case-{next(_ids)}", PROMPT, choices, unconditional=True)
    try:
        scored = await backend.score(asked)
    except CapabilityError as refused:
        if "scores without the prompt" not in str(refused):
            raise
        scored = await backend.score(msgspec.structs.replace(asked, unconditional=False))
    assert isinstance(scored, Scored)
    assert len(scored.choices) == len(choices)
    for choice in scored.choices:
        assert len(choice.token_ids) == len(choice.logprobs) > 0
        assert len(choice.unconditional) in (0, len(choice.logprobs))
        assert all(value <= 1e-6 for value in (*choice.logprobs, *choice.unconditional))
    again = await backend.score(ScoreRequest(f"case-{next(_ids)}", PROMPT, choices[::-1]))
    assert [choice.token_ids for choice in again.choices] == [choice.token_ids for choice in scored.choices[::-1]]
    assert all(choice.unconditional == () for choice in again.choices)


async def probabilities_of_choices_lie_within_bounds(backend: Backend) -> None:
    if not backend.capabilities.probability:
        return
    choices = (" yes", " no")
    exact = await backend.score(ScoreRequest(f"case-{next(_ids)}", PROMPT, choices, probability="exact"))
    overshoot = await backend.score(ScoreRequest(f"case-{next(_ids)}", PROMPT, choices, probability="overshoot"))
    for bounded, found in zip(exact.choices, overshoot.choices, strict=True):
        assert bounded.lower is not None
        assert bounded.upper is not None
        assert found.lower is not None
        assert bounded.lower <= bounded.upper <= 0.0
        assert found.lower <= bounded.upper + 0.1  # under a condition, both are shares of something
        assert found.upper is None
        assert len(bounded.token_ids) == len(bounded.logprobs) > 0
    assert sum(math.exp(choice.lower or 0.0) for choice in exact.choices) <= 1 + 1e-6


async def a_hint_returns_at_once_and_changes_no_text(backend: Backend) -> None:
    if not backend.capabilities.hint:
        return
    _, before = await generate(backend, request())
    backend.hint(Hint(f"case-{next(_ids)}", PROMPT, Origin(fork_group="g")))
    _, after = await generate(backend, request())
    assert before.completions == after.completions


async def a_pin_changes_no_text_and_is_released(backend: Backend) -> None:
    if not backend.capabilities.pins:
        return
    assert isinstance(backend, Pinning)
    _, before = await generate(backend, request())
    pinned = f"case-{next(_ids)}"
    backend.hint(Hint(pinned, PROMPT, pin=60.0))
    _, during = await generate(backend, request())
    backend.release(pinned)
    backend.release(pinned)  # and a pin that is not there
    _, after = await generate(backend, request())
    assert before.completions == during.completions == after.completions


async def a_state_can_be_read_while_requests_run(backend: Backend) -> None:
    if not isinstance(backend, Observable):
        return
    assert backend.health().healthy
    before = await backend.status()
    answers = asyncio.gather(*(generate(backend, request()) for _ in range(3)))
    during = await backend.status()
    await answers
    after = await backend.status()
    assert (during.engine, during.generation) == (EngineState.READY, before.generation)
    assert during.in_flight <= 3
    for earlier, later in ((before, during), (during, after)):
        assert all(later.counters[name] >= count for name, count in earlier.counters.items())
    survey = await backend.survey(most=5_000)
    assert survey.total_nodes == len(survey.nodes)
    assert sum(node.tokens for node in survey.nodes) == survey.pool.cached <= survey.pool.total
    with pytest.raises(UmbelError, match="write 1 to 5000"):
        await backend.survey(most=0)


async def the_times_of_an_answer_are_in_order(backend: Backend) -> None:
    _, final = await generate(backend, request())
    if final.times is None:
        return
    assert final.times.first_token is not None
    assert final.times.last_token is not None
    assert 0 <= final.times.queued <= final.times.first_token <= final.times.last_token


async def controls_are_answered_or_refused(backend: Backend) -> None:
    info = await backend.control("info")
    assert isinstance(info.result, dict)
    try:
        assert isinstance(await backend.control("flush_cache"), Done)
    except CapabilityError:
        if not backend.capabilities.model:
            raise  # a provider's cache is not ours to empty, but our own is
    else:
        _, final = await generate(backend, request())
        assert final.usage.cached_tokens == 0
    with pytest.raises(UmbelError, match="no such verb"):
        await backend.control("no such verb")


async def the_chat_template_opens_and_closes_turns(backend: Backend) -> None:
    parts = backend.chat_template.open((), "user")
    assert all(isinstance(part, Text) for part in parts)


async def a_constraint_holds_or_is_refused(backend: Backend) -> None:
    if "regex" not in backend.capabilities.constraints:
        pytest.skip("the backend enforces no regular expressions")
    constraint = ConstraintSpec("regex", r"[^\n]*")
    asked = msgspec.structs.replace(request(stream=True), constraint=constraint)
    chunks, final = await generate(backend, asked)
    (completion,) = final.completions
    assert re.fullmatch(constraint.source, completion.text)
    assert "".join(chunk.text for chunk in chunks) == completion.text
    if completion.finish_reason is FinishReason.STOP:
        assert completion.guarantee == "enforced"
    if backend.capabilities.token_ids:  # a provider has words of its own for it
        with pytest.raises(ConstraintError, match="position"):
            await generate(backend, msgspec.structs.replace(request(), constraint=ConstraintSpec("regex", "(a")))
    _, after = await generate(backend, request())
    assert after.completions[0].guarantee == ""


async def a_text_ends_before_a_match_of_a_stop_regex(backend: Backend) -> None:
    if not backend.capabilities.stop_regex:
        pytest.skip("the backend has no stop_regex")
    chunks, final = await generate(
        backend, request(sampling=SamplingParams(max_tokens=32, temperature=0.0, stop_regex=(r"\w",)), stream=True)
    )
    (completion,) = final.completions
    assert re.search(r"\w", completion.text) is None
    assert "".join(chunk.text for chunk in chunks) == completion.text


CASES: tuple[Case, ...] = (
    start_can_be_repeated,
    a_request_ends_with_one_final,
    chunks_add_up_to_the_text,
    greedy_repeats_itself,
    max_tokens_zero_generates_nothing,
    max_tokens_is_a_limit,
    a_stop_string_is_not_part_of_the_text,
    n_gives_so_many_continuations,
    a_seed_repeats_itself,
    an_early_close_aborts,
    a_cancelled_request_leaves_the_backend_well,
    many_at_once_do_not_mix,
    generated_tokens_can_be_sent_back,
    usage_counts_what_was_cached,
    marks_keep_what_lies_before_them,
    log_probabilities_belong_to_the_tokens,
    choices_are_scored_in_order,
    probabilities_of_choices_lie_within_bounds,
    a_hint_returns_at_once_and_changes_no_text,
    a_pin_changes_no_text_and_is_released,
    a_state_can_be_read_while_requests_run,
    the_times_of_an_answer_are_in_order,
    controls_are_answered_or_refused,
    the_chat_template_opens_and_closes_turns,
    a_constraint_holds_or_is_refused,
    a_text_ends_before_a_match_of_a_stop_regex,
)
