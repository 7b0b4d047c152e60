"""OpenAI's own client against a server process: what it reads of answers, streams and errors.

The client builds its objects without checking them; with `_strict_response_validation` it checks every field. Its types
of text completions leave out what OpenAI itself sends (null as the first log-probability of an echo and as the reason
of an end that has not come), so those are read without.
"""

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import openai
import pytest
from jsonschema import Draft202012Validator
from openai.types import Completion
from pydantic import BaseModel
from umbel.interpreter.backends.runtime import Runtime

from ..serving import PATIENCE, until
from .conftest import MOST_IN_FLIGHT
from .serving import ADMIN_KEY, KEY, Serving

pytestmark = pytest.mark.processes
PROMPT = {"model": "oracle", "prompt": "hello world", "max_tokens": 6, "temperature": 0}
CHAT = {"model": "oracle", "messages": [{"role": "user", "content": "hello"}], "temperature": 0}
INPUT = {"model": "oracle", "input": "hello", "temperature": 0}
SHORT = {"regex": "[a-z]{5}"}  # ends by itself: the helpers of the client raise for texts that were cut
ENDLESS = PROMPT | {"max_tokens": 4000, "extra_body": {"ignore_eos": True}}


class Choice(BaseModel):
    """A choice."""

    good: bool
    stars: int


class Remark(BaseModel):
    """A remark without an end."""

    text: str


class Weather(BaseModel):
    """Tells the weather."""

    city: bool
    days: bool


TOOL = openai.pydantic_function_tool(Weather, name="weather")
FLAT_TOOL = {"type": "function", **TOOL["function"]}


def client_of(serving: Serving, **options: Any) -> openai.OpenAI:
    return openai.OpenAI(base_url=serving.address + "/v1", api_key=KEY, max_retries=0, **options)


@pytest.fixture(scope="module")
def client(oracle_server: Serving) -> Iterator[openai.OpenAI]:
    with client_of(oracle_server) as client:
        yield client


@pytest.fixture(scope="module")
def strict(oracle_server: Serving) -> Iterator[openai.OpenAI]:
    with client_of(oracle_server, _strict_response_validation=True) as client:
        yield client


@pytest.fixture
def idle(oracle_server: Serving) -> Callable[[], None]:
    """Waits until the server and its engine have no request left."""

    def wait() -> None:
        def nothing() -> bool:
            facts = oracle_server.ask("/server_info", headers={"authorization": f"Bearer {ADMIN_KEY}"})
            return not (facts["http_in_flight"] or facts["running"] or facts["waiting"])

        until(nothing, "requests are left")

    return wait


def test_the_model_is_listed(strict: openai.OpenAI) -> None:
    (listed,) = strict.models.list()
    assert listed == strict.models.retrieve("oracle")
    assert (listed.id, listed.object, listed.owned_by) == ("oracle", "model", "umbel")


# ---------------------------------------------------------------------------------------------- embeddings


def test_embeddings(strict: openai.OpenAI, client: openai.OpenAI) -> None:
    """OpenAI's client sends encoding_format="base64" by default and decodes the answer; strict servers send numbers."""
    answer = client.embeddings.create(model="oracle", input=["hello", "you"], dimensions=4)
    plain = strict.embeddings.create(model="oracle", input=["hello", "you"], dimensions=4, encoding_format="float")
    assert (answer.object, answer.model, [each.index for each in answer.data]) == ("list", "oracle", [0, 1])
    for packed, floats in zip(answer.data, plain.data, strict=True):
        assert len(floats.embedding) == 4
        assert packed.embedding == pytest.approx(floats.embedding)
    assert answer.usage.prompt_tokens == answer.usage.total_tokens == 10
    with pytest.raises(openai.BadRequestError, match="vectors of 8 numbers"):
        strict.embeddings.create(model="oracle", input="hello", dimensions=9)


# ---------------------------------------------------------------------------------------------- completions


