"""An endpoint of an umbel server is the runtime itself: equal answers, whole programs, errors with their class."""

import asyncio
import base64
import math
import random
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx2
import msgspec
import pytest
import umbel as ul
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from umbel.interpreter.backends.hosted.session import Environment
from umbel.interpreter.backends.hosted.sglang.endpoint import RuntimeEndpoint
from umbel.interpreter.backends.hosted.sglang.server import SGLangServer
from umbel.interpreter.backends.hosted.umbel import UmbelServer
from umbel.lang.caching import CacheMark, Caching
from umbel.lang.errors import CapabilityError, ConstraintError, ParameterError, RequestError, UmbelError
from umbel.lang.prompt import Generated, Text
from umbel.lang.protocol import (
    Backend,
    CacheRequest,
    Chunk,
    ConstraintSpec,
    CreateCache,
    DeleteCache,
    Detokenize,
    EmbedRequest,
    ExtendCache,
    Final,
    GenRequest,
    Hint,
    Locate,
    Origin,
    RankRequest,
    ReadCaches,
    Release,
    ScoreRequest,
    Tokenize,
)
from umbel.lang.sampling import SamplingParams
from umbel.lang.status import EngineState, RuntimeStatus
from umbel.server.access import Access
from umbel.server.app import application
from umbel.server.front import Front
from umbel.server.limits import HttpLimits
from umbel.srt.in_process import LocalBackend

from ...compiler.random_programs import bodies, program_of
from ...compiler.watching import seen
from ..client import AsgiClient, served

pytestmark = pytest.mark.filterwarnings("ignore::umbel.TemplateWarning")

PATIENCE = 60.0  # seconds, far above what any of these programs needs
QUIETLY: dict[str, Any] = {
    "deadline": None,
    "derandomize": True,
    "phases": (Phase.explicit, Phase.generate),
    "suppress_health_check": list(HealthCheck),
}


class Wire(httpx2.ASGITransport):
    """A connection to an application, which counts requests."""

    def __init__(self, front: Front) -> None:
        super().__init__(application(front))
        self.asked: Counter[str] = Counter()

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        self.asked[f"{request.method} {request.url.path}"] += 1
        return await super().handle_async_request(request)


def endpoint(front: Front, key: str | None = None, **options: Any) -> tuple[RuntimeEndpoint, Wire]:
    wire = Wire(front)
    environment = Environment(wire=wire, variables={})
    return RuntimeEndpoint("http://localhost", api_key=key, environment=environment, **options), wire


@asynccontextmanager
async def fronted(**front: Any) -> AsyncIterator[Front]:
    local = LocalBackend()
    whole = Front(local, **front)
    await whole.start()
    try:
        yield whole
    finally:
        await local.close()


PROMPT = (Text("is it the "), Generated("end", (101, 110, 100)), Text("?"))
HALF = SamplingParams(max_tokens=12, temperature=0.7, seed=3, n=2, logprobs=True, top_logprobs=2)


async def answers(backend: Backend) -> list[Any]:
    """What a backend says to one message of each kind, twice the first."""
    assert isinstance(backend, RuntimeEndpoint | LocalBackend)
    streamed = GenRequest("a", PROMPT, HALF, stream=True, origin=Origin("p", "f", "s", 1, 30.0, 5))
    letters = ConstraintSpec("regex", "[a-f]{3,9}")
    constrained = GenRequest("b", PROMPT, SamplingParams(max_tokens=30, seed=5), constraint=letters)
    found: list[Any] = []
    for request in (streamed, streamed, constrained):
        found += [event async for event in backend.generate(request)]
    for probability in ("", "overshoot", "exact"):
        score = ScoreRequest("s", PROMPT, ("yes", "no"), unconditional=not probability, probability=probability)  # type: ignore[arg-type]
        found.append(await backend.score(score))
    found.append(await backend.embed(EmbedRequest("v", (PROMPT, (Text("is"),)), 5)))
    found.append(await backend.rank(RankRequest("r", (PROMPT, (Text("is"),)))))
    found.append(await backend.locate(Locate("l", PROMPT, (1, 2), (PROMPT, (Text("is"),)))))
    found.append(await backend.tokenize(Tokenize("t", PROMPT)))
    found.append(await backend.detokenize(Detokenize("d", (101, 110))))
    found.append(backend.vocabulary)
    found.append(msgspec.structs.replace(backend.capabilities, name=""))
    template = backend.chat_template
    found.append((template.source, template.tokens, template.options))
    return found


