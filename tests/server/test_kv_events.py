"""`umbel serve --kv-events`: a foreign router follows the cache of a server that runs as a process of its own."""

import json
import os
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import zmq

from ..kv_subscriber import Subscriber, published_name
from ..serving import ServerProcess, until

pytestmark = pytest.mark.processes


def post(server: ServerProcess, route: str, body: dict[str, Any]) -> Any:
    asked = urllib.request.Request(
        f"{server.address}{route}", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(asked, timeout=120) as answer:
        return json.loads(answer.read() or b"null")


def heard(router: Subscriber, condition: Callable[[], bool], what: str) -> None:
    """Reads what is published until a condition holds."""

    def read() -> bool:
        router.read()
        return condition()

    until(read, what)


def generate(server: ServerProcess, prompt: str) -> None:
    post(server, "/generate", {"text": prompt, "sampling_params": {"max_new_tokens": 1, "temperature": 0}})


def test_a_router_follows_the_cache_of_a_server(tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/kv"
    server = ServerProcess("--model", "oracle", "--kv-events", address)
    context: zmq.Context[Any] = zmq.Context()
    router, late = (Subscriber(context, address, f"{address}.replay") for _ in range(2))
    try:
        until(lambda: server.said("(ready): "), "the server is not ready")
        prompt = "The umbel is a flower of many rays. " * 3
        router.join(lambda: generate(server, "something new " + os.urandom(16).hex()))
        router.snapshot()
        generate(server, prompt)
        names = chain(server, prompt)
        assert len(names) >= 5
        heard(router, lambda: names <= set(router.blocks[0]), "the prompt's blocks are published")

        late.snapshot()
        assert late.blocks == router.blocks

        post(server, "/flush_cache", {})
        heard(router, lambda: not router.blocks[0], "the flushed blocks are gone")
        generate(server, prompt)
        heard(router, lambda: names <= set(router.blocks[0]), "they are there again")
        assert not router.stale
    finally:
        router.close()
        late.close()
        context.term()
        server.end()


def chain(server: ServerProcess, prompt: str) -> set[int]:
    """Computes the hashes of a prompt's blocks as docs/kv_events.md says, from its tokens."""
    tokens = post(server, "/tokenize", {"prompt": prompt})["tokens"]
    names, name = set(), b""
    for first in range(0, len(tokens) - 15, 16):
        name = published_name(name, tuple(tokens[first : first + 16]))
        names.add(int.from_bytes(name[-8:], "big"))
    return names


def test_the_blocks_of_an_engine_that_died_are_cleared(tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/kv"
    server = ServerProcess("--model", "oracle", "--kv-events", address)
    context: zmq.Context[Any] = zmq.Context()
    router = Subscriber(context, address, f"{address}.replay")
    try:
        until(lambda: server.said("(ready): "), "the server is not ready")
        router.join(lambda: generate(server, "something new " + os.urandom(16).hex()))
        router.snapshot()
        generate(server, "something that fills blocks")
        heard(router, lambda: bool(router.blocks[0]), "the prompt's blocks are published")
        children = psutil.Process(server.process.pid).children(recursive=True)
        (engine,) = [child for child in children if "srt.engine.process" in " ".join(child.cmdline())]
        engine.kill()
        heard(router, lambda: not router.blocks[0], "the blocks of the dead engine are gone")
        assert not router.stale
    finally:
        router.close()
        context.term()
        server.end()


def test_an_address_that_is_taken_ends_the_start_with_a_word(tmp_path: Path) -> None:
    context: zmq.Context[Any] = zmq.Context()
    taken = context.socket(zmq.PUB)
    port = taken.bind_to_random_port("tcp://127.0.0.1")
    server = ServerProcess("--model", "oracle", "--kv-events", str(port))
    try:
        until(lambda: server.process.poll() is not None, "the server ends")
        assert "kv_events" in server.log
        assert "cannot be bound" in server.log
    finally:
        taken.close(linger=0)
        context.term()
        server.end()
