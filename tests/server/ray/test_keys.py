"""The routing key of a request has what placement needs of it."""

import base64
import json
from typing import Any

import msgspec
import pytest
from umbel.lang.programs import RunProgram
from umbel.lang.prompt import Text, media_of
from umbel.lang.protocol import Control, GenRequest, Hint, Origin, ReadCaches, Release, Tokenize
from umbel.server.ray.keys import MOST_KEY, UNIT, USUAL_WORK, Reach, RoutingKey, routing_key


def key(path: str, body: Any, **headers: str) -> RoutingKey:
    return routing_key("POST", path, headers, json.dumps(body).encode())


def sent(message: Any) -> RoutingKey:
    return key("/runtime", {"message": base64.b64encode(msgspec.msgpack.encode(message)).decode()})


def common(one: RoutingKey, other: RoutingKey) -> int:
    """Units at the beginning of both."""
    pairs = zip(memoryview(one.units).cast("i"), memoryview(other.units).cast("i"), strict=False)
    return next((place for place, (a, b) in enumerate(pairs) if a != b), min(len(one.units), len(other.units)) // UNIT)


LONG = "A manual that all questions begin with. " * 50


def test_prompts_that_begin_alike_have_keys_that_begin_alike() -> None:
    one = key("/v1/completions", {"model": "m", "prompt": LONG + "And you?"})
    other = key("/v1/completions", {"model": "m", "prompt": LONG + "What else?"})
    assert one.salt == other.salt
    assert len(LONG) // UNIT - 1 <= common(one, other) <= len(LONG) // UNIT + 1


def test_a_conversation_that_goes_on_begins_with_its_key() -> None:
    turns = [{"role": "system", "content": LONG}, {"role": "user", "content": "Hello!"}]
    more = [*turns, {"role": "assistant", "content": "Hi."}, {"role": "user", "content": "How are you?"}]
    one = key("/v1/chat/completions", {"model": "m", "messages": turns})
    other = key("/v1/chat/completions", {"max_tokens": 3, "messages": more, "model": "m"})
    assert common(one, other) == len(one.units) // UNIT


def test_tools_and_system_come_first_as_in_prompts() -> None:
    tools = [{"name": "f", "input_schema": {}}]
    one = key("/v1/messages", {"messages": [{"role": "user", "content": "a"}], "tools": tools, "system": LONG})
    other = key("/v1/messages", {"system": LONG, "tools": tools, "messages": [{"role": "user", "content": "b"}]})
    assert common(one, other) > len(LONG) // UNIT


@pytest.mark.parametrize(
    ("headers", "body"),
    [
        ({"authorization": "Bearer two"}, {}),
        ({"x-api-key": "two"}, {}),
        ({}, {"cache_salt": "a"}),
        ({}, {"cache_salt": ""}),
        ({}, {"model": "adapter"}),
    ],
)
def test_requests_that_share_no_cache_have_different_salts(headers: dict[str, str], body: Any) -> None:
    whole = {"model": "m", "prompt": "hello there"}
    assert key("/v1/completions", {**whole, **body}, **headers).salt != key("/v1/completions", whole).salt


def test_a_group_is_that_of_its_caller() -> None:
    body = {"model": "m", "prompt": "hello", "umbel": {"fork_group": "f", "program": "p"}}
    one, other = key("/v1/completions", body), key("/v1/completions", body, authorization="Bearer two")
    assert one.group
    assert one.program
    assert one.group != other.group
    assert one.program != other.program
    assert key("/v1/completions", {"model": "m", "prompt": "hello"}).group == ""


@pytest.mark.parametrize(
    ("path", "body", "work"),
    [
        ("/v1/completions", {"prompt": "a prompt", "max_tokens": 7}, 7),
        ("/v1/chat/completions", {"messages": [{"role": "user"}], "max_completion_tokens": 8}, 8),
        ("/v1/responses", {"input": "a text", "max_output_tokens": 9}, 9),
        ("/generate", {"text": "a text", "sampling_params": {"max_new_tokens": 10}}, 10),
        ("/generate", {"input_ids": [1, 2, 3]}, USUAL_WORK),
        ("/tokenize", {"prompt": "a prompt"}, 0),
    ],
)
def test_the_work_is_what_a_body_asks_for(path: str, body: Any, work: int) -> None:
    found = key(path, body)
    assert found.work == work
    assert bool(found.units) == bool(work)


def test_a_picture_counts_as_its_digest() -> None:
    def body(data: bytes) -> Any:
        url = "data:image/png;base64," + base64.b64encode(data).decode()
        return {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]}

    one, other = bytes(range(256)) * 4000, bytes(reversed(range(256))) * 4000
    keys = [key("/v1/chat/completions", body(data)) for data in (one, one, other)]
    assert keys[0] == keys[1] != keys[2]
    assert len(keys[0].units) < 300