def test_every_message_has_the_answer_that_the_runtime_gives() -> None:
    async def both() -> tuple[list[Any], list[Any], Counter[str]]:
        async with fronted() as front:
            remote, wire = endpoint(front)
            await remote.start()
            over_http = await answers(remote)
            assert isinstance(remote._served, UmbelServer)
            await remote.close()
        local = LocalBackend()
        await local.start()
        directly = await answers(local)
        await local.close()
        return over_http, directly, wire.asked

    over_http, directly, asked = asyncio.run(both())
    assert sum(isinstance(each, Chunk) for each in directly) > 4
    assert joined(over_http) == joined(directly)
    assert asked["POST /runtime"] == 11  # one request for each


def joined(events: list[Any]) -> list[Any]:
    """Chunks of one continuation as one text, and no times: neither is the same twice."""
    found: list[Any] = []
    texts: dict[int, str] = {}
    for event in events:
        if isinstance(event, Chunk):
            texts[event.index] = texts.get(event.index, "") + event.text
            continue
        if texts:
            found.append(texts)
            texts = {}
        found.append(msgspec.structs.replace(event, times=None) if isinstance(event, Final) else event)
    return found


def test_infinities_and_bytes_travel() -> None:
    """JSON has neither."""

    async def scenario() -> None:
        async with fronted() as front:
            remote, _ = endpoint(front)
            scored = await remote.score(ScoreRequest("s", (Text("a"),), ("b",)))
            impossible = msgspec.structs.replace(scored.choices[0], logprobs=(-math.inf,))

            async def score(request: ScoreRequest) -> Any:
                return msgspec.structs.replace(scored, choices=(impossible,))

            front.backend.score = score  # type: ignore[method-assign]
            assert (await remote.score(ScoreRequest("t", (Text("a"),), ("b",)))).choices == (impossible,)
            await remote.close()

    asyncio.run(scenario())


# ------------------------------------------------------------------------------------ programs


@pytest.fixture(scope="module")
def served_here() -> tuple[LocalBackend, RuntimeEndpoint, Wire]:
    """An oracle, and an endpoint of it over HTTP."""
    local = LocalBackend(debug={"check_every_step": False}, pool_tokens=1 << 15)
    front = Front(local)

    class Started(RuntimeEndpoint):
        async def prepare(self) -> None:
            await front.start()
            await super().prepare()

    wire = Wire(front)
    environment = Environment(wire=wire, variables={})
    return local, Started("http://localhost", server="umbel", environment=environment), wire


def once(program: ul.Program, backend: Backend, *, server: bool) -> ul.State:
    return program.compile(passes="none", server=server).run(question='why "so"? ', backend=backend, timeout=PATIENCE)


@settings(max_examples=20, **QUIETLY)
@given(body=bodies(3))
def test_a_program_over_http_is_one_request_and_shows_what_it_shows_here(
    served_here: tuple[LocalBackend, RuntimeEndpoint, Wire], body: tuple[object, ...]
) -> None:
    local, remote, wire = served_here
    program = program_of(body, [])
    here = once(program, local, server=False)
    expected = seen(here)
    wire.asked.clear()
    there = once(program, remote, server=True)
    assert seen(there) == expected
    assert there.usage.completion_tokens == here.usage.completion_tokens
    assert wire.asked - Counter({path: 1 for path in wire.asked if path.startswith("GET ")}) == {"POST /runtime": 1}