def test_completions(strict: openai.OpenAI) -> None:
    answer = strict.completions.create(**PROMPT, n=2)
    assert answer.id.startswith("cmpl-")
    assert (answer.object, answer.model) == ("text_completion", "oracle")
    assert [(each.index, len(each.text), each.finish_reason) for each in answer.choices] == [
        (0, 6, "length"),
        (1, 6, "length"),
    ]
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (12, 12, 24)
    assert answer.usage.prompt_tokens_details is not None
    assert isinstance(answer.usage.prompt_tokens_details.cached_tokens, int)
    assert answer.usage.completion_tokens_details is not None
    assert answer.usage.completion_tokens_details.reasoning_tokens == 0


def test_a_stream_of_completions_says_what_the_whole_answer_says(client: openai.OpenAI) -> None:
    asked = PROMPT | {"prompt": ["one", "two"], "echo": True, "logprobs": 2}
    whole = client.completions.create(**asked)
    events = list(client.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert {event.id for event in events} == {events[0].id}
    texts = ["", ""]
    tokens: list[list[str]] = [[], []]
    for event in events[:-1]:
        assert event.usage is None
        for choice in event.choices:
            texts[choice.index] += choice.text
            tokens[choice.index] += choice.logprobs.tokens if choice.logprobs and choice.logprobs.tokens else []
    assert texts == [choice.text for choice in whole.choices]
    assert tokens == [choice.logprobs.tokens for choice in whole.choices if choice.logprobs]
    assert events[-1].choices == []
    assert events[-1].usage is not None
    assert whole.usage is not None
    assert events[-1].usage.total_tokens == whole.usage.total_tokens


@pytest.mark.parametrize("max_tokens", [0, 1])
@pytest.mark.parametrize("ids", [False, True])
def test_the_request_of_a_harness_that_scores(client: openai.OpenAI, ids: bool, max_tokens: int) -> None:
    """lm-eval asks for a prompt's own log-probabilities, and takes those from a place on that it knows."""
    text, context = "hello world", 5
    prompt: Any = [list(text.encode())] if ids else text
    scoring = {"prompt": prompt, "echo": True, "logprobs": 10, "max_tokens": max_tokens, "seed": 1234}
    answer = client.completions.create(**PROMPT | scoring)
    assert _score(answer, context, max_tokens) == pytest.approx(
        _score(client.completions.create(**PROMPT | scoring | {"logprobs": 1, "prompt": text}), context, max_tokens)
    )
    (choice,) = answer.choices
    assert choice.logprobs is not None
    lists = (choice.logprobs.tokens, choice.logprobs.token_logprobs, choice.logprobs.top_logprobs)
    begun = 0 if ids else 1  # a text begins with BOS
    assert {len(each or ()) for each in lists} == {begun + len(text) + max_tokens}
    assert choice.text[: len(text)] == text


def _score(answer: Completion, context: int, max_tokens: int) -> float:
    """The sum that lm-eval makes of the tokens after a context, by their places in the text."""
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.token_logprobs is not None
    assert logprobs.text_offset is not None
    end = len(logprobs.token_logprobs) - max_tokens
    begin = next(place for place, offset in enumerate(logprobs.text_offset) if offset == context)
    return sum(logprobs.token_logprobs[begin:end])


# --------------------------------------------------------------------------------------------- conversations


def test_chat(strict: openai.OpenAI) -> None:
    answer = strict.chat.completions.create(**CHAT, max_completion_tokens=4, reasoning_effort="none")
    (choice,) = answer.choices
    assert (choice.index, choice.finish_reason, choice.logprobs) == (0, "length", None)
    assert (choice.message.role, choice.message.refusal, choice.message.tool_calls) == ("assistant", None, None)
    assert choice.message.content is not None
    assert len(choice.message.content) == 4
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 4


def test_a_stream_of_chat_says_what_the_whole_answer_says(strict: openai.OpenAI) -> None:
    asked = CHAT | {"n": 3, "logprobs": True, "top_logprobs": 2, "extra_body": SHORT}
    whole = strict.chat.completions.create(**asked)
    with strict.chat.completions.stream(**asked, stream_options={"include_usage": True}) as stream:
        kinds = [event.type for event in stream]
        streamed = stream.get_final_completion()
    assert {"chunk", "content.delta", "content.done", "logprobs.content.delta", "logprobs.content.done"} == set(kinds)
    assert [choice.message.content for choice in streamed.choices] == [each.message.content for each in whole.choices]
    assert [choice.finish_reason for choice in streamed.choices] == ["stop"] * 3
    assert [choice.logprobs for choice in streamed.choices] == [choice.logprobs for choice in whole.choices]
    for choice in whole.choices:
        assert choice.logprobs is not None
        tokens = choice.logprobs.content or []
        assert "".join(token.token for token in tokens) == choice.message.content
        assert all(bytes(token.bytes or ()).decode() == token.token for token in tokens)
        assert [len(token.top_logprobs) for token in tokens] == [2] * len(tokens)
    assert streamed.usage is not None
    assert whole.usage is not None
    assert streamed.usage.completion_tokens == whole.usage.completion_tokens


@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")  # of the client, about a class of its own
def test_an_answer_is_parsed_into_a_class(strict: openai.OpenAI) -> None:
    whole = strict.chat.completions.parse(**CHAT, response_format=Choice)
    parsed = whole.choices[0].message.parsed
    assert isinstance(parsed, Choice)
    history = [*CHAT["messages"], whole.choices[0].message, {"role": "user", "content": "why?"}]
    assert strict.chat.completions.create(**CHAT | {"messages": history}, max_tokens=4).choices
    with strict.chat.completions.stream(**CHAT, response_format=Choice) as stream:
        assert stream.get_final_completion().choices[0].message.parsed == parsed
    with pytest.raises(openai.LengthFinishReasonError):
        strict.chat.completions.parse(**CHAT, response_format=Remark, max_tokens=20)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}], ids=str)