def test_keys_are_bounded() -> None:
    assert len(key("/v1/completions", {"prompt": "word " * MOST_KEY}).units) <= MOST_KEY


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'{"prompt": 3, "cache_salt": 5}', b"\xff\xff", b"[" * 100_000])
def test_a_body_that_cannot_be_read_has_an_empty_key(body: bytes) -> None:
    assert routing_key("POST", "/v1/completions", {}, body) == RoutingKey()


@pytest.mark.parametrize("message", [b"", b"no msgpack"])
def test_a_message_that_cannot_be_read_has_an_empty_key(message: bytes) -> None:
    assert key("/runtime", {"message": base64.b64encode(message).decode()}) == RoutingKey()


def test_messages_of_the_runtime_have_keys() -> None:
    origin = Origin(salt="s", fork_group="f", program_id="p")
    first, second = (GenRequest(str(n), (Text(LONG), Text(f"{n} or so")), origin=origin) for n in range(2))
    one, other = sent(first), sent(second)
    assert common(one, other) >= len(LONG) // UNIT
    assert one.group == other.group != ""
    assert one.program
    assert one.work == first.sampling.max_tokens
    hint = sent(Hint("h", first.prompt, origin))
    assert (hint.units, hint.work) == (one.units, 0)
    assert sent(Tokenize("t", first.prompt, origin)) == RoutingKey()  # no call of the engine
    picture = media_of("image", b"pixels" * 10_000)
    assert len(sent(GenRequest("g", (picture,))).units) == 64


def test_a_program_that_is_sent_is_known_by_its_graph_and_its_arguments() -> None:
    one, same, other = (sent(RunProgram("r", "d" * 64, arguments=each)) for each in (b"a" * 8, b"a" * 8, b"b" * 8))
    assert one == same
    assert common(one, other) == 64 // UNIT


@pytest.mark.parametrize(
    ("method", "path", "reach"),
    [
        ("POST", "/flush_cache", Reach.ALL),
        ("GET", "/metrics", Reach.ALL),
        ("GET", "/ui/state", Reach.NONE),
        ("POST", "/v1/caches", Reach.NONE),
        ("GET", "/v1/caches/x", Reach.NONE),
        ("PUT", "/v1/programs/judge", Reach.NONE),
        ("DELETE", "/v1/programs/judge", Reach.NONE),
        ("GET", "/v1/programs/judge", Reach.ONE),
        ("POST", "/v1/programs/judge/runs", Reach.ONE),
        ("POST", "/abort", Reach.NONE),
        ("DELETE", "/hints/x", Reach.NONE),
        ("GET", "/v1/models", Reach.ONE),
    ],
)
def test_what_one_replica_alone_would_keep_goes_to_none(method: str, path: str, reach: Reach) -> None:
    assert routing_key(method, path, {}, b"{}").reach is reach


def test_messages_that_change_what_replicas_keep_go_to_all_of_them_or_none() -> None:
    assert sent(Control("c", "flush_cache")).reach is Reach.ALL
    assert sent(Release("r")).reach is Reach.ALL
    assert sent(Control("c", "info")).reach is Reach.ONE
    assert sent(ReadCaches("c")).reach is Reach.NONE
