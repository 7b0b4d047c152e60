"""`/v1/embeddings` and `/v1/rerank` on the oracle."""

import asyncio
import base64
import struct
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from ..client import AsgiClient, served

EMBED = {"model": "oracle", "input": ["hello", "world", "hello"]}
RANK = {
    "model": "oracle",
    "query": "which?",
    "documents": ["one", {"text": "two"}, "three"],
    "template": "{query}{text}:",
}


def run(scenario: Callable[[AsgiClient], Awaitable[None]]) -> None:
    async def whole() -> None:
        async with served() as client:
            await asyncio.wait_for(scenario(client), 60)  # type: ignore[arg-type]

    asyncio.run(whole())


def test_vectors_come_in_order_as_numbers_or_base64() -> None:
    async def scenario(client: AsgiClient) -> None:
        floats = await client.post("/v1/embeddings", EMBED)
        assert floats.status == 200, floats.json
        vectors = [entry["embedding"] for entry in floats.json["data"]]
        assert [entry["index"] for entry in floats.json["data"]] == [0, 1, 2]
        assert vectors[0] == vectors[2] != vectors[1]
        assert floats.json["usage"]["prompt_tokens"] == floats.json["usage"]["total_tokens"] == 18, "with BOS"
        packed = await client.post("/v1/embeddings", EMBED | {"encoding_format": "base64"})
        decoded = [struct.unpack("<8f", base64.b64decode(entry["embedding"])) for entry in packed.json["data"]]
        assert [list(vector) for vector in decoded] == vectors
        assert packed.json["usage"]["cached_tokens"] == 15, "all but the last token of each"

    run(scenario)


def test_one_text_and_its_tokens_are_the_same() -> None:
    async def scenario(client: AsgiClient) -> None:
        given: list[Any] = ["xyz", ["xyz"], [120, 121, 122], [[120, 121, 122]], [256, 120, 121, 122]]
        answers = [await client.post("/v1/embeddings", EMBED | {"input": each, "dimensions": 3}) for each in given]
        vectors = [answer.json["data"][0]["embedding"] for answer in answers]
        assert all(vector == vectors[0] for vector in vectors)
        assert len(vectors[0]) == 3

    run(scenario)


def test_documents_come_by_relevance() -> None:
    async def scenario(client: AsgiClient) -> None:
        whole = (await client.post("/v1/rerank", RANK | {"return_documents": True})).json
        scores = [result["relevance_score"] for result in whole["results"]]
        assert scores == sorted(scores, reverse=True)
        texts = {result["index"]: result["document"] for result in whole["results"]}
        assert texts == {0: {"text": "one"}, 1: {"text": "two"}, 2: {"text": "three"}}
        told = RANK | {"instruction": "Be.", "template": "{instruction}{query}{text}"}
        assert len((await client.post("/v1/rerank", told)).json["results"]) == 3
        best = (await client.post("/v1/rerank", RANK | {"top_n": 1})).json["results"]
        assert best == [{name: whole["results"][0][name] for name in ("index", "relevance_score")}]

    run(scenario)


@pytest.mark.parametrize(
    ("path", "fields", "status", "said"),
    [
        ("embeddings", {"model": "other"}, 404, "not served"),
        ("embeddings", {"input": []}, 400, "the list is empty"),
        ("embeddings", {"input": ["a", ""]}, 400, "a text is empty"),
        ("embeddings", {"input": ["a", 1]}, 400, "not several of them"),
        ("embeddings", {"input": [99999]}, 400, "outside the vocabulary"),
        ("embeddings", {"input": "x" * 5000}, 400, "text 0 has"),
        ("embeddings", {"dimensions": 9}, 400, "vectors of 8 numbers"),
        ("embeddings", {"encoding_format": "int8"}, 400, "encoding_format"),
        ("embeddings", {"temperature": 1}, 400, "temperature"),
        ("rerank", {"documents": []}, 400, "documents"),
        ("rerank", {"documents": ["a", ""]}, 400, "documents"),
        ("rerank", {"template": "{text}"}, 400, "must hold {query} and {text}"),
        ("rerank", {"instruction": "Be."}, 400, "must hold {query} and {instruction} and {text}"),
        ("rerank", {"template": None}, 400, "no chat template with the roles"),
        ("rerank", {"top_n": 0}, 400, "top_n"),
    ],
    ids=range(15),
)
def test_mistakes_are_named(path: str, fields: dict[str, Any], status: int, said: str) -> None:
    async def scenario(client: AsgiClient) -> None:
        answer = await client.post(f"/v1/{path}", (EMBED if path == "embeddings" else RANK) | fields)
        assert answer.status == status, answer.json
        assert said in answer.json["error"]["message"]

    run(scenario)
