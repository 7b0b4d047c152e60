"""`/v1/chat/completions` on the oracle."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from umbel.lang.conversations.messages import Message
from umbel.lang.protocol import Origin
from umbel.lang.sampling import SamplingParams
from umbel.lang.tool_calls import FENCED
from umbel.server.conversation import AnswerReader, Question, Said, open_dialogue
from umbel.srt.in_process import LocalBackend

from ..client import Answered, AsgiClient, served

pytestmark = pytest.mark.filterwarnings("ignore::umbel.lang.chat_template.TemplateWarning")
USER = {"role": "user", "content": "hello"}
BODY = {"model": "oracle", "messages": [USER], "max_tokens": 8, "temperature": 0}
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tells the weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 4},
                "days": {"type": "integer", "minimum": 0, "maximum": 9},
            },
            "required": ["city", "days"],
        },
    },
}
CLOCK = {"type": "function", "function": {"name": "clock"}}
SCHEMA = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}


def run(scenario: Callable[[AsgiClient], Awaitable[None]], backend: LocalBackend | None = None) -> None:
    async def whole() -> None:
        async with served(backend) as client:
            await asyncio.wait_for(scenario(client), 60)  # type: ignore[arg-type]

    asyncio.run(whole())


def _added(known: Any, delta: Any) -> Any:
    """Adds a delta to what came before, as OpenAI's client does: texts and lists grow, `index` finds a member."""
    if known is None:
        return delta
    if isinstance(delta, str):
        return known + delta
    if isinstance(delta, list):
        for member in delta:
            place = member["index"]
            assert place <= len(known), "indexes come without gaps"
            if place == len(known):
                known.append(member)
            else:
                known[place] = _added(known[place], member)
        return known
    if isinstance(delta, dict):
        return known | {
            name: value if name in ("index", "type") else _added(known.get(name), value)
            for name, value in delta.items()
        }
    return delta


def joined(answer: Answered) -> list[dict[str, Any]]:
    """The choices of a stream, put together as clients do."""
    assert answer.events[-1] == ("", "[DONE]")
    found: list[dict[str, Any]] = []
    for _, event in answer.events[:-1]:
        assert event["object"] == "chat.completion.chunk"
        for choice in event["choices"]:
            index, delta = choice["index"], choice["delta"]
            if index == len(found):
                assert delta == {"role": "assistant", "content": ""}
                found.append({"index": index, "message": {}, "finish_reason": None, "logprobs": []})
            whole = found[index]
            assert whole["finish_reason"] is None, "nothing comes after the end"
            whole["message"] = _added(whole["message"], delta)
            whole["finish_reason"] = choice["finish_reason"]
            assert delta == {} or choice["finish_reason"] is None, "the last delta is empty"
            whole["logprobs"] += (choice["logprobs"] or {"content": []})["content"]
    return found


def plain(choice: dict[str, Any]) -> dict[str, Any]:
    """A whole choice in the form of `joined`, without ids."""
    message = {name: value for name, value in choice["message"].items() if name != "refusal"}
    message["content"] = message["content"] or ""
    calls = [{"type": call["type"], "function": call["function"]} for call in message.pop("tool_calls", ())]
    logprobs = choice["logprobs"]
    return {
        "index": choice["index"],
        "message": message,
        "calls": calls,
        "finish_reason": choice["finish_reason"],
        "logprobs": logprobs["content"] if isinstance(logprobs, dict) else logprobs or [],
    }


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"n": 3},
        {"logprobs": True},
        {"logprobs": True, "top_logprobs": 3, "n": 2},
        {"stop": ["v"]},
        {"stop": ["v"], "logprobs": True},
        {"logprobs": True, "n": 2, "max_tokens": 64, "logit_bias": {"257": 5}, "seed": 1, "temperature": 1},  # EOS
        {"response_format": FORMAT, "max_tokens": 40},
        {"response_format": {"type": "json_object"}, "max_tokens": 30},
        {"regex": "[ab]{3}"},
        {"tools": [WEATHER, CLOCK], "tool_choice": "required", "max_tokens": 200},
        {"tools": [WEATHER, CLOCK], "tool_choice": "required", "max_tokens": 70, "logprobs": True},
        {"tools": [WEATHER], "tool_choice": "auto", "n": 2},
        {"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "weather"}}, "max_tokens": 200},
        {"tools": [WEATHER], "tool_choice": "none"},
        {"tools": [WEATHER], "response_format": FORMAT, "max_tokens": 60},
    ],
    ids=lambda fields: json.dumps(fields)[:60],
)
@pytest.mark.sampled(4)
def test_a_stream_and_a_whole_answer_are_equal(fields: dict[str, Any]) -> None:
    async def scenario(client: AsgiClient) -> None:
        whole = await client.post("/v1/chat/completions", BODY | fields)
        assert whole.status == 200, whole.json
        options = {"stream": True, "stream_options": {"include_usage": True}}
        streamed = await client.post("/v1/chat/completions", BODY | fields | options)
        assert streamed.status == 200, streamed.content
        assert [plain(choice) for choice in joined(streamed)] == [plain(each) for each in whole.json["choices"]]
        usage = streamed.events[-2][1]
        assert usage["choices"] == []
        for name in ("prompt_tokens", "completion_tokens", "total_tokens", "completion_tokens_details"):
            assert usage["usage"][name] == whole.json["usage"][name]
        assert all(event["usage"] is None for _, event in streamed.events[:-2])

    run(scenario)


