"""Diagnoses of misses: in messages of Anthropic, in responses of OpenAI, and what the cache had lost meanwhile."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import umbel as ul
from umbel.compiler.files import serialise
from umbel.server.diagnosis.exchanges import Exchanges
from umbel.server.diagnosis.head import IgnoredLines
from umbel.srt.in_process import LocalBackend

from ..client import AsgiClient, served

pytestmark = pytest.mark.filterwarnings("ignore::umbel.lang.chat_template.TemplateWarning")
WORD = {"type": "object", "properties": {"q": {"type": "string", "maxLength": 3}}, "required": ["q"]}
SEARCH = {"name": "search", "description": "Finds pages.", "input_schema": WORD}
NOW = {"name": "now", "input_schema": {"type": "object", "properties": {}}}
BODY: dict[str, Any] = {
    "model": "oracle",
    "max_tokens": 4,
    "temperature": 0,
    "system": "You are brief.",
    "tools": [SEARCH],
    "tool_choice": {"type": "none"},
    "messages": [{"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]}],
}
SWITCHED = (
    "{% if enable_thinking is defined and not enable_thinking %}<|im_start|>system\nBe fast.<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TOOLS_LATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}'
    "\n</tool_call>{% endfor %}"
    "{% if loop.first and tools %}\n# Tools{% for tool in tools %}\n{{ tool | tojson }}{% endfor %}{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def run(
    scenario: Callable[[AsgiClient], Awaitable[None]],
    template: str = "chatml",
    radix_cache: bool = True,
    replicas: int = 1,
    **front: Any,
) -> None:
    async def whole() -> None:
        backend = LocalBackend(chat_template=template, radix_cache=radix_cache, replicas=replicas)
        async with served(backend, **front) as client:
            await asyncio.wait_for(scenario(client), 60)  # type: ignore[arg-type]

    asyncio.run(whole())


async def ask(client: AsgiClient, previous: str | None, **fields: Any) -> dict[str, Any]:
    body = BODY | {"diagnostics": {"previous_message_id": previous}} | fields
    answer = await client.post("/v1/messages", body)
    assert answer.status == 200, answer.content
    found: dict[str, Any] = answer.json
    return found


async def count(client: AsgiClient, **fields: Any) -> int:
    body = {name: value for name, value in (BODY | fields).items() if name != "max_tokens"}
    tokens: int = (await client.post("/v1/messages/count_tokens", body)).json["input_tokens"]
    return tokens


def said(answer: dict[str, Any], *more: str) -> list[dict[str, Any]]:
    """Returns the messages of the next turn."""
    turns = [{"role": "assistant", "content": answer["content"]}, {"role": "user", "content": "and?"}]
    return [*BODY["messages"], *turns, *({"role": "user", "content": text} for text in more)]


def test_a_conversation_that_goes_on_has_no_diagnosis() -> None:
    async def scenario(client: AsgiClient) -> None:
        first = await ask(client, None)
        assert first["diagnostics"] is None
        second = await ask(client, first["id"], messages=said(first))
        assert second["diagnostics"] is None
        assert second["usage"]["umbel"] == {"cached_tokens": second["usage"]["umbel"]["cached_tokens"]}
        third = await ask(client, second["id"], messages=said(first, "more"))  # joins the last message of the user
        assert third["diagnostics"] is None
        again = await ask(client, third["id"])  # a part of what was asked
        assert again["diagnostics"] is None

    run(scenario)


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({"system": "You are short."}, "system_changed"),
        ({"system": None}, "system_changed"),
        ({"system": [{"type": "text", "text": "You are brief."}, {"type": "text", "text": "!"}]}, "system_changed"),
        ({"tools": [SEARCH, NOW]}, "tools_changed"),
        ({"tools": [NOW]}, "tools_changed"),
        ({"tools": None, "tool_choice": None}, "tools_changed"),
        ({"tools": [SEARCH | {"description": "Finds texts."}]}, "tools_changed"),
        ({"messages": [{"role": "user", "content": "one two"}]}, "messages_changed"),
    ],
    ids=str,
)
def test_the_part_that_changed_is_named_with_the_tokens_that_it_cost(fields: dict[str, Any], kind: str) -> None:
    async def scenario(client: AsgiClient) -> None:
        first = await ask(client, None)
        second = await ask(client, first["id"], **fields)
        reason = second["diagnostics"]["cache_miss_reason"]
        # All that both prompts begin with was found; the rest of the first one was of no use.
        shared = second["usage"]["umbel"]["cached_tokens"]
        assert shared > 0
        assert reason == {"type": kind, "cache_missed_input_tokens": await count(client) - shared}

    run(scenario)


@pytest.mark.parametrize(
    ("template", "first_part"),
    [("chatml", "tools_changed"), ("llama-2-chat", "tools_changed"), (TOOLS_LATE, "system_changed")],
)
def test_of_several_changes_the_first_one_in_the_prompt_is_named(template: str, first_part: str) -> None:
    """Our plain way to show tools writes them before the system text."""

    async def scenario(client: AsgiClient) -> None:
        first = await ask(client, None)
        fields = {"system": "Other.", "messages": [{"role": "user", "content": "other"}]}
        second = await ask(client, first["id"], **fields)
        assert second["diagnostics"]["cache_miss_reason"]["type"] == "system_changed"
        third = await ask(client, first["id"], tools=[NOW], **fields)
        assert third["diagnostics"]["cache_miss_reason"]["type"] == first_part
        fourth = await ask(client, first["id"], tools=None, tool_choice=None, **fields)
        assert fourth["diagnostics"]["cache_miss_reason"]["type"] == first_part

    run(scenario, template)


def test_the_first_event_of_a_stream_has_the_diagnosis_of_the_whole_answer() -> None:
    async def scenario(client: AsgiClient) -> None:
        first = await ask(client, None)
        changed = {"system": "Other.", "diagnostics": {"previous_message_id": first["id"]}}
        whole = (await client.post("/v1/messages", BODY | changed)).json
        streamed = await client.post("/v1/messages", BODY | changed | {"stream": True})
        name, event = streamed.events[0]
        assert name == "message_start"
        assert event["message"]["diagnostics"] == whole["diagnostics"] != None  # noqa: E711 - a chain
        later = await ask(client, event["message"]["id"], system="Other.")
        assert later["diagnostics"] is None

    run(scenario)


def test_a_change_that_the_prompt_does_not_show_is_none() -> None:
    """chatml has no switch for thinking."""

    async def scenario(client: AsgiClient) -> None:
        first = await ask(client, None)
        assert (await ask(client, first["id"], thinking={"type": "disabled"}))["diagnostics"] is None

    run(scenario)


def test_a_switch_of_the_template_that_changes_the_prompt_is_unavailable() -> None:
    async def scenario(client: AsgiClient) -> None:
        fields = {"tools": None, "tool_choice": None}
        first = await ask(client, None, **fields)
        second = await ask(client, first["id"], thinking={"type": "disabled"}, **fields)
        assert second["diagnostics"] == {"cache_miss_reason": {"type": "unavailable"}}

    run(scenario, SWITCHED)


def test_an_id_of_another_salt_or_of_no_diagnosed_request_is_not_found() -> None:
    async def scenario(client: AsgiClient) -> None:
        plain = (await client.post("/v1/messages", BODY)).json
        other = await ask(client, None, cache_salt="b")
        for unknown in ("msg_none", plain["id"], other["id"]):
            found = await ask(client, unknown)
            assert found["diagnostics"] == {"cache_miss_reason": {"type": "previous_message_not_found"}}
        assert (await ask(client, other["id"], cache_salt="b"))["diagnostics"] is None

    run(scenario)


def test_a_prompt_that_was_evicted_is_no_change_and_the_usage_says_so() -> None:
    async def scenario(client: AsgiClient) -> None:
        first = await ask(client, None)
        assert (await client.post("/flush_cache", {})).status == 200
        second = await ask(client, first["id"])
        assert second["diagnostics"] is None
        assert second["usage"]["umbel"] == {"cached_tokens": 0, "cache_cause": "evicted"}

    run(scenario)


@ul.function(temperature=0)
def shout(s: ul.State, question: str) -> str:
    s += question + ul.gen("answer", max_tokens=2)
    return s["answer"]


def test_another_model_is_named_and_a_program_is_not_compared_with_itself() -> None:
    async def scenario(client: AsgiClient) -> None:
        file = serialise.encode(shout.trace())
        assert (await client.begin("PUT", "/v1/programs/shout?parameter=question", file).ended()).status == 201
        first = await ask(client, None)
        second = await ask(client, first["id"], model="shout")
        counted = {"type": "model_changed", "cache_missed_input_tokens": await count(client)}
        assert second["diagnostics"] == {"cache_miss_reason": counted}
        third = await ask(client, second["id"])
        uncounted = {"type": "model_changed", "cache_missed_input_tokens": 0}  # its prompts are its own
        assert third["diagnostics"] == {"cache_miss_reason": uncounted}
        again = await ask(client, second["id"], model="shout")
        assert again["diagnostics"] == {"cache_miss_reason": {"type": "unavailable"}}

    run(scenario)


def test_a_prompt_that_is_too_large_is_not_compared() -> None:
    async def scenario(client: AsgiClient) -> None:
        client.app.front.exchanges = Exchanges(salt_bytes=4_000)
        first = await ask(client, None)
        large = await ask(client, first["id"], system="a" * 3_500)
        assert large["diagnostics"] == {"cache_miss_reason": {"type": "unavailable"}}
        later = await ask(client, large["id"])
        assert later["diagnostics"] == {"cache_miss_reason": {"type": "previous_message_not_found"}}

    run(scenario)


def test_a_line_that_is_dropped_is_no_change() -> None:
    async def scenario(client: AsgiClient) -> None:
        first = await ask(client, None, system="x-id: 1\nYou are brief.")
        assert (await ask(client, first["id"], system="x-id: 2\nYou are brief."))["diagnostics"] is None

    run(scenario, ignored=IgnoredLines(["x-id:.*"]))


def test_clients_read_the_diagnoses() -> None:
    message = pytest.importorskip("anthropic.types").Message
    response = pytest.importorskip("openai.types.responses").Response

    async def scenario(client: AsgiClient) -> None:
        first = await ask(client, None)
        found = message.model_validate(await ask(client, first["id"], system="Other."))
        assert type(found.diagnostics.cache_miss_reason).__name__ == "CacheMissSystemChanged"
        found = message.model_validate(await ask(client, "msg_none"))
        assert type(found.diagnostics.cache_miss_reason).__name__ == "CacheMissPreviousMessageNotFound"
        answer = await respond(client, "resp_none")
        kind = type(response.model_validate(answer).prompt_cache_diagnostics).__name__
        assert kind == "PromptCacheDiagnosticsComparisonResponseNotFound"
        answer = await respond(client, answer["id"], instructions="Other.")
        kind = type(response.model_validate(answer).prompt_cache_diagnostics).__name__
        assert kind == "PromptCacheDiagnosticsCacheMiss"

    run(scenario)


def test_a_server_that_keeps_no_prefixes_says_so() -> None:
    async def scenario(client: AsgiClient) -> None:
        first = await ask(client, None)
        second = await ask(client, first["id"])
        assert second["usage"]["umbel"] == {"cached_tokens": 0, "cache_cause": "off"}

    run(scenario, radix_cache=False)


def test_several_processes_compare_nothing_and_say_so() -> None:
    async def scenario(client: AsgiClient) -> None:
        first = await ask(client, None)
        body = BODY | {"diagnostics": {"previous_message_id": first["id"]}}
        answer = await client.post("/v1/messages", body)
        assert answer.json["diagnostics"] == {"cache_miss_reason": {"type": "unavailable"}}
        assert answer.headers["umbel-warning"].startswith("diagnostics: 2 processes serve this address")

    run(scenario, workers=2)


# ------------------------------------------------------------------------------------------ responses

TOOL = {"type": "function", "name": "search", "parameters": WORD}
RESPONSE: dict[str, Any] = {
    "model": "oracle",
    "max_output_tokens": 4,
    "temperature": 0,
    "instructions": "You are brief.",
    "input": "one",
    "tools": [TOOL],
    "tool_choice": "none",
}


async def respond(client: AsgiClient, earlier: str | None = None, **fields: Any) -> dict[str, Any]:
    options = {} if earlier is None else {"prompt_cache_options": {"comparison_response_id": earlier}}
    answer = await client.post("/v1/responses", RESPONSE | options | fields)
    assert answer.status == 200, answer.content
    found: dict[str, Any] = answer.json
    return found


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"instructions": "Other."}, "input_changed"),
        ({"input": "other"}, "input_changed"),
        ({"tools": [TOOL | {"description": "Finds."}]}, "tools_changed"),
    ],
    ids=str,
)
def test_a_response_names_the_change(fields: dict[str, Any], reason: str) -> None:
    async def scenario(client: AsgiClient) -> None:
        first = await respond(client)
        assert first["prompt_cache_diagnostics"] is None
        second = await respond(client, first["id"], **fields)
        shared = second["usage"]["input_tokens_details"]["cached_tokens"]
        assert second["prompt_cache_options"]["comparison_response_id"] == first["id"]
        assert second["prompt_cache_diagnostics"] == {
            "type": "cache_miss",
            "reason": reason,
            "cache_missed_tokens": second["usage"]["input_tokens"] - shared,
            "comparison_reusable_tokens": shared,
        }

    run(scenario)


def test_a_response_that_goes_on_hits_or_was_evicted() -> None:
    async def scenario(client: AsgiClient) -> None:
        first = await respond(client)
        turns = [{"role": "user", "content": "one"}, *first["output"], {"role": "user", "content": "two"}]
        second = await respond(client, first["id"], input=turns)
        assert second["prompt_cache_diagnostics"] == {"type": "cache_hit"}
        await client.post("/flush_cache", {})
        third = await respond(client, second["id"], input=turns)
        assert third["prompt_cache_diagnostics"] == {"type": "unavailable", "cause": "evicted"}
        options = {"comparison_response_id": "resp_none"}
        streamed = await client.post("/v1/responses", RESPONSE | {"stream": True, "prompt_cache_options": options})
        responses = [
            event["response"]["prompt_cache_diagnostics"] for _, event in streamed.events if "response" in event
        ]
        assert responses == [None, None, {"type": "comparison_response_not_found"}]

    run(scenario)


def test_an_effort_that_changes_the_prompt_is_named() -> None:
    async def scenario(client: AsgiClient) -> None:
        plain = {"tools": None, "tool_choice": None}
        first = await respond(client, **plain)
        second = await respond(client, first["id"], reasoning={"effort": "none"}, **plain)
        assert second["prompt_cache_diagnostics"]["reason"] == "reasoning_effort_changed"

    run(scenario, SWITCHED)


def test_diagnoses_name_the_engine_of_several_and_why_it_was_chosen() -> None:
    async def scenario(client: AsgiClient) -> None:
        response = await respond(client, (await respond(client))["id"])
        placed = response["prompt_cache_diagnostics"].pop("placed")
        assert response["prompt_cache_diagnostics"] == {"type": "cache_hit"}
        length = response["usage"]["input_tokens"]
        said = "a part of its prompt is cached there, or will be"
        assert placed == {"replica": placed["replica"], "reason": said, "cached_tokens": length}
        message = await ask(client, (await ask(client, None))["id"])
        assert set(message["usage"]["umbel"]["placed"]) == {"replica", "reason", "cached_tokens"}
        unasked = await client.post("/v1/messages", BODY)
        assert "placed" not in unasked.json["usage"]["umbel"], "it is for those who ask"
        plain = {"text": "one", "sampling_params": {"max_new_tokens": 1}}
        native = await client.post("/generate", plain)
        assert native.json["meta_info"]["umbel"]["placed"]["replica"] in (0, 1)

    run(scenario, replicas=2)