# ------------------------------------------------------------------------------------ callers

KEYS = {"a": "sk-a", "b": "sk-b"}
LONG = GenRequest("r", (Text("a prompt that is long enough to be cached " * 3),), SamplingParams(max_tokens=2))


async def cached(remote: RuntimeEndpoint, salt: str = "") -> int:
    request = msgspec.structs.replace(LONG, origin=Origin(salt=salt))
    (final,) = [event async for event in remote.generate(request) if isinstance(event, Final)]
    return final.usage.cached_tokens


def test_a_caller_finds_what_it_has_cached_itself_and_nothing_of_others() -> None:
    async def scenario() -> None:
        async with fronted(access=Access(KEYS, "sk-admin")) as front:
            a, b = (endpoint(front, key)[0] for key in KEYS.values())
            assert [await cached(a), await cached(a) > 50] == [0, True]
            assert [await cached(a, "x"), await cached(a, "x") > 50] == [0, True]
            assert [await cached(b), await cached(b, "x")] == [0, 0]
            with pytest.raises(CapabilityError, match="'flush_cache' takes the admin key"):
                await a.control("flush_cache")
            admin, _ = endpoint(front, "sk-admin")
            await admin.control("flush_cache")
            assert await cached(a) == 0
            stranger, _ = endpoint(front, "sk-c")
            with pytest.raises(RequestError, match="401"):
                await cached(stranger)
            for remote in (a, b, admin, stranger):
                await remote.close()

    asyncio.run(scenario())


def test_marks_keep_no_less_than_the_server_lets_them() -> None:
    async def created(least: int) -> int:
        async with fronted(limits=HttpLimits(cache_minimum=least)) as front:
            remote, _ = endpoint(front)
            marked = msgspec.structs.replace(LONG, caching=Caching((CacheMark(1),), minimum=1))
            (final,) = [event async for event in remote.generate(marked) if isinstance(event, Final)]
            await remote.close()
            assert final.caching is not None
            return final.caching.created

    assert asyncio.run(created(50)) > 50
    assert asyncio.run(created(1_000)) == 0


def test_vectors_are_those_of_a_runtime_and_cached_for_their_caller() -> None:
    texts = [f"a text about the number {number}" for number in range(70)]

    async def scenario() -> None:
        async with fronted(access=Access(KEYS), limits=HttpLimits(most_in_flight=70)) as front:
            a, b = (endpoint(front, key)[0] for key in KEYS.values())
            directly = await ul.embed_async(texts, backend=front.backend)
            assert await ul.embed_async(texts, dimensions=3, backend=b) != directly
            assert await ul.embed_async(texts, backend=a) == directly
            pair = "{query} {text}:"
            ranked = await ul.rerank_async("which?", texts[:9], template=pair, backend=a)
            assert ranked == await ul.rerank_async("which?", texts[:9], template=pair, backend=front.backend)
            again = [await one.embed(EmbedRequest("v", ((Text("new " * 20),),))) for one in (a, a, b)]
            assert [one.usage.cached_tokens for one in again] == [1, again[0].usage.prompt_tokens - 1, 1], "BOS"
            with pytest.raises(ul.ContextLengthError, match="text 1 has"):
                await ul.embed_async(["a", "long " * 2000], backend=a)
            with pytest.raises(ul.RequestError, match="asks for 71 texts"):
                await a.embed(EmbedRequest("v", ((Text("x"),),) * 71))
            assert front.in_flight == 0
            for remote in (a, b):
                await remote.close()

    asyncio.run(scenario())


NAMED = CreateCache("c", "manual", LONG.prompt, ttl=60.0, minimum=1, record=b"kept")


