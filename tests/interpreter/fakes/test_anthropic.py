"""FakeAnthropic: it answers, counts, caches and refuses as the provider does."""

import pytest
from umbel.testing import AnthropicFeatures, FakeAnthropic

from .wire import events, message, message_body, post

BREAK = {"type": "ephemeral"}
SCHEMA = {"type": "object", "properties": {"kind": {"enum": ["cat", "dog"]}}, "required": ["kind"]}


def text(words: str, *, cached: bool = False) -> dict[str, object]:
    return {"type": "text", "text": words} | ({"cache_control": BREAK} if cached else {})


def test_a_message_is_the_scripts() -> None:
    with FakeAnthropic({"France?": "Paris."}) as server:
        answer = message(server, "The capital of France?", system="Be brief.")
        assert answer["content"] == [{"type": "text", "text": "Paris."}]
        assert (answer["stop_reason"], answer["stop_sequence"]) == ("end_turn", None)
        assert server.requests[0].text == (
            "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nThe capital of France?<|im_end|>\n"
            "<|im_start|>assistant\n"
        )
        assert answer["usage"]["input_tokens"] == server.usage.prompt_tokens


def test_how_an_answer_ended_is_told() -> None:
    with FakeAnthropic(lambda prompt: "one two three") as server:
        stopped = message(server, stop_sequences=["two"])
        assert (stopped["content"][0]["text"], stopped["stop_sequence"]) == ("one ", "two")
        assert stopped["stop_reason"] == "stop_sequence"
        assert message(server, max_tokens=1)["stop_reason"] == "max_tokens"


def test_a_stream_has_the_providers_events() -> None:
    with FakeAnthropic(lambda prompt: "eins zwölf") as server:
        told = events(post(server, "/v1/messages", message_body(stream=True)))
        assert [each["type"] for each in told] == [
            "message_start",
            "content_block_start",
            "ping",
            "content_block_delta",
            "content_block_delta",
            "content_block_stop",
            "message_delta",
            "message_stop",
        ]
        assert "".join(each["delta"]["text"] for each in told[3:5]) == "eins zwölf"
        assert told[-2]["usage"] == {"output_tokens": 2}


def test_thoughts_come_first_and_can_be_switched_off() -> None:
    with FakeAnthropic(lambda prompt: "yes", features=AnthropicFeatures(thinks=True)) as server:
        assert [block["type"] for block in message(server)["content"]] == ["thinking", "text"]
        assert [block["type"] for block in message(server, thinking={"type": "disabled"})["content"]] == ["text"]


def test_a_begun_answer_is_continued() -> None:
    turns = [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "James"}]
    with FakeAnthropic(lambda prompt: " Bond") as server:
        assert message(server, messages=turns)["content"][0]["text"] == " Bond"
        assert server.requests[0].text.endswith("<|im_start|>assistant\nJames")
    with FakeAnthropic(lambda prompt: " Bond", features=AnthropicFeatures(prefill=False)) as server:
        assert (
            "does not support assistant message prefill"
            in post(server, "/v1/messages", message_body(messages=turns)).text
        )


def test_a_prefix_is_stored_where_it_is_said_and_read_from_there() -> None:
    def ask(server: FakeAnthropic, question: str) -> tuple[int, int]:
        told = message(
            server, system=[text("A long story.", cached=True)], messages=[{"role": "user", "content": question}]
        )
        usage = told["usage"]
        return usage["cache_creation_input_tokens"], usage["cache_read_input_tokens"]

    with FakeAnthropic(lambda prompt: "yes") as server:
        written, read = ask(server, "first")
        assert (written > 0, read) == (True, 0)
        assert ask(server, "second") == (0, written)
        assert (server.usage.cached_tokens, server.usage.cache_write_tokens) == (written, written)
    with FakeAnthropic(lambda prompt: "yes", features=AnthropicFeatures(cache_minimum=1024)) as server:
        assert ask(server, "first") == (0, 0)


def test_a_longer_prefix_reads_the_shorter_one_and_writes_the_rest() -> None:
    with FakeAnthropic(lambda prompt: "yes") as server:
        first = message(server, messages=[{"role": "user", "content": [text("one", cached=True)]}])["usage"]
        turns = [
            {"role": "user", "content": [text("one")]},
            {"role": "assistant", "content": "yes"},
            {"role": "user", "content": [text("two", cached=True)]},
        ]
        second = message(server, messages=turns)["usage"]
        assert second["cache_read_input_tokens"] == first["cache_creation_input_tokens"] > 0
        assert second["cache_creation_input_tokens"] > 0


def test_a_schema_and_a_tool_hold_the_script() -> None:
    config = {"format": {"type": "json_schema", "schema": SCHEMA}}
    tool = {"name": "pet", "input_schema": SCHEMA}
    with FakeAnthropic(lambda prompt: "cat") as server:
        assert message(server, output_config=config)["content"][0]["text"] == '{"kind": "cat"}'
        used = message(server, tools=[tool], tool_choice={"type": "tool", "name": "pet"})
        assert used["content"][0]["input"] == {"kind": "cat"}
        assert used["stop_reason"] == "tool_use"


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"stop_sequences": ["\n"]}, "each stop sequence must contain non-whitespace"),
        ({"temperature": 1.5}, "temperature"),
        ({"temperature": 0.5, "top_p": 0.5}, "cannot both be specified"),
        ({"top_x": 1}, "top_x: Extra inputs are not permitted"),
        ({"model": "claude-0"}, "model: claude-0"),
        ({"messages": []}, "at least one message"),
        ({"messages": [{"role": "assistant", "content": "hi"}]}, 'must use the "user" role'),
        ({"messages": [{"role": "user", "content": ""}]}, "must have non-empty content"),
        ({"messages": [{"role": "user", "content": [text(" ")]}]}, "must contain non-whitespace text"),
        (
            {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b "}]},
            "cannot end with trailing whitespace",
        ),
        ({"system": [text(str(i), cached=True) for i in range(5)]}, "A maximum of 4 blocks"),
    ],
)
def test_what_the_provider_refuses_costs_nothing(fields: dict[str, object], words: str) -> None:
    with FakeAnthropic(lambda prompt: "yes") as server:
        response = post(server, "/v1/messages", message_body(**fields))
        assert response.status_code in (400, 404)
        assert words in response.json()["error"]["message"]
        assert server.calls == 0


def test_a_wrong_key_is_refused_as_the_provider_does_it() -> None:
    with FakeAnthropic(lambda prompt: "yes") as server:
        response = post(server, "/v1/messages", message_body(), key="sk-other")
        assert (response.status_code, response.json()["error"]["type"]) == (401, "authentication_error")
