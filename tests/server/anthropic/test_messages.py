"""`/v1/messages` and `/v1/messages/count_tokens` on the oracle, and on a model that says what a test has written."""

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

import anthropic
import anyio
import httpx2
import msgspec
import pytest
import umbel as ul
from umbel.compiler.files import serialise
from umbel.lang.protocol import Chunk, Final, FinishReason, GenRequest
from umbel.server.limits import HttpLimits
from umbel.srt.gateway.validation import RequestValidator
from umbel.srt.in_process import LocalBackend

from ..client import Answered, AsgiClient, served
from .test_answers import added

BODY: dict[str, Any] = {
    "model": "oracle",
    "max_tokens": 40,
    "temperature": 0,
    "messages": [{"role": "user", "content": "hello"}],
}
WORD = {"type": "object", "properties": {"q": {"type": "string", "maxLength": 3}}, "required": ["q"]}
TOOLS = [
    {"name": "search", "description": "Finds pages.", "input_schema": WORD},
    {"name": "now", "input_schema": {"type": "object", "properties": {}}},
]
SPOKEN = [
    {"role": "user", "content": [{"type": "text", "text": "find it"}]},
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "I should search.", "signature": "s"},
            {"type": "text", "text": "Wait."},
            {"type": "tool_use", "id": "toolu_1", "name": "search", "input": {"q": "it"}},
        ],
    },
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "toolu_1", "content": "nothing"}]},
]
# ChatML whose generation prompt opens the model's reasoning, unless that is turned off.
THINKS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% else %}<think>\n{% endif %}"
    "{% endif %}"
)


class Wire(httpx2.ASGITransport):
    """A connection to an application, which notes the statuses of its answers."""

    def __init__(self, app: Any) -> None:
        super().__init__(app)
        self.statuses: list[int] = []

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        response = await super().handle_async_request(request)
        self.statuses.append(response.status_code)
        return response


class Scripted(LocalBackend):
    """The oracle's costs, and answers that a test has written."""

    def __init__(self, *pieces: str, ending: FinishReason = FinishReason.STOP, template: str = "chatml") -> None:
        super().__init__(chat_template=template)
        self._pieces = pieces
        self._ending = ending
        self.requests: list[GenRequest] = []

    async def generate(self, request: GenRequest) -> AsyncGenerator[Chunk | Final, None]:
        self.requests.append(request)
        short = msgspec.structs.replace(request.sampling, max_tokens=1, ignore_eos=True)
        begun = None
        async for event in super().generate(msgspec.structs.replace(request, constraint=None, sampling=short)):
            if isinstance(event, Chunk):
                begun = event.begun
            else:
                if request.stream:
                    for number, piece in enumerate(self._pieces):
                        yield Chunk(request.id, 0, piece, (1,), begun=None if number else begun)
                said = msgspec.structs.replace(
                    event.completions[0],
                    text="".join(self._pieces),
                    token_ids=(1,) * len(self._pieces),
                    finish_reason=self._ending,
                    matched_stop=None,
                )
                yield msgspec.structs.replace(event, completions=(said,))


def run(scenario: Callable[[AsgiClient], Awaitable[None]], backend: LocalBackend | None = None, **front: Any) -> None:
    async def whole() -> None:
        async with served(backend or LocalBackend(chat_template="chatml"), **front) as client:
            await asyncio.wait_for(scenario(client), 60)  # type: ignore[arg-type]

    asyncio.run(whole())


def joined(answer: Answered) -> dict[str, Any]:
    """The message of a stream, put together as clients do."""
    assert answer.status == 200, answer.content
    events = [data for name, data in answer.events if name == data["type"]]
    assert len(events) == len(answer.events), "clients drop an event without its name"
    kinds = [event["type"] for event in events]
    assert kinds[:2] == ["message_start", "ping"]
    assert kinds[-2:] == ["message_delta", "message_stop"]
    assert kinds.count("message_start") == kinds.count("message_delta") == kinds.count("message_stop") == 1
    message, end = events[0]["message"], events[-2]
    assert (message["content"], message["stop_reason"], message["usage"]["output_tokens"]) == ([], None, 0)
    assert prompt_usage(message["usage"]) == prompt_usage(end["usage"])
    return message | end["delta"] | {"content": added(events[2:-2]), "usage": end["usage"]}