def test_a_cache_is_kept_under_a_name_of_its_caller() -> None:
    async def scenario() -> None:
        async with fronted(access=Access(KEYS), limits=HttpLimits(cache_minimum=50)) as front:
            a, b = (endpoint(front, key)[0] for key in KEYS.values())
            made = await a.caches(NAMED)
            (cache,) = made.caches
            assert made.caching is not None
            assert cache.tokens == made.caching.created == made.usage.cache_write_tokens > 50
            with pytest.raises(ParameterError, match="'manual' exists"):
                await a.caches(NAMED)
            (found,) = (await a.caches(ReadCaches("r", "manual"))).caches
            assert (found.tokens, found.ttl, found.record) == (cache.tokens, 60.0, b"kept")
            (longer,) = (await a.caches(ExtendCache("e", "manual", 600.0))).caches
            assert longer.ttl == 600.0
            for elsewhere, salt in ((b, ""), (a, "x")):
                mine = Origin(salt=salt)
                for request in (
                    ReadCaches("r", origin=mine),
                    ExtendCache("e", "manual", 60.0, mine),
                    DeleteCache("d", "manual", mine),
                ):
                    assert (await elsewhere.caches(request)).caches == ()
            assert len((await a.caches(DeleteCache("d", "manual"))).caches) == 1
            assert (await a.caches(ReadCaches("r"))).caches == ()
            for remote in (a, b):
                await remote.close()

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("request_", "error", "says"),
    [
        (msgspec.structs.replace(NAMED, ttl=3_601.0), ParameterError, "ttl=3601 is too long; write at most 3600"),
        (ExtendCache("e", "manual", 7_200.0), ParameterError, "ttl=7200 is too long"),
        (NAMED, RequestError, "at least 1024 tokens"),
    ],
    ids=["create", "extend", "minimum"],
)
def test_a_cache_stays_within_the_limits_of_the_server(
    request_: CacheRequest, error: type[Exception], says: str
) -> None:
    async def scenario() -> None:
        async with fronted() as front:
            remote, _ = endpoint(front)
            with pytest.raises(error, match=says):
                await remote.caches(request_)
            marked = msgspec.structs.replace(LONG, caching=Caching((CacheMark(1, 3_601.0),)))
            with pytest.raises(ParameterError, match="cache_point ttl=3601 is too long"):
                await anext(aiter(remote.generate(marked)))
            await remote.close()

    asyncio.run(scenario())


def test_the_state_and_the_tree_of_all_callers_are_shown_to_the_administrator() -> None:
    async def scenario() -> None:
        async with fronted(access=Access(KEYS, "sk-admin"), limits=HttpLimits(most_in_flight=1)) as front:
            user, admin = (endpoint(front, key)[0] for key in ("sk-a", "sk-admin"))
            await cached(user)
            status, directly = await admin.status(), await state(front.backend)  # type: ignore[arg-type]
            assert (status.engine, status.model, status.pool) == (EngineState.READY, directly.model, directly.pool)
            tree = await admin.survey(most=100, text=200)
            assert tree.total_nodes == len(tree.nodes) > 0
            assert "a prompt that is long enough" in "".join(node.text for node in tree.nodes)
            assert not any(node.text for node in (await admin.survey()).nodes)
            with pytest.raises(ParameterError, match=r"survey\(most=0\) is out of range"):
                await admin.survey(most=0)
            with front.open():  # a server without room shows its state
                assert (await admin.status()).engine is EngineState.READY
            for asked, says in (
                (user.status(), "the status, which shows all callers, takes the admin key"),
                (user.survey(), "the radix tree, which shows all callers, takes the admin key"),
            ):
                with pytest.raises(CapabilityError, match=says):
                    await asked
            for remote in (user, admin):
                await remote.close()

    asyncio.run(scenario())