def test_a_tool_is_called_and_answered(strict: openai.OpenAI, choice: Any) -> None:
    asked = CHAT | {"tools": [TOOL], "tool_choice": choice, "parallel_tool_calls": False}
    answer = strict.chat.completions.parse(**asked)
    assert answer.choices[0].finish_reason == "tool_calls"
    message = answer.choices[0].message
    assert message.tool_calls is not None
    (call,) = message.tool_calls
    assert (call.type, call.function.name) == ("function", "weather")
    assert isinstance(call.function.parsed_arguments, Weather)
    with strict.chat.completions.stream(**asked) as stream:
        streamed = stream.get_final_completion().choices[0].message.tool_calls
    assert streamed is not None
    assert [each.function for each in streamed] == [call.function]

    history = [*CHAT["messages"], message, {"role": "tool", "tool_call_id": call.id, "content": "sunny"}]
    after = strict.chat.completions.create(**asked | {"messages": history, "tool_choice": "none", "max_tokens": 4})
    assert (after.choices[0].finish_reason, after.choices[0].message.tool_calls) == ("length", None)


def test_no_tool_has_to_be_called(strict: openai.OpenAI) -> None:
    answer = strict.chat.completions.create(**CHAT, tools=[TOOL], tool_choice="auto", max_tokens=8)
    assert answer.choices[0].finish_reason in ("stop", "length")


# ------------------------------------------------------------------------------------------------- responses


def test_responses(strict: openai.OpenAI) -> None:
    answer = strict.responses.create(**INPUT, max_output_tokens=4, instructions="Be kind.", metadata={"a": "b"})
    assert (answer.status, answer.object, answer.error) == ("incomplete", "response", None)
    assert answer.incomplete_details is not None
    assert answer.incomplete_details.reason == "max_output_tokens"
    assert (answer.instructions, answer.metadata, answer.store) == ("Be kind.", {"a": "b"}, False)
    assert len(answer.output_text) == 4
    assert answer.usage is not None
    assert answer.usage.output_tokens == 4
    assert answer.usage.total_tokens == answer.usage.input_tokens + 4


