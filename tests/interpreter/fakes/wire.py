"""A client that says exactly what a test writes: no SDK between."""

import json
from collections.abc import Mapping
from typing import Any

import openai
from umbel.interpreter.backends.hosted.transport import http_library
from umbel.interpreter.fakes.provider import FakeProvider
from umbel.testing import FakeAnthropic

http = http_library(openai)  # httpx or httpx2, as the SDK is written for

PATIENCE = 20.0  # seconds; no answer takes that long

Json = dict[str, Any]  # Any: JSON


def post(server: FakeProvider, path: str, body: object, key: str | None = None) -> http.Response:
    return http.post(server.address + path, json=body, headers=headers(server, key), timeout=PATIENCE)


def headers(server: FakeProvider, key: str | None = None) -> Mapping[str, str]:
    given = server.api_key if key is None else key
    name, value = ("x-api-key", given) if isinstance(server, FakeAnthropic) else ("authorization", f"Bearer {given}")
    return {name: value}


def chat(server: FakeProvider, said: str = "hi", **fields: object) -> Json:
    """A chat request of one turn that must be answered."""
    return answered(post(server, "/v1/chat/completions", chat_body(said, **fields)))


def chat_body(said: str = "hi", **fields: object) -> Json:
    return {"model": "gpt-4o", "messages": [{"role": "user", "content": said}], **fields}


def complete(server: FakeProvider, prompt: str, **fields: object) -> Json:
    body = {"model": "gpt-3.5-turbo-instruct", "prompt": prompt, **fields}
    return answered(post(server, "/v1/completions", body))


def message(server: FakeProvider, said: str = "hi", **fields: object) -> Json:
    """A Messages request of one turn that must be answered."""
    return answered(post(server, "/v1/messages", message_body(said, **fields)))


def message_body(said: str = "hi", **fields: object) -> Json:
    messages = [{"role": "user", "content": said}]
    return {"model": "claude-haiku-4-5", "max_tokens": 100, "messages": messages, **fields}


def answered(response: http.Response) -> Json:
    assert response.status_code == 200, response.text
    result: Json = response.json()
    return result


def events(response: http.Response) -> list[Json | str]:
    """The data of a stream's events; "[DONE]" as it is."""
    assert response.headers["content-type"].startswith("text/event-stream")
    data = [line.removeprefix("data: ") for line in response.text.split("\n") if line.startswith("data: ")]
    return [each if each == "[DONE]" else json.loads(each) for each in data]