def test_a_pin_belongs_to_its_caller() -> None:
    async def scenario() -> None:
        async with fronted(access=Access(KEYS)) as front:
            local = front.backend
            assert isinstance(local, LocalBackend)
            a, b = (endpoint(front, key)[0] for key in KEYS.values())
            for remote in (a, b):
                await remote.start()
            a.hint(Hint("pin", LONG.prompt, pin=60.0))
            while not (await state(local)).pool.pinned:
                await asyncio.sleep(0)
            b.release("pin")
            await asyncio.gather(*b._served._sent)  # type: ignore[union-attr]
            assert (await state(local)).pool.pinned
            a.release("pin")
            while (await state(local)).pool.pinned:
                await asyncio.sleep(0)
            for remote in (a, b):
                await remote.close()

    asyncio.run(scenario())


async def state(local: LocalBackend) -> RuntimeStatus:
    return await local.status()


@pytest.mark.parametrize(
    ("request_", "error"),
    [
        (GenRequest("a", PROMPT, constraint=ConstraintSpec("regex", "(")), ConstraintError),
        (GenRequest("a", PROMPT, origin=Origin(priority=1 << 40)), ParameterError),
        (GenRequest("a", (Generated("x", (1 << 40,)),)), ParameterError),
        (GenRequest("a", PROMPT, origin=Origin(salt="a b")), ParameterError),
    ],
)
def test_an_error_has_its_class_and_its_words(request_: GenRequest, error: type[Exception]) -> None:
    async def told(backend: Backend) -> str:
        with pytest.raises(error) as caught:
            [event async for event in backend.generate(request_)]
        return str(caught.value)

    async def scenario() -> None:
        async with fronted() as front:
            remote, wire = endpoint(front)
            assert wire.asked["POST /runtime"] == 0
            words = await told(remote)
            assert wire.asked["POST /runtime"] == 1  # it is not sent again
            if request_.origin.salt == "":
                assert words == await told(front.backend)
            await remote.close()

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("kind", "source", "says"),
    [
        ("regex", "a" * 10_000, "constraint.source has 10000 characters; at most 4096"),
        ("json_schema", '{"enum": ["' + "a" * 99_000 + '"]}', "constraint.source has 99014 bytes; at most 65536"),
    ],
    ids=["regex", "schema"],
)
def test_a_constraint_is_no_longer_than_the_fields_of_other_routes_take(kind: Any, source: str, says: str) -> None:
    asked = GenRequest("a", PROMPT, SamplingParams(max_tokens=1), constraint=ConstraintSpec(kind, source))

    async def scenario() -> None:
        async with fronted() as front:
            remote, _ = endpoint(front)
            with pytest.raises(ParameterError, match=says):
                [event async for event in remote.generate(asked)]
            await remote.close()

    asyncio.run(scenario())


# ------------------------------------------------------------------------------------ other servers


