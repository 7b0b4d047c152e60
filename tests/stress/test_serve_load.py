"""Many clients at once, and for long: each gets its text, the server refuses one too many, and nothing grows."""

import asyncio
import base64
import contextlib
import io
import itertools
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from ..serving import PATIENCE
from .serving import Answer, Serving, serving, until_async

pytestmark = pytest.mark.processes

RATE = 50  # requests a second; on a machine that takes fewer, as many as it takes
MOST_GROWTH = 1.0  # MB of all processes together, a minute and in a minute's requests at RATE
PROMPTS = 50  # different ones under each salt: what caches of bounded size keep of them is there after a minute
SALTS = ("", "a", "b")
KEPT = 1  # seconds of pins and caches after their last use


STEP = 0.5  # seconds of an engine step
MOST_STEPS = 2  # from a request to its refusal: a second


async def fill(server: Serving, places: int, tokens: int) -> int:
    """Takes all places with streams, asks for one more → engine steps until that one was refused."""
    await server.ready()
    body = {"model": "oracle", "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    prompts = [f"a long text {number}: " for number in range(8)]
    chunks = [0] * places  # of each stream; a step gives one to each that runs

    def stream(number: int) -> asyncio.Task[Answer]:
        def count(_: bytes) -> None:
            chunks[number] += 1

        return asyncio.create_task(server.stream({**body, "prompt": prompts[number % 8]}, count))

    streams = [stream(number) for number in range(places)]

    async def full() -> bool:
        return bool((await server.facts())["http_in_flight"] == places)

    await until_async(full, "all places are taken")
    before = list(chunks)
    refused = await server.post("/v1/completions", {**body, "prompt": "one more"})
    steps = max(after - earlier for after, earlier in zip(chunks, before, strict=True))
    assert refused.status == 503
    assert int(refused.headers["retry-after"]) >= 1
    assert refused.json["error"]["code"] == "overloaded"
    assert await server.status_of_health() == 200  # full is not ill
    answers = await asyncio.gather(*streams)
    alone = await asyncio.gather(*(server.post("/v1/completions", {**body, "prompt": prompt}) for prompt in prompts))
    for answer, text in zip(answers, itertools.cycle(each.text for each in alone)):
        assert answer.whole
        assert answer.error == ""
        assert answer.text == text
    await server.rest()
    return steps


def test_the_request_after_the_last_place_is_refused_and_all_others_get_their_text(server: Serving) -> None:
    asyncio.run(fill(server, 64, 100))


@pytest.mark.nightly
def test_the_default_limits_hold_256_streams_and_1024_that_wait(tmp_path: Path) -> None:
    options = {"max_running": 256, "pool_tokens": 1 << 16, "debug": {"step_delay": STEP}}
    with serving(tmp_path, options) as server:
        steps = asyncio.run(fill(server, 256 + 1_024, 40))
    print(f"refused within {steps} steps of {STEP} s")
    assert steps <= MOST_STEPS


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "y"]}}, "required": ["a", "b"]}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}


def some_request(draw: random.Random) -> tuple[str, dict[str, Any]]:
    """A request of one of eleven kinds."""
    prompt = random.Random(draw.randrange(PROMPTS))
    words = " ".join(prompt.choice(("red", "green", "blue", "sea", "sky")) for _ in range(prompt.randrange(4, 30)))
    salt = {"cache_salt": salt} if (salt := draw.choice(SALTS)) else {}
    base = {"model": "oracle", "max_tokens": draw.randrange(4, 24), "temperature": 0.7, "seed": draw.randrange(1 << 30)}
    completion = {**base, **salt, "prompt": words, "umbel": {"program": "p", "fork_group": f"g{draw.randrange(9)}"}}
    turns = {"messages": [{"role": "user", "content": words}]}
    chat = {**base, **salt, **turns}
    seen = [{"type": "text", "text": words}, {"type": "image_url", "image_url": {"url": _picture(draw.randrange(20))}}]
    return draw.choice(
        [
            ("/v1/completions", completion),
            ("/v1/completions", {**completion, "stream": True}),
            ("/v1/completions", {**completion, "regex": draw.choice(["[a-z]{3}", "(yes|no)", "20[0-9]{2}"])}),
            ("/v1/completions", {**completion, "n": 3}),
            ("/v1/chat/completions", {**chat, "stream": True}),
            ("/v1/chat/completions", {**chat, "max_tokens": 40, "response_format": _format()}),
            ("/v1/chat/completions", {**chat, "max_tokens": 60, "tools": [TOOL], "tool_choice": "required"}),
            ("/v1/chat/completions", {**chat, "messages": [{"role": "user", "content": seen}]}),
            ("/hints", {**salt, "text": words}),
            ("/hints", {**salt, "text": words, "pin": KEPT}),
            ("/v1/caches", {"model": "oracle", **salt, **turns, "ttl": KEPT}),
        ]
    )


def _format() -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}