def prompt_usage(usage: dict[str, Any]) -> dict[str, Any]:
    """The part of a usage that is about the prompt."""
    return {name: value for name, value in usage.items() if not name.startswith("output_tokens")}


def without_ids(message: dict[str, Any]) -> dict[str, Any]:
    """A message without what differs between two requests: ids, and what the first left in the cache."""
    content = [{name: value for name, value in block.items() if name != "id"} for block in message["content"]]
    usage = {name: value for name, value in message["usage"].items() if name != "umbel"}
    return message | {"id": "", "content": content, "usage": usage}


async def both(client: AsgiClient, body: dict[str, Any]) -> dict[str, Any]:
    """Returns the whole answer to a body, which is that of its stream."""
    whole = await client.post("/v1/messages", body)
    assert whole.status == 200, whole.json
    streamed = joined(await client.post("/v1/messages", body | {"stream": True}))
    assert without_ids(streamed) == without_ids(whole.json)
    return whole.json


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"system": "be brief", "max_tokens": 1},
        {"system": [{"type": "text", "text": "be"}, {"type": "text", "text": " brief"}]},
        {"messages": [*BODY["messages"], {"role": "assistant", "content": "well, "}]},
        {"messages": [*BODY["messages"], {"role": "system", "content": "be brief"}, *BODY["messages"]]},
        {"tools": TOOLS},
        {"tools": TOOLS, "tool_choice": {"type": "any"}, "max_tokens": 60},
        {"tools": TOOLS, "tool_choice": {"type": "tool", "name": "now"}, "max_tokens": 60},
        {"tools": TOOLS, "tool_choice": {"type": "none"}},
        {"tools": TOOLS, "messages": SPOKEN},
        {"output_config": {"format": {"type": "json_schema", "schema": WORD}, "effort": "low"}},
        {"max_tokens": 0},
        {"max_tokens": 0, "tools": TOOLS, "tool_choice": {"type": "any"}},
        {"stop_sequences": ["g"]},
        {"temperature": 1, "top_p": 0.9, "top_k": 5, "seed": 3},
    ],
    ids=str,
)
@pytest.mark.sampled(4)
def test_a_stream_a_whole_answer_and_the_count_are_equal(fields: dict[str, Any]) -> None:
    async def scenario(client: AsgiClient) -> None:
        body = BODY | fields
        usage = (await both(client, body))["usage"]
        prompt = {name: value for name, value in body.items() if name not in ("max_tokens", "stop_sequences")}
        count = (await client.post("/v1/messages/count_tokens", prompt)).json
        cached = usage["cache_read_input_tokens"] + usage["cache_creation_input_tokens"]
        assert count == {"input_tokens": usage["input_tokens"] + cached}

    run(scenario)


def test_a_stream_tokenizes_its_prompt_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    encode = RequestValidator._encode
    monkeypatch.setattr(RequestValidator, "_encode", lambda *given: asked.append("prompt") or encode(*given))

    async def scenario(client: AsgiClient) -> None:
        for times in (1, 2):  # computed, then found in the cache
            whole = joined(await client.post("/v1/messages", BODY | {"stream": True}))
            assert len(asked) == times
            prompt = whole["usage"]["input_tokens"]
            assert whole["usage"]["umbel"] == {"cached_tokens": prompt - 1 if times > 1 else 0}

    run(scenario)


def test_a_message_has_every_field_that_clients_read() -> None:
    async def scenario(client: AsgiClient) -> None:
        answer = (await client.post("/v1/messages", BODY)).json
        assert answer.pop("id").startswith("msg_")
        (block,) = answer.pop("content")
        assert block == {"type": "text", "text": block["text"], "citations": None}
        assert answer == {
            "type": "message",
            "role": "assistant",
            "model": "oracle",
            "stop_reason": "max_tokens",
            "stop_sequence": None,
            "stop_details": None,
            "container": None,
            "diagnostics": None,
            "context_management": None,
            "usage": {
                "input_tokens": answer["usage"]["input_tokens"],
                "output_tokens": 40,
                "cache_creation_input_tokens": 0,
                "cache_read_input_tokens": 0,
                "cache_creation": {"ephemeral_5m_input_tokens": 0, "ephemeral_1h_input_tokens": 0},
                "output_tokens_details": {"thinking_tokens": 0},
                "service_tier": "standard",
                "umbel": {"cached_tokens": 0},
            },
        }

    run(scenario)


