"""Embeddings of a hosted model, by the OpenAI dialect."""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import umbel as ul
from umbel.interpreter.fakes.server import Exchange, HttpRequest
from umbel.testing import FakeAnthropic, FakeOpenAI, FakeSGLang

MODEL = "text-embedding-3-small"
Body = dict[str, Any]  # Any: JSON


def right(body: Body) -> tuple[int, object]:
    """Vectors that begin with the length of each text, in another order."""
    entries = [
        {"object": "embedding", "index": place, "embedding": [len(text), 0.5, *[0] * (body.get("dimensions", 4) - 2)]}
        for place, text in enumerate(body["input"])
    ]
    return 200, {"object": "list", "data": entries[::-1], "usage": {"prompt_tokens": 7, "total_tokens": 7}}


class Embeddings(FakeOpenAI):
    """A server that answers `/v1/embeddings`, too."""

    def __init__(self, answers: Callable[[Body], tuple[int, object]] = right) -> None:
        super().__init__([], models=[MODEL])
        self.answers = answers
        self.bodies: list[Body] = []

    async def _respond(self, request: HttpRequest, exchange: Exchange) -> None:
        if request.path != "/v1/embeddings":
            await super()._respond(request, exchange)
            return
        self.bodies.append(msgspec.json.decode(request.body))
        status, answer = self.answers(self.bodies[-1])
        await exchange.respond(status, {"content-type": "application/json"}, msgspec.json.encode(answer))


def backend(server: FakeOpenAI, **options: Any) -> ul.OpenAI:  # Any: of the constructor
    return ul.OpenAI(MODEL, base_url=server.base_url, api_key=server.api_key, max_retries=0, **options)


def test_vectors_come_in_the_order_of_the_texts() -> None:
    with Embeddings() as server:
        found = ul.embed(["a", "bbb"], dimensions=3, backend=backend(server, extra_body={"user": "me"}))
        assert found == [[1.0, 0.5, 0.0], [3.0, 0.5, 0.0]]
        assert server.bodies == [
            {"model": MODEL, "input": ["a", "bbb"], "encoding_format": "float", "dimensions": 3, "user": "me"}
        ]


def test_an_endpoint_of_the_dialect_gives_the_same() -> None:
    with Embeddings() as server:
        named = ul.RuntimeEndpoint(server.address, server="openai", model=MODEL, api_key=server.api_key)
        assert ul.embed(["a", "bbb"], backend=named) == ul.embed(["a", "bbb"], backend=backend(server))
        with pytest.raises(ul.CapabilityError, match="is no reranker"):
            ul.rerank("q", ["a"], backend=named)


def test_backends_without_embeddings_are_refused_by_name() -> None:
    with FakeAnthropic([]) as server:
        claude = ul.Anthropic("claude-sonnet-4-5", base_url=server.base_url, api_key=server.api_key)
        with pytest.raises(ul.CapabilityError, match=r"anthropic claude-sonnet-4-5 makes no embeddings; .*ul\.OpenAI"):
            ul.embed(["a"], backend=claude)
    with FakeSGLang([]) as sglang:
        endpoint = ul.RuntimeEndpoint(sglang.address, api_key=sglang.api_key)
        for call in (lambda: ul.embed(["a"], backend=endpoint), lambda: ul.rerank("q", ["a"], backend=endpoint)):
            with pytest.raises(ul.CapabilityError, match=r"sglang .* (makes no embeddings|is no reranker)"):
                call()


def test_it_is_no_reranker() -> None:
    with Embeddings() as server, pytest.raises(ul.CapabilityError, match="is no reranker"):
        ul.rerank("q", ["a"], backend=backend(server))


@pytest.mark.parametrize(
    "answer",
    [
        {"data": [{"index": 0, "embedding": [0.1]}]},
        {"data": [{"index": 0, "embedding": [0.1]}, {"index": 0, "embedding": [0.1]}]},
        {"data": [{"index": 0, "embedding": []}, {"index": 1, "embedding": [0.1]}]},
        {"data": [{"index": 0, "embedding": [1e300]}, {"index": 1, "embedding": [0.1]}]},
        {"data": "no"},
        [],
    ],
    ids=range(6),
)
def test_answers_that_are_none_are_errors(answer: object) -> None:
    with Embeddings(lambda _: (200, answer)) as server, pytest.raises(ul.BackendError, match=f"openai {MODEL}"):
        ul.embed(["a", "b"], backend=backend(server))


def test_a_model_without_embeddings_is_named_by_its_server() -> None:
    refusal = 404, {"error": {"message": "this model has no embeddings", "type": "invalid_request_error"}}
    with Embeddings(lambda _: refusal) as server, pytest.raises(ul.RequestError, match="no embeddings"):
        ul.embed(["a"], backend=backend(server))
