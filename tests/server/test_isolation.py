"""Tenants: what one has made the engine compute does not help, slow or reorder another."""

import asyncio
import base64
import logging
import random
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from umbel.lang.prompt import Text
from umbel.lang.protocol import Final, GenRequest, Placed, PlaceKind, SamplingParams
from umbel.server.access import Access
from umbel.srt.core.instruments import Clock
from umbel.srt.in_process import LocalBackend

from benchmarks.round_trips.virtual_time import VirtualTime

from .client import AsgiClient, served

KEYS = {"a": "sk-a", "ab": "sk-ab", "b": "sk-b"}
Tenant = tuple[str, str | None]  # key, salt
PROMPT = "hello world"

# Pairs that a careless join of key and salt would confuse.
CONFUSING: list[tuple[Tenant, Tenant]] = [
    (("a", "bc"), ("ab", "c")),
    (("a", None), ("a", "")),
    (("a", ""), ("ab", "")),
    (("a", "b"), ("ab", None)),
    (("a", "a"), ("a", "A")),
    (("a", "x"), ("b", "x")),
    (("b", None), ("a", "b")),
    (("a", "a_a"), ("a", "a-a")),
]


async def ask(client: AsgiClient, tenant: Tenant, prompt: str, **fields: Any) -> int:
    """Asks for one token → the number of cached tokens."""
    key, salt = tenant
    body = {"model": "oracle", "prompt": prompt, "max_tokens": 1, "temperature": 0, **fields}
    if salt is not None:
        body["cache_salt"] = salt
    answer = await client.post("/v1/completions", body, **{"x-api-key": KEYS[key]})
    assert answer.status == 200, answer.content
    cached: int = answer.json["usage"]["prompt_tokens_details"]["cached_tokens"]
    return cached


@pytest.mark.parametrize("count", [32, pytest.param(500, marks=pytest.mark.nightly)])
def test_pairs_of_salts_share_nothing_and_each_shares_with_itself(count: int) -> None:
    draw = random.Random(7)
    pairs = [*CONFUSING]
    while len(pairs) < count:
        one, other = ((draw.choice([*KEYS]), draw.choice([None, "", "a", "b", "ab", "c"])) for _ in range(2))
        if one != other:
            pairs.append((one, other))

    async def scenario() -> None:
        backend = LocalBackend(debug={"check_every_step": False})
        async with served(backend, access=Access(KEYS)) as client:
            for one, other in pairs:
                await backend.control("flush_cache")
                cached = [await ask(client, tenant, PROMPT) for tenant in (one, other, one, other)]
                # Within a salt all but the last token is reused, or the test would prove nothing.
                assert cached == [0, 0, len(PROMPT), len(PROMPT)], (one, other)

    asyncio.run(scenario())


PROBES = 24
DECOYS = 9  # unknown texts that wait next to a probe
LENGTH = 64  # characters, a token each; eight steps of a chunk of eight


def auc(misses: Sequence[float], hits: Sequence[float]) -> float:
    """Returns how often a miss looks larger than a hit; a tie counts half."""
    pairs = [(miss > hit) + 0.5 * (miss == hit) for miss in misses for hit in hits]
    return sum(pairs) / len(pairs)


async def _noise(client: AsgiClient, draw: random.Random) -> None:
    """Requests of a third tenant at random moments, so that times differ for other reasons than the cache."""
    for _ in range(draw.randrange(3)):
        await asyncio.sleep(draw.random() * 0.05)  # of virtual time
        await ask(client, ("b", None), f"{draw.random():.17f}" * 2)


Probe = tuple[bool, float, float]


async def _probe(client: AsgiClient, victim: Tenant, attacker: Tenant, draw: random.Random) -> Probe:
    """One probe → (the victim has asked the secret, seconds to its token, its place among unknown texts)."""
    asked = draw.random() < 0.5
    secret = await _secret(client, victim, asked, draw)
    loop = asyncio.get_running_loop()
    noise = asyncio.ensure_future(_noise(client, draw))
    began = loop.time()
    await ask(client, attacker, secret + "?")
    seconds = loop.time() - began
    await noise
    secret = await _secret(client, victim, asked, draw)
    order: list[str] = []

    async def note(prompt: str) -> None:
        await ask(client, attacker, prompt + "?")
        order.append(prompt)

    prompts = [secret, *(_text(draw) for _ in range(DECOYS))]
    draw.shuffle(prompts)
    blocker = asyncio.ensure_future(ask(client, ("b", None), _text(draw)))
    await asyncio.sleep(0.005)  # of virtual time: the blocker runs, the others wait
    await asyncio.gather(*map(note, prompts), blocker)
    return asked, seconds, order.index(secret)


def _text(draw: random.Random) -> str:
    return f"{draw.getrandbits(4 * LENGTH):0{LENGTH}x}"


async def _secret(client: AsgiClient, victim: Tenant, asked: bool, draw: random.Random) -> str:
    """Draws a text, and lets the victim ask it, or another one."""
    secret, other = _text(draw), _text(draw)
    await ask(client, victim, secret if asked else other)
    return secret


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("probes", [PROBES, pytest.param(400, marks=pytest.mark.nightly)])
def test_neither_times_nor_the_order_of_answers_tell_what_another_has_asked(shared: bool, probes: int) -> None:
    """Over virtual time. The same probes within one salt do tell, or the test would prove nothing."""
    draw = random.Random(11)
    victim: Tenant = ("a", "x")
    attacker: Tenant = ("a", "x") if shared else ("a", "y")

    found: list[Probe] = []

    async def scenario(clock: Clock) -> None:
        options: dict[str, Any] = {"chunk_size": 8, "max_running": 1, "debug": {"check_every_step": False}}
        async with served(LocalBackend(step_seconds=0.01, clock=clock, **options), access=Access(KEYS)) as client:
            for _ in range(probes):
                found.append(await _probe(client, victim, attacker, draw))

    with VirtualTime() as time:
        time.run(scenario(time))
    for place in (1, 2):
        score = auc([each[place] for each in found if not each[0]], [each[place] for each in found if each[0]])
        spread = 0.05 if probes >= 400 else 0.3  # two deviations of so many probes
        assert score > 0.9 if shared else 0.5 - spread <= score <= 0.5 + spread, (place, score)