def test_a_tool_that_is_chosen_is_called() -> None:
    async def scenario(client: AsgiClient) -> None:
        forced = BODY | {"tools": TOOLS, "tool_choice": {"type": "tool", "name": "search"}, "max_tokens": 200}
        answer = await both(client, forced)
        (call,) = answer["content"]
        assert (call["type"], call["name"], answer["stop_reason"]) == ("tool_use", "search", "tool_use")
        assert list(call["input"]) == ["q"]

    run(scenario)


@pytest.mark.parametrize(
    ("pieces", "content", "reason"),
    [
        (["Hel", "lo"], [("text", "Hello")], "end_turn"),
        ([], [], "end_turn"),
        (
            ["Wait.\n```tool_", 'call\n{"name": "search", "argu', 'ments": {"q": ', '"it"}}\n```'],
            [("text", "Wait."), ("tool_use", {"q": "it"})],
            "tool_use",
        ),
        (
            [
                '```tool_call\n{"name": "now", "arguments": {}}\n```\n',
                '```tool_call\n{"name": "now", "arguments": {}}\n```',
            ],
            [("tool_use", {}), ("tool_use", {})],
            "tool_use",
        ),
    ],
)
def test_blocks_are_found_in_what_the_model_writes(
    pieces: list[str], content: list[tuple[str, Any]], reason: str
) -> None:
    async def scenario(client: AsgiClient) -> None:
        answer = await both(client, BODY | {"tools": TOOLS})
        assert [(block["type"], block.get("text", block.get("input"))) for block in answer["content"]] == content
        assert answer["stop_reason"] == reason
        assert len({block.get("id", number) for number, block in enumerate(answer["content"])}) == len(content)

    run(scenario, Scripted(*pieces))


def test_a_call_that_is_cut_is_no_use_of_a_tool() -> None:
    async def scenario(client: AsgiClient) -> None:
        answer = await both(client, BODY | {"tools": TOOLS, "max_tokens": 1})
        assert answer["stop_reason"] == "max_tokens"
        assert answer["content"][0]["input"] == {}

    run(scenario, Scripted('```tool_call\n{"name": "search", "arguments": {"q": "i', ending=FinishReason.LENGTH))


def test_a_full_context_is_not_max_tokens() -> None:
    async def scenario(client: AsgiClient) -> None:
        answer = await both(client, BODY | {"max_tokens": 1000})
        assert answer["stop_reason"] == "model_context_window_exceeded"

    run(scenario, Scripted("a", ending=FinishReason.LENGTH))


def test_reasoning_is_a_block_that_can_be_sent_back() -> None:
    backend = Scripted("I th", "ink.</thi", "nk>\n\nYes.", template=THINKS)

    async def scenario(client: AsgiClient) -> None:
        answer = await both(client, BODY)
        thinking, text = answer["content"]
        assert (thinking["thinking"], text["text"]) == ("I think.", "Yes.")
        assert len(thinking["signature"]) > 40
        again = [*BODY["messages"], {"role": "assistant", "content": answer["content"]}, *BODY["messages"]]
        assert (await client.post("/v1/messages", BODY | {"messages": again})).status == 200

    run(scenario, backend)


def test_reasoning_is_counted_and_may_be_omitted() -> None:
    async def scenario(client: AsgiClient) -> None:
        thinking = {"type": "enabled", "budget_tokens": 1024, "display": "omitted"}
        answer = await both(client, BODY | {"thinking": thinking, "max_tokens": 2000})
        assert answer["content"][0]["thinking"] == ""
        assert answer["content"][0]["signature"]
        assert 0 < answer["usage"]["output_tokens_details"]["thinking_tokens"] < 4

    run(scenario, Scripted("I th", "ink.", "</think>", "Yes.", template=THINKS))


def test_reasoning_is_turned_off_where_the_template_can() -> None:
    backend = Scripted("Yes.", template=THINKS)

    async def scenario(client: AsgiClient) -> None:
        answer = await both(client, BODY | {"thinking": {"type": "disabled"}})
        assert [block["type"] for block in answer["content"]] == ["text"]
        assert backend.requests[0].prompt[-1].text.endswith("</think>\n\n")  # type: ignore[union-attr]

    run(scenario, backend)


