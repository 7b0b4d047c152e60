"""Metrics and loads: what is counted, who may read it, and what stays true over restarts."""

import asyncio
import os
from collections.abc import Awaitable, Callable, Mapping

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families
from umbel.lang.status import BOUNDS, EngineState, RisingCounters, RuntimeStatus
from umbel.server import bodies
from umbel.server.access import Access
from umbel.server.activity import Counts, open_shared
from umbel.server.errors import HttpError
from umbel.server.front import Front
from umbel.server.metrics import Snapshot
from umbel.srt.in_process import LocalBackend

from .client import AsgiClient, served

Samples = Mapping[str, float]  # name and labels → value
COMPLETION = {"model": "oracle", "prompt": "a private text", "max_tokens": 5, "temperature": 0, "ignore_eos": True}


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(scenario(), 60))  # type: ignore[arg-type]


def samples(text: str) -> Samples:
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = ",".join(f"{name}={value}" for name, value in sorted(sample.labels.items()))
            found[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return found


async def scrape(client: AsgiClient) -> Samples:
    answer = await client.get("/metrics")
    assert answer.status == 200
    assert answer.headers["content-type"].startswith("text/plain")
    assert b"private" not in answer.content
    return samples(answer.content.decode())


def test_what_requests_cost_is_counted() -> None:
    async def scenario() -> None:
        async with served() as client:
            before = await scrape(client)
            for _ in range(2):
                assert (await client.post("/v1/completions", COMPLETION)).status == 200
            after = await scrape(client)
            prompt = len(COMPLETION["prompt"]) + 1  # type: ignore[arg-type]  # a text
            assert before["umbel_prompt_tokens_total"] == 0
            assert after["umbel_prompt_tokens_total"] == 2 * prompt
            assert after["umbel_cached_tokens_total"] == prompt - 1
            assert after["umbel_computed_prompt_tokens_total"] == prompt + 1
            assert after["umbel_generated_tokens_total"] == 10
            assert after["umbel_requests_total{ending=finished}"] == 2
            assert after["umbel_time_to_first_token_seconds_count"] == 2
            assert after["umbel_time_per_token_seconds_count"] == 8
            assert after["umbel_queue_seconds_bucket{le=+Inf}"] == 2
            assert after["umbel_ready"] == 1
            free, cached = (after[f"umbel_pool_slots{{state={state}}}"] for state in ("free", "cached"))
            assert free + cached == after["umbel_pool_size"]
            assert after["umbel_window_slots{state=free}"] == after["umbel_window_slots{state=used}"] == 0
            assert all(after[name] >= count for name, count in before.items() if name.endswith("_total"))

    run(scenario)


def test_forced_tokens_are_counted() -> None:
    async def scenario() -> None:
        async with served() as client:
            await client.post("/v1/completions", COMPLETION)
            before = await scrape(client)
            constrained = {**COMPLETION, "regex": "[ab]cdefgh", "max_tokens": 20, "ignore_eos": False}
            answer = await client.post("/v1/completions", constrained)
            assert answer.json["choices"][0]["text"][1:] == "cdefgh"
            after = await scrape(client)
            assert before["umbel_forced_tokens_total"] == 0
            assert after["umbel_forced_tokens_total"] == len("cdefgh")  # the first character is the model's

    run(scenario)


def test_evicted_tokens_are_counted() -> None:
    async def scenario() -> None:
        async with served(LocalBackend(pool_tokens=64)) as client:
            await client.post("/v1/completions", {**COMPLETION, "prompt": "a" * 40})
            before = await scrape(client)
            await client.post("/v1/completions", {**COMPLETION, "prompt": "b" * 40})
            after = await scrape(client)
            assert before["umbel_evicted_tokens_total"] == 0
            # Of 64 tokens the first request has cached 45 at most; the second one needs 45 as well.
            assert 20 <= after["umbel_evicted_tokens_total"] <= 45

    run(scenario)


def test_a_server_that_still_starts_has_metrics_of_its_own_only() -> None:
    front = Front(LocalBackend())
    front.refused = 3
    found = {sample.name: sample.value for metric in Snapshot(front, None).collect() for sample in metric.samples}
    assert found["umbel_ready"] == 0
    assert found["umbel_http_refused_total"] == 3
    assert "umbel_steps_total" not in found


def test_counters_do_not_fall_when_an_engine_is_replaced() -> None:
    rising, totals = RisingCounters(), []
    for life, steps in ((0, 5.0), (0, 7.0), (1, 1.0), (1, 2.0)):
        rising.note(life, {"steps": steps, "queue_seconds_count": steps})
        status = RuntimeStatus("m", "0", EngineState.READY, counters=rising.sums)
        metrics = Snapshot(Front(LocalBackend()), status).collect()
        totals.append({sample.name: sample.value for metric in metrics for sample in metric.samples})
    assert [found["umbel_steps_total"] for found in totals] == [5, 7, 8, 9]
    assert [found["umbel_queue_seconds_count"] for found in totals] == [5, 7, 8, 9]


def test_a_histogram_has_all_bounds_and_rises() -> None:
    async def scenario() -> None:
        async with served() as client:
            await client.post("/v1/completions", COMPLETION)
            found = await scrape(client)
            name = "umbel_time_to_first_token_seconds_bucket"
            counts = [found[f"{name}{{le={bound:g}}}"] for bound in BOUNDS]
            assert counts == sorted(counts)
            assert found[f"{name}{{le=+Inf}}"] >= counts[-1]

    run(scenario)


def test_a_refused_field_is_counted_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "refused_fields", type(bodies.refused_fields)())
    monkeypatch.setattr("umbel.server.metrics.refused_fields", bodies.refused_fields)

    async def scenario() -> None:
        async with served() as client:
            for _ in range(2):
                assert (await client.post("/v1/completions", {**COMPLETION, "sparkle": 1})).status == 400
            assert (await scrape(client))["umbel_refused_fields_total{field=sparkle}"] == 2

    run(scenario)


