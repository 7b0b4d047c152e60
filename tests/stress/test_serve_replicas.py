"""A server of two engines, of which one is killed or stopped, or both: what has sent nothing is answered all the same.

The short form is for every run. The full one is for `pytest -m nightly tests/stress`.
"""

import asyncio
import signal
from collections import Counter
from collections.abc import Iterator

import psutil
import pytest

from .serving import Answer, Serving, serving, until_async

pytestmark = pytest.mark.processes

WHOLE = {"model": "oracle", "max_tokens": 80, "temperature": 0, "ignore_eos": True}


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


async def figures(server: Serving) -> dict[str, float]:
    """Returns the samples of `/metrics` by name and labels."""
    content = (await server.ask("GET", "/metrics")).content.decode()
    lines = (line.rpartition(" ") for line in content.splitlines() if line and not line.startswith("#"))
    return {name: float(value) for name, _, value in lines}


async def lose_one(server: Serving, count: int, by: int, which: int) -> int:
    """Loses one of two engines while `count` texts are asked for, of which no byte is sent before they end.

    Checks that all are answered as without the loss. Returns how many were sent again.
    """
    await both_ready(server)
    fault_free = {number: (await ask(server, number)).text for number in range(4)}
    before = (await figures(server))["umbel_retried_requests_total"]
    asked = [asyncio.create_task(ask(server, number)) for number in range(count)]

    async def spread() -> bool:
        found = await figures(server)
        return all(found[f'umbel_replica_in_flight{{replica="{index}"}}'] for index in range(2))

    await until_async(spread, "both engines have some")
    engine = server.engines()[which]
    engine.send_signal(by)
    answers = await asyncio.gather(*asked)
    assert Counter(answer.status for answer in answers) == {200: count}
    assert {number: answers[number].text for number in fault_free} == fault_free
    await both_ready(server)
    assert not engine.is_running() or engine.status() == psutil.STATUS_ZOMBIE
    await server.rest()
    return int((await figures(server))["umbel_retried_requests_total"] - before)


@pytest.mark.parametrize("by", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_what_has_sent_nothing_is_answered_by_the_other_engine(by: int, pair: Serving) -> None:
    moved = asyncio.run(lose_one(pair, 16, by, 0))
    assert moved > 0


@pytest.mark.nightly
@pytest.mark.parametrize(("by", "times"), [(signal.SIGKILL, 10), (signal.SIGSTOP, 5)], ids=["killed", "stopped"])
def test_engines_are_lost_again_and_again_with_sixty_four_in_flight(by: int, times: int, pair: Serving) -> None:
    async def scenario() -> list[int]:
        return [await lose_one(pair, 64, by, turn % 2) for turn in range(times)]

    assert min(asyncio.run(scenario())) > 0


def test_with_all_engines_down_a_request_is_refused_at_once_and_served_again_soon(pair: Serving) -> None:
    async def scenario() -> None:
        await both_ready(pair)
        for engine in pair.engines():
            engine.kill()

        async def down() -> bool:
            return await pair.status_of_health() == 503

        await until_async(down, "/health tells it")
        answer = await ask(pair, 0)
        assert answer.status == 503
        assert answer.headers["retry-after"] == "1"
        assert answer.json["error"]["code"] == "restarting"
        await both_ready(pair)
        assert (await ask(pair, 0)).status == 200

    asyncio.run(scenario())


def test_refused_requests_do_not_count_against_an_engine(pair: Serving) -> None:
    async def scenario() -> None:
        await both_ready(pair)
        before = await figures(pair)
        bad = {**WHOLE, "prompt": "a", "max_tokens": -1}
        too_long = {**WHOLE, "prompt": "a" * 20_000}
        for body in [bad, too_long] * 20:
            assert (await pair.post("/v1/completions", body)).status == 400
        assert (await pair.ask("GET", "/health")).json == {"status": "ok", "replicas": ["ready", "ready"]}
        after = await figures(pair)
        assert after["umbel_engine_losses_total"] == before["umbel_engine_losses_total"]
        assert (await ask(pair, 1)).status == 200

    asyncio.run(scenario())


def test_equal_requests_go_to_one_engine_and_reuse_all_but_the_last_token(pair: Serving) -> None:
    """The same request three times: n new tokens after the one that begins every text, then one new each."""

    async def counted(least: int) -> list[tuple[int, int]]:
        """Returns (new, cached) prompt tokens of both engines, once heartbeats have told so many."""

        async def told() -> list[tuple[int, int]] | None:
            found = await figures(pair)
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
