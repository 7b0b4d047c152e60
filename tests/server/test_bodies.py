"""Bodies that are wrong in one field: a 400 in the shape of the dialect, which names it."""

import asyncio
from typing import Any

import pytest
import umbel as ul
from umbel.compiler.files import serialise
from umbel.server.app import ENDPOINTS, application
from umbel.server.front import Front
from umbel.server.http import Endpoint
from umbel.srt.in_process import LocalBackend

from .client import Answered, AsgiClient, served
from .document import DOCUMENT, fields, least, misfits, resolved, spelled, with_value

TAKING = [each for each in ENDPOINTS if each.body is not None]


def check_named(endpoint: Endpoint, answer: Answered, field: str) -> None:
    if answer.headers["content-type"] == "application/json":
        assert answer.status == 400, (field, answer.content)
        data = answer.json
    else:
        data = answer.events[-1][1]
    error = data["error"]
    if endpoint.dialect == "anthropic":
        assert set(data) == {"type", "error", "request_id"}
        assert set(error) == {"type", "message"}
        assert error["message"].startswith(field), (field, error)
    else:
        assert set(error) == {"message", "type", "param", "code"}
        assert str(error["param"]).startswith(field), (field, error)


@pytest.mark.parametrize("endpoint", TAKING, ids=lambda each: f"{each.method} {each.path}")
@pytest.mark.sampled(4)
def test_a_value_of_another_type_or_out_of_range_is_refused_by_the_name_of_its_field(endpoint: Endpoint) -> None:
    operation = DOCUMENT["paths"][endpoint.path][endpoint.method.lower()]
    schema = resolved(operation["requestBody"]["content"]["application/json"]["schema"])
    path = endpoint.path.replace("{name}", "any")

    async def scenario() -> int:
        front = Front(LocalBackend())
        front.started = True
        client = AsgiClient(application(front))
        sent = 0
        for body, place, field in fields(schema, least(schema)):
            values = list(misfits(field))
            assert values or "type" not in field, f"{spelled(place)} has a type, and takes any value"
            for value in values:
                answer = await client.begin(endpoint.method, path, with_value(body, place, value)).ended()
                check_named(endpoint, answer, spelled(place))
            sent += len(values)
        return sent

    assert asyncio.run(scenario()) >= len(schema["properties"])


def test_every_body_has_the_field_umbel() -> None:
    without = {each.path for each in TAKING if "umbel" not in each.body.__struct_fields__}  # type: ignore[union-attr]
    assert without == {"/runtime"}


LONG, FAR = "a" * 700, 2**31 - 1  # beyond the context; beyond the vocabulary
ASKED = [{"role": "user", "content": "hello"}]
CALLED = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "["}}
TOOL = {"name": "look", "parameters": {"type": "object"}}
SCHEMA = {"type": "object", "required": 1}
CHAT = {"model": "oracle", "max_tokens": 9, "messages": ASKED}
FORMAT = {"type": "json_schema", "json_schema": {"schema": SCHEMA}}
FLAT_FORMAT = {"type": "json_schema", "schema": SCHEMA}
FLAT_TOOL = {"type": "function", **TOOL}
FORCED = {"type": "function", "function": {"name": "other"}}
CALL_ITEM = {"type": "function_call", "name": "look", "call_id": "c", "arguments": "["}
ODD_TOOL = {"name": "look", "input_schema": {"type": "string"}}


@ul.function
def ask(s: ul.State, q: str) -> None:
    s += q + ul.gen("a", max_tokens=3)


