"""Odd bodies, listed and drawn from the OpenAPI document: no answer of 5xx, no death, and errors that name the field.

The short forms are for every run. Together the nightly ones are more than 10,000 requests.
"""

import asyncio
import itertools
import json
from collections import Counter
from collections.abc import Iterable
from typing import Any

import hypothesis
import msgspec
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from umbel.server.app import ENDPOINTS
from umbel.server.http import Endpoint

from .client import Answered, AsgiClient, served
from .document import DOCUMENT, problem
from .odd_bodies import (
    GOOD,
    LARGE,
    LIMITS,
    VALUES,
    odd_requests,
    places,
    prepared,
    small,
    some_requests,
    url,
    whole_bodies,
    with_value,
)

LEAST_DRAWN = 4_000
TAKING = [each for each in ENDPOINTS if each.body is not None]
OF_NO_FIELD = ("the body", "prompt is too long: ")  # about all of it; the latter are Anthropic's own words


def documented_path(endpoint: Endpoint) -> str:
    """Returns the path of an endpoint as the document has it, which does not tell a value with slashes in it apart."""
    return endpoint.path.replace(":path}", "}")


def check(endpoint: Endpoint, what: str, answer: Answered) -> None:
    """One answer: never the server's fault, an error in the shape of its dialect, with its field where it has one."""
    told = f"{endpoint.path}: {what}: {answer.status} {answer.content[:500]!r}"
    rows = DOCUMENT["paths"][documented_path(endpoint)][endpoint.method.lower()]["responses"]
    assert str(answer.status) in rows, told
    if "timeout" in what and answer.status == 504:
        return  # as the body asked for
    assert answer.status < 500, told
    assert b'"server_error"' not in answer.content, told
    assert b'"api_error"' not in answer.content, told
    if answer.status < 400:
        return
    body = answer.json
    error = body["error"]
    assert isinstance(error["message"], str), told
    assert error["message"], told
    assert "0x7f" not in error["message"], told
    if endpoint.dialect == "anthropic":
        assert set(error) == {"type", "message"}, told
        assert body["type"] == "error", told
        name = error["message"]
    else:
        assert set(error) == {"message", "type", "param", "code"}, told
        name = error["param"] or ""
    if answer.status == 400 and not what.startswith("whole") and not error["message"].startswith(OF_NO_FIELD):
        fields = tuple(each.encode_name for each in msgspec.structs.fields(endpoint.body))
        assert name.startswith(fields) or "no such field" in error["message"], told


async def check_all(client: AsgiClient, endpoint: Endpoint, bodies: Iterable[tuple[str, bytes]]) -> Counter[int]:
    seen: Counter[int] = Counter()
    for what, body in bodies:
        answer = await client.begin(endpoint.method, url(endpoint), body).ended()
        check(endpoint, what, answer)
        seen[answer.status] += 1
        if endpoint.path == "/v1/caches" and answer.status == 201:  # many of them would fill the pool
            salt = json.loads(body).get("cache_salt")
            query = "" if salt is None else f"?cache_salt={salt}"
            gone = await client.begin("DELETE", f"/v1/caches/{answer.json['name']}{query}").ended()
            assert gone.status == 200, gone.content
    return seen


async def check_unharmed(client: AsgiClient) -> None:
    """After all of it: nothing runs or is locked, and each endpoint answers its good bodies."""
    backend = client.app.front.backend
    for endpoint in TAKING:
        for body in GOOD[endpoint.method, endpoint.path]:
            answer = await client.begin(endpoint.method, url(endpoint), body).ended()
            assert answer.status in (200, 201), (endpoint.path, answer.content)
    status = await backend.status()
    assert (status.running, status.waiting, status.in_flight) == (0, 0, 0)
    assert status.pool.free + status.pool.cached == status.pool.total
    assert client.app.front.in_flight == 0


def test_each_endpoint_with_a_body_has_good_ones_in_the_list() -> None:
    assert {(each.method, each.path) for each in TAKING} == set(GOOD), "write good bodies into odd_bodies.GOOD"


def test_the_requests_of_a_night_are_ten_thousand() -> None:
    """Each nightly test asserts that it has sent its own."""
    listed = sum(len(places(each)) * len(VALUES) for each in TAKING)
    assert listed + LEAST_DRAWN >= 10_000


