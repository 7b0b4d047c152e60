"""Anthropic's own client against a server process. It runs with version 1 and 2 of the client."""

from collections.abc import Iterator
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from ..serving import KEY, Serving

anthropic = pytest.importorskip("anthropic", reason="the anthropic extra is not installed")
pytestmark = [pytest.mark.model, pytest.mark.processes]

HELLO = [{"role": "user", "content": "Say hello."}]
GREEDY = {"temperature": 0}
TOOL = {
    "name": "weather",
    "description": "Tells the weather of a city.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 12}, "days": {"enum": [1, 2, 3]}},
        "required": ["city", "days"],
        "additionalProperties": False,
    },
}
NUMBERS = {"type": "array", "items": {"type": "integer"}, "minItems": 500}
LONG = {"max_tokens": 3000, "output_config": {"format": {"type": "json_schema", "schema": NUMBERS}}}


# Any: the client is an optional package
@pytest.fixture(scope="module")
def client(model_server: Serving) -> Iterator[Any]:
    with anthropic.Anthropic(
        base_url=model_server.address, api_key=KEY, max_retries=0, _strict_response_validation=True
    ) as client:
        yield client


@pytest.fixture(scope="module")
def model(client: Any) -> str:
    (listed,) = client.models.list()
    assert client.models.retrieve(listed.id) == listed
    return str(listed.id)


def asked(model: str, **fields: Any) -> dict[str, Any]:
    return {"model": model, "max_tokens": 12, "messages": HELLO, "extra_body": GREEDY} | fields


def test_a_message_and_its_stream(client: Any, model: str) -> None:
    whole = client.messages.create(**asked(model, system="Be brief."))
    assert (whole.type, whole.role, whole.model) == ("message", "assistant", model)
    assert whole.content[0].text
    assert whole._request_id
    with client.messages.stream(**asked(model, system="Be brief.")) as stream:
        text = "".join(stream.text_stream)
        streamed = stream.get_final_message()
    assert text == whole.content[0].text == streamed.content[0].text
    assert (streamed.stop_reason, streamed.stop_sequence) == (whole.stop_reason, whole.stop_sequence)
    assert streamed.usage.input_tokens == whole.usage.input_tokens
    assert streamed.usage.output_tokens == whole.usage.output_tokens


def test_the_count_is_that_of_the_message(client: Any, model: str) -> None:
    prompt = {"model": model, "messages": HELLO, "system": "Be brief.", "tools": [TOOL]}
    count = client.messages.count_tokens(**prompt).input_tokens
    usage = client.messages.create(max_tokens=1, **prompt).usage
    assert count == usage.input_tokens + usage.cache_read_input_tokens + usage.cache_creation_input_tokens


def test_a_tool_is_called_and_its_result_read(client: Any, model: str) -> None:
    forced = asked(model, tools=[TOOL], tool_choice={"type": "tool", "name": "weather"}, max_tokens=80)
    whole = client.messages.create(**forced)
    assert whole.stop_reason == "tool_use"
    (call,) = whole.content
    assert (call.type, call.name, set(call.input)) == ("tool_use", "weather", {"city", "days"})
    with client.messages.stream(**forced) as stream:
        kinds = [event.type for event in stream]
        (streamed,) = stream.get_final_message().content
    assert streamed.input == call.input
    assert "input_json" in kinds
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "Rain."}
    turns = [*HELLO, {"role": "assistant", "content": whole.content}, {"role": "user", "content": [result]}]
    after = client.messages.create(**asked(model, tools=[TOOL], messages=turns, max_tokens=4))
    assert after.usage.input_tokens > whole.usage.input_tokens


CLOCK = {
    "name": "clock",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 12}},
        "required": ["city"],
        "additionalProperties": False,
    },
}


def fits(call: Any) -> bool:
    """Whether the input of a call follows the schema of its tool."""
    schema = next(each for each in (TOOL, CLOCK) if each["name"] == call.name)["input_schema"]
    return Draft202012Validator(schema).is_valid(call.input)