def test_the_events_of_a_response_make_the_whole_answer(strict: openai.OpenAI) -> None:
    asked = INPUT | {"text_format": Choice, "include": ["message.output_text.logprobs"], "top_logprobs": 1}
    whole = strict.responses.parse(**asked)
    assert isinstance(whole.output_parsed, Choice)
    again = [{"role": "user", "content": "hello"}, *whole.output, {"role": "user", "content": "why?"}]
    assert strict.responses.create(**INPUT | {"input": again}, max_output_tokens=4).status == "incomplete"
    with strict.responses.stream(**asked) as stream:
        events = list(stream)
        streamed = stream.get_final_response()
    assert events[0].type == "response.created"
    assert [event.sequence_number for event in events] == list(range(len(events)))
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == streamed.output_text == whole.output_text
    assert streamed.output_parsed == whole.output_parsed
    assert _logprobs(streamed) == _logprobs(whole)
    assert "".join(entry["token"] for entry in _logprobs(whole)) == text


def _logprobs(answer: Any) -> list[dict[str, Any]]:
    return [entry.model_dump() for entry in answer.output[0].content[0].logprobs]


def test_a_response_calls_a_tool(strict: openai.OpenAI) -> None:
    asked = INPUT | {"tools": [FLAT_TOOL], "tool_choice": "required", "parallel_tool_calls": False}
    (call,) = strict.responses.parse(**asked).output
    assert call.type == "function_call"
    with strict.responses.stream(**asked) as stream:
        (streamed,) = stream.get_final_response().output
    assert streamed.type == "function_call"
    assert (streamed.name, streamed.arguments, streamed.status) == ("weather", call.arguments, "completed")
    assert set(json.loads(call.arguments)) == {"city", "days"}

    result = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    answer = strict.responses.create(**INPUT | {"input": [call, result]}, max_output_tokens=4)
    (message,) = answer.output
    assert message.type == "message"
    again = [{"role": "user", "content": "hello"}, call, result, message]
    assert strict.responses.create(**INPUT | {"input": again}, max_output_tokens=4).status == "incomplete"


def test_a_response_that_is_cut_says_so_at_its_end(strict: openai.OpenAI) -> None:
    with strict.responses.stream(**INPUT, max_output_tokens=4) as stream:
        last = list(stream)[-1]
    assert last.type == "response.incomplete"
    assert last.response.usage is not None
    assert last.response.usage.output_tokens == 4


# ---------------------------------------------------------------------------------- errors, retries, hanging up


@pytest.mark.parametrize(
    ("fields", "kind", "code", "param"),
    [
        ({"model": "other"}, openai.NotFoundError, "model_not_found", "model"),
        ({"max_tokens": -1}, openai.BadRequestError, "invalid_value", "max_tokens"),
        ({"suffix": "x"}, openai.BadRequestError, "unsupported_parameter", "suffix"),
        ({"extra_body": {"other": 1}}, openai.BadRequestError, "unknown_parameter", "other"),
        ({"extra_body": {"umbel": {"timeout": "soon"}}}, openai.BadRequestError, "invalid_value", "umbel.timeout"),
        ({"prompt": "x" * 5000}, openai.BadRequestError, "context_length_exceeded", "prompt"),
        ({"extra_headers": {"Authorization": "Bearer x"}}, openai.AuthenticationError, "invalid_api_key", None),
        ({"extra_headers": {"Host": "example.com"}}, openai.PermissionDeniedError, "forbidden_host", None),
        ({"prompt": ["x"] * (MOST_IN_FLIGHT + 1)}, openai.BadRequestError, "too_many", None),
    ],
    ids=str,
)
def test_errors(
    client: openai.OpenAI, fields: dict[str, Any], kind: type[openai.APIStatusError], code: str, param: str | None
) -> None:
    for stream in (False, True):
        with pytest.raises(kind) as raised:
            client.completions.create(**PROMPT | fields, stream=stream)
        assert (raised.value.code, raised.value.param) == (code, param)
        assert raised.value.type == "invalid_request_error"
        assert raised.value.request_id
        assert raised.value.message


