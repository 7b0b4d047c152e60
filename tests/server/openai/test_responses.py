"""`/v1/responses` on the oracle."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from itertools import chain
from typing import Any

import pytest
from umbel.lang.protocol import Chunk, Completion, Final, FinishReason, GenRequest, TokenLogprob, Usage
from umbel.server.openai.conversations import warn_of_hints
from umbel.srt.in_process import LocalBackend

from ..anthropic.test_messages import THINKS
from ..client import AsgiClient, served

pytestmark = pytest.mark.filterwarnings("ignore::umbel.lang.chat_template.TemplateWarning")
BODY = {"model": "oracle", "input": "hello", "max_output_tokens": 8, "temperature": 0}
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 4}}, "required": ["city"]}
WEATHER = {"type": "function", "name": "weather", "parameters": PARAMETERS, "strict": True}
SPACE = {"type": "namespace", "name": "sky", "description": "", "tools": [WEATHER]}


def run(scenario: Callable[[AsgiClient], Awaitable[None]], backend: LocalBackend | None = None) -> None:
    async def whole() -> None:
        async with served(backend) as client:
            await asyncio.wait_for(scenario(client), 60)  # type: ignore[arg-type]

    asyncio.run(whole())


def same(item: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in item.items() if name not in ("id", "call_id")}


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"instructions": "Be brief.", "input": [{"role": "user", "content": "hello"}]},
        {"top_logprobs": 2},
        {"include": ["message.output_text.logprobs", "reasoning.encrypted_content"]},
        {"text": {"format": {"type": "json_object"}}, "max_output_tokens": 30},
        {"tools": [WEATHER], "tool_choice": "required", "max_output_tokens": 200},
        {"tools": [SPACE], "tool_choice": {"type": "function", "name": "weather"}, "max_output_tokens": 200},
        {"tools": [WEATHER], "tool_choice": "required", "max_output_tokens": 75},
    ],
    ids=str,
)
def test_the_events_of_a_stream_make_the_whole_answer(fields: dict[str, Any]) -> None:
    async def scenario(client: AsgiClient) -> None:
        whole = (await client.post("/v1/responses", BODY | fields)).json
        assert "error" in whole, whole
        assert whole["error"] is None, whole
        streamed = await client.post("/v1/responses", BODY | fields | {"stream": True})
        events = [data for _, data in streamed.events]
        assert [name for name, _ in streamed.events] == [event["type"] for event in events]
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
        assert events[-1]["type"] == f"response.{whole['status']}"
        last = events[-1]["response"]
        assert [same(item) for item in last["output"]] == [same(item) for item in whole["output"]]
        assert last["usage"]["total_tokens"] == whole["usage"]["total_tokens"]
        assert [event["item"] for event in events if event["type"] == "response.output_item.done"] == last["output"]
        _check_items(events)

    run(scenario)


def _check_items(events: list[dict[str, Any]]) -> None:
    """Every item begins, grows and ends, in this order, and its deltas are its text."""
    texts: dict[int, str] = {}
    for event in events:
        kind = event["type"].removeprefix("response.")
        index = event.get("output_index")
        match kind:
            case "output_item.added":
                assert index == len(texts)
                texts[index] = ""
            case "content_part.added":
                assert texts[index] == ""
            case "output_text.delta" | "function_call_arguments.delta" | "reasoning_text.delta":
                texts[index] += event["delta"]
            case "output_text.done" | "reasoning_text.done":
                assert texts[index] == event["text"]
            case "function_call_arguments.done":
                assert texts[index] == event["arguments"]


CALL = '```tool_call\n{"name": "weather", "arguments": {"city": "Ulm"}}\n```'


def texts_of(logprobs: list[dict[str, Any]]) -> list[str]:
    return [bytes(entry["bytes"]).decode() for entry in logprobs]


@pytest.mark.parametrize(
    ("template", "chunks", "ending", "told"),
    [
        ("chatml", [["Hel"], ["lo"]], [""], [["Hel"], ["lo"], [""]]),
        ("chatml", [], [""], [[""]]),
        ("chatml", [["Hi"]], ["ST", "OP"], [["Hi"], ["ST", "OP"]]),
        ("chatml", [["a "], ["``"], ["x"], ["`"], ["`"], ["y"]], [], [["a "], ["``", "x"], ["`", "`", "y"]]),
        ("chatml", [["a\n", "`"], ["b"]], [], [["a\n"], ["`", "b"]]),
        ("chatml", [["Hi"], [CALL], ["\n", "bye"]], [""], [["Hi"], ["\n", "bye"], [""]]),
        ("chatml", [["Hi", CALL[:20], CALL[20:], "Hi"]], [], [["Hi"], ["Hi"]]),
        (THINKS, [["hm"], ["</th"], ["ink>"], ["\n\n"], ["Hello"]], [""], [["Hello"], [""]]),
        (THINKS, [["hm", "</think>", "\n\n", "Hi"], ["."]], [], [["Hi"], ["."]]),
        (THINKS, [["hm"]], [""], []),
    ],
    ids=str,
)
def test_each_token_of_a_message_is_told_once(
    template: str, chunks: list[list[str]], ending: list[str], told: list[list[str]]
) -> None:
    async def events(requests: list[GenRequest]) -> AsyncIterator[tuple[int, Chunk | Final]]:
        (request,) = requests
        entries = [[TokenLogprob(97, text, -1.0, data=text.encode()) for text in texts] for texts in (*chunks, ending)]
        for texts, each in zip(chunks, entries, strict=False):
            yield 0, Chunk(request.id, 0, "".join(texts), (97,) * len(texts), tuple(each))
        text = "".join("".join(texts) for texts in chunks)
        tokens = tuple(entry for each in entries for entry in each)
        said = Completion(text, (97,) * len(tokens), 0, text, FinishReason.STOP, logprobs=tokens)
        yield 0, Final(request.id, (said,), Usage())

    async def scenario(client: AsgiClient) -> None:
        client.app.front.events = events
        fields = {"include": ["message.output_text.logprobs"], "tools": [WEATHER] if template == "chatml" else []}
        streamed = await client.post("/v1/responses", BODY | fields | {"stream": True})
        deltas = [event for name, event in streamed.events if name == "response.output_text.delta"]
        assert [texts for delta in deltas if (texts := texts_of(delta["logprobs"]))] == told
        messages = [item["content"][0] for item in streamed.events[-1][1]["response"]["output"] if "role" in item]
        assert [text for part in messages for text in texts_of(part["logprobs"])] == [*chain(*told)]

    run(scenario, LocalBackend(chat_template=template))


def test_calls_of_a_namespace_say_it_and_keep_their_name() -> None:
    async def scenario(client: AsgiClient) -> None:
        fields = {"tools": [SPACE], "tool_choice": "required", "max_output_tokens": 200, "parallel_tool_calls": False}
        (item,) = (await client.post("/v1/responses", BODY | fields)).json["output"]
        assert (item["type"], item["name"], item["namespace"]) == ("function_call", "weather", "sky")

    run(scenario)


def test_tools_of_a_provider_are_left_out_with_a_warning() -> None:
    async def scenario(client: AsgiClient) -> None:
        tools = [{"type": "web_search", "search_content_types": ["text"]}, WEATHER, {"type": "custom", "name": "patch"}]
        answer = await client.post("/v1/responses", BODY | {"tools": tools})
        assert answer.status == 200
        assert "tools[2] 'custom' is not offered" in answer.headers["umbel-warning"]
        forced = {"tools": tools[:1], "tool_choice": "required"}
        assert (await client.post("/v1/responses", BODY | forced)).json["error"]["param"] == "tool_choice"

    run(scenario)


def test_the_items_of_an_answer_come_back_as_one_turn() -> None:
    async def scenario(client: AsgiClient) -> None:
        items = [
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "How is Ulm?"}]},
            {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "xyz"},
            {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "weather", "arguments": '{"city": "Ulm"}'},
            {"type": "function_call_output", "call_id": "c1", "output": "sunny"},
            {
                "type": "message",
                "id": "msg_1",
                "status": "completed",
                "role": "assistant",
                "content": [{"type": "output_text", "text": "Sunny.", "annotations": []}],
            },
            {"role": "user", "content": "Thanks."},
        ]
        answer = await client.post("/v1/responses", BODY | {"input": items, "tools": [WEATHER]})
        assert answer.status == 200, answer.json
        items[2]["arguments"] = '{"city": "Ulm", "da'
        cut = await client.post("/v1/responses", BODY | {"input": items, "tools": [WEATHER]})
        assert cut.headers["umbel-warning"].startswith("input[2].arguments: they were cut")
        assert same(cut.json["output"][0]) == same(answer.json["output"][0])
        items[2]["arguments"] = "Ulm"
        refused = await client.post("/v1/responses", BODY | {"input": items, "tools": [WEATHER]})
        assert refused.json["error"]["param"] == "input[2].arguments"

    run(scenario)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "c"}, "conversation"),
        ({"background": True}, "background"),
        ({"truncation": "auto"}, "truncation"),
        ({"input": []}, "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": [{"role": "user"}]}, "input[0]"),
        ({"input": [{"type": "function_call", "name": "a"}]}, "input[0]"),
        ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "input[0].content[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tools": [{"name": "a"}]}, "tools[0].type"),
        ({"tools": [WEATHER | {"prompt_cache_breakpoint": {}}]}, "tools[0].prompt_cache_breakpoint"),
        ({"tools": [WEATHER | {"defer_loading": True}]}, "tools[0].defer_loading"),
        ({"tools": [SPACE | {"tools": [WEATHER | {"x": 1}]}]}, "tools[0].tools[0].x"),
        ({"tools": [SPACE | {"tools": []}]}, "tools[0].tools"),
        ({"tools": [WEATHER, SPACE]}, "tools[1].tools[0].name"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"include": ["file_search_call.results"]}, "include[0]"),
        ({"n": 2}, "n"),
        ({"priority": 1}, "priority"),
    ],
    ids=str,
)
def test_what_is_wrong_is_named(fields: dict[str, Any], param: str) -> None:
    async def scenario(client: AsgiClient) -> None:
        answer = await client.post("/v1/responses", BODY | fields)
        assert answer.status == 400, answer.json
        assert answer.json["error"]["param"] == param, answer.json

    run(scenario)


def test_what_gateways_add_at_its_default_is_taken() -> None:
    async def scenario(client: AsgiClient) -> None:
        plain = (await client.post("/v1/responses", BODY)).json["output"][0]["content"]
        added = {"store": True, "priority": 0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
        assert (await client.post("/v1/responses", BODY | added)).json["output"][0]["content"] == plain
        likeliest = await client.post("/v1/responses", BODY | {"temperature": 1.0, "top_k": 1})
        assert likeliest.json["output"][0]["content"] == plain

    run(scenario)


def test_a_failure_in_a_stream_is_an_event_of_its_own() -> None:
    async def scenario(client: AsgiClient) -> None:
        live = client.begin("POST", "/v1/responses", BODY | {"max_output_tokens": 3000, "stream": True})
        await live.until(b"output_text.delta")
        await client.app.front.backend.close()
        events = (await live.ended()).events
        assert events[-1][0] == "response.failed"
        assert events[-1][1]["response"]["error"]["code"] == "server_error"

    run(scenario)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"text": {"verbosity": "high"}}, "text.verbosity: "),
        ({"reasoning": {"effort": "high"}}, "reasoning.effort: "),
        ({"reasoning": {"summary": "auto"}}, "reasoning.summary: "),
        ({"include": ["reasoning.encrypted_content"]}, "include: "),
        ({"text": {"verbosity": "medium"}, "reasoning": {"effort": "none"}, "include": []}, None),
    ],
    ids=str,
)
def test_a_header_names_what_changes_nothing(fields: dict[str, Any], said: str | None) -> None:
    async def scenario(client: AsgiClient) -> None:
        warning = (await client.post("/v1/responses", BODY | fields)).headers.get("umbel-warning")
        assert warning is None if said is None else str(warning).startswith(said)

    run(scenario)


def test_a_detail_of_a_picture_is_warned_of() -> None:
    warnings: list[str] = []
    warn_of_hints(None, "verbosity", [None, "auto"], warnings)
    assert warnings == []
    warn_of_hints(None, "verbosity", ["auto", "low"], warnings)
    assert [warning.partition(":")[0] for warning in warnings] == ["detail"]