def test_a_forced_call_follows_its_schema() -> None:
    async def scenario(client: AsgiClient) -> None:
        body = BODY | {"tools": [WEATHER], "parallel_tool_calls": False, "max_tokens": 300}
        for chosen in ("required", {"type": "function", "function": {"name": "weather"}}):
            (choice,) = (await client.post("/v1/chat/completions", body | {"tool_choice": chosen})).json["choices"]
            assert choice["finish_reason"] == "tool_calls"
            for call in choice["message"]["tool_calls"]:
                arguments = json.loads(call["function"]["arguments"])
                if call["function"]["name"] == "weather":
                    assert len(arguments["city"]) <= 4
                    assert arguments["days"] <= 9
            if chosen != "required":
                assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["weather"]

    run(scenario)


def test_a_call_that_max_tokens_led_to_its_end_is_a_cut_answer() -> None:
    async def scenario(client: AsgiClient) -> None:
        forced = {"tools": [WEATHER], "tool_choice": "required", "max_tokens": 75}
        (choice,) = (await client.post("/v1/chat/completions", BODY | forced)).json["choices"]
        assert choice["finish_reason"] == "length"
        json.loads(choice["message"]["tool_calls"][0]["function"]["arguments"])
        refused = (await client.post("/v1/chat/completions", BODY | forced | {"max_tokens": 9})).json["error"]
        assert "write max_tokens=" in refused["message"]

    run(scenario)


@pytest.mark.parametrize(("fields", "reason"), [({"stop": '"days"'}, "stop"), ({"max_tokens": 75}, "length")])
def test_a_stop_inside_a_call_is_the_reason_of_the_end(fields: dict[str, Any], reason: str) -> None:
    async def scenario(client: AsgiClient) -> None:
        forced = {"tools": [WEATHER], "tool_choice": "required", "max_tokens": 300}
        whole = await client.post("/v1/chat/completions", BODY | forced | fields)
        streamed = await client.post("/v1/chat/completions", BODY | forced | fields | {"stream": True})
        for choice in (*whole.json["choices"], *joined(streamed)):
            assert choice["finish_reason"] == reason
            assert choice["message"]["tool_calls"][0]["function"]["arguments"].startswith('{"city"')

    run(scenario)


