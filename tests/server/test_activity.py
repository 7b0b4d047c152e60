"""The line of the log, and the watch over the runtime."""

import asyncio
import logging

import msgspec
import psutil
import pytest
from umbel.lang.errors import ModelError
from umbel.lang.status import EngineState, PoolGauges, RuntimeHealth, RuntimeState, RuntimeStatus, TreeSurvey
from umbel.server import activity
from umbel.server.activity import Activity, keep

from ..serving import until
from .serving import ADMIN_KEY, Serving

POOL = PoolGauges(total=1000, free=970)


def status(age: float = 0.0, running: int = 0, waiting: int = 0, **counters: float) -> RuntimeStatus:
    return RuntimeStatus(
        "m",
        "0",
        EngineState.READY,
        heartbeat_age=age,
        running=running,
        waiting=waiting,
        pool=POOL,
        counters=counters,
    )


def test_a_line_has_what_was_done_since_the_one_before() -> None:
    watch = Activity()
    assert watch.line(status(computed_prompt_tokens=5), 10.0) == ""
    done = {
        "computed_prompt_tokens": 12.0,
        "cached_tokens": 1.0,
        "queue_seconds_count": 1.0,
        "completion_tokens": 121.0,
    }
    line = watch.line(status(running=4, **done), 11.0)
    assert line == "prefill: 1 request, 7 new tokens, 1 cached; pool 3 % · decode: 4 running, 121 tok/s"
    assert watch.line(status(**done), 12.0) == ""
    assert watch.tokens_per_second == 0.0


def test_a_line_of_an_engine_that_is_gone_tells_no_pool() -> None:
    watch = Activity()
    watch.line(status(), 10.0)
    gone = msgspec.structs.replace(status(computed_prompt_tokens=7.0), pool=PoolGauges())
    assert watch.line(gone, 11.0) == "prefill: 7 new tokens, 0 cached"
    assert watch.line(msgspec.structs.replace(gone, running=1, counters={"completion_tokens": 2.0}), 12.0) == (
        "decode: 1 running, 2 tok/s"
    )


@pytest.mark.parametrize(
    ("counters", "line"),
    [
        ({"completion_tokens": 30.0}, "pool 3 % · decode: 2 running, 9 waiting, 30 tok/s"),
        (
            {"computed_prompt_tokens": 600.0, "queue_seconds_count": 3.0},
            "prefill: 3 requests, 600 new tokens, 0 cached; pool 3 % · decode: 2 running, 9 waiting, 0 tok/s",
        ),
        (
            {"computed_prompt_tokens": 8.0, "cached_tokens": 2.0},
            "prefill: 8 new tokens, 2 cached; pool 3 % · decode: 2 running, 9 waiting, 0 tok/s",
        ),
    ],
)
def test_a_line_leaves_out_what_did_not_happen(counters: dict[str, float], line: str) -> None:
    watch = Activity()
    watch.line(status(), 10.0)
    assert watch.line(status(running=2, waiting=9, **counters), 11.0) == line


def test_rates_are_those_between_the_heartbeats() -> None:
    watch = Activity()
    watch.line(status(age=0.5), 10.0)
    watch.line(status(age=0.0, completion_tokens=30.0), 11.0)
    assert watch.tokens_per_second == pytest.approx(20.0)


def test_a_reading_without_a_new_heartbeat_is_no_news() -> None:
    watch = Activity()
    watch.line(status(age=0.0), 10.0)
    assert watch.line(status(age=1.0), 11.0) == ""
    assert watch.line(status(age=0.0, completion_tokens=8.0), 12.0).endswith("4 tok/s")
    assert [(reading.at, reading.generated_tokens) for reading in watch.readings] == [(10.0, 0), (12.0, 8)]


