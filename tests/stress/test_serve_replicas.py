"""A server of two engines, of which one is killed or stopped, or both: what has sent nothing is answered all the same.

The short form is for every run. The full one is for `pytest -m nightly tests/stress`.
"""

import asyncio
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import psutil
import pytest

from .replica_faults import stress
from .serving import Answer, Serving, serving, until_async

pytestmark = pytest.mark.processes

WHOLE = {"model": "oracle", "max_tokens": 48, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """`umbel serve --replicas 2` on oracles whose steps take 20 ms."""
    options = {"debug": {"step_delay": 0.02}, "pool_tokens": 16_384}
    with serving(tmp_path_factory.mktemp("serve"), options, "--replicas", "2", "--most-in-flight", "128") as running:
        yield running


async def both_ready(server: Serving) -> None:
    async def are() -> bool:
        answer = await server.ask("GET", "/health")
        return answer.status == 200 and answer.json["replicas"] == ["ready", "ready"]

    await until_async(are, "both engines are ready")


async def ask(server: Serving, number: int) -> Answer:
    return await server.post("/v1/completions", {**WHOLE, "prompt": f"{number} is the number of a text: "})


async def fault_free(server: Serving) -> dict[int, str]:
    """Returns texts of the server while nothing happens to it."""
    await both_ready(server)
    return {
        number: answer.text for number, answer in enumerate(await asyncio.gather(*(ask(server, n) for n in range(4))))
    }


async def lose_one(server: Serving, count: int, by: int, which: int, right: Mapping[int, str]) -> int:
    """Loses one of two engines while `count` texts are asked for, of which no byte is sent before they end.

    Checks that all are answered as without the loss. Returns how many were sent again.
    """
    await both_ready(server)
    before = (await server.figures())["umbel_retried_requests_total"]
    asked = [asyncio.create_task(ask(server, number)) for number in range(count)]

    async def spread() -> bool:
        found = await server.figures()
        return all(found[f'umbel_replica_in_flight{{replica="{index}"}}'] for index in range(2))

    await until_async(spread, "both engines have some")
    engine = server.engines()[which]
    engine.send_signal(by)
    answers = await asyncio.gather(*asked)
    assert Counter(answer.status for answer in answers) == {200: count}
    assert {number: answers[number].text for number in right} == right
    await both_ready(server)
    assert not engine.is_running() or engine.status() == psutil.STATUS_ZOMBIE
    await server.rest()
    return int((await server.figures())["umbel_retried_requests_total"] - before)


@pytest.mark.parametrize("by", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_what_has_sent_nothing_is_answered_by_the_other_engine(by: int, pair: Serving) -> None:
    async def scenario() -> int:
        return await lose_one(pair, 16, by, 0, await fault_free(pair))

    assert asyncio.run(scenario()) > 0


@pytest.mark.nightly
@pytest.mark.parametrize(("by", "times"), [(signal.SIGKILL, 10), (signal.SIGSTOP, 5)], ids=["killed", "stopped"])
def test_engines_are_lost_again_and_again_with_sixty_four_in_flight(by: int, times: int, pair: Serving) -> None:
    async def scenario() -> list[int]:
        right = await fault_free(pair)
        return [await lose_one(pair, 64, by, turn % 2, right) for turn in range(times)]

    assert min(asyncio.run(scenario())) > 0


@contextmanager
def slowed(engine: psutil.Process, rest: float = 0.27, work: float = 0.03) -> Iterator[None]:
    """Lets a process have a tenth of the time."""
    ended = threading.Event()

    def alternate() -> None:
        while not ended.is_set():
            engine.suspend()
            ended.wait(rest)
            engine.resume()
            ended.wait(work)

    thread = threading.Thread(target=alternate)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        engine.resume()


@pytest.mark.nightly
def test_a_slow_engine_gets_fewer_calls_and_is_not_replaced(pair: Serving) -> None:
    async def scenario() -> None:
        await both_ready(pair)
        before, slow = await pair.figures(), pair.engines()[0]
        left = iter(range(96))

        async def client() -> None:
            for number in left:
                assert (await ask(pair, 1_000 + number)).status == 200

        with slowed(slow):
            await asyncio.gather(*(client() for _ in range(16)))
        assert slow.is_running()
        await pair.rest()

        async def told() -> bool:
            return sum(await counts()) > 0

        async def counts() -> list[int]:
            after = await pair.figures()
            names = [f'umbel_replica_prompt_tokens_total{{replica="{index}"}}' for index in (0, 1)]
            return sorted(int(after[name] - before[name]) for name in names)

        await until_async(told, "heartbeats tell it")
        fewer, more = await counts()
        print(f"tokens of prompts at the slow engine and the other one: {fewer} and {more}")
        assert 0 < 2 * fewer < more
        assert (await pair.figures())["umbel_engine_losses_total"] == before["umbel_engine_losses_total"]

    asyncio.run(scenario())


@pytest.mark.nightly
def test_random_losses_under_mixed_traffic_make_nothing_wrong(tmp_path: Path) -> None:
    options = {"debug": {"step_delay": 0.01}, "pool_tokens": 16_384}
    (tmp_path / "three").mkdir()
    (tmp_path / "one").mkdir()
    with (
        serving(tmp_path / "three", options, "--replicas", "3") as server,
        serving(tmp_path / "one", options) as one,
    ):
        verdict = asyncio.run(stress(server, one, 20.0, 0))
    assert verdict.is_clean, verdict
    assert verdict.counts["right"] > 0


def test_with_all_engines_down_a_request_is_refused_at_once_and_served_again_soon(pair: Serving) -> None:
    async def scenario() -> None:
        await both_ready(pair)
        for engine in pair.engines():
            engine.kill()

        async def down() -> bool:
            return await pair.status_of_health() == 503

        await until_async(down, "/health tells it")
        seconds = []
        for _ in range(20):
            asked = time.monotonic()
            answer = await ask(pair, 0)
            if answer.status == 200:  # an engine was ready before
                break
            seconds.append(time.monotonic() - asked)
            assert answer.status == 503
            assert answer.headers["retry-after"] == "1"
            assert answer.json["error"]["code"] == "restarting"
        assert seconds
        print(f"{len(seconds)} refusals: median {median(seconds):.4f} s, worst {max(seconds):.4f} s")
        await both_ready(pair)
        assert (await ask(pair, 0)).status == 200

    asyncio.run(scenario())


def test_refused_requests_do_not_count_against_an_engine(pair: Serving) -> None:
    async def scenario() -> None:
        await both_ready(pair)
        before = await pair.figures()
        bad = {**WHOLE, "prompt": "a", "max_tokens": -1}
        too_long = {**WHOLE, "prompt": "a" * 20_000}
        for body in [bad, too_long] * 20:
            assert (await pair.post("/v1/completions", body)).status == 400
        assert (await pair.ask("GET", "/health")).json == {"status": "ok", "replicas": ["ready", "ready"]}
        after = await pair.figures()
        assert after["umbel_engine_losses_total"] == before["umbel_engine_losses_total"]
        assert (await ask(pair, 1)).status == 200

    asyncio.run(scenario())


def test_equal_requests_go_to_one_engine_and_reuse_all_but_the_last_token(pair: Serving) -> None:
    """The same request three times: n new tokens after the one that begins every text, then one new each."""

    async def counted(least: int) -> list[tuple[int, int]]:
        """Returns (new, cached) prompt tokens of both engines, once heartbeats have told so many."""

        async def told() -> list[tuple[int, int]] | None:
            found = await pair.figures()
            counts = [
                [int(found[f'umbel_replica_{kind}_tokens_total{{replica="{index}"}}']) for kind in ("prompt", "cached")]
                for index in (0, 1)
            ]
            return (
                [(whole - cached, cached) for whole, cached in counts] if sum(c[0] for c in counts) >= least else None
            )

        return await until_async(told, "heartbeats tell it")  # type: ignore[no-any-return]

    async def scenario() -> None:
        await both_ready(pair)
        await pair.ask("POST", "/flush_cache")
        question = {**WHOLE, "max_tokens": 1, "prompt": "What is the capital of France?"}
        first_of_all = sum(map(sum, await counted(1)))
        other = await pair.post("/v1/completions", {**question, "prompt": "Other."})  # it brings BOS to one of them
        await counted(first_of_all + other.json["usage"]["prompt_tokens"])
        seen = []
        for _ in range(3):
            before = await counted(0)
            answer = await pair.post("/v1/completions", question)
            after = await counted(sum(map(sum, before)) + answer.json["usage"]["prompt_tokens"])
            seen.append([(new - old, found - known) for (old, known), (new, found) in zip(before, after, strict=True)])
        at = 0 if seen[0][0] != (0, 0) else 1
        assert [each[1 - at] for each in seen] == [(0, 0)] * 3
        first, second, third = (each[at] for each in seen)
        length = sum(first)
        assert second == third == (1, length - 1)
        assert first in ((length - 1, 1), (length, 0))  # the token that begins every text may be at the other one

    asyncio.run(scenario())
