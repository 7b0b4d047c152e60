"""`GET /v1/models`: facts of a model that its clients act on."""

import asyncio

import pytest
from umbel.srt.in_process import LocalBackend

from ..client import served


@pytest.mark.parametrize(("template", "told"), [(None, "plain"), ("chatml", "model")])
def test_a_model_says_whether_it_has_a_chat_template_of_its_own(template: str | None, told: str) -> None:
    async def scenario() -> None:
        async with served(LocalBackend(chat_template=template)) as client:
            (listed,) = (await client.get("/v1/models")).json["data"]
            assert listed["umbel"]["template"] == told
            assert (await client.get("/v1/models/oracle")).json == listed

    asyncio.run(scenario())


def test_the_name_on_the_command_line_is_answered_and_not_listed() -> None:
    async def scenario() -> None:
        async with served(alias="org/repo") as client:
            assert [listed["id"] for listed in (await client.get("/v1/models")).json["data"]] == ["oracle"]
            assert (await client.get("/v1/models/org/repo")).json["id"] == "oracle"
            for name in ("org/repo", "oracle"):
                answer = await client.post("/v1/completions", {"model": name, "prompt": "a", "max_tokens": 1})
                assert (answer.status, answer.json["model"]) == (200, name)

    asyncio.run(scenario())


def test_a_name_that_is_given_to_clients_stands_in_place_of_that_on_the_command_line() -> None:
    async def scenario() -> None:
        async with served(names=("small",), alias="default") as client:
            assert (await client.get("/v1/models/default")).status == 404

    asyncio.run(scenario())


def test_an_adapter_goes_before_the_name_on_the_command_line() -> None:
    async def scenario() -> None:
        async with served(LocalBackend(adapters={"sql": "of the oracle"}), alias="sql") as client:
            assert (await client.get("/v1/models/sql")).json["parent"] == "oracle"

    asyncio.run(scenario())


def test_a_model_is_found_by_a_name_with_a_slash() -> None:
    async def scenario() -> None:
        async with served(names=("org/repo:Q4_K_M",)) as client:
            (listed,) = (await client.get("/v1/models")).json["data"]
            assert listed["id"] == "org/repo:Q4_K_M"
            assert (await client.get("/v1/models/org/repo:Q4_K_M")).json == listed
            assert (await client.get("/v1/models/org/none")).status == 404

    asyncio.run(scenario())
