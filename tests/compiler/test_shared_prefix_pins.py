"""Heads in a backend's cache: what is put there, and for how long it stays."""

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from umbel.compiler.graph import Graph
from umbel.compiler.program import function
from umbel.compiler.shared_prefix import SHORTEST, Cached, cache_head, pin
from umbel.interpreter import loop
from umbel.interpreter.backends.echo import Echo
from umbel.interpreter.backends.runtime import Runtime
from umbel.interpreter.run import get_server_info
from umbel.lang.errors import CapabilityError, ParameterError
from umbel.lang.generation import gen
from umbel.lang.prompt import Text
from umbel.lang.protocol import Capabilities, GenRequest, Hint
from umbel.srt.in_process import LocalBackend
from umbel.srt.tokenizer.prompt import PromptEncoder
from umbel.srt.tokenizer.tokenizer import ByteTokenizer

from .test_shared_prefix import LONG, Chain

HEAD = (Text(LONG),)
TOKENS = len(PromptEncoder(ByteTokenizer()).encode(HEAD))  # of the oracle


def program() -> Graph:
    chain = Chain().say(LONG)
    return chain.say(chain.argument()).gen().graph()


@pytest.fixture
def local() -> Iterator[LocalBackend]:
    backend = LocalBackend(pool_tokens=400)
    loop.streams.run(backend.start())
    yield backend
    loop.streams.run(backend.close())


def settled() -> None:
    """What was called on the streams' loop has been done."""

    async def turn() -> None:
        await asyncio.sleep(0)

    loop.streams.run(turn())


def pinned(backend: LocalBackend) -> object:
    """The engine's number of pinned slots; asking it takes a step, so what was sent before has arrived."""
    settled()
    return get_server_info(backend)["pinned_slots"]


def test_the_head_is_computed_pinned_and_released(local: LocalBackend) -> None:
    cached = loop.streams.run(cache_head(program(), local, ttl=60))
    assert (cached.tokens, cached.text, pinned(local)) == (TOKENS, LONG, TOKENS)
    cached.release()
    cached.release()
    assert pinned(local) == 0


def test_leaving_the_block_releases(local: LocalBackend) -> None:
    with loop.streams.run(cache_head(program(), local)) as cached:
        assert pinned(local) == cached.tokens > 0
    assert pinned(local) == 0
    assert repr(cached) == f"<cached head of {cached.tokens} tokens, not pinned>"


def test_a_batch_pins_without_waiting_and_counts_by_the_backends_bound(local: LocalBackend) -> None:
    held = pin(local, HEAD)
    assert held.tokens == local.tokens_at_most(HEAD)
    assert pinned(local) == TOKENS
    held.release()
    assert pinned(local) == 0


def test_the_salt_of_the_runs_is_that_of_the_pin(local: LocalBackend) -> None:
    with pin(local, HEAD, salt="mine"):
        assert pinned(local) == TOKENS
        space = local.engine.scheduler.kv
        assert [match.node.salt for match in space.pins.matches] == ["mine"]


def test_a_head_that_is_not_worth_it_is_left_alone() -> None:
    echo = Echo()
    short = Chain().say("Q: ").gen().graph()
    for cached in (loop.streams.run(cache_head(short, echo)), pin(echo, (Text("Q: "),)), pin(echo, ())):
        assert (cached.tokens, cached.parts) == (0, ())
        cached.release()
    settled()
    assert not echo.requests
    assert SHORTEST > 3


def test_echo_is_told_the_same() -> None:
    echo = Echo()
    text = "one two three four " * 8
    cached = loop.streams.run(cache_head(Chain().say(text).gen().graph(), echo, salt="s", ttl=5))
    request, hint = echo.requests
    assert isinstance(request, GenRequest)
    assert isinstance(hint, Hint)
    assert request.sampling.max_tokens == 0
    assert (hint.prompt, hint.pin, hint.origin.salt) == (request.prompt, 5.0, "s")
    assert cached.tokens == echo.tokens_at_most(request.prompt)


def test_echo_keeps_what_is_pinned_when_its_cache_is_emptied() -> None:
    echo = Echo(cache_tokens=60)
    text = "one two three four " * 8
    graph = Chain().say(text).gen().graph()

    async def cached_tokens(prompt: str) -> int:
        request = GenRequest(prompt[:9], (Text(prompt),))
        return [event async for event in echo.generate(request)][-1].usage.cached_tokens  # type: ignore[union-attr]

    held = loop.streams.run(cache_head(graph, echo))
    for release, found in ((False, True), (True, False)):
        if release:
            held.release()
            settled()
        for number in range(4):
            loop.streams.run(cached_tokens(f"{number} other words " * 10))
        assert (loop.streams.run(cached_tokens(text + "five")) > 0) is found


def test_a_backend_without_pins_says_what_to_do_instead() -> None:
    echo = Echo(capabilities=Capabilities("plain", hint=True))
    with pytest.raises(CapabilityError, match=r"plain .* leave cache\(\) out"):
        loop.streams.run(cache_head(program(), echo))
    assert isinstance(pin(echo, HEAD), Cached)
    settled()
    assert not echo.requests  # a batch on it runs as it always did


@pytest.mark.parametrize("ttl", [0, -1, True, "5", float("nan"), 1e9])
def test_the_time_is_seconds(ttl: object) -> None:
    with pytest.raises(ParameterError, match="ttl="):
        loop.streams.run(cache_head(program(), Echo(), ttl=ttl))  # type: ignore[arg-type]


# -------------------------------------------------------------------------------- Program.cache


@function
def classify(s: Any, text: str, labels: str) -> None:
    s += f"Labels, of which one is right: {labels}. Text: {text} Label:"
    s += gen("label", max_tokens=3)


def test_a_program_caches_its_head_with_the_arguments_that_are_bound(local: LocalBackend) -> None:
    bound = classify.bind(labels="sports, politics, weather")
    with bound.cache(local, ttl=60) as cached:
        assert cached.text == "Labels, of which one is right: sports, politics, weather. Text: "
        assert pinned(local) == cached.tokens
        state = bound.run("It rains.", backend=local, temperature=0)
        assert state.get_meta_info("label")["cached_tokens"] >= cached.tokens - 1
    assert pinned(local) == 0
    with classify.cache(local, static_args={"labels": "a, b"}, salt="s") as static:
        assert "a, b" in static.text
    with classify.cache(local) as plain:
        assert plain.text == "Labels, of which one is right: "


def test_caching_runs_nothing_and_changes_nothing(local: LocalBackend) -> None:
    first = classify.run("It rains.", "a, b", backend=local, temperature=0)["label"]
    with classify.cache(local):
        assert classify.run("It rains.", "a, b", backend=local, temperature=0)["label"] == first
    with pytest.raises(ParameterError, match="salt="):
        classify.cache(local, salt="not allowed")


@pytest.mark.processes
def test_a_runtime_keeps_the_head_and_lets_it_go() -> None:
    """Through both processes. What is sent later is done later, so a run tells that the pin has come to the engine."""
    runtime = Runtime(model="oracle")
    try:
        bound = classify.bind(labels="sports, politics, weather")
        with bound.cache(runtime, ttl=60) as cached:
            bound.run("It rains.", backend=runtime, temperature=0).sync()
            info = get_server_info(runtime)
            assert (info["pins"], info["pinned_slots"]) == (1, cached.tokens)
        bound.run("It snows.", backend=runtime, temperature=0).sync()
        assert get_server_info(runtime)["pins"] == 0
    finally:
        runtime.shutdown()
