"""The OpenAPI document: each status of each route has a request, and its answer is what the document says of it."""

import asyncio
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
from umbel.lang.status import RuntimeHealth, RuntimeState
from umbel.server import program_store
from umbel.server.access import Access
from umbel.server.app import ENDPOINTS
from umbel.server.front import Front
from umbel.server.http import EVENTS, JSON, Endpoint
from umbel.server.limits import MAX_BODY

from .client import Answered, AsgiClient, served
from .document import DOCUMENT, problem
from .odd_bodies import GOOD, LIMITS, PROGRAM, prepared, small

TEAM, ADMIN = {"authorization": "Bearer sk-one"}, {"authorization": "Bearer sk-admin"}
NAMES = {"{name}": "odd", "{model:path}": "oracle"}  # of what is there; "none" is not


@dataclass(frozen=True)
class Case:
    """A request whose answer has a status. `change`: of the server, before it is sent."""

    fields: Mapping[str, Any] = field(default_factory=dict)  # next to those of a good body
    body: bytes | None = None  # in place of it
    name: str = ""  # in the path
    query: str = ""
    headers: Mapping[str, str] = field(default_factory=lambda: ADMIN)
    change: Callable[[pytest.MonkeyPatch, Front], None] = lambda patch, front: None


def draining(patch: pytest.MonkeyPatch, front: Front) -> None:
    front.draining = True


def shared(patch: pytest.MonkeyPatch, front: Front) -> None:
    front.workers = 2


def full(patch: pytest.MonkeyPatch, front: Front) -> None:
    patch.setattr(program_store, "MAX_PROGRAMS", 1)


def restarting(patch: pytest.MonkeyPatch, front: Front) -> None:
    patch.setattr(front.backend, "health", lambda: RuntimeHealth(RuntimeState.RESTARTING))


CASES: dict[tuple[str, str, int], Case] = {
    ("PUT", "/v1/programs/{name}", 201): Case(name="fresh"),
    ("PUT", "/v1/programs/{name}", 409): Case(name="fresh", change=full),
    ("POST", "/v1/programs/{name}/runs", 422): Case({"budget": {"tokens": 1}}),
    ("POST", "/v1/caches", 201): Case(),
    ("GET", "/v1/caches", 400): Case(query="?cache_salt=!"),
    ("GET", "/v1/caches/{name}", 400): Case(query="?cache_salt=!"),
    ("DELETE", "/v1/caches/{name}", 400): Case(query="?cache_salt=!"),
    ("PATCH", "/v1/caches/{name}", 404): Case(name="none"),
    ("DELETE", "/hints/{name}", 400): Case(change=shared),
    ("GET", "/ui/state", 400): Case(query="?before=1"),
    ("GET", "/ui/tree", 400): Case(query="?most=0"),
    ("GET", "/ui/tree", 503): Case(change=restarting),
}


def case_of(endpoint: Endpoint, status: int) -> Case | None:
    """The case of a row: its own, or that of all rows like it."""
    taking = endpoint.body is not None or endpoint.raw
    fields = () if endpoint.body is None else endpoint.body.__struct_fields__  # type: ignore[attr-defined]
    match status:
        case _ if own := CASES.get((endpoint.method, endpoint.path, status)):
            return own
        case 200:
            return Case()
        case 400 if taking:
            return Case(body=b"{")
        case 401:
            return Case(headers={})
        case 403:
            return Case(headers=TEAM if endpoint.admin else {**ADMIN, "host": "elsewhere.example"})
        case 404 if "{" in endpoint.path:
            return Case(name="none")
        case 404 if "model" in fields:
            return Case({"model": "none"})
        case 413 if taking:
            return Case(headers={**ADMIN, "content-length": str(MAX_BODY + 1)})
        case 503:
            return Case(change=draining)
        case 504 if "umbel" in fields:
            return Case({"umbel": {"timeout": 1e-6}})
        case _:
            return None


def bodies(endpoint: Endpoint, case: Case) -> Iterator[Any]:
    """The bodies of a case. That of an answer has all good ones, and asks for a stream where there are some."""
    if case.body is not None or endpoint.body is None:
        yield case.body if case.body is not None else PROGRAM if endpoint.raw else None
        return
    first, *others = GOOD[endpoint.method, endpoint.path]
    yield {**first, **case.fields}
    if not case.fields and case.headers is ADMIN:
        yield from others
        if EVENTS in endpoint.media:
            yield {**first, "stream": True} if "stream" in endpoint.body.__struct_fields__ else first  # type: ignore[attr-defined]