def test_an_engine_that_starts_gives_no_reading() -> None:
    watch = Activity()
    for second, engine in enumerate((EngineState.STARTING, EngineState.READY, EngineState.STARTING)):
        watch.line(RuntimeStatus("m", "0", engine, pool=POOL), float(second))
    assert [reading.at for reading in watch.readings] == [1.0]


class Sick:
    """A runtime that breaks, cannot be started once, and then can."""

    def __init__(self) -> None:
        self.starts = 0
        self.states = iter([RuntimeState.READY, RuntimeState.BROKEN, RuntimeState.BROKEN, RuntimeState.READY])

    def health(self) -> RuntimeHealth:
        state = next(self.states, None)
        if state is None:
            raise asyncio.CancelledError
        return RuntimeHealth(state, "" if state is RuntimeState.READY else "it was killed")

    async def start(self) -> None:
        self.starts += 1
        if self.starts == 1:
            raise ModelError("no such file")

    async def status(self) -> RuntimeStatus:
        return status()

    async def survey(self, most: int = 1_000, text: int = 0) -> TreeSurvey:
        raise AssertionError("nothing asks for the tree")


def test_a_runtime_that_broke_is_started_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(activity, "PERIOD", 0.0)
    runtime = Sick()
    with caplog.at_level(logging.INFO, "umbel.server"), pytest.raises(asyncio.CancelledError):
        asyncio.run(keep(runtime, Activity()))
    assert runtime.starts == 2
    assert [record.getMessage() for record in caplog.records] == [
        "the runtime is broken: it was killed",
        "the runtime could not be started again: no such file",
        "the runtime is ready",
    ]


# ------------------------------------------------------------------------------------ with processes

COMPLETION = {"model": "oracle", "prompt": "abcdefg", "max_tokens": 9, "temperature": 0, "ignore_eos": True}


@pytest.mark.processes
def test_a_server_logs_its_work_and_no_text(oracle_server: Serving) -> None:
    oracle_server.ask("/v1/completions", COMPLETION)
    until(lambda: oracle_server.said(r"(prefill: .* tok/s)\n"), "the server does not say what it did")
    assert "abcdefg" not in oracle_server.log
    assert oracle_server.ask("/health") == {"status": "ok"}
    loads = oracle_server.ask("/v1/loads", headers={"authorization": f"Bearer {ADMIN_KEY}"})
    assert loads["loads"][0]["max_total_num_tokens"] > 0


@pytest.mark.processes
def test_a_server_and_its_processes_listen_on_one_port_of_this_machine(oracle_server: Serving) -> None:
    server = psutil.Process(oracle_server.process.pid)
    every = [server, *server.children(recursive=True)]
    found = {each.laddr for process in every for each in process.net_connections("inet") if each.status == "LISTEN"}
    assert found == {("127.0.0.1", oracle_server.port)}
    assert len(every) >= 3  # the server, the gateway and the engine


def child(parent: int, module: str) -> psutil.Process | None:
    return next((each for each in psutil.Process(parent).children() if module in each.cmdline()), None)


@pytest.mark.processes
@pytest.mark.nightly
def test_health_follows_an_engine_that_is_stopped_and_a_gateway_that_is_killed() -> None:
    serving = Serving("--model", "oracle").ready()
    try:
        serving.ask("/v1/completions", COMPLETION)
        gateway = child(serving.process.pid, "umbel.srt.gateway")
        assert gateway is not None
        engine = child(gateway.pid, "umbel.srt.engine.process")
        assert engine is not None
        engine.suspend()
        until(lambda: serving.attempt("/health") is None, "a stopped engine counts as healthy")
        until(lambda: serving.attempt("/health"), "the engine is not replaced")
        gateway.kill()
        until(lambda: serving.attempt("/health") is None, "a server without a gateway counts as healthy")
        until(lambda: serving.attempt("/health"), "without a request the gateway is not replaced")
        assert serving.ask("/v1/completions", COMPLETION)["usage"]["completion_tokens"] == 9
    finally:
        serving.end()