def test_openmetrics_is_spoken_to_clients_that_ask_for_it() -> None:
    async def scenario() -> None:
        async with served() as client:
            answer = await client.get("/metrics", accept="application/openmetrics-text; version=1.0.0")
            assert answer.headers["content-type"].startswith("application/openmetrics-text")
            assert answer.content.endswith(b"# EOF\n")

    run(scenario)


def refuse(front: Front) -> None:
    with front.open(1_000), front.open(1_000):
        pass


def test_a_scrape_of_any_worker_counts_the_requests_of_all() -> None:
    async def scenario() -> None:
        with open_shared(2) as file:
            first, second = (Counts(2, file.fileno(), row) for row in range(2))
            async with served(workers=2, counts=first) as client, served(workers=2, counts=second) as other:
                client.app.front.malformed += 3
                for each, times in ((client, 1), (other, 2)):
                    for _ in range(times):
                        with pytest.raises(HttpError, match="run or wait"):
                            refuse(each.app.front)
                with other.app.front.open(5):
                    for each in (client, other):
                        found = await scrape(each)
                        assert found["umbel_http_refused_total"] == 3
                        assert found["umbel_http_malformed_total"] == 3
                        assert found["umbel_http_in_flight"] == 5
                        state = (await each.get("/ui/state")).json
                        assert (state["in_flight"], state["most_in_flight"], state["refused"]) == (5, 2 * 1_280, 3)
                    assert (client.app.front.in_flight, other.app.front.in_flight) == (0, 5)  # admission is its own

    run(scenario)


def test_a_worker_that_replaces_another_one_counts_on() -> None:
    with open_shared(2) as file:
        front = Front(LocalBackend(), workers=2, counts=Counts(2, file.fileno(), 1))
        front.in_flight, front.disconnects = 4, 7
        again = Counts(2, file.fileno(), 1)
        assert (again.total("in_flight"), again.total("disconnects")) == (0, 7)


def test_refused_fields_say_which_process_has_answered() -> None:
    async def scenario() -> None:
        async with served(workers=2) as client:
            await client.post("/v1/completions", {**COMPLETION, "sparkle": 1})
            assert f"umbel_refused_fields_total{{field=sparkle,process={os.getpid()}}}" in await scrape(client)

    run(scenario)


@pytest.mark.parametrize("path", ["/metrics", "/v1/loads", "/loads"])
@pytest.mark.parametrize(
    ("admin_key", "sent", "status"), [(None, "sk-a", 404), ("sk-x", "sk-a", 403), ("sk-x", "sk-x", 200)]
)
def test_numbers_of_all_keys_are_the_administrators(path: str, admin_key: str | None, sent: str, status: int) -> None:
    async def scenario() -> None:
        async with served(access=Access({"a": "sk-a"}, admin_key)) as client:
            assert (await client.get(path, authorization=f"Bearer {sent}")).status == status

    run(scenario)


def test_loads_are_told_in_sglangs_words() -> None:
    async def scenario() -> None:
        async with served() as client:
            for _ in range(2):
                await client.post("/v1/completions", COMPLETION)
            client.app.front.activity.tokens_per_second = 12.345
            found = (await client.get("/v1/loads")).json
            (load,) = found["loads"]
            assert (load["num_running_reqs"], load["num_waiting_reqs"], load["dp_rank"]) == (0, 0, 0)
            assert load["num_used_tokens"] > 0
            usage = load["num_used_tokens"] / load["max_total_num_tokens"]
            assert load["token_usage"] == pytest.approx(usage, abs=1e-4)
            assert load["cache_hit_rate"] == pytest.approx(14 / 30, abs=1e-4)
            assert found["aggregate"]["avg_throughput"] == load["gen_throughput"] == 12.35
            assert (await client.get("/loads")).json.keys() == found.keys()

    run(scenario)


class Ill(LocalBackend):
    """A backend whose engine is not what it was."""

    state = EngineState.FAILED

    def ail(self) -> None:
        assert self._gateway is not None
        self._gateway._replicas[0].state = self.state


def test_health_follows_the_runtime() -> None:
    async def scenario() -> None:
        backend = Ill()
        async with served(backend) as client:
            assert (await client.get("/health")).json == {"status": "ok"}
            backend.ail()
            answer = await client.get("/health")
            assert (answer.status, answer.json["status"]) == (503, "failed")
            assert answer.headers["retry-after"] == "1"
            assert samples((await client.get("/metrics")).content.decode())["umbel_ready"] == 0

    run(scenario)


def test_the_status_can_be_encoded() -> None:
    """`/server_info` and views take it as it is."""
    status = RuntimeStatus("m", "0", EngineState.READY, counters={"steps": 1.0})
    assert msgspec.json.decode(msgspec.json.encode(status), type=RuntimeStatus) == status
