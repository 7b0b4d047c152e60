"""The application: routes, bodies, streams, errors, disconnects, admission."""

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Annotated, Any

import msgspec
import pytest
from umbel.lang.errors import EngineError, ParameterError
from umbel.server.access import Access
from umbel.server.app import ENDPOINTS
from umbel.server.bodies import Body
from umbel.server.front import Front
from umbel.server.http import MOST_UNWRITTEN, Application, Asked, Endpoint, EventStream, Reply, sse
from umbel.server.limits import MAX_BODY, MAX_HEADERS, HttpLimits
from umbel.srt.in_process import LocalBackend

from .client import AsgiClient, Live, served


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(scenario(), 60))  # type: ignore[arg-type]


class Number(Body, frozen=True):
    number: Annotated[int, msgspec.Meta(ge=0, le=100)] = 0


def client_of(handle: Callable[[Asked[Any]], Awaitable[Any]], **facts: Any) -> AsgiClient:
    """A client of one endpoint, on a front that has started."""
    front = Front(LocalBackend(), limits=facts.pop("limits", None))
    front.started = True
    return AsgiClient(Application(front, [Endpoint("POST", "/x", handle, "a test", body=Number, **facts)]))


async def doubled(asked: Asked[Number]) -> Reply:
    return Reply({"twice": 2 * asked.body.number})


def test_an_answer_has_its_request_id_under_both_names() -> None:
    async def scenario() -> None:
        answer = await client_of(doubled).post("/x", {"number": 21})
        assert (answer.status, answer.json) == (200, {"twice": 42})
        assert answer.headers["x-request-id"] == answer.headers["request-id"]
        assert answer.headers["content-length"] == str(len(answer.content))

    run(scenario)


@pytest.mark.parametrize(
    ("body", "status", "code", "param"),
    [
        (b"{", 400, "invalid_json", None),
        (b"", 400, "invalid_json", None),
        (b"[" * 100_000, 400, "invalid_value", None),
        (b'{"number": ' + b"[" * 100_000, 400, "invalid_value", "number"),
        (b'{"number": "\xff"}', 400, "invalid_value", "number"),
        (b'{"number": 1e999}', 400, "invalid_value", "number"),
        (b'{"number": NaN}', 400, "invalid_json", None),
        (b'{"number": true}', 400, "invalid_value", "number"),
        (b'{"number": ' + b"9" * 4000 + b"}", 400, None, None),
        (b'{"nubmer": 1}', 400, "unknown_parameter", "nubmer"),
        (b'{"x\\ud800": 1}', 400, None, None),
        (b'"number"', 400, "invalid_value", None),
    ],
    ids=range(12),
)
def test_a_body_that_is_wrong_is_a_400(body: bytes, status: int, code: str | None, param: str | None) -> None:
    async def scenario() -> None:
        answer = await client_of(doubled).post("/x", body)
        error = answer.json["error"]
        assert answer.status == status, error
        assert code is None or (error["code"], error["param"]) == (code, param), error

    run(scenario)


def test_a_field_that_is_misspelt_is_answered_with_the_right_one() -> None:
    async def scenario() -> None:
        client = client_of(doubled)
        for field, message in (("nubmer", "no such field; did you mean number?"), ("x", "no such field is known here")):
            assert (await client.post("/x", {field: 1})).json["error"]["message"] == f"{field}: {message}"

    run(scenario)


def test_a_body_that_is_too_large_is_refused_by_its_header() -> None:
    async def scenario() -> None:
        answer = await client_of(doubled).post("/x", b"", **{"content-length": str(MAX_BODY + 1)})
        assert answer.status == 413

    run(scenario)


@pytest.mark.parametrize(
    ("method", "path", "headers", "status"),
    [
        ("GET", "/x", {}, 405),
        ("POST", "/y", {}, 404),
        ("POST", "/x", {"content-encoding": "gzip"}, 415),
        ("POST", "/x", {"host": "evil.example"}, 403),
        ("POST", "/x", {"origin": "https://evil.example"}, 403),
        ("POST", "/x", {"a": "b" * 17_000}, 431),
        ("POST", "/x", {f"h{number}": "" for number in range(MAX_HEADERS)}, 431),
    ],
    ids=range(7),
)
def test_a_request_that_is_wrong_before_its_body(method: str, path: str, headers: dict[str, str], status: int) -> None:
    async def scenario() -> None:
        answer = await client_of(doubled).begin(method, path, {}, headers).ended()
        assert answer.status == status
        assert answer.json["error"]["message"]

    run(scenario)


