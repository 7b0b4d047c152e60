"""Many clients at once, and for long: each gets its text, one too many is told so, and nothing grows."""

import asyncio
import itertools
import random
import statistics
import time
from pathlib import Path
from typing import Any

import pytest

from ..serving import PATIENCE
from .serving import Serving, serving, until_async

pytestmark = pytest.mark.processes

MOST_GROWTH = 1.0  # MB in 3,000 requests, a minute of fifty a second, however fast the machine is
PROMPTS = 200  # different ones: what caches of bounded size keep of them is kept before the growth is measured


async def fill(server: Serving, places: int, tokens: int) -> float:
    """Takes all places with streams, asks for one more → seconds until that one was refused."""
    await server.ready()
    body = {"model": "oracle", "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    prompts = [f"a long text {number}: " for number in range(8)]
    streams = [asyncio.create_task(server.stream({**body, "prompt": prompts[n % 8]})) for n in range(places)]

    async def full() -> bool:
        return bool((await server.facts())["http_in_flight"] == places)

    await until_async(full, "all places are taken")
    asked = time.monotonic()
    refused = await server.post("/v1/completions", {**body, "prompt": "one more"})
    seconds = time.monotonic() - asked
    assert refused.status == 503
    assert int(refused.headers["retry-after"]) >= 1
    assert refused.json["error"]["code"] == "overloaded"
    assert await server.status_of_health() == 200  # full is not ill
    answers = await asyncio.gather(*streams)
    texts = [(await server.post("/v1/completions", {**body, "prompt": prompt})).text for prompt in prompts]
    for answer, text in zip(answers, itertools.cycle(texts)):
        assert answer.whole
        assert answer.error == ""
        assert answer.text == text
    await server.rest()
    return seconds


def test_the_request_after_the_last_place_is_refused_and_all_others_get_their_text(server: Serving) -> None:
    asyncio.run(fill(server, 64, 100))


@pytest.mark.nightly
def test_the_default_limits_hold_256_streams_and_1024_that_wait(tmp_path: Path) -> None:
    options = {"max_running": 256, "pool_tokens": 1 << 16, "debug": {"step_delay": 0.5}}
    with serving(tmp_path, options) as server:
        seconds = asyncio.run(fill(server, 256 + 1_024, 40))
    print(f"refused after {seconds:.3f} s")
    assert seconds < 5  # a second on a quiet machine


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "y"]}}, "required": ["a", "b"]}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}


def some_request(draw: random.Random) -> tuple[str, dict[str, Any]]:
    """A request of one of seven kinds."""
    prompt = random.Random(draw.randrange(PROMPTS))
    words = " ".join(prompt.choice(("red", "green", "blue", "sea", "sky")) for _ in range(prompt.randrange(1, 30)))
    base = {"model": "oracle", "max_tokens": draw.randrange(4, 24), "temperature": 0.7, "seed": draw.randrange(1 << 30)}
    chat = {**base, "messages": [{"role": "user", "content": words}]}
    completion = {**base, "prompt": words, "umbel": {"program": "p", "fork_group": f"g{draw.randrange(9)}"}}
    return draw.choice(
        [
            ("/v1/completions", completion),
            ("/v1/completions", {**completion, "stream": True}),
            ("/v1/completions", {**completion, "regex": draw.choice(["[a-z]{3}", "(yes|no)", "20[0-9]{2}"])}),
            ("/v1/chat/completions", {**chat, "stream": True}),
            ("/v1/chat/completions", {**chat, "max_tokens": 40, "response_format": _format()}),
            ("/v1/chat/completions", {**chat, "max_tokens": 60, "tools": [TOOL], "tool_choice": "required"}),
            ("/hints", {"text": words}),
        ]
    )


def _format() -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}


async def soak(server: Serving, count: int, at_once: int, seed: int) -> list[tuple[float, float]]:
    """Sends mixed requests, a tenth of which hang up → the memory of the server over them: (requests, MB)."""
    draw = random.Random(seed)
    memory: list[tuple[float, float]] = []
    left = iter(range(count))

    async def client() -> None:
        for number in left:
            path, body = some_request(draw)
            hangs_up = number % 10 == 0
            async with server.sending("POST", path, body) as (reader, _):
                if hangs_up:
                    await asyncio.wait([asyncio.ensure_future(reader.read(1))], timeout=draw.random() * 0.02)
                    continue
                head = await asyncio.wait_for(reader.read(), PATIENCE)
                assert head.startswith(b"HTTP/1.1 200"), head[:500]
            if number % (count // 200) == 0:
                memory.append((number, server.memory() / 2**20))

    await asyncio.gather(*(client() for _ in range(at_once)))
    return memory


def growth(memory: list[tuple[float, float]]) -> float:
    """MB in 3,000 requests."""
    numbers, sizes = zip(*memory, strict=True)
    return 3_000 * statistics.linear_regression(numbers, sizes).slope


@pytest.mark.nightly
@pytest.mark.parametrize("count", [15_000])
def test_mixed_requests_leave_nothing(count: int, tmp_path: Path) -> None:
    async def scenario(server: Serving) -> None:
        await server.ready()
        await soak(server, 400, 32, seed=1)
        await server.rest()
        before = server.resources()
        memory = await soak(server, count, 32, seed=2)
        facts = await server.rest()
        after = server.resources()
        rate = growth(memory[len(memory) // 2 :])
        print(f"{memory[0]} → {memory[len(memory) // 2]} → {memory[-1]}: {rate:.2f} MB in 3,000 requests")
        print(f"descriptors, threads, processes: {before} → {after}")
        print({name: facts[name] for name in ("pool_free", "pool_cached", "max_total_tokens")})
        assert rate < MOST_GROWTH
        assert after[1:] == before[1:]
        assert after[0] <= before[0] + 2

    with serving(tmp_path, {"pool_tokens": 8_192}) as server:
        asyncio.run(scenario(server))