REFUSED: dict[str, list[tuple[str, dict[str, Any]]]] = {
    "/v1/completions": [
        ("prompt", {"model": "oracle", "prompt": LONG}),
        ("prompt", {"model": "oracle", "prompt": [FAR]}),
        ("regex", {"model": "oracle", "regex": "("}),
        ("max_tokens", {"model": "oracle", "regex": "a{9}", "max_tokens": 2}),
        ("stop_regex", {"model": "oracle", "stop_regex": "("}),
        ("stop_token_ids", {"model": "oracle", "stop_token_ids": [FAR]}),
        ("logit_bias", {"model": "oracle", "logit_bias": {str(FAR): 1}}),
        ("min_tokens", {"model": "oracle", "min_tokens": 9, "max_tokens": 2}),
    ],
    "/v1/chat/completions": [
        ("messages", CHAT | {"messages": [{"role": "user", "content": LONG}]}),
        ("messages", CHAT | {"messages": [*ASKED, {"role": "assistant", "tool_calls": [CALLED]}]}),
        ("chat_template_kwargs", CHAT | {"chat_template_kwargs": {"messages": 1}}),
        ("chat_template_kwargs", CHAT | {"chat_template_kwargs": {"a": "b c"}}),
        ("response_format", CHAT | {"response_format": FORMAT}),
        ("max_compl", CHAT | {"regex": "a{9}", "max_completion_tokens": 2, "max_tokens": 2}),
        ("tools", CHAT | {"tools": [{"function": TOOL}] * 2}),
        ("tools", CHAT | {"tools": [{"function": TOOL | {"parameters": SCHEMA}}]}),
        ("tool_choice", CHAT | {"tools": [{"function": TOOL}], "tool_choice": FORCED}),
    ],
    "/v1/responses": [
        ("input", {"model": "oracle", "input": LONG}),
        ("input", {"model": "oracle", "input": [CALL_ITEM]}),
        ("text.format", {"model": "oracle", "input": "a", "text": {"format": FLAT_FORMAT}}),
        ("tools[1].name", {"model": "oracle", "input": "a", "tools": [FLAT_TOOL] * 2}),
    ],
    "/v1/messages": [
        ("prompt is too long", CHAT | {"messages": [{"role": "user", "content": LONG}]}),
        ("output_config.format", CHAT | {"output_config": {"format": FLAT_FORMAT}}),
        ("tools", CHAT | {"tools": [{"name": "a", "input_schema": SCHEMA}]}),
    ],
    "/v1/messages/count_tokens": [
        ("tools", {"model": "oracle", "messages": ASKED, "tools": [ODD_TOOL]}),
    ],
    "/v1/caches": [
        ("messages", {"model": "oracle", "messages": []}),
        ("messages", {"model": "oracle", "messages": ASKED}),
        ("ttl", {"model": "oracle", "messages": ASKED, "ttl": "9999s"}),
    ],
    "/v1/programs/ask/runs": [
        ("arguments", {"arguments": {}}),
        ("arguments", {"arguments": {"q": "a", "other": 1}}),
        ("arguments", {"arguments": {"q": [1]}}),
        ("arguments", {"arguments": {"q": LONG}}),
        ("budget", {"arguments": {"q": "a"}, "budget": {}}),
        ("sampling.max_tokens", {"arguments": {"q": "a"}, "sampling": {"max_tokens": -1}}),
        ("sampling", {"arguments": {"q": "a"}, "sampling": {"nonsense": 1}}),
    ],
    "/generate": [
        ("text", {"text": LONG}),
        ("input_ids", {"input_ids": [[1], [FAR]]}),
        ("parts", {"parts": [["g", "", [FAR]]]}),
        ("sampling_params.json_schema", {"text": "a", "sampling_params": {"json_schema": SCHEMA}}),
        ("sampling_params.ebnf", {"text": "a", "sampling_params": {"ebnf": "("}}),
        ("sampling_params.stop_regex", {"text": "a", "sampling_params": {"stop_regex": "("}}),
        ("constraint", {"text": "a", "constraint": {"kind": "regex", "source": "("}}),
        ("constraint", {"text": "a", "constraint": {"kind": "choices", "source": "yes"}}),
        ("logprob_start_len", {"text": "a", "return_logprob": True, "logprob_start_len": 9}),
    ],
    "/score": [
        ("text", {"text": LONG, "choices": ["a"]}),
    ],
    "/detokenize": [
        ("tokens", {"tokens": [FAR]}),
    ],
    "/runtime": [
        ("message", {"message": "AAAA"}),
    ],
}


@pytest.mark.parametrize("path", REFUSED)
def test_what_the_runtime_refuses_is_named_as_the_body_names_it(path: str) -> None:
    endpoint = next(each for each in TAKING if each.path == path.replace("/ask/", "/{name}/"))
    assert endpoint.body is not None
    modes = [{"stream": False}, {"stream": True}] if "stream" in endpoint.body.__struct_fields__ else [{}]

    async def scenario() -> None:
        async with served(LocalBackend(chat_template="chatml", context_length=640, pool_tokens=2_048)) as client:
            await client.begin("PUT", "/v1/programs/ask", serialise.encode(ask.trace())).ended()
            for field, body in REFUSED[path]:
                for mode in modes:
                    check_named(endpoint, await client.post(path, body | mode), field)

    asyncio.run(scenario())