def test_a_route_that_is_none(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="no route '/v1/moderations'"):
        client.moderations.create(model="oracle", input="x")


def test_a_full_server_is_asked_again(
    client: openai.OpenAI, idle: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client obeys Retry-After; here it hangs up in that time, which makes room."""
    waits: list[float] = []
    stream = client.completions.create(**ENDLESS, n=MOST_IN_FLIGHT, stream=True)
    sleep = time.sleep

    def make_room(seconds: float) -> None:
        monkeypatch.setattr(time, "sleep", sleep)
        waits.append(seconds)
        stream.close()
        idle()

    monkeypatch.setattr(time, "sleep", make_room)
    raw = client.with_options(max_retries=2).completions.with_raw_response.create(**PROMPT)
    assert (raw.retries_taken, waits) == (1, [1.0])
    assert raw.parse().choices[0].text


def test_a_deadline_that_passed_is_not_asked_again(client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "sleep", lambda seconds: pytest.fail(f"asks again after {seconds} s"))
    late = ENDLESS | {"extra_body": {"ignore_eos": True, "umbel": {"timeout": 0.05}}}
    with pytest.raises(openai.InternalServerError, match="deadline") as raised:
        client.with_options(max_retries=2).completions.create(**late)
    assert (raised.value.status_code, raised.value.code) == (504, "timeout")


def test_a_deadline_that_passes_in_a_stream_is_an_error_of_it(client: openai.OpenAI) -> None:
    stream = client.completions.create(
        **ENDLESS | {"extra_body": {"ignore_eos": True, "umbel": {"timeout": 0.5}}}, stream=True
    )
    with pytest.raises(openai.APIError, match="deadline") as raised:
        list(stream)
    assert raised.value.code == "timeout"


def test_a_client_that_waits_no_longer_frees_the_engine(client: openai.OpenAI, idle: Callable[[], None]) -> None:
    with pytest.raises(openai.APITimeoutError):
        client.completions.create(**ENDLESS, timeout=0.1)
    idle()


def test_a_stream_that_is_closed_frees_the_engine(client: openai.OpenAI, idle: Callable[[], None]) -> None:
    with client.completions.create(**ENDLESS, n=2, stream=True) as stream:
        next(iter(stream))
    idle()


def test_the_asynchronous_client(oracle_server: Serving, client: openai.OpenAI) -> None:
    asked = CHAT | {"extra_body": SHORT}
    expected = client.chat.completions.create(**asked).choices[0].message.content

    async def scenario() -> None:
        async with openai.AsyncOpenAI(base_url=oracle_server.address + "/v1", api_key=KEY, max_retries=0) as client:
            answers = await asyncio.gather(*(client.chat.completions.create(**asked) for _ in range(8)))
            assert {answer.choices[0].message.content for answer in answers} == {expected}
            stream = await client.chat.completions.create(**asked, stream=True)
            pieces = [event.choices[0].delta.content or "" async for event in stream]
            assert "".join(pieces) == expected

    asyncio.run(scenario())


# ------------------------------------------------------------------------------------------ the default model

CAPITALS = "Germany: Berlin. Italy: Rome. Spain: Madrid. France:"


@pytest.fixture(scope="module")
def real(model_server: Serving) -> Iterator[openai.OpenAI]:
    with client_of(model_server, timeout=PATIENCE) as client:
        yield client


@pytest.mark.model
def test_the_default_model_answers_in_all_forms(real: openai.OpenAI) -> None:
    (model,) = real.models.list()
    assert model.model_extra == real.models.retrieve(model.id).model_extra
    assert (model.model_extra or {})["max_model_len"] == 4096  # of the pool, which is smaller than the context
    text: Any = {"model": model.id, "prompt": CAPITALS, "max_tokens": 8, "temperature": 0}
    whole = real.completions.create(**text)
    assert "Paris" in whole.choices[0].text
    pieces = [event.choices[0].text for event in real.completions.create(**text, stream=True)]
    assert "".join(pieces) == whole.choices[0].text

    question: Any = [{"role": "user", "content": "What is the capital of France?"}]
    asked: Any = {"model": model.id, "messages": question, "max_tokens": 24, "temperature": 0}
    answer = real.chat.completions.create(**asked).choices[0].message.content
    events = real.chat.completions.create(**asked, stream=True)
    assert "".join(event.choices[0].delta.content or "" for event in events) == answer
    response = real.responses.create(model=model.id, input=question, max_output_tokens=24, temperature=0)
    assert response.output_text == answer
    parsed = real.chat.completions.parse(**asked | {"max_tokens": 64}, response_format=Choice)
    assert isinstance(parsed.choices[0].message.parsed, Choice)


CITY = {"type": "string", "maxLength": 12}
FORECAST = {
    "name": "forecast",
    "description": "Tells the weather of a city.",
    "parameters": {
        "type": "object",
        "properties": {"city": CITY, "days": {"enum": [1, 2, 3]}},
        "required": ["city", "days"],
        "additionalProperties": False,
    },
}
CLOCK = {
    "name": "clock",
    "description": "Tells the time in a city.",
    "parameters": {
        "type": "object",
        "properties": {"city": CITY},
        "required": ["city"],
        "additionalProperties": False,
    },
}
ESSAY = {
    "name": "essay",
    "parameters": {"type": "object", "properties": {"text": {"type": "string", "minLength": 500}}},
}
ESSAY["parameters"]["required"] = ["text"]  # more than 40 tokens of any language
TOOLS: Any = [{"type": "function", "function": each} for each in (FORECAST, CLOCK)]
FORCED: Any = {"type": "function", "function": {"name": "forecast"}}
ASKED: Any = {"messages": [{"role": "user", "content": "What is the weather in Paris?"}], "temperature": 0}


def fits(call: Any) -> bool:
    """Whether the arguments of a call follow the schema of its tool."""
    schema = next(each for each in (FORECAST, CLOCK) if each["name"] == call.name)["parameters"]
    return Draft202012Validator(schema).is_valid(json.loads(call.arguments))


@pytest.mark.model
def test_the_default_model_calls_a_tool_and_reads_its_result(real: openai.OpenAI) -> None:
    (model,) = real.models.list()
    asked = ASKED | {"model": model.id, "tools": TOOLS, "tool_choice": FORCED, "max_tokens": 80}
    whole = real.chat.completions.create(**asked)
    (choice,) = whole.choices
    assert choice.message.tool_calls is not None
    (call,) = choice.message.tool_calls
    assert (choice.finish_reason, choice.message.content, call.function.name) == ("tool_calls", None, "forecast")
    assert fits(call.function)

    result = {"role": "tool", "tool_call_id": call.id, "content": "Rain."}
    history = [*ASKED["messages"], choice.message, result]
    after = real.chat.completions.create(**asked | {"messages": history, "tool_choice": "none", "max_tokens": 4})
    assert after.choices[0].message.content
    assert after.choices[0].message.tool_calls is None
    assert after.usage is not None
    assert whole.usage is not None
    assert after.usage.prompt_tokens > whole.usage.prompt_tokens
    # The prompt of the second turn goes on where that of the first one ended.
    assert after.usage.prompt_tokens_details is not None
    assert (after.usage.prompt_tokens_details.cached_tokens or 0) >= whole.usage.prompt_tokens - 8


@pytest.mark.model
def test_arguments_of_the_default_model_come_in_pieces_of_the_whole(real: openai.OpenAI) -> None:
    (model,) = real.models.list()
    text = {"type": "string", "minLength": 250, "maxLength": 260}
    note = {"name": "note", "parameters": {"type": "object", "properties": {"text": text}, "required": ["text"]}}
    tools, forced = [{"type": "function", "function": note}], {"type": "function", "function": {"name": "note"}}
    asked = ASKED | {"model": model.id, "tools": tools, "tool_choice": forced, "max_tokens": 600}
    deltas = [event.choices[0] for event in real.chat.completions.create(**asked, stream=True)]
    whole = real.chat.completions.create(**asked).choices[0].message.tool_calls
    assert whole is not None
    calls = [call for delta in deltas for call in delta.delta.tool_calls or ()]
    assert calls[0].id
    assert calls[0].function is not None
    assert calls[0].function.name == "note"
    pieces = [call.function.arguments or "" for call in calls if call.function]
    assert "".join(pieces) == whole[0].function.arguments
    assert len([piece for piece in pieces if piece]) > 1, "more tokens than a step verifies"
    assert [delta.finish_reason for delta in deltas if delta.finish_reason] == ["tool_calls"]


@pytest.mark.model
def test_the_default_model_may_call_no_tool(real: openai.OpenAI) -> None:
    (model,) = real.models.list()
    choice = real.chat.completions.create(**ASKED, model=model.id, tools=TOOLS, max_tokens=12).choices[0]
    if calls := choice.message.tool_calls:
        assert choice.finish_reason in ("tool_calls", "length")
        assert all(call.function.name in ("forecast", "clock") for call in calls)
    else:
        assert choice.finish_reason in ("stop", "length")
        assert choice.message.content


@pytest.mark.model
def test_the_default_model_calls_tools_in_parallel_until_it_is_cut(real: openai.OpenAI) -> None:
    """Told to go on, it has room for at least two calls. The one for which there is no room does not begin."""
    (model,) = real.models.list()
    asked = ASKED | {"model": model.id, "tools": TOOLS, "tool_choice": "required", "max_tokens": 110}
    asked["extra_body"] = {"ignore_eos": True}
    (choice,) = real.chat.completions.create(**asked).choices
    calls = choice.message.tool_calls
    assert calls is not None
    assert len(calls) >= 2
    assert len({call.id for call in calls}) == len(calls)
    assert all(fits(call.function) for call in calls)
    assert choice.finish_reason == "length"
    with real.chat.completions.stream(**asked) as stream, pytest.raises(openai.LengthFinishReasonError) as cut:
        stream.get_final_completion()
    (streamed,) = cut.value.completion.choices
    assert streamed.finish_reason == "length"
    assert [(call.function.name, call.function.arguments) for call in streamed.message.tool_calls or ()] == [
        (call.function.name, call.function.arguments) for call in calls
    ]

    one = real.chat.completions.create(**asked | {"parallel_tool_calls": False, "extra_body": {}}).choices[0]
    assert len(one.message.tool_calls or ()) == 1
    assert one.finish_reason == "tool_calls"


@pytest.mark.model
def test_a_call_of_the_default_model_that_is_cut_says_so(real: openai.OpenAI) -> None:
    (model,) = real.models.list()
    tools: Any = [{"type": "function", "function": ESSAY}]
    asked = ASKED | {"model": model.id, "tools": tools, "tool_choice": "required", "max_tokens": 40}
    assert real.chat.completions.create(**asked).choices[0].finish_reason == "length"
    response = real.responses.create(
        model=model.id,
        input=ASKED["messages"],
        tools=[{"type": "function", "strict": True, **ESSAY}],
        tool_choice="required",
        max_output_tokens=40,
        temperature=0,
    )
    assert (response.status, response.output[0].type) == ("incomplete", "function_call")
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"


@pytest.mark.model
@pytest.mark.nightly
def test_responses_of_the_default_model_call_a_tool_and_follow_a_class(real: openai.OpenAI) -> None:
    (model,) = real.models.list()
    asked: Any = {"model": model.id, "input": ASKED["messages"], "temperature": 0, "max_output_tokens": 80}
    tool: Any = {"type": "function", "strict": True, **FORECAST}
    forced = asked | {"tools": [tool], "tool_choice": {"type": "function", "name": "forecast"}}
    whole = real.responses.create(**forced)
    (call,) = whole.output
    assert (whole.status, call.type) == ("completed", "function_call")
    assert fits(call)
    with real.responses.stream(**forced) as stream:
        pieces = [event.delta for event in stream if event.type == "response.function_call_arguments.delta"]
    assert "".join(pieces) == call.arguments

    result = {"type": "function_call_output", "call_id": call.call_id, "output": "Rain."}
    after = real.responses.create(**asked | {"input": [*asked["input"], call, result], "max_output_tokens": 4})
    assert after.output[0].type == "message"
    parsed = real.responses.parse(**asked, text_format=Choice)
    assert isinstance(parsed.output_parsed, Choice)
    with real.responses.stream(**asked, text_format=Choice) as stream:
        assert stream.get_final_response().output_parsed == parsed.output_parsed


@pytest.mark.model
def test_log_probabilities_of_the_default_model_are_of_its_text(real: openai.OpenAI) -> None:
    (model,) = real.models.list()
    text: Any = {"model": model.id, "prompt": CAPITALS, "max_tokens": 6, "temperature": 0, "logprobs": 2}
    whole = real.completions.create(**text).choices[0]
    pieces = [event.choices[0].logprobs for event in real.completions.create(**text, stream=True)]
    assert whole.logprobs is not None
    tokens = whole.logprobs.tokens or []
    assert "".join(tokens) == whole.text
    assert [token for piece in pieces if piece for token in piece.tokens or ()] == tokens
    assert all(value is not None and value <= 0 for value in whole.logprobs.token_logprobs or ())

    chat = real.chat.completions.create(**ASKED, model=model.id, max_tokens=6, logprobs=True, top_logprobs=3)
    (choice,) = chat.choices
    assert choice.logprobs is not None
    entries = choice.logprobs.content or []
    assert "".join(entry.token for entry in entries).strip() == (choice.message.content or "").strip()
    for entry in entries:
        assert [entry.token, entry.logprob] == [entry.top_logprobs[0].token, entry.top_logprobs[0].logprob]  # greedy
        assert len(entry.top_logprobs) == 3


@pytest.mark.model
def test_errors_and_timeouts_of_a_server_of_the_default_model(real: openai.OpenAI) -> None:
    (model,) = real.models.list()
    text: Any = {"model": model.id, "prompt": CAPITALS, "max_tokens": 3000, "extra_body": {"ignore_eos": True}}
    with pytest.raises(openai.NotFoundError):
        real.completions.create(**text | {"model": "gpt-4"})
    with pytest.raises(openai.BadRequestError) as long:
        real.completions.create(**text | {"prompt": "word " * 10_000})
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.AuthenticationError):
        real.with_options(api_key="sk-wrong").completions.create(**text)
    with pytest.raises(openai.InternalServerError) as late:
        real.completions.create(**text | {"extra_body": {"ignore_eos": True, "umbel": {"timeout": 0.05}}})
    assert (late.value.status_code, late.value.code) == (504, "timeout")
    with pytest.raises(openai.APITimeoutError):
        real.completions.create(**text, timeout=0.3)
    assert real.completions.create(**text | {"max_tokens": 2}).choices[0].finish_reason == "length"


@pytest.mark.model
@pytest.mark.nightly
def test_a_request_that_comes_before_the_model_is_loaded_is_asked_again() -> None:
    serving = Serving("--model", "default", "--pool-tokens", "4096")
    try:
        with client_of(serving) as early:
            asking = early.with_options(max_retries=int(PATIENCE)).completions.with_raw_response
            raw = asking.create(model="gemma3-270m", prompt=CAPITALS, max_tokens=2)
        assert raw.retries_taken > 0
        assert raw.parse().choices[0].finish_reason == "length"
    finally:
        serving.end()


@pytest.mark.model
@pytest.mark.nightly
def test_texts_equal_those_of_a_runtime(real: openai.OpenAI) -> None:
    (model,) = real.models.list()
    prompts = [CAPITALS, "The capital of France is", "1, 2, 3, 4,"]
    with Runtime(pool_tokens=4096) as runtime:
        expected = [runtime.complete(prompt, {"max_tokens": 16, "temperature": 0}) for prompt in prompts]
    answer = real.completions.create(model=model.id, prompt=prompts, max_tokens=16, temperature=0)
    assert [choice.text for choice in answer.choices] == expected
