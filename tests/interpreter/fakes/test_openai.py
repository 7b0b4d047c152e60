"""FakeOpenAI: it answers, counts and refuses as the provider does."""

import base64
from typing import Any

import pytest
from umbel.interpreter.backends.echo import Echo
from umbel.interpreter.backends.hosted.conversation import CONTINUE_TEXT, CONTINUE_TURN
from umbel.lang.protocol import Usage
from umbel.testing import LLAMA_CPP, REASONING, VLLM, FakeOpenAI, OpenAIFeatures

from .wire import chat, chat_body, complete, events, post

PET = {
    "type": "object",
    "properties": {"kind": {"type": "string", "enum": ["cat", "dog"]}},
    "required": ["kind"],
    "additionalProperties": False,
}


def form(schema: object, strict: bool = True) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "pet", "strict": strict, "schema": schema}}


def test_a_chat_answer_is_the_scripts() -> None:
    with FakeOpenAI({"France?": "Paris."}) as server:
        answer = chat(server, "The capital of France?")
        assert answer["choices"][0]["message"] == {"role": "assistant", "content": "Paris.", "refusal": None}
        assert answer["choices"][0]["finish_reason"] == "stop"
        assert server.calls == 1
        assert server.requests[0].text == (
            "<|im_start|>user\nThe capital of France?<|im_end|>\n<|im_start|>assistant\n"
        )
        assert server.usage == Usage(answer["usage"]["prompt_tokens"], 0, 2, 1)


def test_stops_and_max_tokens_cut_as_echo_cuts() -> None:
    with FakeOpenAI(lambda text: "one two three four") as server:
        cut = chat(server, max_tokens=2)["choices"][0]
        assert (cut["message"]["content"], cut["finish_reason"]) == ("one two", "length")
        stopped = chat(server, stop=["o th"])["choices"][0]
        assert (stopped["message"]["content"], stopped["finish_reason"]) == ("one tw", "stop")


def test_a_stream_tells_the_same_in_pieces_and_its_cost_at_the_end() -> None:
    with FakeOpenAI(lambda text: "one zwölf three") as server:
        body = chat_body(stream=True, stream_options={"include_usage": True}, n=2)
        *told, usage, done = events(post(server, "/v1/chat/completions", body))
        texts = {0: "", 1: ""}
        for each in told:
            for choice in each["choices"]:
                texts[choice["index"]] += choice["delta"].get("content", "")
        assert texts == {0: "one zwölf three", 1: "one zwölf three"}
        assert [c["finish_reason"] for each in told[-2:] for c in each["choices"]] == ["stop", "stop"]
        assert usage["usage"]["completion_tokens"] == 6
        assert done == "[DONE]"


def test_what_was_sent_before_is_cached() -> None:
    with FakeOpenAI(lambda text: "yes") as server:
        first = chat(server, "a long story")["usage"]
        second = chat(server, "a long story")["usage"]
        assert first["prompt_tokens_details"]["cached_tokens"] == 0
        assert second["prompt_tokens_details"]["cached_tokens"] == second["prompt_tokens"] - 1


def test_continuation_requests_are_the_text_that_they_quote() -> None:
    with FakeOpenAI(lambda text: " Bond") as server:
        turns = [
            {"role": "user", "content": "Who?"},
            {"role": "assistant", "content": "James"},
            {"role": "user", "content": CONTINUE_TURN},
        ]
        post(server, "/v1/chat/completions", {"model": "gpt-4o", "messages": turns})
        texts = [{"role": "system", "content": CONTINUE_TEXT}, {"role": "user", "content": "Once upon"}]
        post(server, "/v1/chat/completions", {"model": "gpt-4o", "messages": texts})
        assert [asked.text for asked in server.requests] == [
            "<|im_start|>user\nWho?<|im_end|>\n<|im_start|>assistant\nJames",
            "Once upon",
        ]


def test_an_open_turn_is_continued_where_the_server_can() -> None:
    turns = [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "James"}]
    body = {"model": "gpt-4o", "messages": turns, "continue_final_message": True, "add_generation_prompt": False}
    with FakeOpenAI(lambda text: " Bond", features=VLLM) as server:
        post(server, "/v1/chat/completions", body)
        assert server.requests[0].text.endswith("<|im_start|>assistant\nJames")
    with FakeOpenAI(lambda text: " Bond") as server:
        assert "Unrecognized request argument" in post(server, "/v1/chat/completions", body).text


def test_a_completion_goes_on_with_its_prompt() -> None:
    with FakeOpenAI(lambda text: " two three", scores={" yes": -0.25}) as server:
        told = complete(server, "one", echo=True, logprobs=1, max_tokens=4)["choices"][0]
        assert told["text"] == "one two three"
        assert told["logprobs"]["tokens"] == ["one", " two", " three"]
        assert told["logprobs"]["text_offset"] == [0, 3, 7]
        assert told["logprobs"]["token_logprobs"][0] is None
        scored = complete(server, "Is it so? yes", echo=True, logprobs=0, max_tokens=0)["choices"][0]
        assert scored["logprobs"]["token_logprobs"][-1] == -0.25
        assert scored["text"] == "Is it so? yes"


