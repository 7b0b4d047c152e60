"""Adapters as models: listed, chosen by `model`, and computed by every dialect."""

import asyncio
from typing import Any

import pytest
import umbel as ul
from umbel.server.front import Front
from umbel.srt.in_process import LocalBackend

from .client import served

NAMES = {"sql": "of the oracle", "law": "of the oracle"}
ASKED = {"role": "user", "content": "select the best umbel"}
ROUTES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [ASKED], "max_tokens": 4},
    "/v1/completions": {"prompt": "select", "max_tokens": 4},
    "/v1/responses": {"input": "select", "max_output_tokens": 4},
    "/v1/messages": {"messages": [ASKED], "max_tokens": 4},
    "/generate": {"text": "select", "sampling_params": {"max_new_tokens": 4}},
    "/score": {"text": "select", "choices": ["a", "b"]},
    "/hints": {"text": "select"},
    "/v1/caches": {"messages": [{**ASKED, "content": "select the best umbel " * 200}]},
}


def recorded(backend: LocalBackend) -> list[Any]:
    """Requests that reach the backend, from now on."""
    seen: list[Any] = []
    generate, score, hint, caches = backend.generate, backend.score, backend.hint, backend.caches

    def note(function: Any) -> Any:
        def noted(request: Any) -> Any:
            seen.append(request)
            return function(request)

        return noted

    for name, function in (("generate", generate), ("score", score), ("hint", hint), ("caches", caches)):
        setattr(backend, name, note(function))
    return seen


def test_every_route_computes_with_the_adapter_that_its_model_names() -> None:
    async def scenario() -> None:
        backend = LocalBackend(adapters=NAMES, chat_template="chatml", pool_tokens=16_384, context_length=8_192)
        async with served(backend) as client:
            seen = recorded(backend)
            for route, body in ROUTES.items():
                for model, adapter in (("sql", "sql"), ("oracle", "")):
                    answer = await client.post(route, {**body, "model": model})
                    assert answer.status in (200, 201), answer.content
                    assert seen.pop().origin.adapter == adapter, route
            assert not seen

    asyncio.run(scenario())


def test_adapters_are_listed_as_models_with_their_parent() -> None:
    async def scenario() -> None:
        async with served(LocalBackend(adapters=NAMES)) as client:
            entries = (await client.get("/v1/models")).json["data"]
            assert [(each["id"], each["parent"], each["umbel"]["adapter"]) for each in entries] == [
                ("oracle", None, ""),
                ("sql", "oracle", "sql"),
                ("law", "oracle", "law"),
            ]
            assert (await client.get("/v1/models/law")).json["parent"] == "oracle"
            missing = await client.post("/v1/completions", {"model": "poems", "prompt": "a"})
            assert missing.status == 404
            assert "'sql'" in missing.json["error"]["message"]

    asyncio.run(scenario())


def test_an_adapter_with_the_name_of_the_model_is_refused_at_the_start() -> None:
    async def scenario() -> None:
        backend = LocalBackend(adapters=NAMES)
        try:
            with pytest.raises(ul.ParameterError, match="'sql' is a name of the model itself; give the"):
                await Front(backend, names=("sql",)).start()
        finally:
            await backend.close()

    asyncio.run(scenario())
