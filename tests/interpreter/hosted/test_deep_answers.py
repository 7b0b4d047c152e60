"""Answers of providers that are JSON, and so deep that no parser goes through them."""

import httpx2
import pytest
import umbel as ul
from umbel.interpreter.backends.hosted.session import Environment

DEEP = b'{"a":' * 100_000 + b"1" + b"}" * 100_000
EVENTS = {"content-type": "text/event-stream"}
JSON = {"content-type": "application/json"}


class DeepWire(httpx2.AsyncBaseTransport):
    """Answers everything with deep JSON: as a list of models, as an answer, or as an event of one."""

    def __init__(self, *, lists: bool) -> None:
        self.lists = lists

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        if request.method == "GET" and not self.lists:
            return httpx2.Response(404, headers=JSON, content=b"{}", request=request)
        if b'"stream":true' in request.content or b'"stream": true' in request.content:
            return httpx2.Response(200, headers=EVENTS, content=b"data: " + DEEP + b"\n\n", request=request)
        return httpx2.Response(200, headers=JSON, content=DEEP, request=request)


@ul.function
def ask(s: ul.State) -> None:
    s += ul.user("hello") + ul.assistant(ul.gen("x", max_tokens=4))
    s.sync()


def openai(*, lists: bool) -> ul.OpenAI:
    around = Environment(wire=DeepWire(lists=lists))
    return ul.OpenAI("m", api_key="k", base_url="http://a.example.org/v1", max_retries=0, environment=around)


def anthropic() -> ul.Anthropic:
    around = Environment(wire=DeepWire(lists=True))
    return ul.Anthropic("claude-haiku-4-5", api_key="k", max_retries=0, environment=around)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "make", [lambda: openai(lists=True), lambda: openai(lists=False), anthropic], ids=["list", "answer", "anthropic"]
)
def test_a_deep_answer_is_an_error_of_the_backend(make, stream: bool) -> None:
    with pytest.raises(ul.BackendError) as caught:
        for _ in ask.run(backend=make(), stream=stream).text_iter():
            pass
    assert len(str(caught.value)) < 2000