def test_an_answer_of_a_schema_is_reasoned_about_where_that_is_asked_for() -> None:
    async def scenario(client: AsgiClient) -> None:
        body = BODY | {"output_config": {"format": {"type": "json_schema", "schema": WORD}}}
        (block,) = (await both(client, body))["content"]
        assert "q" in json.loads(block["text"])
        thinking = {"type": "enabled", "budget_tokens": 1024}
        reasoned, answered = (await both(client, body | {"thinking": thinking, "max_tokens": 1025}))["content"]
        assert reasoned["type"] == "thinking"
        assert "q" in json.loads(answered["text"])

    run(scenario, LocalBackend(chat_template=THINKS))


def test_a_template_that_cannot_reason_is_named_in_a_header() -> None:
    async def scenario(client: AsgiClient) -> None:
        thinking = {"thinking": {"type": "enabled", "budget_tokens": 1024}, "max_tokens": 1025}
        assert "reasoning" in (await client.post("/v1/messages", BODY | thinking)).headers["umbel-warning"]
        adaptive = BODY | {"thinking": {"type": "adaptive"}}
        assert "umbel-warning" not in (await client.post("/v1/messages", adaptive)).headers

    run(scenario, Scripted("Yes."))


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"service_tier": "standard_only"}, "service_tier: "),
        ({"service_tier": "auto", "context_management": {"edits": []}}, None),
        ({"context_management": {"edits": [{"type": "clear_thinking_20251015"}]}}, "context_management: "),
        ({"output_config": {"effort": "high"}}, "output_config.effort: "),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}, "max_tokens": 1025}, "thinking.budget_tokens: "),
    ],
    ids=str,
)
@pytest.mark.sampled(4)
def test_a_header_names_what_changes_nothing(fields: dict[str, Any], said: str | None) -> None:
    async def scenario(client: AsgiClient) -> None:
        warning = (await client.post("/v1/messages", BODY | fields)).headers.get("umbel-warning")
        assert warning is None if said is None else str(warning).startswith(said)

    run(scenario, LocalBackend(chat_template=THINKS))


def test_the_stop_sequence_is_told() -> None:
    async def scenario(client: AsgiClient) -> None:
        text = (await both(client, BODY))["content"][0]["text"]
        answer = await both(client, BODY | {"stop_sequences": ["not in it", text[3:6]]})
        assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", text[3:6])
        assert answer["content"][0]["text"] == text[: text.index(text[3:6])]

    run(scenario)


def test_a_stop_sequence_inside_a_call_is_told() -> None:
    async def scenario(client: AsgiClient) -> None:
        forced = BODY | {"tools": TOOLS, "tool_choice": {"type": "tool", "name": "search"}, "max_tokens": 200}
        answer = await both(client, forced | {"stop_sequences": ['"}']})
        assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", '"}')
        assert answer["content"][0]["input"] == {}

    run(scenario)


def test_a_begun_answer_is_continued() -> None:
    async def scenario(client: AsgiClient) -> None:
        text = (await both(client, BODY))["content"][0]["text"]
        begun = [*BODY["messages"], {"role": "assistant", "content": text[:5]}]
        answer = await both(client, BODY | {"messages": begun, "max_tokens": 35})
        assert answer["content"][0]["text"] == text[5:]

    run(scenario)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"max_tokens": -1}, "max_tokens: "),
        ({"max_tokens": None}, "max_tokens: "),
        ({"temperature": 1.5}, "temperature: "),
        ({"messages": []}, "messages: "),
        ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0].role: write user, assistant or system"),
        ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "messages[0].content[0].type: this kind"),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "x": 1}]}]},
            "messages[0].content[0].x: ",
        ),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type: this kind"),
        ({"tools": TOOLS + TOOLS}, "tools: two are called search"),
        ({"tool_choice": {"type": "tool", "name": "x"}}, "tool_choice: 'x' is no tool"),
        ({"stop_sequences": ["a"] * 17}, "stop_sequences: "),
        ({"diagnostics": {"previous_message_id": 1}}, "diagnostics.previous_message_id: "),
        ({"service_tier": "priority"}, "service_tier: "),
        ({"speed": "fast"}, "speed: "),
        ({"cache_control": {}}, "cache_control.type is missing"),
        ({"cache_control": {"type": "ephemeral", "x": 1}}, "cache_control.x: no such field"),
        ({"output_config": {"format": {"schema": WORD}}}, "output_config.format.type is missing"),
        ({"container": "c"}, "container: "),
        ({"mcp_servers": [{}]}, "mcp_servers: the server calls no other"),
        ({"context_management": {"edits": [{"type": "compact_20260112"}]}}, "context_management.edits[0]: "),
        (
            {"thinking": {"type": "enabled", "budget_tokens": 1024}},
            "thinking.budget_tokens: it must be below max_tokens",
        ),
        ({"umbel": {"timeout": 0}}, "umbel.timeout: "),
    ],
    ids=str,
)
def test_what_is_wrong_is_named_in_anthropics_shape(fields: dict[str, Any], said: str) -> None:
    async def scenario(client: AsgiClient) -> None:
        answer = await client.post("/v1/messages", BODY | fields)
        assert answer.status == 400, answer.json
        assert answer.json["error"]["message"].startswith(said), answer.json
        assert answer.json == {
            "type": "error",
            "error": {"type": "invalid_request_error", "message": answer.json["error"]["message"]},
            "request_id": answer.headers["request-id"],
        }

    run(scenario)