def test_what_is_known_and_not_offered_says_what_to_do() -> None:
    class Offered(Body, frozen=True):
        inner: list[Number] = []
        suffix: None = None

    async def scenario() -> None:
        front = Front(LocalBackend())
        front.started = True
        endpoint = Endpoint("POST", "/x", doubled, "", body=Offered, not_offered={"suffix": "leave it out"})
        client = AsgiClient(Application(front, [endpoint]))
        refused = (await client.post("/x", {"suffix": "a"})).json["error"]
        assert (refused["code"], refused["param"]) == ("unsupported_parameter", "suffix")
        assert "leave it out" in refused["message"]
        nested = (await client.post("/x", {"inner": [{}, {"number": "a"}]})).json["error"]
        assert nested["param"] == "inner[1].number"

    run(scenario)


@pytest.mark.parametrize(("error", "status"), [(ParameterError("n must be 1"), 400), (KeyError("a secret"), 500)])
def test_an_error_before_the_first_event_is_a_whole_answer(error: Exception, status: int) -> None:
    async def handle(asked: Asked[Number]) -> EventStream:
        async def events() -> AsyncGenerator[bytes, None]:
            raise error
            yield b""

        return EventStream(events())

    async def scenario() -> None:
        answer = await client_of(handle).post("/x", {})
        assert answer.status == status
        assert b"secret" not in answer.content

    run(scenario)


@pytest.mark.parametrize("dialect", ["openai", "anthropic"])
def test_an_error_after_the_first_event_is_the_last_event(dialect: Any) -> None:
    async def handle(asked: Asked[Number]) -> EventStream:
        async def events() -> AsyncGenerator[bytes, None]:
            yield sse({"n": 1})
            await asyncio.sleep(0)
            raise EngineError("the engine died")

        return EventStream(events())

    async def scenario() -> None:
        answer = await client_of(handle, dialect=dialect).post("/x", {})
        (_, first), (name, last) = answer.events
        assert (answer.status, first, name) == (200, {"n": 1}, "error" if dialect == "anthropic" else "")
        assert last["error"]["message"] == "the engine died"

    run(scenario)


def test_events_that_come_together_are_one_write() -> None:
    async def handle(asked: Asked[Number]) -> EventStream:
        async def events() -> AsyncGenerator[bytes, None]:
            for step in range(3):
                for choice in range(4):
                    yield sse([step, choice])
                await asyncio.sleep(0.001)

        return EventStream(events())

    async def scenario() -> None:
        answer = await client_of(handle).post("/x", {})
        assert [data for _, data in answer.events] == [[step, choice] for step in range(3) for choice in range(4)]
        assert answer.writes == 4  # three steps, and the end

    run(scenario)


class Slow(Live):
    """A client that reads nothing of its answer until the test lets it."""

    def __init__(self, app: Application, path: str, body: bytes) -> None:
        self.reads = asyncio.Event()
        super().__init__(app, "POST", path, body, {})

    async def _send(self, message: dict[str, Any]) -> None:
        await self.reads.wait()
        await super()._send(message)


def test_a_stream_does_not_run_ahead_of_a_client_that_does_not_read() -> None:
    async def handle(asked: Asked[Number]) -> EventStream:
        async def events() -> AsyncGenerator[bytes, None]:
            for number in range(asked.body.number):
                yield sse(number)
                made.append(number)
                await asyncio.sleep(0)

        return EventStream(events())

    async def scenario() -> None:
        client = client_of(handle)
        slow = Slow(client.app, "/x", b'{"number": 100}')
        while len(made) < MOST_UNWRITTEN:
            await asyncio.sleep(0)
        held = len(made)
        assert [data for _, data in (await client.post("/x", {"number": 50})).events] == [*range(50)]
        assert made[held:] == [*range(50)]  # nothing more of the slow one
        slow.reads.set()
        assert [data for _, data in (await slow.ended()).events] == [*range(100)]

    made: list[int] = []
    run(scenario)