async def answers(endpoint: Endpoint, case: Case, patch: pytest.MonkeyPatch) -> list[Answered]:
    """What a server with keys, a program and a cache says to a case."""
    async with served(small(), limits=LIMITS, access=Access({"team": "sk-one"}, "sk-admin")) as client:
        asking = AsgiClient(client.app, case.headers)
        await prepared(AsgiClient(client.app, ADMIN))
        with patch.context() as changed:
            case.change(changed, client.app.front)
            path = endpoint.path
            for name, there in NAMES.items():
                path = path.replace(name, case.name or there)
            found = []
            for body in bodies(endpoint, case):
                live = asking.begin(endpoint.method, path + case.query, body)
                found.append(await live.ended())
        return found


@pytest.mark.parametrize("endpoint", ENDPOINTS, ids=lambda each: f"{each.method} {each.path}")
def test_every_row_has_a_request_whose_answer_is_what_the_row_says(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    operation = DOCUMENT["paths"][endpoint.path.replace(":path}", "}")][endpoint.method.lower()]
    assert ("requestBody" in operation) == (endpoint.body is not None or endpoint.raw)
    responses = operation["responses"]
    assert responses.keys() >= {"403", "default"}
    for row, said in responses.items():
        if row == "default":
            continue
        status = int(row)
        case = case_of(endpoint, status)
        assert case is not None, f"{endpoint.method} {endpoint.path} {status}: write a case, or leave the status out"
        seen = set()
        for answer in asyncio.run(answers(endpoint, case, monkeypatch)):
            assert answer.status == status, (status, answer.content)
            media = answer.headers["content-type"].partition(";")[0]
            seen.add(media)
            if media == JSON:
                assert not problem(said["content"][JSON]["schema"], answer.json), (status, answer.content)
        assert seen == set(said["content"]), status


def test_every_case_is_of_a_row() -> None:
    rows = {
        (method.upper(), path, int(status))
        for path, operations in DOCUMENT["paths"].items()
        for method, operation in operations.items()
        for status in operation["responses"].keys() - {"default"}
    }
    assert CASES.keys() <= rows
    assert len(rows) > 150


def test_a_server_without_an_administrator_describes_no_administrative_route() -> None:
    async def scenario(access: Access) -> set[str]:
        async with served(small(), access=access) as client:
            document = await client.get("/openapi.json", **TEAM)
            assert (await client.get("/metrics", **TEAM)).status == (403 if access.administered else 404)
        return {f"{method} {path}" for path, found in document.json["paths"].items() for method in found}

    without = asyncio.run(scenario(Access({"team": "sk-one"})))
    whole = asyncio.run(scenario(Access({"team": "sk-one"}, "sk-admin")))
    assert whole - without == {f"{each.method.lower()} {each.path}" for each in ENDPOINTS if each.admin}


@pytest.mark.parametrize("endpoint", [each for each in ENDPOINTS if each.query], ids=lambda each: each.path)
def test_the_query_has_the_parameters_of_the_document_and_no_others(endpoint: Endpoint) -> None:
    operation = DOCUMENT["paths"][endpoint.path][endpoint.method.lower()]
    named = {each["name"]: each["schema"] for each in operation["parameters"] if each["in"] == "query"}
    assert named.keys() == endpoint.query.keys()

    async def scenario() -> None:
        async with served(small(), limits=LIMITS, access=Access({"team": "sk-one"}, "sk-admin")) as client:
            asking = AsgiClient(client.app, ADMIN)
            path, body = endpoint.path.replace("{name}", "odd"), PROGRAM if endpoint.raw else None
            for name, schema in named.items():
                await prepared(asking)
                value = "q" if schema["type"] == "string" else 1
                answer = await asking.begin(endpoint.method, f"{path}?{name}={value}", body).ended()
                assert answer.status in (200, 201) or answer.json["error"]["code"] != "unknown_parameter"
            refused = (await asking.begin(endpoint.method, f"{path}?other=1", body).ended()).json["error"]
            assert (refused["code"], refused["param"]) == ("unknown_parameter", "other")
            assert all(name in refused["message"] for name in named)

    asyncio.run(scenario())


def test_the_document_has_every_parameter_of_a_query() -> None:
    assert {name for each in ENDPOINTS for name in each.query} == {"parameter", "cache_salt", "after", "most", "text"}