def test_a_prompt_that_is_too_long_is_said_so_with_its_size() -> None:
    async def scenario(client: AsgiClient) -> None:
        body = BODY | {"messages": [{"role": "user", "content": "a" * 5000}]}
        count = (await client.post("/v1/messages/count_tokens", {**body, "max_tokens": 1})).json
        assert count["error"]["message"].startswith("max_tokens: ")
        most = client.app.front.backend.capabilities.max_context
        long = BODY | {"messages": [{"role": "user", "content": "a" * (most + 1)}]}
        for stream in (False, True):
            answer = await client.post("/v1/messages", long | {"stream": stream})
            assert answer.status == 400
            assert answer.json["error"]["message"].startswith("prompt is too long: ")
            assert answer.json["error"]["message"].endswith(f"> {most} maximum")

    run(scenario)


def test_fields_that_coding_agents_send_are_taken() -> None:
    async def scenario(client: AsgiClient) -> None:
        body = BODY | {
            "system": [{"type": "text", "text": "x-anthropic-billing-header: cch=1;"}, {"type": "text", "text": "Hi."}],
            "metadata": {"user_id": "someone"},
            "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
            "output_config": {"effort": "high"},
            "thinking": {"type": "adaptive"},
            "service_tier": "auto",
            "mcp_servers": [],
            "tools": [TOOLS[0] | {"strict": True, "eager_input_streaming": True, "type": "custom"}],
        }
        answer = await client.post("/v1/messages?beta=true", body, **{"anthropic-version": "2026-10-21"})
        assert answer.status == 200, answer.json
        assert answer.json["context_management"] == {"applied_edits": []}
        older = await client.post("/v1/messages", body, **{"anthropic-version": "2023-06-01"})
        assert older.status == 200

    run(scenario)


def test_an_error_after_the_first_event_ends_the_stream() -> None:
    fails = asyncio.Event()

    class Failing(Scripted):
        async def generate(self, request: GenRequest) -> AsyncGenerator[Chunk | Final, None]:
            yield Chunk(request.id, 0, "begun")
            await fails.wait()
            raise KeyError("a defect")

    async def scenario(client: AsgiClient) -> None:
        live = client.begin("POST", "/v1/messages", BODY | {"stream": True})
        await live.until(b"begun")
        fails.set()
        answer = await live.ended()
        name, data = answer.events[-1]
        assert (answer.status, name, data["type"], data["error"]["type"]) == (200, "error", "error", "api_error")
        assert "defect" not in data["error"]["message"]
        whole = await client.post("/v1/messages", BODY)
        assert (whole.status, whole.json["error"]["type"]) == (500, "api_error")

    run(scenario, Failing())


