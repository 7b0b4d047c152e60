"""Several processes that serve one socket."""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest
from umbel.server.limits import HttpLimits
from umbel.server.workers import share_of

from .client import served


@pytest.mark.parametrize(("workers", "each"), [(1, 1000), (3, 334), (64, 16)])
def test_workers_together_let_in_as_many_requests_as_one(workers: int, each: int) -> None:
    assert share_of(HttpLimits(most_in_flight=1000, drain=3.0), workers) == HttpLimits(most_in_flight=each, drain=3.0)


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("PUT", "/v1/programs/x", b"{}"),
        ("DELETE", "/v1/programs/x", None),
        ("POST", "/abort", {"rid": "x"}),
        ("DELETE", "/hints/x", None),
    ],
)
def test_what_one_worker_alone_would_know_is_refused(method: str, path: str, body: Any) -> None:
    async def scenario() -> None:
        async with served(workers=2) as client:
            answer = await client.begin(method, path, body).ended()
            assert answer.status == 400
            assert answer.json["error"]["code"] == "several_workers"
            assert answer.json["error"]["message"].startswith(
                "2 processes serve this address, and each keeps its own; "
            )

    asyncio.run(scenario())


# ------------------------------------------------------------------------------------ with processes

PATIENCE = 60.0  # seconds until a condition that must come counts as missing


def until(condition: Callable[[], Any], what: str) -> Any:
    deadline = time.monotonic() + PATIENCE
    while not (found := condition()):
        assert time.monotonic() < deadline, what
        time.sleep(0.01)
    return found


class Serving:
    """`umbel serve --http-workers 2` on the oracle."""

    def __init__(self) -> None:
        command = ["serve", "--model", "oracle", "--port", "0", "--http-workers", "2", "--api-key", "a=sk-a"]
        program = "import sys; from umbel.interpreter.cli import main; sys.exit(main(sys.argv[1:]))"
        self.process = subprocess.Popen([sys.executable, "-c", program, *command], stderr=subprocess.PIPE, text=True)
        assert self.process.stderr is not None
        found = re.search(r"http://[\d.]+:\d+", self.process.stderr.readline())
        assert found is not None, "the first line says where it listens"
        self.address = found[0]

    def workers(self) -> list[psutil.Process]:
        children = psutil.Process(self.process.pid).children()
        return [each for each in children if "umbel.server.worker" in each.cmdline()]

    def ready(self) -> bool:
        try:
            return bool(self.get("/health"))
        except OSError:  # nothing listens yet, or 503
            return False

    def get(self, path: str, body: Any = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        headers = {"authorization": "Bearer sk-a", "content-type": "application/json", "connection": "close"}
        request = urllib.request.Request(self.address + path, data, headers)
        with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
            return json.loads(answer.read())

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate()


@pytest.fixture
def serving() -> Iterator[Serving]:
    serving = Serving()
    yield serving
    serving.end()


PROMPT = "a prompt that is long enough to be cached " * 3
ASKED = {"text": PROMPT, "sampling_params": {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}}


@pytest.mark.processes
def test_workers_share_a_socket_and_a_cache_and_end_with_their_parent(serving: Serving) -> None:
    until(serving.ready, "the server is not ready")
    first, second = until(lambda: len(serving.workers()) == 2 and serving.workers(), "two workers run")
    answers = [serving.get("/generate", ASKED) for _ in range(2)]

    first.kill()
    first.wait()
    answers.append(serving.get("/generate", ASKED))
    until(lambda: len(serving.workers()) == 2, "another worker was started")
    second.kill()
    second.wait()
    answers.append(until(lambda: _answered(serving), "the new worker serves"))

    assert len({answer["text"] for answer in answers}) == 1
    assert all(answer["meta_info"]["cached_tokens"] > 50 for answer in answers[1:])  # one salt in all workers
    everything = psutil.Process(serving.process.pid).children(recursive=True)
    serving.process.kill()
    _, living = psutil.wait_procs(everything, PATIENCE)
    assert living == []


def _answered(serving: Serving) -> Any:
    try:
        return serving.get("/generate", ASKED)
    except OSError:
        return None


@pytest.mark.processes
@pytest.mark.nightly
def test_workers_drain_when_their_parent_is_told_to_end(serving: Serving) -> None:
    until(serving.ready, "the server is not ready")
    everything = psutil.Process(serving.process.pid).children(recursive=True)
    os.kill(serving.process.pid, signal.SIGTERM)
    assert serving.process.wait(PATIENCE) == 0
    _, living = psutil.wait_procs(everything, PATIENCE)
    assert living == []
