"""`/v1/completions` on the oracle."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from umbel.server.cost import Recorder, read_records

from ..client import Answered, AsgiClient, served

BODY = {"model": "oracle", "prompt": "hello world", "max_tokens": 6, "temperature": 0}


def run(scenario: Callable[[AsgiClient], Awaitable[None]], **front: Any) -> None:
    async def whole() -> None:
        async with served(**front) as client:
            await asyncio.wait_for(scenario(client), 60)  # type: ignore[arg-type]

    asyncio.run(whole())


def joined(answer: Answered) -> dict[int, dict[str, Any]]:
    """The choices of a stream, put together as clients do."""
    assert answer.events[-1] == ("", "[DONE]")
    found: dict[int, dict[str, Any]] = {}
    for _, event in answer.events[:-1]:
        for choice in event["choices"]:
            whole = found.setdefault(choice["index"], {"index": choice["index"], "text": "", "logprobs": None})
            assert whole.get("finish_reason") is None, "nothing comes after the end"
            whole["text"] += choice["text"]
            whole["finish_reason"] = choice["finish_reason"]
            if choice["logprobs"] is not None:
                known = whole["logprobs"] or {name: [] for name in choice["logprobs"]}
                whole["logprobs"] = {name: values + choice["logprobs"][name] for name, values in known.items()}
    return found


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"n": 3},
        {"echo": True},
        {"prompt": ["one", "two"], "n": 2},
        {"logprobs": 2},
        {"logprobs": 0, "echo": True},
        {"logprobs": 2, "echo": True, "n": 2, "prompt": ["one", "two"]},
        {"stop": ["g"]},
        {"regex": "[ab]{3}"},
        {"prompt": [104, 101]},
        {"max_tokens": 0, "echo": True, "logprobs": 1},
    ],
    ids=str,
)
def test_a_stream_and_a_whole_answer_are_equal(fields: dict[str, Any]) -> None:
    async def scenario(client: AsgiClient) -> None:
        whole = await client.post("/v1/completions", BODY | fields)
        assert whole.status == 200, whole.json
        options = {"stream": True, "stream_options": {"include_usage": True}}
        streamed = await client.post("/v1/completions", BODY | fields | options)
        assert streamed.status == 200, streamed.content
        choices = joined(streamed)
        assert [choices[index] for index in sorted(choices)] == [
            {name: choice[name] for name in ("index", "text", "logprobs", "finish_reason")}
            for choice in whole.json["choices"]
        ]
        usage = streamed.events[-2][1]
        assert usage["choices"] == []
        for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
            assert usage["usage"][name] == whole.json["usage"][name]
        assert all(event["usage"] is None for _, event in streamed.events[:-2])

    run(scenario)


@pytest.mark.parametrize("stream", [False, True])
def test_an_echo_with_log_probabilities_is_recorded_once(stream: bool, tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "run.jsonl")

    async def scenario(client: AsgiClient) -> None:
        length = {"max_tokens": 3, "ignore_eos": True}
        body = BODY | {"prompt": ["hello", "a world"], "echo": True, "logprobs": 1} | length
        options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
        answer = await client.post("/v1/completions", body | options)
        usage = (answer.events[-2][1] if stream else answer.json)["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] == 0

    run(scenario, recorder=recorder)
    recorder.close()
    records = read_records(tmp_path / "run.jsonl")
    assert sorted((record.prompt, record.completion, record.reused) for record in records) == [(6, 3, 0), (8, 3, 0)]


def test_the_log_probabilities_of_a_prompt_have_a_place_each() -> None:
    async def scenario(client: AsgiClient) -> None:
        body = BODY | {"echo": True, "logprobs": 2, "max_tokens": 2}
        (choice,) = (await client.post("/v1/completions", body)).json["choices"]
        lists = choice["logprobs"]
        assert "".join(lists["tokens"]) == choice["text"]
        assert lists["token_logprobs"][0] is None
        assert lists["top_logprobs"][0] is None
        for offset, token in zip(lists["text_offset"], lists["tokens"], strict=True):
            assert choice["text"][offset : offset + len(token)] == token
        for place in range(1, len(lists["tokens"])):
            top = lists["top_logprobs"][place]
            assert top[lists["tokens"][place]] == lists["token_logprobs"][place]
            assert 2 <= len(top) <= 3

    run(scenario)


def test_token_ids_are_echoed_as_their_text() -> None:
    """Tools that measure models send ids, and ask for the log-probabilities of their own prompt."""

    async def scenario(client: AsgiClient) -> None:
        asked = {"echo": True, "logprobs": 1, "max_tokens": 1}
        text = (await client.post("/v1/completions", BODY | asked | {"prompt": "h☂ the"})).json["choices"]
        ids = [104, *"☂".encode(), 260]
        (bare,) = (await client.post("/v1/completions", BODY | asked | {"prompt": ids})).json["choices"]
        assert bare["text"] == text[0]["text"]
        assert bare["logprobs"] == {name: values[1:] for name, values in text[0]["logprobs"].items()}
        assert len(bare["logprobs"]["token_logprobs"]) == len(ids) + 1, "an entry for each id, and for the new token"
        begun = (await client.post("/v1/completions", BODY | asked | {"prompt": [[256, *ids]]})).json["choices"]
        assert begun[0]["text"] == "<s>" + text[0]["text"]
        assert begun[0]["logprobs"]["tokens"] == ["<s>", *text[0]["logprobs"]["tokens"][1:]]
        assert begun[0]["logprobs"]["text_offset"][1:4] == [3, 4, 4]
        wrong = await client.post("/v1/completions", BODY | {"prompt": [999]})
        assert (wrong.status, wrong.json["error"]["param"]) == (400, "prompt")

    run(scenario)


def test_parts_of_a_character_have_their_bytes_and_its_place() -> None:
    async def scenario(client: AsgiClient) -> None:
        body = BODY | {"prompt": "a☂b", "echo": True, "logprobs": 2, "max_tokens": 0}
        (choice,) = (await client.post("/v1/completions", body)).json["choices"]
        lists = choice["logprobs"]
        assert lists["tokens"] == ["", "a", r"bytes:\xe2", r"bytes:\x98", r"bytes:\x82", "b"]
        assert lists["text_offset"] == [0, 0, 1, 1, 1, 2]
        assert all(token in top for token, top in zip(lists["tokens"][1:], lists["top_logprobs"][1:], strict=True))

    run(scenario)


def test_a_stream_tells_the_token_that_ended_it() -> None:
    """It has no text, so no chunk comes with it."""

    async def scenario(client: AsgiClient) -> None:
        body = BODY | {"logprobs": 1, "max_tokens": 64, "logit_bias": {"257": 3}, "seed": 3, "temperature": 1}
        (whole,) = (await client.post("/v1/completions", body)).json["choices"]
        assert (whole["finish_reason"], whole["logprobs"]["tokens"][-1]) == ("stop", "</s>")
        assert joined(await client.post("/v1/completions", body | {"stream": True}))[0] == whole

    run(scenario)


def test_the_beginning_of_sequence_comes_once() -> None:
    async def scenario(client: AsgiClient) -> None:
        plain = (await client.post("/v1/completions", BODY)).json
        assert plain["usage"]["prompt_tokens"] == 1 + len("hello world")
        begun = (await client.post("/v1/completions", BODY | {"prompt": "<s>hello world"})).json
        assert begun["usage"]["prompt_tokens"] == plain["usage"]["prompt_tokens"]
        assert begun["choices"][0]["text"] == plain["choices"][0]["text"]

    run(scenario)


def test_cached_tokens_are_a_number() -> None:
    async def scenario(client: AsgiClient) -> None:
        for cached in (0, 11):
            usage = (await client.post("/v1/completions", BODY)).json["usage"]
            assert usage["prompt_tokens_details"]["cached_tokens"] == cached

    run(scenario)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"suffix": "x"}, "suffix"),
        ({"best_of": 2}, "best_of"),
        ({"n": 17}, "n"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"temperature": "0"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"stop": ""}, "stop"),
        ({"logprobs": 21}, "logprobs"),
        ({"logit_bias": {"a": 1}}, "logit_bias"),
        ({"logit_bias": {"1": 101}}, "logit_bias"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": ["a"] * 1025}, "prompt"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"umbel": {"timeout": 0}}, "umbel.timeout"),
        ({"umbel": {"x": 0}}, "umbel.x"),
        ({"cache_salt": "a b"}, "cache_salt"),
        ({"min_tokens": 7}, "min_tokens"),
        ({"prompt": {"text": "a"}}, "prompt"),
        ({"unknown": None}, "unknown"),
    ],
    ids=str,
)
def test_what_is_wrong_is_named(fields: dict[str, Any], param: str) -> None:
    async def scenario(client: AsgiClient) -> None:
        answer = await client.post("/v1/completions", BODY | fields)
        assert answer.status == 400, answer.json
        assert answer.json["error"]["param"].partition("[")[0] == param, answer.json

    run(scenario)


def test_what_gateways_add_at_its_default_is_taken() -> None:
    async def scenario(client: AsgiClient) -> None:
        added = {"no_stop_trim": False, "skip_special_tokens": True, "return_hidden_states": False, "user": "someone"}
        assert (await client.post("/v1/completions", BODY | added | {"ignore_eos": False, "echo": False})).status == 200
        refused = await client.post("/v1/completions", BODY | {"return_hidden_states": True})
        assert refused.json["error"]["code"] == "unsupported_parameter"

    run(scenario)


def test_a_client_that_hangs_up_frees_the_engine() -> None:
    async def scenario(client: AsgiClient) -> None:
        live = client.begin("POST", "/v1/completions", BODY | {"max_tokens": 2000, "ignore_eos": True, "stream": True})
        await live.until(b"data")
        await live.hang_up()
        assert client.app.front.in_flight == 0
        after = await client.post("/v1/completions", BODY)
        assert after.status == 200
        assert client.app.front.backend.engine.scheduler.idle

    run(scenario)


def test_another_salt_reuses_nothing() -> None:
    async def scenario(client: AsgiClient) -> None:
        for salt, cached in (("a", 0), ("b", 0), ("a", 11)):
            usage = (await client.post("/v1/completions", BODY | {"cache_salt": salt})).json["usage"]
            assert usage["prompt_tokens_details"]["cached_tokens"] == cached

    run(scenario)
