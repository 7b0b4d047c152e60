"""FakeGemini and FakeOllama: what they refuse, and what their clients make of a provider that fails."""

import asyncio
import json
import re
import traceback
import urllib.error
import urllib.request
from typing import Any

import pytest
import umbel as ul
from umbel.interpreter.backends.hosted.session import Environment
from umbel.interpreter.fakes.provider import FakeProvider
from umbel.lang.protocol import Backend
from umbel.testing import FakeGemini, FakeOllama, Fault

ANSWER = "Zwölf Boxkämpfer jagen Víktor."
AGAIN = [Fault.RATE_LIMIT_AND_WHEN, Fault.RATE_LIMIT, Fault.SERVER_ERROR, Fault.UNAVAILABLE, Fault.DISCONNECT]
PICTURE = bytes.fromhex("89504e470d0a1a0a")  # nothing decodes it
LEGAL = [Fault.SPLIT_UTF8, Fault.SPLIT_JSON]
BROKEN = [Fault.CUT, Fault.ERROR_EVENT, Fault.NO_DONE, Fault.HTML]


@ul.function
def ask(s: ul.State) -> None:
    s += ul.user("Sentence?") + ul.assistant(ul.gen("answer", max_tokens=64))


async def at_once(seconds: float) -> None:
    await asyncio.sleep(0)


def served(name: str, *faults: Any) -> FakeProvider:
    fake = FakeGemini if name == "gemini" else FakeOllama
    return fake(lambda text: ANSWER, faults=list(faults), retry_after="0")


def backend_of(name: str, server: Any, **options: Any) -> Backend:
    environment = Environment(sleep=at_once, variables={})
    if name == "gemini":
        key = server.api_key
        return ul.Gemini("gemini-2.5-flash", base_url=server.base_url, api_key=key, environment=environment, **options)
    return ul.Ollama("llama3.2", base_url=server.base_url, environment=environment, **options)


def test_gemini_takes_whole_numbers_for_top_k_as_its_client_sends_them() -> None:
    with FakeGemini(lambda text: ANSWER) as server:
        assert ask.run(backend=backend_of("gemini", server), top_k=40)["answer"] == ANSWER
        assert server.requests[0].body["generationConfig"]["topK"] == 40


@pytest.mark.parametrize("spelling", ["mime_type", "mimeType"])
def test_gemini_sees_pictures(spelling: str) -> None:
    @ul.function
    def look(s: ul.State) -> None:
        s += ul.user(ul.image(PICTURE) + "What is it?") + ul.assistant(ul.gen("answer", max_tokens=64))

    with FakeGemini(lambda text: ANSWER) as server:
        assert look.run(backend=backend_of("gemini", server))["answer"] == ANSWER
        # Versions of Google's client write one or the other.
        body = json.loads(re.sub('"mime(_t|T)ype"', f'"{spelling}"', json.dumps(server.requests[0].body)))
        assert list(body["contents"][0]["parts"][0]["inlineData"]) == ["data", spelling]
        path = "/v1beta/models/gemini-2.5-flash:generateContent"
        headers = {"x-goog-api-key": server.api_key, "content-type": "application/json"}
        request = urllib.request.Request(server.base_url + path, json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=60) as answer:
            assert json.loads(answer.read())["candidates"][0]["content"]["parts"][0]["text"] == ANSWER


@pytest.mark.parametrize("name", ["gemini", "ollama"])
@pytest.mark.parametrize("fault", [*AGAIN, *LEGAL])
@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.sampled(4)
def test_a_fault_before_an_answer_is_tried_again_and_pieces_are_put_together(
    name: str, fault: Fault, streams: bool
) -> None:
    with served(name, fault) as server:
        state = ask.run(backend=backend_of(name, server), stream=streams)
        assert state["answer"] == ANSWER
        assert len(server.requests) == (2 if fault in AGAIN else 1)