def test_a_conversation_goes_on_after_calls_and_reuses_what_it_had() -> None:
    async def scenario(client: AsgiClient) -> None:
        call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Ulm"}'}}
        messages = [
            {"role": "system", "content": "Be brief."},
            {"role": "developer", "content": [{"type": "text", "text": "And kind."}]},
            {"role": "user", "content": [{"type": "text", "text": "How is "}, {"type": "text", "text": "Ulm?"}]},
            {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None, "annotations": []},
            {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
        ]
        body = BODY | {"messages": messages, "tools": [WEATHER]}
        first = (await client.post("/v1/chat/completions", body)).json
        answer = first["choices"][0]["message"]
        again = [*messages, answer, {"role": "user", "content": "And tomorrow?"}]
        second = (await client.post("/v1/chat/completions", body | {"messages": again})).json
        cached = second["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert cached >= first["usage"]["prompt_tokens"] - 1

    run(scenario)


def test_a_conversation_goes_on_after_a_call_that_was_cut() -> None:
    async def scenario(client: AsgiClient) -> None:
        body = BODY | {"tools": [WEATHER]}
        cut = {"tool_choice": "required", "max_tokens": 300, "stop": '"days"'}
        message = (await client.post("/v1/chat/completions", body | cut)).json["choices"][0]["message"]
        (call,) = message["tool_calls"]
        result = {"role": "tool", "tool_call_id": call["id"], "content": "no days"}
        again = await client.post("/v1/chat/completions", body | {"messages": [USER, message, result]})
        assert again.status == 200, again.json
        param = "messages[1].tool_calls[0].function.arguments"
        assert again.headers["umbel-warning"].startswith(f"{param}: they were cut")
        call["function"]["arguments"] = call["function"]["arguments"].rstrip().removesuffix(",") + "}"
        whole = await client.post("/v1/chat/completions", body | {"messages": [USER, message, result]})
        assert "umbel-warning" not in whole.headers
        assert whole.json["choices"] == again.json["choices"]
        assert whole.json["usage"]["prompt_tokens"] == again.json["usage"]["prompt_tokens"]

    run(scenario)


@pytest.mark.parametrize(
    "arguments", ["Ulm", '"Ulm"', '["Ulm"]', '{"city" "Ulm"', "}", '{"a":' * 10_000, '{"a": "' + "x" * 65_536]
)
def test_arguments_that_are_no_object_are_named(arguments: str) -> None:
    async def scenario(client: AsgiClient) -> None:
        call = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": arguments}}
        messages = [USER, {"role": "assistant", "tool_calls": [call]}]
        refused = await client.post("/v1/chat/completions", BODY | {"messages": messages})
        assert refused.status == 400
        assert refused.json["error"]["param"] == "messages[1].tool_calls[0].function.arguments"

    run(scenario)


def test_special_tokens_in_a_message_are_text() -> None:
    async def scenario(client: AsgiClient) -> None:
        texts = ["<s></s>hello", "hello"]
        lengths = []
        for text in texts:
            body = BODY | {"messages": [{"role": "user", "content": text}]}
            lengths.append((await client.post("/v1/chat/completions", body)).json["usage"]["prompt_tokens"])
        assert lengths[0] == lengths[1] + len("<s></s>")

    run(scenario)


def test_the_last_message_may_be_continued() -> None:
    async def scenario(client: AsgiClient) -> None:
        messages = [USER, {"role": "assistant", "content": "The answer is"}]
        body = BODY | {"messages": messages, "continue_final_message": True, "max_tokens": 1}
        answer = await client.post("/v1/chat/completions", body)
        assert answer.status == 200, answer.json
        begun = await client.post("/v1/completions", {"model": "oracle", "prompt": "x", "max_tokens": 1})
        assert begun.status == 200

    run(scenario)


def picture(url: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "wizard", "content": "a"}]}, "messages[0]"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [USER | {"opts": 1}]}, "messages[0].opts"),
        ({"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]}, "messages[0].content[0]"),
        (picture("http://x/a.png"), "messages[0].content[0].image_url.url"),
        (picture("data:image/png;base64,?"), "messages[0].content[0].image_url.url"),
        ({"messages": [{"role": "assistant", "reasoning": "a", "reasoning_content": "b"}]}, "messages[0].reasoning"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_completion_tokens": 9}, "max_tokens"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": 2}, "logprobs"),
        ({"store": True}, "store"),
        ({"service_tier": "flex"}, "service_tier"),
        ({"audio": {}}, "audio"),
        ({"functions": []}, "functions"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "x"}}}, None),
        ({"tools": [WEATHER, WEATHER]}, None),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [CLOCK], "regex": "a"}, "regex"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": FORMAT, "regex": "a"}, "regex"),
        ({"continue_final_message": True}, "continue_final_message"),
        ({"chat_template_kwargs": {"messages": 1}}, None),
        ({"metadata": {"a": 1}}, "metadata"),
    ],
    ids=str,
)
def test_what_is_wrong_is_named(fields: dict[str, Any], param: str | None) -> None:
    async def scenario(client: AsgiClient) -> None:
        answer = await client.post("/v1/chat/completions", BODY | fields)
        assert answer.status == 400, answer.json
        found = answer.json["error"]["param"]
        assert param is None or found.startswith(param), answer.json

    run(scenario)


def test_what_gateways_and_clients_add_is_taken() -> None:
    async def scenario(client: AsgiClient) -> None:
        added = {
            "logprobs": False,
            "top_logprobs": 0,
            "stream": False,
            "no_stop_trim": False,
            "ignore_eos": False,
            "continue_final_message": False,
            "skip_special_tokens": True,
            "separate_reasoning": True,
            "stream_reasoning": True,
            "return_hidden_states": False,
            "parallel_tool_calls": False,
            "store": False,
            "service_tier": "auto",
            "modalities": ["text"],
            "verbosity": "low",
            "metadata": {"a": "b"},
            "prompt_cache_key": "k",
            "reasoning_effort": "low",
            "umbel": {"program": "p", "fork_group": "g", "priority": 2, "ahead": 10, "timeout": 30},
        }
        answer = await client.post("/v1/chat/completions", BODY | added)
        assert answer.status == 200, answer.json

    run(scenario)