def test_others_are_answered_while_a_client_does_not_read() -> None:
    body = {"model": "oracle", "prompt": "hello", "max_tokens": 200, "temperature": 0, "ignore_eos": True}

    async def scenario() -> None:
        async with served() as client:
            slow = Slow(client.app, "/v1/completions", json.dumps({**body, "stream": True}).encode())
            texts = {(await client.post("/v1/completions", body)).json["choices"][0]["text"] for _ in range(3)}
            assert not slow.task.done()
            assert slow.writes == 0
            slow.reads.set()
            events = [data for _, data in (await slow.ended()).events]
        assert {"".join(event["choices"][0]["text"] for event in events[:-1])} == texts

    run(scenario)


def test_a_silent_stream_says_that_it_is_alive() -> None:
    async def handle(asked: Asked[Number]) -> EventStream:
        async def events() -> AsyncGenerator[bytes, None]:
            await pinged.wait()
            yield sse("late")

        return EventStream(events(), ping=b": ping\n\n")

    async def scenario() -> None:
        live = client_of(handle, limits=HttpLimits(keep_alive=0.01)).begin("POST", "/x", {})
        await live.until(b": ping\n\n: ping")
        pinged.set()
        assert (await live.ended()).events == [("", "late")]

    pinged = asyncio.Event()
    run(scenario)


def test_a_client_that_hangs_up_cancels_its_endpoint() -> None:
    async def handle(asked: Asked[Number]) -> Reply:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(asked.id)
        raise AssertionError

    async def scenario() -> None:
        client = client_of(handle)
        live = client.begin("POST", "/x", {})
        await begun.wait()
        await live.hang_up()
        assert len(ended) == 1
        assert (live.status, client.app.front.disconnects) == (0, 1)

    ended: list[str] = []
    begun = asyncio.Event()
    run(scenario)


@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize("dialect", ["openai", "anthropic"])
def test_a_request_that_the_end_of_the_server_cuts_off_is_told_so(dialect: Any, begun: bool) -> None:
    async def handle(asked: Asked[Number]) -> EventStream:
        async def events() -> AsyncGenerator[bytes, None]:
            if begun:
                yield sse({"n": 1})
            waits.set()
            await asyncio.Event().wait()

        return EventStream(events())

    async def scenario() -> None:
        client = client_of(handle, dialect=dialect)
        live = client.begin("POST", "/x", {})
        await waits.wait()
        client.app.front.draining = True
        live.task.cancel()
        answer = await live.ended()
        assert answer.status == (200 if begun else 503)
        told = answer.events[-1][1] if begun else answer.json
        assert told["error"]["message"] == "the server ended before the answer did; another one may answer"
        assert client.app.front.disconnects == 0

    waits = asyncio.Event()
    run(scenario)


def test_the_request_after_the_last_place_is_refused_at_once() -> None:
    async def handle(asked: Asked[Number]) -> Reply:
        with asked.front.open(asked.body.number):
            await released.wait()
        return Reply("done")

    async def scenario() -> None:
        client = client_of(handle, limits=HttpLimits(most_in_flight=3, retry_after=7))
        first = client.begin("POST", "/x", {"number": 2})
        second = client.begin("POST", "/x", {"number": 1})
        await asyncio.sleep(0)
        while client.app.front.in_flight < 3:
            await asyncio.sleep(0)
        refused = await client.post("/x", {"number": 1})
        assert (refused.status, refused.headers["retry-after"]) == (503, "7")
        assert refused.headers["x-should-retry"] == "true"
        released.set()
        assert [(await each.ended()).status for each in (first, second)] == [200, 200]
        assert (client.app.front.in_flight, client.app.front.refused) == (0, 1)

    released = asyncio.Event()
    run(scenario)