def test_a_tool_may_be_called_or_not(client: Any, model: str) -> None:
    answer = client.messages.create(**asked(model, tools=[TOOL, CLOCK]))
    called = answer.content[-1].type == "tool_use"
    assert answer.stop_reason in ("tool_use" if called else "end_turn", "max_tokens")


def test_several_tools_are_called_or_one(client: Any, model: str) -> None:
    """The last call may be the one that max_tokens led to its end, and the text before it is none."""
    many = asked(model, tools=[TOOL, CLOCK], tool_choice={"type": "any"}, max_tokens=110)
    whole = client.messages.create(**many)
    assert whole.stop_reason in ("tool_use", "max_tokens")
    assert {block.type for block in whole.content} == {"tool_use"}
    assert len({block.id for block in whole.content}) == len(whole.content)
    assert all(fits(call) for call in whole.content)
    with client.messages.stream(**many) as stream:
        streamed = stream.get_final_message()
    assert [(call.name, call.input) for call in streamed.content] == [(call.name, call.input) for call in whole.content]
    assert streamed.stop_reason == whole.stop_reason
    one = client.messages.create(**many | {"tool_choice": {"type": "any", "disable_parallel_tool_use": True}})
    assert (len(one.content), one.stop_reason) == (1, "tool_use")


def test_a_call_that_is_cut_says_so(client: Any, model: str) -> None:
    text = {"type": "string", "minLength": 500}  # more than 40 tokens of any language
    essay = {"name": "essay", "input_schema": {"type": "object", "properties": {"text": text}, "required": ["text"]}}
    cut = asked(model, tools=[essay], tool_choice={"type": "any"}, max_tokens=40)
    whole = client.messages.create(**cut)
    assert (whole.stop_reason, [block.type for block in whole.content]) == ("max_tokens", ["tool_use"])
    with client.messages.stream(**cut) as stream:
        kinds = [event.type for event in stream]
        streamed = stream.get_final_message()
    assert kinds.count("input_json") >= 2  # more tokens than a step verifies
    assert (streamed.stop_reason, streamed.content[0].input) == ("max_tokens", whole.content[0].input)


def test_json_of_a_schema(client: Any, model: str) -> None:
    import pydantic

    class Answer(pydantic.BaseModel):
        yes: bool

    parsed = client.messages.parse(**asked(model, output_format=Answer, max_tokens=30))
    assert isinstance(parsed.parsed_output, Answer)


def test_a_stop_sequence_ends_the_text(client: Any, model: str) -> None:
    text = client.messages.create(**asked(model)).content[0].text
    answer = client.messages.create(**asked(model, stop_sequences=[text[2:4]]))
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", text[2:4])


def test_errors_are_the_classes_of_the_client(client: Any, model: str) -> None:
    with pytest.raises(anthropic.BadRequestError, match="messages: "):
        client.messages.create(**asked(model, messages=[]))
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long: "):
        client.messages.create(**asked(model, messages=[{"role": "user", "content": "word " * 40_000}]))
    with pytest.raises(anthropic.NotFoundError) as missing:
        client.messages.create(**asked("claude"))
    assert missing.value.request_id
    with pytest.raises(anthropic.AuthenticationError):
        client.with_options(api_key="sk-wrong").messages.create(**asked(model))
    many_steps = LONG | {"extra_body": GREEDY | {"umbel": {"timeout": 0.001}}}
    with pytest.raises(anthropic.APIStatusError) as late:
        client.messages.create(**asked(model, **many_steps))
    assert late.value.status_code == 504
    assert late.value.response.headers["x-should-retry"] == "false"


def test_a_client_that_waits_no_longer_frees_the_server(client: Any, model: str) -> None:
    with pytest.raises(anthropic.APITimeoutError):
        client.with_options(timeout=0.3).messages.create(**asked(model, **LONG))
    assert client.messages.create(**asked(model, max_tokens=2)).content