def test_a_program_answers_as_a_model() -> None:
    @ul.function(temperature=0)
    def shout(s: ul.State, question: str) -> str:
        s += question + ul.gen("answer", max_tokens=5)
        return s["answer"] + "!"

    async def scenario(client: AsgiClient) -> None:
        file = serialise.encode(shout.trace())
        assert (await client.begin("PUT", "/v1/programs/shout?parameter=question", file).ended()).status == 201
        body = BODY | {"model": "shout", "system": [marked("unread")], "tools": TOOLS, "tool_choice": {"type": "none"}}
        whole = await client.post("/v1/messages", body)
        assert whole.status == 200, whole.json
        (block,) = whole.json["content"]
        streamed = await client.post("/v1/messages", body | {"stream": True})
        assert added([data for _, data in streamed.events[2:-2]]) == [block]
        assert (block["text"][-1], whole.json["stop_reason"]) == ("!", "end_turn")
        assert streamed.events[-2][1]["usage"]["output_tokens"] == whole.json["usage"]["output_tokens"] == 5
        prompt = {"model": "shout", "messages": BODY["messages"]}
        assert (await client.post("/v1/messages/count_tokens", prompt)).status == 400

    run(scenario)


def test_an_unknown_model_and_a_wrong_method() -> None:
    async def scenario(client: AsgiClient) -> None:
        answer = await client.post("/v1/messages", BODY | {"model": "claude"})
        assert (answer.status, answer.json["error"]["type"]) == (404, "not_found_error")
        wrong = await client.get("/v1/messages")
        assert (wrong.status, wrong.json["type"]) == (405, "error")
        for path in ("/v1/nothing", "/v1/models/claude"):  # routes of all dialects
            missing = await client.get(path, **{"anthropic-version": "2023-06-01"})
            assert (missing.status, missing.json["error"]["type"]) == (404, "not_found_error")
            assert (await client.get(path)).json["error"]["type"] == "invalid_request_error"

    run(scenario)


def test_a_client_that_hangs_up_frees_the_engine() -> None:
    async def scenario(client: AsgiClient) -> None:
        live = client.begin("POST", "/v1/messages", BODY | {"max_tokens": 2000, "stream": True})
        await live.until(b"content_block_delta")
        await live.hang_up()
        assert client.app.front.in_flight == 0
        assert (await client.post("/v1/messages", BODY)).status == 200
        assert client.app.front.backend.engine.scheduler.idle

    run(scenario)


# ------------------------------------------------------------------------------------------ explicit caching

MARK = {"type": "ephemeral"}
KEPT = {"limits": HttpLimits(cache_minimum=16)}


def marked(text: str, **mark: str) -> dict[str, Any]:
    return {"type": "text", "text": text, "cache_control": MARK | mark}


async def cached(client: AsgiClient, **fields: Any) -> tuple[int, int]:
    """Returns the tokens that a request creates and reads."""
    answer = await client.post("/v1/messages", BODY | {"max_tokens": 1} | fields)
    assert answer.status == 200, answer.json
    usage = answer.json["usage"]
    by_ttl = usage["cache_creation"]
    assert sum(by_ttl.values()) == usage["cache_creation_input_tokens"]
    return usage["cache_creation_input_tokens"], usage["cache_read_input_tokens"]