def test_a_route_that_is_read_answers_head() -> None:
    async def scenario() -> None:
        async with served() as client:
            answer = await client.begin("HEAD", "/health").ended()
            assert (answer.status, answer.headers["content-length"]) == (200, str(len(b'{"status":"ok"}')))
            refused = await client.begin("HEAD", "/v1/completions").ended()
            assert (refused.status, refused.headers["allow"]) == (405, "POST")

    run(scenario)


def test_nothing_is_served_before_the_start_and_while_it_drains() -> None:
    async def scenario() -> None:
        async with served() as client:
            front = client.app.front
            front.started = False
            assert (await client.get("/health")).status == 503
            refused = await client.post("/v1/completions", {"model": "oracle"})
            assert (refused.status, refused.json["error"]["code"]) == (503, "starting")
            front.started, front.draining = True, True
            assert (await client.get("/health")).json["status"] == "draining"
            front.draining = False
            assert (await client.get("/health")).status == 200

    run(scenario)


PUBLIC = {"/health": 503, "/ui": 200}  # of a server that has not started; the page holds no data


@pytest.mark.parametrize("endpoint", ENDPOINTS, ids=lambda each: f"{each.method} {each.path}")
@pytest.mark.parametrize("headers", [{}, {"authorization": "Bearer sk-wrong"}, {"x-api-key": "sk-on"}])
@pytest.mark.sampled(5)
def test_every_route_but_health_and_the_page_asks_for_a_key(endpoint: Endpoint, headers: dict[str, str]) -> None:
    assert endpoint.public == (endpoint.path in PUBLIC)

    async def scenario() -> None:
        front = Front(LocalBackend(), Access({"team": "sk-one"}, "sk-admin"))
        client = AsgiClient(Application(front, ENDPOINTS))
        for path in (endpoint.path, endpoint.path + "?x=1"):
            answer = await client.begin(endpoint.method, path, {}, headers).ended()
            assert answer.status == PUBLIC.get(endpoint.path, 401)

    run(scenario)


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1:80", "[::1]", "localhost/health", "localhost:80:80"])
def test_no_spelling_of_a_path_goes_round_the_key(host: str) -> None:
    spellings = [
        "//v1/models",
        "/v1/models/",
        "/v1//models",
        "/v1/./models",
        "/V1/Models",
        "/v1/models;x",
        "/v1/models#",
    ]
    spellings += ["/health/../v1/models", "/health//v1/models", "/health/", "/healthz", "/ui/../v1/models", "/ui/tree/"]
    spellings += [
        "/%68ealth/v1/models",
        "/health%2f..%2fv1/models",
        "/v1/models%00",
        "/v1/models\x00",
        "v1/models",
        "*",
        "",
    ]

    async def scenario() -> None:
        front = Front(LocalBackend(), Access({"team": "sk-one"}, "sk-admin"))
        front.started = True
        client = AsgiClient(Application(front, ENDPOINTS), {"host": host})
        for path in spellings:
            for method in ("GET", "POST", "DELETE"):
                answer = await client.begin(method, path, {}).ended()
                assert answer.status in (401, 403, 404, 405), (method, path)

    run(scenario)


def test_an_administrative_route_takes_the_admin_key_and_is_absent_without_one() -> None:
    async def scenario() -> None:
        endpoint = Endpoint("POST", "/x", doubled, "", body=Number, admin=True)
        front = Front(LocalBackend(), Access({"team": "sk-one"}, "sk-admin"))
        front.started = True
        client = AsgiClient(Application(front, [endpoint]))
        assert (await client.post("/x", {}, **{"x-api-key": "sk-one"})).status == 403
        assert (await client.post("/x", {}, **{"x-api-key": "sk-admin"})).status == 200
        absent = Application(Front(LocalBackend(), Access({"team": "sk-one"})), [endpoint])
        assert (await AsgiClient(absent).post("/x", {}, **{"x-api-key": "sk-one"})).status == 404

    run(scenario)


def test_warnings_are_headers() -> None:
    async def handle(asked: Asked[Number]) -> Reply:
        asked.warnings.append("the first mark\nis ignored")
        return Reply("")

    async def scenario() -> None:
        assert (await client_of(handle).post("/x", {})).headers["umbel-warning"] == "the first mark is ignored"

    run(scenario)