def test_odd_values_in_fields() -> None:
    """A share of the list: each value and each field comes up, though not each value in each field."""

    async def scenario() -> None:
        async with served(small(), limits=LIMITS) as client:
            await prepared(client)
            start = 0
            for endpoint in TAKING:
                count = max(12, len(places(endpoint)) // 6)
                await check_all(client, endpoint, some_requests(endpoint, count, start))
                start += count
            await check_unharmed(client)
        assert start > 120

    asyncio.run(scenario())


def test_bodies_that_are_odd_as_a_whole() -> None:
    async def scenario() -> None:
        async with served(small(), limits=LIMITS) as client:
            await prepared(client)
            for endpoint in TAKING:
                bodies = (("whole " + repr(body[:60]), body) for body in whole_bodies(endpoint))
                seen = await check_all(client, endpoint, bodies)
                assert seen[400] >= 9, (endpoint.path, seen)

    asyncio.run(scenario())


@pytest.mark.nightly
@pytest.mark.parametrize("endpoint", TAKING, ids=lambda each: each.path)
def test_every_odd_value_in_every_field(endpoint: Endpoint) -> None:
    async def scenario() -> None:
        async with served(small(), limits=LIMITS) as client:
            await prepared(client)
            seen = await check_all(client, endpoint, odd_requests(endpoint))
            first, *_ = places(endpoint)
            large = [(path, value) for (_, path) in places(endpoint) if len(path) == 1 for value in LARGE]
            bodies = ((f"{path[0]} = large", with_value(first[0], path, value)) for path, value in large)
            seen += await check_all(client, endpoint, bodies)
            assert seen.total() == len(places(endpoint)) * len(VALUES) + len(large)
            print(endpoint.path, dict(seen))
            await check_unharmed(client)

    asyncio.run(scenario())


# ------------------------------------------------------------------------------ drawn from the document

BY_PATH = {(each.method, documented_path(each)): each for each in ENDPOINTS}


def check_answer(operation: Any, answer: Answered) -> None:
    """A whole answer of 200 is what the document says."""
    if answer.status == 200 and answer.headers["content-type"] == "application/json":
        said = DOCUMENT["paths"][operation.path][operation.method.lower()]["responses"]["200"]["content"]
        assert not problem(said["application/json"]["schema"], answer.json)


def draw_requests(operation: Any, mode: Any, count: int, runner: asyncio.Runner, client: AsgiClient) -> int:
    """Sends what schemathesis draws from an operation → how many requests that were."""
    endpoint = BY_PATH[operation.method.upper(), operation.path]
    sent = 0

    @settings(
        max_examples=count,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(operation.as_strategy(generation_mode=mode))
    def send(case: Any) -> None:
        nonlocal sent
        path = case.formatted_path
        hypothesis.assume(path.isascii() and path.isprintable() and "?" not in path)
        body = case.body if endpoint.body is not None or endpoint.raw else b""
        data = body if isinstance(body, bytes) else b"" if _absent(body) else json.dumps(body).encode()
        answer = runner.run(_answer(client, endpoint.method, path, data))
        check(endpoint, f"whole {path} {data!r}", answer)
        check_answer(operation, answer)
        sent += 1

    send()
    return sent


async def _answer(client: AsgiClient, method: str, path: str, data: bytes) -> Answered:
    return await client.begin(method, path, data).ended()


def _absent(body: Any) -> bool:
    return type(body).__name__ == "NotSet"


def draw_from_all(count: int) -> int:
    """Positive and negative requests of every operation, on one server → how many."""
    import schemathesis  # takes seconds of CPU time, which the short forms do not need
    from schemathesis import GenerationMode

    sent = 0
    operations = [found.ok() for found in schemathesis.openapi.from_dict(DOCUMENT).get_all_operations()]
    with asyncio.Runner() as runner:
        server = served(small(), limits=LIMITS)
        client = runner.run(server.__aenter__())
        runner.run(prepared(client))
        for operation, mode in itertools.product(operations, GenerationMode):
            try:
                sent += draw_requests(operation, mode, count, runner, client)
            except (hypothesis.errors.Unsatisfiable, schemathesis.errors.InvalidSchema):
                # A route that takes nothing; and it cannot break the type of each list.
                assert mode is GenerationMode.NEGATIVE, operation.path
        runner.run(prepared(client))  # it may have been deleted
        runner.run(check_unharmed(client))
        runner.run(server.__aexit__(None, None, None))
    return sent


@pytest.mark.nightly
def test_three_hundred_requests_of_every_operation() -> None:
    """Positive and negative ones, half each."""
    sent = draw_from_all(150)
    print(f"{sent} requests")
    assert sent >= LEAST_DRAWN
