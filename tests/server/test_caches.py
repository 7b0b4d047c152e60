"""Explicit caching over HTTP, in OpenAI's dialect and by names: the figures of published examples."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from umbel.server.limits import HttpLimits
from umbel.srt.core.instruments import VirtualClock
from umbel.srt.in_process import LocalBackend

from .client import AsgiClient, served

pytestmark = pytest.mark.filterwarnings("ignore::umbel.lang.chat_template.TemplateWarning")
CONTROL = {"type": "ephemeral"}
POINT = {"mode": "explicit"}
TOOL = {"type": "function", "function": {"name": "weather", "description": "Tells the weather."}}


def run(scenario: Callable[[AsgiClient, VirtualClock], Awaitable[None]], *, minimum: int = 1_024) -> None:
    clock = VirtualClock()
    backend = LocalBackend(clock=clock, pool_tokens=16_384, context_length=8_192, debug={"check_every_step": False})

    async def whole() -> None:
        async with served(backend, limits=HttpLimits(cache_minimum=minimum)) as client:
            await asyncio.wait_for(scenario(client, clock), 120)  # type: ignore[arg-type]

    asyncio.run(whole())


def text(words: str, **marks: Any) -> dict[str, Any]:
    return {"type": "text", "text": words, **marks}


async def ask(client: AsgiClient, *messages: tuple[str, list[dict[str, Any]]], **fields: Any) -> tuple[int, int, int]:
    """Asks for one token → (created, read, reused)."""
    turns = [{"role": role, "content": blocks} for role, blocks in messages]
    body = {"model": "oracle", "messages": turns, "max_tokens": 1, "temperature": 0, **fields}
    answer = await client.post("/v1/chat/completions", body)
    assert answer.status == 200, answer.content
    details = answer.json["usage"]["prompt_tokens_details"]
    assert details["cache_write_tokens"] == details["cache_creation_input_tokens"]
    return details["cache_write_tokens"], details["cache_read_input_tokens"], details["cached_tokens"]


async def words_of(client: AsgiClient, tokens: int, *before: dict[str, Any]) -> str:
    """Returns a text after which a mark covers exactly so many tokens, those of the blocks before it among them.

    A mark covers what stays the same whatever follows: here a long word, and not the space after it."""
    length = tokens
    for _ in range(3):
        words = "w" * length + " "
        blocks = [*before, text(words, cache_control=CONTROL)]
        created, read, _ = await ask(client, ("system", blocks), cache_salt=f"measure-{length}")
        if created + read == tokens:
            return words
        length += tokens - created - read
    raise AssertionError("no text has so many tokens")


def test_what_a_mark_creates_the_next_question_reads() -> None:
    async def scenario(client: AsgiClient, clock: VirtualClock) -> None:
        system = await words_of(client, 1_605)
        for question, created, read in (("What is this?", 1_605, 0), ("And that?", 0, 1_605)):
            turns = [("system", [text(system, cache_control=CONTROL)]), ("user", [text(question)])]
            assert (await ask(client, *turns))[:2] == (created, read)

    run(scenario)


def test_a_longer_prefix_reads_the_shorter_one_and_creates_the_rest() -> None:
    async def scenario(client: AsgiClient, clock: VirtualClock) -> None:
        first = await words_of(client, 1_200)
        more = await words_of(client, 1_500, text(first))
        assert (await ask(client, ("system", [text(first, cache_control=CONTROL)])))[:2] == (1_200, 0)
        grown = [text(first), text(more, cache_control=CONTROL)]
        assert (await ask(client, ("system", grown)))[:2] == (300, 1_200)

    run(scenario)


@pytest.mark.parametrize(
    ("apart", "kind", "read"), [(20, "control", True), (21, "control", False), (40, "point", True)]
)
def test_how_far_a_mark_looks_back(apart: int, kind: str, read: bool) -> None:
    mark = {"cache_control": CONTROL} if kind == "control" else {"prompt_cache_breakpoint": POINT}

    async def scenario(client: AsgiClient, clock: VirtualClock) -> None:
        head = text("head " * 40)
        assert (await ask(client, ("user", [head | mark])))[0] > 0
        between = [text(f"block {number:02d} ") for number in range(apart - 1)]
        found = await ask(client, ("user", [head, *between, text("the end ") | mark]))
        assert (found[1] > 0) == read
        assert found[2] > 0  # the tokens are reused anyway

    run(scenario, minimum=64)


def test_of_five_marks_the_last_four_count_and_a_header_warns() -> None:
    async def scenario(client: AsgiClient, clock: VirtualClock) -> None:
        blocks = [text(f"{number}{number}{number}{number} " * 20, cache_control=CONTROL) for number in range(5)]
        body = {"model": "oracle", "max_tokens": 1, "messages": [{"role": "user", "content": blocks}]}
        answer = await client.post("/v1/chat/completions", body)
        assert answer.headers["umbel-warning"] == "5 cache marks; the last 4 count"
        assert (await ask(client, ("user", [text("0000 " * 20, cache_control=CONTROL)])))[1] == 0
        assert (await ask(client, ("user", [text("0000 " * 20), text("1111 " * 20, cache_control=CONTROL)])))[1] > 0

    run(scenario, minimum=64)


def test_another_tool_is_another_prefix() -> None:
    async def scenario(client: AsgiClient, clock: VirtualClock) -> None:
        turn = ("user", [text("user " * 40, cache_control=CONTROL)])
        assert (await ask(client, turn, tools=[TOOL], tool_choice="none"))[0] > 0
        assert (await ask(client, turn, tools=[TOOL], tool_choice="none"))[1] > 0
        changed = {"type": "function", "function": TOOL["function"] | {"description": "Tells the Weather."}}
        assert (await ask(client, turn, tools=[changed], tool_choice="none"))[1] == 0

    run(scenario, minimum=64)


@pytest.mark.parametrize(
    ("mark", "fields", "seconds"),
    [
        ({"cache_control": CONTROL}, {}, 300),
        ({"cache_control": CONTROL | {"ttl": "1h"}}, {}, 3_600),
        ({"prompt_cache_breakpoint": POINT}, {}, 1_800),
        ({}, {"cache_control": CONTROL}, 300),
        ({}, {"prompt_cache_options": {"mode": "implicit"}}, 1_800),
    ],
    ids=["5m", "1h", "30m", "whole", "implicit"],
)
def test_a_use_begins_the_time_anew(mark: dict[str, Any], fields: dict[str, Any], seconds: float) -> None:
    async def scenario(client: AsgiClient, clock: VirtualClock) -> None:
        turn = ("user", [text("user " * 40) | mark])
        assert (await ask(client, turn, **fields))[0] > 0
        for _ in range(2):
            clock.advance(seconds - 1)
            created, read, _ = await ask(client, turn, **fields)
            assert created == 0 < read
        clock.advance(seconds + 1)
        created, read, _ = await ask(client, turn, **fields)
        assert read == 0 < created

    run(scenario, minimum=64)


def test_marks_below_the_minimum_keep_nothing() -> None:
    async def scenario(client: AsgiClient, clock: VirtualClock) -> None:
        for _ in range(2):
            assert (await ask(client, ("user", [text("short", cache_control=CONTROL)])))[:2] == (0, 0)

    run(scenario)


def test_explicit_options_without_marks_keep_nothing() -> None:
    async def scenario(client: AsgiClient, clock: VirtualClock) -> None:
        for _ in range(2):
            fields = {"prompt_cache_options": {"mode": "explicit"}}
            assert (await ask(client, ("user", [text("user " * 40)]), **fields))[:2] == (0, 0)

    run(scenario, minimum=64)


def test_marks_of_two_kinds_are_refused() -> None:
    async def scenario(client: AsgiClient, clock: VirtualClock) -> None:
        blocks = [text("a", cache_control=CONTROL), text("b", prompt_cache_breakpoint=POINT)]
        body = {"model": "oracle", "messages": [{"role": "user", "content": blocks}]}
        refused = await client.post("/v1/chat/completions", body)
        assert (refused.status, refused.json["error"]["param"]) == (400, "cache_control")

    run(scenario)


def test_responses_have_breakpoints() -> None:
    async def scenario(client: AsgiClient, clock: VirtualClock) -> None:
        block = {"type": "input_text", "text": "user " * 40, "prompt_cache_breakpoint": {}}
        body = {"model": "oracle", "input": [{"role": "user", "content": [block]}], "max_output_tokens": 1}
        details = [(await client.post("/v1/responses", body)).json["usage"]["input_tokens_details"] for _ in range(2)]
        created = details[0]["cache_write_tokens"]
        assert created > 64
        assert [(each["cache_write_tokens"], each["cache_read_input_tokens"]) for each in details] == [
            (created, 0),
            (0, created),
        ]
        assert details[1]["cached_tokens"] >= created
        events = (await client.post("/v1/responses", body | {"stream": True})).events
        last = events[-1][1]["response"]["usage"]["input_tokens_details"]
        assert (last["cache_write_tokens"], last["cache_read_input_tokens"]) == (0, created)

    run(scenario, minimum=64)


# ------------------------------------------------------------------------------------------------- by name

TURNS = [{"role": "system", "content": "rule " * 60}]


def test_a_cache_by_name_from_its_creation_to_its_end() -> None:
    async def scenario(client: AsgiClient, clock: VirtualClock) -> None:
        body = {"model": "oracle", "name": "manual", "messages": TURNS, "ttl": "600s"}
        made = await client.post("/v1/caches", body)
        assert made.status == 201, made.content
        tokens = made.json["tokens"]
        assert made.json["usage"]["prompt_tokens_details"]["cache_write_tokens"] == tokens
        taken = await client.post("/v1/caches", body)
        assert (taken.status, taken.json["error"]["param"]) == (400, "name")
        clock.advance(100)
        (listed,) = (await client.get("/v1/caches")).json["data"]
        assert (listed["name"], listed["ttl"], listed["seconds_left"], listed["age"]) == ("manual", 600, 500, 100)
        created, read, _ = await ask(client, ("user", [text("And?")]), cached_content="manual")
        assert (created, read) == (0, tokens)
        assert (await client.get("/v1/caches/manual")).json["seconds_left"] == 600
        extended = await client.begin("PATCH", "/v1/caches/manual", {"ttl": 1_200}).ended()
        assert extended.json["seconds_left"] == 1_200
        assert (await client.begin("DELETE", "/v1/caches/manual").ended()).json["deleted"]
        for gone in (
            await client.get("/v1/caches/manual"),
            await client.begin("DELETE", "/v1/caches/manual").ended(),
            await client.post(
                "/v1/chat/completions", {"model": "oracle", "messages": TURNS, "cached_content": "manual"}
            ),
        ):
            assert (gone.status, gone.json["error"]["code"]) == (404, "cache_not_found")

    run(scenario, minimum=64)


def test_errors_do_not_count_the_messages_of_a_cache() -> None:
    async def scenario(client: AsgiClient, clock: VirtualClock) -> None:
        body = {"model": "oracle", "name": "manual", "messages": TURNS, "ttl": 60}
        assert (await client.post("/v1/caches", body)).status == 201
        url = {"type": "image_url", "image_url": {"url": "http://x/y.png"}}
        asked = {"model": "oracle", "messages": [{"role": "user", "content": [url]}], "cached_content": "manual"}
        error = (await client.post("/v1/chat/completions", asked)).json["error"]
        assert error["param"] == "messages[0].content[0].image_url.url"

    run(scenario, minimum=64)


def test_a_cache_ends_with_its_time_and_is_unknown_to_other_salts() -> None:
    async def scenario(client: AsgiClient, clock: VirtualClock) -> None:
        body = {"model": "oracle", "messages": TURNS, "ttl": 60, "cache_salt": "a"}
        name = (await client.post("/v1/caches", body)).json["name"]
        assert (await client.get(f"/v1/caches/{name}?cache_salt=a")).status == 200
        for salt in ("", "?cache_salt=b"):
            assert (await client.get(f"/v1/caches/{name}{salt}")).status == 404
            assert (await client.get(f"/v1/caches{salt}")).json["data"] == []
        clock.advance(61)
        assert (await client.get(f"/v1/caches/{name}?cache_salt=a")).status == 404

    run(scenario, minimum=64)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"ttl": 0}, "ttl"),
        ({"ttl": "9000s"}, "ttl"),
        ({"ttl": 3_601}, "ttl"),
        ({"name": "a b"}, "name"),
        ({"name": ""}, "name"),
        ({"contents": []}, "contents"),
        ({"messages": [{"role": "user", "content": "short"}]}, None),
    ],
    ids=str,
)
def test_a_cache_that_cannot_be_kept_is_refused(fields: dict[str, Any], param: str | None) -> None:
    async def scenario(client: AsgiClient, clock: VirtualClock) -> None:
        refused = await client.post("/v1/caches", {"model": "oracle", "messages": TURNS} | fields)
        assert refused.status == 400, refused.content
        assert param is None or refused.json["error"]["param"] == param

    run(scenario, minimum=64)