def test_a_server_of_another_version_is_asked_by_the_api_that_both_have(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("umbel.server.native.runtime.__version__", "0.0.1")

    async def scenario() -> None:
        async with fronted() as front:
            remote, _ = endpoint(front)
            await remote.start()
            assert isinstance(remote._served, SGLangServer)
            with pytest.raises(
                CapabilityError, match="does not tell where tokens are; a Runtime does, and a server of"
            ):
                await remote.locate(Locate("l", PROMPT, (1,)))
            for asked, says in (
                (remote.caches(ReadCaches("c")), "keeps nothing under names; a Runtime does"),
                (remote.status(), "does not tell its state; a Runtime does"),
                (remote.survey(), "does not show its cache; a Runtime does"),
            ):
                with pytest.raises(CapabilityError, match=says):
                    await asked
            named, _ = endpoint(front, server="umbel")
            with pytest.raises(RequestError, match=r"does not take the messages of umbel .* \(it is umbel 0.0.1\)"):
                await named.start()

    asyncio.run(scenario())


def test_a_template_of_the_client_keeps_its_programs_here() -> None:
    async def scenario() -> None:
        async with fronted() as front:
            remote, _ = endpoint(front, chat_template="chatml")
            await remote.start()
            assert not remote.capabilities.programs
            assert "im_start" in (remote.chat_template.source or "")

    asyncio.run(scenario())


# ------------------------------------------------------------------------------------ faults on the way


class FaultyWire(Wire):
    """Loses, repeats, swaps, damages and cuts off the events of answers."""

    def __init__(self, front: Front, seed: int) -> None:
        super().__init__(front)
        self._dice = random.Random(seed)

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        response = await super().handle_async_request(request)
        if request.method == "GET":
            return response
        events = (await response.aread()).split(b"\n\n")
        at, other = (self._dice.randrange(len(events)) for _ in range(2))
        match self._dice.randrange(6):
            case 0:
                del events[at]
            case 1:
                events.insert(at, events[at])
            case 2:
                events[at], events[other] = events[other], events[at]
            case 3:
                events[at] = self._dice.choice((b"data: {}", b'data: {"message": "?"}', b"data: [", b"\xff"))
            case 4:
                events[at:] = [events[at][: self._dice.randrange(30)]]
            case _:
                del events[at:]
        return httpx2.Response(200, headers=response.headers, content=b"\n\n".join(events))


def test_an_answer_that_suffers_on_its_way_is_whole_or_an_error() -> None:
    requests = (
        GenRequest("a", PROMPT, SamplingParams(max_tokens=3, temperature=0), stream=True),
        ScoreRequest("s", PROMPT, ("yes", "no")),
        Tokenize("t", PROMPT),
    )

    async def ending(remote: RuntimeEndpoint, request: Any) -> Any:
        if isinstance(request, GenRequest):
            *_, final = [event async for event in remote.generate(request)]
            return final.completions
        scored = isinstance(request, ScoreRequest)
        return await (remote.score(request) if scored else remote.tokenize(request))

    async def scenario() -> Counter[str]:
        seen: Counter[str] = Counter()
        async with fronted() as front:
            remote, _ = endpoint(front)
            await remote.start()
            expected = [await ending(remote, request) for request in requests]
            for seed in range(40):
                environment = Environment(wire=FaultyWire(front, seed), variables={})
                hurt = RuntimeEndpoint("http://localhost", server="umbel", environment=environment)
                for request, whole in zip(requests, expected, strict=True):
                    try:
                        assert joined([await ending(hurt, request)]) == joined([whole])
                        seen["whole"] += 1
                    except UmbelError as error:
                        seen[type(error).__name__] += 1
                await hurt.close()
            assert front.in_flight == 0
        return seen

    seen = asyncio.run(scenario())
    assert seen["whole"] > 30
    assert seen["BackendError"] > 20


# ------------------------------------------------------------------------------------ the route


def wrapped(message: bytes) -> dict[str, str]:
    return {"message": base64.b64encode(message).decode()}


async def posted(client: AsgiClient, message: bytes) -> int:
    return (await client.post("/runtime", wrapped(message))).status


@settings(max_examples=50, **QUIETLY)
@given(data=st.binary(max_size=60) | st.builds(msgspec.msgpack.encode, st.dictionaries(st.text(), st.integers(0, 9))))
def test_bytes_that_are_no_message_are_refused(data: bytes) -> None:
    async def scenario() -> None:
        client = AsgiClient(application(ready))
        assert await posted(client, data) == 400

    ready = Front(LocalBackend())
    ready.started = True
    asyncio.run(scenario())


def test_a_client_that_hangs_up_ends_its_message() -> None:
    endless = GenRequest("e", PROMPT, SamplingParams(max_tokens=400, temperature=0, ignore_eos=True), stream=True)

    async def scenario() -> None:
        async with served() as client:
            live = client.begin("POST", "/runtime", wrapped(msgspec.msgpack.encode(endless)))
            await live.until(b"message")
            assert client.app.front.in_flight == 1
            await live.hang_up()
            assert client.app.front.in_flight == 0
            while (await client.app.front.backend.status()).running:
                await asyncio.sleep(0)
            release = await client.post("/runtime", wrapped(msgspec.msgpack.encode(Release("x"))))
            assert release.events == [("", "[DONE]")]

    asyncio.run(scenario())