def test_why_an_engine_was_chosen_tells_no_load_of_other_keys() -> None:
    """The reason of a local runtime has figures of it; the words of an answer over HTTP leave them out."""
    words = {kind.words for kind in PlaceKind}
    parts, sampling = (Text("why here"),), SamplingParams(max_tokens=1, temperature=0)
    request = GenRequest("r", parts, sampling)

    async def local_reason(backend: LocalBackend) -> str:
        final = [event async for event in backend.generate(request)][-1]
        assert isinstance(final, Final)
        assert final.placed is not None
        return final.placed.reason

    async def check_http(client: AsgiClient) -> None:
        key = {"x-api-key": KEYS["a"]}
        body = {"text": "why here", "sampling_params": {"max_new_tokens": 1}}
        placed = (await client.post("/generate", body, **key)).json["meta_info"]["umbel"]["placed"]
        assert set(placed) == {"replica", "reason", "cached_tokens"}
        assert placed["reason"] in words
        question = base64.b64encode(msgspec.msgpack.encode(request)).decode()
        remote = await client.post("/runtime", {"message": question}, **key)
        answer = msgspec.msgpack.decode(base64.b64decode(remote.events[-2][1]["message"]))  # before [DONE]
        at = msgspec.convert(answer["placed"], Placed)
        assert at.reason == f"{at.kind.words}; {at.cached} tokens cached there"

    async def scenario() -> None:
        backend = LocalBackend(replicas=2)
        async with served(backend, access=Access(KEYS)) as client:
            idle = await local_reason(backend)
            await check_http(client)
            long = {"model": "oracle", "prompt": "x" * 1_000, "max_tokens": 3_000, "ignore_eos": True}
            others = asyncio.create_task(client.post("/v1/completions", long, **{"x-api-key": KEYS["b"]}))
            while (await backend.status()).in_flight < 1:
                await asyncio.sleep(0)
            assert await local_reason(backend) != idle, "the load has to show in the reason of the runtime itself"
            await check_http(client)
            assert not others.done(), "the load has to last"
            others.cancel()
            await asyncio.gather(others, return_exceptions=True)

    asyncio.run(scenario())


CANARY, SECRET = "canary-fdzq", "sk-canary-77ab"  # a label of a line has no digits
TALK = {"model": "oracle", "messages": [{"role": "user", "content": CANARY}], "max_tokens": 2}
BODIES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("/v1/completions", {"model": "oracle", "prompt": CANARY, "max_tokens": 2}),
    ("/v1/chat/completions", TALK),
    ("/v1/messages", TALK),
    ("/v1/responses", {"model": "oracle", "input": CANARY, "max_output_tokens": 2}),
    ("/generate", {"text": CANARY, "sampling_params": {"max_new_tokens": 2}}),
    ("/score", {"text": CANARY, "choices": ["a", "b"]}),
    ("/hints", {"text": CANARY}),
    ("/v1/caches", {"model": "oracle", "messages": TALK["messages"]}),
)
FAULTS: tuple[dict[str, Any], ...] = ({}, {"stream": True}, {"temperature": -1}, {"cache_salt": "no salt"}, {"oops": 1})


def test_neither_log_nor_metrics_hold_a_prompt_or_a_key(caplog: pytest.LogCaptureFixture) -> None:
    """Also where a request fails, and where the server has a defect."""
    caplog.set_level(logging.DEBUG, "umbel")

    async def scenario() -> None:
        async with served(access=Access({"team": SECRET}, "sk-admin")) as client:
            answers = []
            for path, body in BODIES:
                for fault in FAULTS:
                    for key in (SECRET, f"{SECRET}x"):
                        answers.append(await client.post(path, body | fault, **{"x-api-key": key}))
            for number in range(3):  # a line that changes with every request is warned of
                changing = f"{CANARY}: {number}\n{'Answer in short words. ' * 30}\n"
                body = {"model": "oracle", "messages": [{"role": "user", "content": changing}], "max_tokens": 1}
                answers.append(await client.post("/v1/chat/completions", body, **{"x-api-key": SECRET}))
            assert CANARY in answers[-1].headers["umbel-warning"], "the caller reads the label"
            client.app.front.backend.generate = client.app.front.backend.score = None  # a defect
            for path, body in BODIES[:6]:
                answers.append(await client.post(path, body, **{"x-api-key": SECRET}))
                assert answers[-1].status == 500
                assert CANARY not in answers[-1].content.decode()
            metrics = await client.get("/metrics", **{"x-api-key": "sk-admin"})
            assert metrics.status == 200
            assert {200, 400, 401, 500} <= {answer.status for answer in answers}
            for answer in (*answers, metrics):
                assert SECRET not in answer.content.decode() + repr(answer.headers)
            assert CANARY not in metrics.content.decode()

    asyncio.run(scenario())
    assert "Traceback" in caplog.text, "the defect is in the log"
    assert "line 1 of the first message changes with every request" in caplog.text
    assert SECRET not in caplog.text
    assert CANARY not in caplog.text