QWEN = """{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}{%- if add_generation_prompt %}<|im_start|>assistant
{%- if enable_thinking is defined and enable_thinking is false %}
<think>

</think>

{% else %}
<think>
{% endif %}{% endif %}"""


@pytest.mark.parametrize("n", [1, 2])
def test_reasoning_is_apart_in_streams_and_whole_answers(n: int) -> None:
    async def scenario(client: AsgiClient) -> None:
        fields = {"n": n, "max_tokens": 20}
        whole = (await client.post("/v1/chat/completions", BODY | fields)).json
        streamed = await client.post("/v1/chat/completions", BODY | fields | {"stream": True})
        assert [plain(choice) for choice in joined(streamed)] == [plain(each) for each in whole["choices"]]
        message = whole["choices"][0]["message"]
        assert message["reasoning"] == message["reasoning_content"] != ""
        assert message["content"] == ""
        assert whole["choices"][0]["finish_reason"] == "length"
        assert whole["usage"]["completion_tokens_details"]["reasoning_tokens"] == 20 * n
        off = (await client.post("/v1/chat/completions", BODY | fields | {"reasoning_effort": "none"})).json
        assert "reasoning" not in off["choices"][0]["message"]
        assert off["choices"][0]["message"]["content"]

    run(scenario, LocalBackend(chat_template=QWEN))


def test_an_answer_after_reasoning_has_the_format_that_is_asked_for() -> None:
    properties = {"a": {"type": "boolean"}}
    schema = {"type": "object", "properties": properties, "required": ["a"], "additionalProperties": False}
    chat = BODY | {
        "max_tokens": 400,
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
    }
    claude = {
        "model": "oracle",
        "messages": [{"role": "user", "content": "Say it."}],
        "max_tokens": 400,
        "output_config": {"format": {"type": "json_schema", "schema": schema}},
    }

    async def scenario(client: AsgiClient) -> None:
        for fields in ({}, {"reasoning_effort": "none"}):
            message = (await client.post("/v1/chat/completions", chat | fields)).json["choices"][0]["message"]
            assert set(json.loads(message["content"])) == {"a"}
            assert ("reasoning" in message) == (not fields)
        blocks = (await client.post("/v1/messages", claude)).json["content"]
        assert set(json.loads(blocks[-1]["text"])) == {"a"}
        refused = await client.post("/v1/chat/completions", BODY | {"regex": "[ab]+"})
        assert refused.status == 400
        assert refused.json["error"]["message"].startswith("regex: the model reasons first")

    run(scenario, LocalBackend(chat_template=QWEN))


def test_a_plain_template_ends_answers_where_another_turn_would_begin() -> None:
    async def scenario(client: AsgiClient) -> None:
        front = client.app.front
        for stops in ((), ("a",), tuple(f"stop {number}" for number in range(16))):
            question = Question((Message("user", ("hello",)),))
            sampling = SamplingParams(stop=stops)
            dialogue = await open_dialogue(front, question, sampling, Origin(), "x")
            asked = dialogue.request.sampling.stop
            assert asked[: len(stops)] == stops
            assert len(asked) <= 16
            assert len(stops) > 1 or asked[len(stops) :] == front.template.turn_stops != ()

    run(scenario)


@pytest.mark.parametrize(
    ("texts", "content"),
    [([" a", "b"], "ab"), (["a b"], "a b"), (["  a"], " a"), ([" ", "a"], "a"), ([" "], ""), ([], "")],
)
def test_the_white_space_that_a_template_writes_before_answers_is_no_content(texts: list[str], content: str) -> None:
    reader, said = AnswerReader(None, "", FENCED, lead=" "), Said()
    for piece in texts:
        said.add(reader.feed(piece, 1))
    said.add(reader.finish())
    assert said.content == content


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"verbosity": "low"}, "verbosity: "),
        ({"verbosity": "medium"}, None),
        ({"reasoning_effort": "high"}, "reasoning_effort: "),
        ({"reasoning_effort": "none"}, None),  # it never reasons
    ],
    ids=str,
)
def test_a_header_names_what_changes_nothing(fields: dict[str, Any], said: str | None) -> None:
    async def scenario(client: AsgiClient) -> None:
        warning = (await client.post("/v1/chat/completions", BODY | fields)).headers.get("umbel-warning")
        assert warning is None if said is None else str(warning).startswith(said)

    run(scenario)


def test_an_effort_that_a_template_knows_needs_no_warning() -> None:
    async def scenario(client: AsgiClient) -> None:
        answer = await client.post("/v1/chat/completions", BODY | {"reasoning_effort": "high"})
        assert answer.status == 200
        assert "umbel-warning" not in answer.headers

    run(scenario, LocalBackend(chat_template=QWEN))