@pytest.mark.parametrize("name", ["gemini", "ollama"])
@pytest.mark.parametrize("fault", BROKEN)
@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.sampled(4)
def test_a_broken_answer_is_an_error_and_no_shorter_answer(name: str, fault: Fault, streams: bool) -> None:
    """What stays broken at every try; a provider's own key is in its words, and in none of ours."""
    with served(name, fault, fault, fault, fault) as server:
        with pytest.raises(ul.UmbelError) as raised:
            _ = ask.run(backend=backend_of(name, server), stream=streams)["answer"]
        assert server.api_key not in "".join(traceback.format_exception(raised.value))


def post(url: str, body: Any, headers: dict[str, str]) -> tuple[int, Any]:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json", **headers})
    try:
        with urllib.request.urlopen(request, timeout=20) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


CALLED = {"role": "model", "parts": [{"functionCall": {"name": "f", "args": {}}}]}
ANSWERED = {"role": "user", "parts": [{"functionResponse": {"name": "f", "response": {"output": "1"}}}]}
HI = {"role": "user", "parts": [{"text": "Hi"}]}


@pytest.mark.parametrize(
    ("model", "body", "status", "words"),
    [
        ("gemini-2.5-flash", {"contents": [HI]}, 200, ""),
        ("gemini-2.5-flash", {"contents": [HI, CALLED, ANSWERED]}, 200, ""),
        ("gemini-9", {"contents": [HI]}, 404, "is not found"),
        ("gemini-2.5-flash", {"contents": [HI], "stop": ["a"]}, 400, "unknown field `stop`"),
        ("gemini-2.5-flash", {"contents": [HI], "generationConfig": {"topK": 0}}, 400, "topK"),
        ("gemini-2.5-flash", {"contents": [HI], "generationConfig": {"topK": 1.5}}, 400, "topK"),
        ("gemini-2.5-flash", {"contents": [HI], "generationConfig": {"topK": 40.0}}, 200, ""),
        ("gemini-2.5-flash", {"contents": [HI, CALLED]}, 400, "number of function response parts"),
        ("gemini-2.5-flash", {"contents": [HI, ANSWERED]}, 400, "number of function response parts"),
        ("gemini-2.5-flash", {"contents": [{"role": "user", "parts": [{"text": ""}]}]}, 400, "empty text"),
        ("gemini-3-pro-preview", {"contents": [HI, CALLED, ANSWERED]}, 400, "missing a thought_signature"),
    ],
)
def test_gemini_refuses_what_google_does(model: str, body: Any, status: int, words: str) -> None:
    with FakeGemini(lambda text: "Hello.") as server:
        url = f"{server.base_url}/v1beta/models/{model}:generateContent"
        told = post(url, body, {"x-goog-api-key": server.api_key})
        assert (told[0], words in json.dumps(told[1])) == (status, True), told
        assert post(url, body, {"x-goog-api-key": "another"})[0] == 401


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        ({}, 200, '"done": true'),
        ({"model": "qwen3"}, 404, "model 'qwen3' not found"),
        ({"think": True}, 400, "does not support thinking"),
        ({"options": {"top_k": -1}}, 400, "top_k"),
        ({"format": "yaml"}, 400, "format"),
        ({"messages": [{"role": "tool", "content": "1"}]}, 400, "has no tool_name"),
        ({"messages": [{"role": "user", "content": "?", "images": ["AAAA"]}]}, 400, "image"),
    ],
)
def test_ollama_refuses_what_ollama_does(body: Any, status: int, words: str) -> None:
    with FakeOllama(lambda text: "Hello.") as server:
        given = {"model": "llama3.2", "messages": [{"role": "user", "content": "Hi"}], "stream": False, **body}
        told = post(f"{server.base_url}/api/chat", given, {})
        assert (told[0], words in json.dumps(told[1])) == (status, True), told
        with urllib.request.urlopen(f"{server.base_url}/api/tags", timeout=20) as answer:
            assert json.loads(answer.read())["models"][0]["name"] == "llama3.2"


def test_wrong_abilities_are_named() -> None:
    with pytest.raises(ul.ParameterError, match="abilities"):
        FakeOllama([], abilities=["sight"])