def _picture(number: int) -> str:
    file = io.BytesIO()
    Image.new("RGB", (16, 16), (number, 0, 0)).save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


@dataclass(frozen=True)
class Sample:
    """The memory of the server's processes in MB, so many minutes and requests after the first request."""

    minutes: float
    requests: int
    sizes: dict[str, float]


async def soak(server: Serving, count: int, *, rate: float, seed: int) -> list[Sample]:
    """Sends mixed requests at a rate, at most 32 at once, a tenth of which hang up → a sample for each second of it."""
    draw = random.Random(seed)
    places = asyncio.Semaphore(32)
    samples: list[Sample] = []
    begun = time.monotonic()

    async def ask(path: str, body: dict[str, Any], hangs_up: float | None) -> None:
        try:
            async with server.sending("POST", path, body) as (reader, _):
                if hangs_up is not None:
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(reader.read(1), hangs_up)
                    return
                head = await asyncio.wait_for(reader.read(), PATIENCE)
                assert head.startswith((b"HTTP/1.1 200", b"HTTP/1.1 201")), (path, body, head[:500])
        finally:
            places.release()

    async with asyncio.TaskGroup() as group:
        for number in range(count):
            await places.acquire()
            await asyncio.sleep(max(0.0, begun + number / rate - time.monotonic()))
            group.create_task(ask(*some_request(draw), draw.random() * 0.02 if number % 10 == 0 else None))
            if number % rate == 0:
                sizes = {name: size / 2**20 for name, size in server.sizes().items()}
                samples.append(Sample((time.monotonic() - begun) / 60, number, sizes))
    return samples


def growth(samples: Sequence[Sample], name: str) -> tuple[float, float]:
    """Returns the growth of one process in MB: a minute, and in the requests of a minute at RATE."""
    sizes = [sample.sizes[name] for sample in samples]
    by_time = statistics.linear_regression([sample.minutes for sample in samples], sizes)
    by_requests = statistics.linear_regression([sample.requests for sample in samples], sizes)
    return by_time.slope, 60 * RATE * by_requests.slope


async def conserved(server: Serving, checks: int) -> None:
    """Waits until the pool has been checked as a whole, once more than `checks` times; then nothing may be held."""

    async def released() -> dict[str, Any] | None:
        facts = await server.rest()
        return facts if facts["pool_pinned"] == facts["pool_pins"] == 0 and facts["idle_checks"] > checks else None

    facts = await until_async(released, "pins and caches have ended, and the pool was checked")
    assert facts["integrity_failures"] == 0
    tree = (await server.ask("GET", "/ui/tree?most=5000")).json
    pool, nodes = tree["pool"], tree["nodes"]  # id, parent, tokens, locks, pins, keeps, age, salt, text
    assert len(nodes) == tree["total_nodes"]
    assert [node for node in nodes if any(node[3:6])] == []
    assert sum(node[2] for node in nodes) == pool["cached"] == pool["total"] - pool["free"]
    for salt in SALTS:
        found = await server.ask("GET", f"/v1/caches?cache_salt={salt}" if salt else "/v1/caches")
        assert found.json["data"] == []


async def leaves_nothing(server: Serving, count: int, *, rate: float) -> list[Sample]:
    """Soaks a server after a hundred requests, which start all of its processes → the samples."""
    await server.ready()
    await soak(server, 100, rate=rate, seed=1)
    facts = await server.rest()
    before = server.resources()
    samples = await soak(server, count, rate=rate, seed=2)
    await conserved(server, facts["idle_checks"])
    after = server.resources()
    print(f"descriptors, threads, processes: {before} → {after}")
    assert after[1:] == before[1:]
    assert after[0] <= before[0] + 2
    return samples


def test_mixed_requests_leave_nothing_in_the_pool(server: Serving) -> None:
    asyncio.run(leaves_nothing(server, 100, rate=200))


@pytest.mark.nightly
@pytest.mark.parametrize("count", [15_000])
def test_mixed_requests_leave_no_memory(count: int, tmp_path: Path) -> None:
    with serving(tmp_path, {"pool_tokens": 8_192}, "--cache-minimum", "16") as server:
        samples = asyncio.run(leaves_nothing(server, count, rate=RATE))
    warm = [sample for sample in samples if sample.requests >= 60 * RATE]
    rates = {name: growth(warm, name) for name in warm[-1].sizes}
    print(f"{count} requests in {samples[-1].minutes:.1f} minutes")
    for name, (by_time, by_requests) in rates.items():
        sizes = [sample.sizes[name] for sample in (samples[0], warm[0], warm[len(warm) // 2], warm[-1])]
        shown = " → ".join(f"{size:.1f}" for size in sizes)
        print(f"{name}: {shown} MB; {by_time:.2f} MB a minute, {by_requests:.2f} MB in {60 * RATE} requests")
    assert sum(by_time for by_time, _ in rates.values()) < MOST_GROWTH
    assert sum(by_requests for _, by_requests in rates.values()) < MOST_GROWTH
