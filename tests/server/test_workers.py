"""Several processes that serve one socket."""

import asyncio
import os
import re
import signal
import socket
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
from umbel.server.limits import HttpLimits
from umbel.server.workers import MOST_FAILED_STARTS, share_of

from ..serving import PATIENCE, until
from .client import served
from .serving import ADMIN_KEY, Serving
from .test_program_store import FILE


@pytest.mark.parametrize(("workers", "each"), [(1, 1000), (3, 334), (64, 16)])
def test_workers_together_let_in_as_many_requests_as_one(workers: int, each: int) -> None:
    assert share_of(HttpLimits(most_in_flight=1000, drain=3.0), workers) == HttpLimits(most_in_flight=each, drain=3.0)


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
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


def workers_of(serving: Serving) -> list[psutil.Process]:
    children = psutil.Process(serving.process.pid).children()
    return [each for each in children if "umbel.server.worker" in each.cmdline()]


@pytest.fixture
def serving() -> Iterator[Serving]:
    serving = Serving("--model", "oracle", "--http-workers", "2")
    yield serving
    serving.end()


PROMPT = "a prompt that is long enough to be cached " * 3
ASKED = {"text": PROMPT, "sampling_params": {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}}


def answered(serving: Serving) -> Any:
    """Asks until a worker answers: one may serve while another one still starts."""
    return until(lambda: serving.attempt("/generate", ASKED), "no worker serves")


def send_no_http(serving: Serving) -> bytes:
    with socket.create_connection(("127.0.0.1", int(serving.address.rpartition(":")[2])), PATIENCE) as connection:
        connection.sendall(b"no HTTP\r\n\r\n")
        return connection.recv(1000)


def malformed(serving: Serving) -> set[str]:
    """What several scrapes count, which may reach any worker, also one that still starts."""
    request = urllib.request.Request(serving.address + "/metrics", headers={"authorization": f"Bearer {ADMIN_KEY}"})
    found = set()
    for _ in range(8):
        with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
            found |= set(re.findall(r"\numbel_http_malformed_total (.*)", answer.read().decode()))
    return found


def programs(serving: Serving) -> list[list[str]]:
    """The names that several answers list, which may come from any worker."""
    return [[each["name"] for each in serving.ask("/v1/programs")["data"]] for _ in range(8)]


def change(serving: Serving, method: str, data: bytes | None) -> bool:
    """Puts or deletes a program; False where the worker still starts."""
    headers = {"authorization": f"Bearer {ADMIN_KEY}"}
    request = urllib.request.Request(serving.address + "/v1/programs/answer", data, headers, method=method)
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
            return bool(answer.status < 300)
    except urllib.error.HTTPError as error:
        if error.code != 503:
            raise
        return False


@pytest.mark.processes
def test_workers_share_a_socket_and_a_cache_and_end_with_their_parent(serving: Serving) -> None:
    until(lambda: serving.attempt("/health"), "the server is not ready")
    first, second = until(lambda: len(workers_of(serving)) == 2 and workers_of(serving), "two workers run")
    answers = [answered(serving) for _ in range(2)]
    for _ in range(8):
        assert send_no_http(serving).startswith(b"HTTP/1.1 400")
    assert malformed(serving) == {"8.0"}
    until(lambda: change(serving, "PUT", FILE), "no worker takes a program")
    assert programs(serving) == [["answer"]] * 8

    first.kill()
    first.wait()
    answers.append(answered(serving))  # by the second one
    until(lambda: len(workers_of(serving)) == 2, "another worker was started")
    second.kill()
    second.wait()
    answers.append(answered(serving))  # by the new one

    assert malformed(serving) == {"8.0"}
    assert programs(serving) == [["answer"]] * 8
    until(lambda: change(serving, "DELETE", None), "no worker forgets a program")
    assert programs(serving) == [[]] * 8
    assert len({answer["text"] for answer in answers}) == 1
    assert all(answer["meta_info"]["cached_tokens"] > 50 for answer in answers[1:])  # one salt in all workers
    everything = psutil.Process(serving.process.pid).children(recursive=True)
    serving.process.kill()
    _, living = psutil.wait_procs(everything, PATIENCE)
    assert living == []


@pytest.mark.processes
@pytest.mark.nightly
def test_workers_that_have_served_may_end_as_often_as_they_like(serving: Serving) -> None:
    until(lambda: serving.attempt("/health"), "the server is not ready")
    until(lambda: len(workers_of(serving)) == 2, "two workers run")
    for _ in range(MOST_FAILED_STARTS + 1):
        kept, killed = workers_of(serving)
        kept.suspend()
        answered(serving)  # by the other one
        killed.kill()
        killed.wait()
        kept.resume()
        until(lambda: len(workers_of(serving)) == 2, "another worker was started")
    assert serving.process.poll() is None


@pytest.mark.processes
@pytest.mark.nightly
@pytest.mark.parametrize("signals", [1, 2])
def test_a_worker_that_hangs_is_killed_in_the_end(signals: int) -> None:
    serving = Serving("--model", "oracle", "--http-workers", "2", "--drain", "0" if signals == 1 else "86400")
    try:
        until(lambda: serving.attempt("/health"), "the server is not ready")
        hung = until(lambda: len(workers_of(serving)) == 2 and workers_of(serving), "two workers run")[0]
        hung.suspend()
        for _ in range(signals):
            os.kill(serving.process.pid, signal.SIGTERM)
            until(lambda: "stopping: " in serving.log, "it was told")  # two signals at once may be one
        assert serving.process.wait(PATIENCE) == 0
        assert not hung.is_running()
    finally:
        serving.end()


@pytest.mark.processes
@pytest.mark.nightly
def test_workers_drain_when_their_parent_is_told_to_end(serving: Serving) -> None:
    until(lambda: serving.attempt("/health"), "the server is not ready")
    everything = psutil.Process(serving.process.pid).children(recursive=True)
    os.kill(serving.process.pid, signal.SIGTERM)
    assert serving.process.wait(PATIENCE) == 0
    _, living = psutil.wait_procs(everything, PATIENCE)
    assert living == []