def question(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


def test_a_marked_system_text_is_created_once_then_read() -> None:
    async def scenario(client: AsgiClient) -> None:
        system = [marked("c" * (1605 - 2 - len("system\n")))]  # BOS and the mark of a turn are tokens
        assert await cached(client, system=system) == (1605, 0)
        assert await cached(client, system=system, messages=question("another")) == (0, 1605)

    run(scenario, LocalBackend(chat_template="chatml", context_length=3000, pool_tokens=8000))


def test_a_stream_says_what_was_created_and_read() -> None:
    async def scenario(client: AsgiClient) -> None:
        body = BODY | {"system": [marked("c" * 50)], "stream": True}
        first = joined_usage(await client.post("/v1/messages", body))
        again = joined_usage(await client.post("/v1/messages", body))
        created = first["cache_creation_input_tokens"]
        assert created > 50
        assert first["cache_creation"] == {"ephemeral_5m_input_tokens": created, "ephemeral_1h_input_tokens": 0}
        assert (again["cache_creation_input_tokens"], again["cache_read_input_tokens"]) == (0, created)
        assert first["input_tokens"] == again["input_tokens"]

    run(scenario, **KEPT)


def joined_usage(answer: Answered) -> dict[str, Any]:
    """The usage of a stream, whose beginning says of the prompt what its end says."""
    start, end = answer.events[0][1]["message"]["usage"], answer.events[-2][1]["usage"]
    assert prompt_usage(start) == prompt_usage(end)
    return dict(end)


def test_a_changed_tool_misses() -> None:
    async def scenario(client: AsgiClient) -> None:
        tools = [TOOLS[0], TOOLS[1] | {"cache_control": MARK}]
        created, read = await cached(client, tools=tools)
        assert (created > 100, read) == (True, 0)
        assert await cached(client, tools=tools, messages=question("another")) == (0, created)
        changed = [TOOLS[0] | {"description": "Finds books."}, tools[1]]
        assert (await cached(client, tools=changed))[1] == 0

    run(scenario, **KEPT)


def alternating(blocks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A message for each block, and one of the user at the end: what separates two of them is a token of its own."""
    said = [{"role": ("user", "assistant")[n % 2], "content": [block]} for n, block in enumerate(blocks)]
    return said if len(said) % 2 else [*said, *question("go on")]


def test_twenty_blocks_are_looked_back_over_and_no_more() -> None:
    async def scenario(client: AsgiClient) -> None:
        for distance, hits in ((20, True), (21, False)):
            more = [{"type": "text", "text": f"{n:04}"} for n in range(distance - 1)]
            blocks = alternating([marked(str(distance) * 10), *more, marked("end")])
            created, _ = await cached(client, messages=blocks[:1], max_tokens=0)
            assert created > 20
            del blocks[0]["content"][0]["cache_control"]
            _, read = await cached(client, messages=blocks)
            assert read == (created if hits else 0)

    run(scenario, **KEPT)


def test_the_last_four_marks_count_and_a_header_says_so() -> None:
    async def scenario(client: AsgiClient) -> None:
        messages = alternating([marked(f"{n}" * 20) for n in range(5)])
        answer = await client.post("/v1/messages", BODY | {"messages": messages})
        assert answer.headers["umbel-warning"] == "5 cache marks; the last 4 count"
        assert (await cached(client, messages=messages[:1]))[1] == 0, "the first of five marks has created nothing"
        assert (await cached(client, messages=messages[:3]))[0] == 0, "the third one has"

    run(scenario, **KEPT)


def test_hours_are_told_from_minutes_and_the_top_level_marks_the_end() -> None:
    async def scenario(client: AsgiClient) -> None:
        body = BODY | {"system": [marked("s" * 30, ttl="1h")], "cache_control": MARK}
        usage = (await client.post("/v1/messages", body)).json["usage"]
        both_kinds = usage["cache_creation"]
        assert both_kinds["ephemeral_1h_input_tokens"] > 30
        assert both_kinds["ephemeral_5m_input_tokens"] > len("hello")

    run(scenario, **KEPT)


def test_without_a_mark_nothing_is_promised() -> None:
    async def scenario(client: AsgiClient) -> None:
        for _ in range(2):
            assert await cached(client, system="c" * 50) == (0, 0)
        long = await client.post("/v1/messages", BODY | {"system": "c" * 50})
        assert long.json["usage"]["umbel"]["cached_tokens"] > 50
        below = [marked("short")]
        assert await cached(client, system=below) == (0, 0)

    run(scenario)


def test_the_client_asks_a_full_server_again_and_after_a_deadline_it_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """It obeys Retry-After and X-Should-Retry; here the place gets free in that time."""
    waits: list[float] = []

    async def scenario() -> None:
        async with (
            served(limits=HttpLimits(most_in_flight=1, retry_after=7)) as client,
            contextlib.AsyncExitStack() as stack,
        ):
            wire = Wire(client.app)
            http = anthropic.DefaultAsyncHttpxClient(transport=wire)
            official: Any = await stack.enter_async_context(
                anthropic.AsyncAnthropic(api_key="none", base_url="http://localhost", max_retries=2, http_client=http)
            )
            taken = stack.enter_context(contextlib.ExitStack())
            taken.enter_context(client.app.front.open())

            async def make_room(seconds: float) -> None:
                waits.append(seconds)
                taken.close()

            monkeypatch.setattr(anyio, "sleep", make_room)
            asked = {"model": "oracle", "max_tokens": 4, "messages": BODY["messages"]}
            assert (await official.messages.create(**asked)).usage.output_tokens > 0
            assert (wire.statuses, waits) == ([503, 200], [7.0])
            with pytest.raises(anthropic.APIStatusError) as late:
                await official.messages.create(**asked, extra_body={"umbel": {"timeout": 1e-9}})
            assert late.value.status_code == 504
            assert (wire.statuses, waits) == ([503, 200, 504], [7.0])

    asyncio.run(scenario())