def test_logprobs_of_a_chat_are_those_of_echo() -> None:
    with FakeOpenAI(lambda text: "one two") as server:
        tokens = chat(server, logprobs=True, top_logprobs=2)["choices"][0]["logprobs"]["content"]
        assert [token["token"] for token in tokens] == ["one", " two"]
        assert tokens[0]["top_logprobs"][0]["logprob"] == tokens[0]["logprob"]


def test_pictures_are_one_mark_in_the_text() -> None:
    url = "data:image/png;base64," + base64.b64encode(b"picture").decode()
    parts = [{"type": "text", "text": "See "}, {"type": "image_url", "image_url": {"url": url}}]
    body = {"model": "gpt-4o", "messages": [{"role": "user", "content": parts}]}
    with FakeOpenAI(lambda text: "a cat") as server:
        assert post(server, "/v1/chat/completions", body).status_code == 200
        assert "See <image>" in server.requests[0].text


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"temperature": 3}, "temperature"),
        ({"top_k": 3}, "Unrecognized request argument supplied: top_k"),
        ({"stop": ["a", "b", "c", "d", "e"]}, "maximum length 4"),
        ({"model": "gpt-9"}, "does not exist"),
        ({"messages": []}, "messages"),
        ({"stream_options": {}}, "only allowed when 'stream' is enabled"),
        ({"top_logprobs": 3}, "only allowed when 'logprobs' is enabled"),
        ({"response_format": {"type": "json_object"}}, "must contain the word 'json'"),
        ({"response_format": form({"type": "array"})}, 'got \'type: "array"'),
        ({"response_format": form({"type": "object", "properties": {}})}, "additionalProperties"),
        ({"response_format": form({**PET, "required": []})}, "Missing 'kind'"),
        ({"response_format": form({**PET, "allOf": []})}, "'allOf' is not permitted"),
    ],
)
def test_what_the_provider_refuses_costs_nothing(fields: dict[str, object], words: str) -> None:
    with FakeOpenAI(lambda text: "yes") as server:
        response = post(server, "/v1/chat/completions", chat_body(**fields))
        assert response.status_code in (400, 404)
        assert words in response.json()["error"]["message"]
        assert server.calls == 0
        assert len(server.requests) == 1


@pytest.mark.parametrize(
    ("features", "fields"),
    [
        (REASONING, {"stop": "a"}),
        (REASONING, {"max_tokens": 3}),
        (REASONING, {"temperature": 0}),
        (REASONING, {"logprobs": True}),
        (OpenAIFeatures(response_format=False), {"response_format": form(PET)}),
        (OpenAIFeatures(chat=False), {}),
    ],
)
def test_features_that_are_missing_are_refused(features: OpenAIFeatures, fields: dict[str, object]) -> None:
    with FakeOpenAI(lambda text: "yes", features=features) as server:
        assert post(server, "/v1/chat/completions", chat_body(**fields)).status_code in (400, 404)


def test_a_wrong_key_is_refused_as_the_provider_does_it() -> None:
    with FakeOpenAI(lambda text: "yes") as server:
        response = post(server, "/v1/chat/completions", chat_body(), key="sk-other")
        assert response.status_code == 401
        assert response.json()["error"]["code"] == "invalid_api_key"
        assert len(server.requests) == 0


def test_a_schema_holds_the_script() -> None:
    with FakeOpenAI(['{"kind": "cat"}', "dog"]) as server:
        told = [chat(server, response_format=form(PET))["choices"][0]["message"]["content"] for _ in range(2)]
        assert told == ['{"kind": "cat"}', '{"kind": "dog"}'], "a bare answer is put into an object of one member"


def test_a_script_that_breaks_the_schema_is_told_to_the_test() -> None:
    with (
        pytest.raises(AssertionError, match="the script breaks the form"),
        FakeOpenAI(["cow"]) as server,
    ):
        assert post(server, "/v1/chat/completions", chat_body(response_format=form(PET))).status_code == 500


def test_other_servers_have_other_words_for_constraints() -> None:
    with FakeOpenAI(lambda text: "12", features=VLLM) as server:
        told = chat(server, structured_outputs={"regex": "[0-9]+"}, stop="2")["choices"][0]
        assert (told["message"]["content"], told["stop_reason"]) == ("1", "2")
        assert chat(server, structured_outputs={"choice": ["12", "13"]})["choices"][0]["message"]["content"] == "12"
    with FakeOpenAI(lambda text: "no", features=LLAMA_CPP) as server:
        assert chat(server, grammar='root ::= "yes" | "no"')["choices"][0]["message"]["content"] == "no"
        assert chat(server, grammar="root ::= [a-z]+")["choices"][0]["message"]["content"] == "no"
        assert post(server, "/v1/chat/completions", chat_body(grammar="root ::= [a-z")).status_code == 400


def test_one_script_answers_for_echo_too() -> None:
    def script(text: str) -> str:
        return f" {len(text)}"

    with FakeOpenAI(script) as server:
        echo = Echo(script)
        text = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
        assert [chat(server)["choices"][0]["message"]["content"]] == echo.answer(text, (), 1)
