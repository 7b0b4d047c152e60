"""Gateway and engine as processes: killed, restarted, started many times, and gone with their parent.

All tests run the oracle model, and wait for conditions, not for time.
"""

import asyncio
import contextlib
import gc
import os
import re
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
import zmq
from umbel.interpreter.backends.runtime import Runtime
from umbel.interpreter.backends.runtime_gateway import GatewayProcess
from umbel.interpreter.backends.runtime_link import Link
from umbel.interpreter.loop import streams
from umbel.lang.errors import BackendError, ConnectionLostError, DeadlineError, EngineError, ModelError, UmbelError
from umbel.lang.prompt import Text
from umbel.lang.protocol import (
    Chunk,
    ConstraintSpec,
    Detokenize,
    Final,
    FinishReason,
    GenRequest,
    Locate,
    ScoreRequest,
    Tokenize,
)
from umbel.lang.runtime_options import RuntimeOptions
from umbel.lang.sampling import SamplingParams
from umbel.lang.status import EngineState, RuntimeState, RuntimeStatus
from umbel.lang.transport.link import Codec, Outbound, ToGateway

from ..own_processes import own_processes

pytestmark = pytest.mark.processes

LONG = SamplingParams(max_tokens=3000, temperature=0.0, ignore_eos=True)
CONSTRAINT = ConstraintSpec("regex", "[a-z ]{40,60}")
PATIENCE = 60.0  # seconds until a condition that must come counts as missing


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


def children() -> list[psutil.Process]:
    return own_processes("umbel.srt")


def engine_of(runtime: Runtime) -> psutil.Process:
    assert runtime._process is not None
    found = [
        process
        for process in psutil.Process(runtime._process.process_id).children()
        if process.is_running() and "umbel.srt.engine.process" in process.cmdline()
    ]
    assert len(found) == 1, "one engine per gateway"
    return found[0]


def folder_of(runtime: Runtime) -> Path:
    assert runtime._process is not None
    return runtime._process.folder


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="module")
def runtime() -> Iterator[Runtime]:
    """Shared by tests that kill parts of it: each finds it whole again."""
    with Runtime("oracle", debug={"step_delay": 0.005}) as runtime:
        yield runtime


@pytest.fixture
def own_runtime() -> Iterator[Runtime]:
    with Runtime("oracle", debug={"step_delay": 0.005}) as runtime:
        yield runtime


def request(name: str, sampling: SamplingParams = LONG) -> GenRequest:
    return GenRequest(name, (Text(f"prompt {name}: "),), sampling, stream=True)


async def tokens_of(runtime: Runtime, label: str) -> int:
    """Tokens of a short text that does not end by itself; some tokens are several characters."""
    async for event in runtime.generate(request(label, SamplingParams(max_tokens=5, ignore_eos=True))):
        if isinstance(event, Final):
            return event.usage.completion_tokens
    raise AssertionError("no ending")


async def run_batch_and(runtime: Runtime, count: int, act: Callable[[], None]) -> list[str | BaseException]:
    """`count` long requests; `act` is called when each of them has shown some text."""
    started = asyncio.Semaphore(0)

    async def one(index: int) -> str:
        shown = False
        async for event in runtime.generate(request(f"r{index}")):
            if isinstance(event, Chunk) and not shown:
                shown = True
                started.release()
            if isinstance(event, Final):
                return event.completions[0].text
        raise AssertionError("no ending")

    tasks = [asyncio.create_task(one(index)) for index in range(count)]
    for _ in range(count):
        await asyncio.wait_for(started.acquire(), PATIENCE)
    act()
    return await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), PATIENCE)


def test_a_killed_engine_ends_every_request_and_is_restarted(runtime: Runtime) -> None:
    runtime.wait_ready()
    killed_at = 0.0

    def kill() -> None:
        nonlocal killed_at
        engine_of(runtime).kill()
        killed_at = time.monotonic()

    async def scenario() -> tuple[list[str | BaseException], float, int]:
        results = await run_batch_and(runtime, 8, kill)
        seconds = time.monotonic() - killed_at
        return results, seconds, await tokens_of(runtime, "again")

    results, seconds, tokens = asyncio.run(scenario())
    assert all(isinstance(result, EngineError) for result in results)
    assert "SIGKILL" in str(results[0])
    assert seconds < 2.0  # a bound of the issue, far above what it takes
    assert tokens == 5


@pytest.mark.nightly
def test_requests_that_have_given_nothing_away_are_asked_the_next_engine(runtime: Runtime) -> None:
    async def answers(while_running: Callable[[], None]) -> list[object]:
        async def text(n: int, stream: bool) -> object:
            sampling = SamplingParams(max_tokens=400, temperature=0.8, seed=3, n=n, ignore_eos=True)
            asked = GenRequest(f"n{n}{stream}", (Text("prompt: "),), sampling, stream)
            return [event.completions async for event in runtime.generate(asked) if isinstance(event, Final)]

        async def constrained() -> object:
            asked = GenRequest("c", (Text("prompt: "),), SamplingParams(seed=3), constraint=CONSTRAINT)
            return [event.completions async for event in runtime.generate(asked) if isinstance(event, Final)]

        async def scored() -> object:
            asked = ScoreRequest("s", (Text("prompt "),), ("yes", "no"), unconditional=True)
            return (await runtime.score(asked)).choices

        await runtime.start()
        tasks = [asyncio.create_task(each) for each in (text(1, False), text(3, False), constrained(), scored())]
        while_running()
        return await asyncio.wait_for(asyncio.gather(*tasks), PATIENCE)

    quiet = asyncio.run(answers(lambda: None))
    for act in (psutil.Process.kill, psutil.Process.suspend):
        engine = engine_of(runtime)
        before = int(runtime.get_server_info().get("gateway_engine_losses", 0))
        assert asyncio.run(answers(lambda act=act, engine=engine: act(engine))) == quiet
        assert runtime.get_server_info()["gateway_engine_losses"] == before + 1
    assert runtime.get_server_info()["gateway_retried_requests"] >= 2 * len(quiet) - 2  # a score may have come before


def test_a_stopped_engine_counts_as_dead_and_is_replaced(runtime: Runtime) -> None:
    """The state of the runtime is known throughout, and its counters do not fall."""
    runtime.wait_ready()
    first = engine_of(runtime)
    read: list[asyncio.Task[RuntimeStatus]] = []

    def stop() -> None:
        first.send_signal(signal.SIGSTOP)
        read.append(asyncio.create_task(runtime.status()))

    async def scenario() -> tuple[list[str | BaseException], int]:
        await runtime.start()
        read.append(asyncio.create_task(runtime.status()))
        results = await run_batch_and(runtime, 2, stop)
        assert runtime.health().state is RuntimeState.RESTARTING
        tokens = await tokens_of(runtime, "again")
        assert runtime.health().healthy
        read.append(asyncio.create_task(runtime.status()))
        await asyncio.wait(read)
        return results, tokens

    results, tokens = asyncio.run(scenario())
    before, during, after = (task.result() for task in read)
    assert (before.gateway, before.generation) == (during.gateway, during.generation)
    assert (after.gateway, after.generation) == (before.gateway, before.generation + 1)
    assert after.engine_losses == before.engine_losses + 1
    for earlier, later in ((before, during), (during, after)):
        assert all(later.counters[name] >= count for name, count in earlier.counters.items())
    assert all(isinstance(result, EngineError) for result in results)
    assert "its process was stopped" in str(results[0])  # why it was ended, not how
    assert tokens == 5
    assert not first.is_running()


def test_a_request_during_the_restart_waits_for_the_new_engine(runtime: Runtime) -> None:
    async def scenario() -> int:
        """Ask until the gateway has seen the death, then generate at once."""
        await runtime.start()
        engine_of(runtime).kill()
        while (await runtime.status()).engine is not EngineState.STARTING:  # never asked of an engine
            await asyncio.sleep(0)
        return await tokens_of(runtime, "during")

    assert asyncio.run(asyncio.wait_for(scenario(), PATIENCE)) == 5


def test_a_killed_gateway_ends_every_request_and_the_next_use_starts_a_new_one(runtime: Runtime) -> None:
    runtime.wait_ready()
    assert runtime._process is not None
    gateway, engine, folder = psutil.Process(runtime._process.process_id), engine_of(runtime), folder_of(runtime)

    async def scenario() -> tuple[list[str | BaseException], int]:
        await runtime.start()
        before = await runtime.status()
        results = await run_batch_and(runtime, 4, gateway.kill)
        assert runtime.health().state is RuntimeState.BROKEN
        assert "SIGKILL" in runtime.health().cause
        with pytest.raises(BackendError, match="broken has no status"):
            await runtime.status()
        tokens = await tokens_of(runtime, "again")
        after = await runtime.status()
        assert after.gateway != before.gateway
        assert all(after.counters[name] >= count for name, count in before.counters.items())
        return results, tokens

    results, tokens = asyncio.run(scenario())
    assert all(isinstance(result, ConnectionLostError) for result in results)
    assert tokens == 5
    wait_until(lambda: not engine.is_running(), "the engine outlived its gateway")
    assert not folder.exists()


def test_a_gateway_that_is_stopped_is_replaced_and_its_engine_ended(own_runtime: Runtime) -> None:
    own_runtime.wait_ready()
    assert own_runtime._process is not None
    gateway, engine = psutil.Process(own_runtime._process.process_id), engine_of(own_runtime)

    async def scenario() -> tuple[list[str | BaseException], int]:
        results = await run_batch_and(own_runtime, 2, gateway.suspend)
        return results, await tokens_of(own_runtime, "again")

    results, tokens = asyncio.run(scenario())
    assert all(isinstance(result, ConnectionLostError) and "was stopped" in str(result) for result in results)
    assert tokens == 5
    wait_until(lambda: not gateway.is_running() and not engine.is_running(), "the stopped one goes on")
    assert own_runtime._process.process_id != gateway.pid


@pytest.mark.nightly
@pytest.mark.parametrize("act", [psutil.Process.kill, psutil.Process.suspend])
def test_requests_that_have_given_nothing_away_are_asked_a_second_gateway(
    act: Callable[[psutil.Process], None], own_runtime: Runtime
) -> None:
    """Texts are those of a run without a fault, whatever kind of request it is."""

    async def answers(while_running: Callable[[], None]) -> list[object]:
        async def text(n: int, stream: bool) -> object:
            sampling = SamplingParams(max_tokens=400, temperature=0.8, seed=3, n=n, ignore_eos=True)
            asked = GenRequest(f"n{n}{stream}", (Text("prompt: "),), sampling, stream)
            return [event.completions async for event in own_runtime.generate(asked) if isinstance(event, Final)]

        async def scored() -> object:
            asked = ScoreRequest("s", (Text("prompt "),), ("yes", "no"), unconditional=True)
            return (await own_runtime.score(asked)).choices

        async def located() -> object:
            return (await own_runtime.locate(Locate("l", (Text("prompt "),), (3,)))).tokens

        async def tokens() -> object:
            ids = (await own_runtime.tokenize(Tokenize("t", (Text("prompt "),)))).token_ids
            return ids, (await own_runtime.detokenize(Detokenize("d", ids, control=True))).text

        async def flushed() -> object:
            return (await own_runtime.control("flush_cache")).result

        await own_runtime.start()
        asked = (text(1, False), text(3, False), scored(), located(), tokens(), flushed())
        tasks = [asyncio.create_task(each) for each in asked]
        while_running()
        return await asyncio.wait_for(asyncio.gather(*tasks), PATIENCE)

    quiet = asyncio.run(answers(lambda: None))
    assert own_runtime._process is not None
    gateway = psutil.Process(own_runtime._process.process_id)
    assert asyncio.run(answers(lambda: act(gateway))) == quiet
    assert own_runtime.get_server_info()["client_retried_requests"] == 6
    assert quiet[4] == ((256, *b"prompt "), "<s>prompt ")
    assert own_runtime.vocabulary.control["<s>"] == own_runtime.vocabulary.bos_id == 256


@pytest.mark.nightly
def test_links_of_several_threads_that_find_a_gateway_stopped_replace_it_once(own_runtime: Runtime) -> None:
    own_runtime.wait_ready()
    assert own_runtime._process is not None
    gateway, before = psutil.Process(own_runtime._process.process_id), len(children())
    stopped = threading.Barrier(5, action=gateway.suspend)

    def use() -> int:
        async def both() -> int:
            assert await tokens_of(own_runtime, "before") == 5
            await asyncio.to_thread(stopped.wait)
            return await tokens_of(own_runtime, "after")

        return asyncio.run(both())

    with ThreadPoolExecutor(5) as pool:
        answers = [pool.submit(use) for _ in range(5)]
        assert [answer.result(timeout=PATIENCE) for answer in answers] == [5] * 5
    wait_until(lambda: len(children()) == before, "more than one gateway was started")
    assert own_runtime._process is not None
    assert own_runtime._process.process_id != gateway.pid


@pytest.mark.nightly
def test_a_gateway_that_is_stopped_while_it_starts_is_found(own_runtime: Runtime) -> None:
    async def scenario() -> None:
        starting = asyncio.create_task(own_runtime.start())
        while own_runtime._process is None:
            await asyncio.sleep(0)
        os.kill(own_runtime._process.process_id, signal.SIGSTOP)
        with pytest.raises(ConnectionLostError, match="while it started: its process was stopped"):
            await asyncio.wait_for(starting, PATIENCE)

    asyncio.run(scenario())
    assert own_runtime._process is None
    assert own_runtime.complete("hello", {"max_tokens": 1})


def test_a_start_that_takes_too_long_says_where_it_was_and_what_it_got(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = Runtime("oracle", startup_timeout=0.001)
    with pytest.raises(DeadlineError) as caught:
        runtime.wait_ready()
    assert "startup_timeout of 0.001 s: it has been starting the gateway for" in str(caught.value)
    assert re.search(r"consumed [\d.]+ s of CPU time and waited [\d.]+ s for a core", str(caught.value))
    assert re.search(r"the machine is (not )?busy \(load [\d.]+ on \d+ cores\)", str(caught.value))
    assert runtime._process is None


def test_an_aborted_request_gives_its_text_so_far(runtime: Runtime) -> None:
    async def story() -> list[Chunk | Final]:
        events = []
        async for event in runtime.generate(request("a", SamplingParams(max_tokens=10_000, ignore_eos=True))):
            if not events:
                assert runtime.abort("a")
                assert not runtime.abort("b")
            events.append(event)
        return events

    *chunks, final = asyncio.run(story())
    assert isinstance(final, Final)
    (completion,) = final.completions
    assert completion.finish_reason is FinishReason.ABORT
    assert completion.text == "".join(chunk.text for chunk in chunks if isinstance(chunk, Chunk))


def test_a_client_that_vanishes_without_a_word_has_its_requests_aborted(runtime: Runtime) -> None:
    runtime.wait_ready()
    assert runtime._process is not None
    aborted = runtime.get_server_info()["aborted"]
    outbound: Outbound[ToGateway] = Outbound(Codec(ToGateway))
    with zmq.Context() as context, context.socket(zmq.DEALER) as vanishing:
        vanishing.connect(runtime._process.address)
        vanishing.send_multipart(outbound.write([request("vanishing")]))
        assert vanishing.poll(PATIENCE * 1000), "no text came"
        vanishing.close(linger=0)
    wait_until(lambda: runtime.get_server_info()["aborted"] != aborted, "the request of a gone client goes on")
    assert runtime.get_server_info()["in_flight"] == 1  # this question


def test_nothing_is_left_when_the_parent_is_killed(tmp_path: Path) -> None:
    program = textwrap.dedent("""
        import sys
        from umbel.interpreter.backends.runtime import Runtime
        runtime = Runtime("oracle").wait_ready()
        print(runtime._process.process_id, runtime._process.folder, flush=True)
        sys.stdin.read()
    """)
    environment = {**os.environ, "TMPDIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    parent = subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
        cwd=tmp_path,
    )
    assert parent.stdout is not None
    line = parent.stdout.readline().split()
    gateway = psutil.Process(int(line[0]))
    wait_until(lambda: len(gateway.children(recursive=True)) == 2, "an engine and a compiler of constraints")
    family = [gateway, *gateway.children(recursive=True)]
    parent.kill()
    parent.wait()
    wait_until(lambda: not any(map(psutil.Process.is_running, family)), "a process outlived the killed parent")
    wait_until(lambda: not Path(line[1]).exists(), "the sockets' folder outlived the killed parent")


@pytest.mark.nightly
def test_ten_starts_and_stops_leave_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    process, others = psutil.Process(), set(children())

    def started() -> Runtime:
        runtime = Runtime("oracle")

        async def begin() -> None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(runtime.start(), 0.05)

        asyncio.run(begin())
        return runtime

    before: tuple[int, int] | None = None
    for cycle in range(10):
        runtime = (
            Runtime("oracle").wait_ready() if cycle in (0, 4, 9) else started()
        )  # most are stopped while they start
        runtime.shutdown()
        now = (process.num_fds(), process.num_threads())
        if cycle == 1:
            before = now  # loops and helper threads exist from the first use on
        if before is not None:
            assert now <= before
    assert set(children()) == others
    assert list(tmp_path.iterdir()) == []


def test_closing_ends_what_runs_and_a_closed_runtime_says_so(own_runtime: Runtime) -> None:
    own_runtime.wait_ready()
    assert own_runtime._process is not None
    gateway = psutil.Process(own_runtime._process.process_id)
    wait_until(lambda: len(gateway.children(recursive=True)) == 2, "an engine and a compiler of constraints")
    family = [gateway, *gateway.children(recursive=True)]

    async def scenario() -> list[str | BaseException]:
        closing: list[asyncio.Task[None]] = []
        results = await run_batch_and(own_runtime, 2, lambda: closing.append(asyncio.create_task(own_runtime.close())))
        await asyncio.gather(*closing)
        return results

    assert all(isinstance(result, UmbelError) for result in asyncio.run(scenario()))
    wait_until(lambda: not any(map(psutil.Process.is_running, family)), "a process outlived the closed runtime")
    with pytest.raises(BackendError, match="closed"):
        own_runtime.complete("hello")


def test_a_runtime_that_nobody_holds_ends_its_processes() -> None:
    runtime = Runtime("oracle").wait_ready()
    assert runtime._process is not None
    gateway, engine = psutil.Process(runtime._process.process_id), engine_of(runtime)
    del runtime
    gc.collect()
    wait_until(lambda: not gateway.is_running() and not engine.is_running(), "a forgotten runtime goes on")


def test_an_orderly_end_saves_the_cache_for_the_next_start_and_a_quick_one_does_not(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    cached = []
    for end in (Runtime.end_at_once, Runtime.close, Runtime.close):
        runtime = Runtime("oracle", disk_cache=str(tmp_path / "pages"))
        final = runtime.final_of("a" * 200, {"max_tokens": 1})
        cached.append(final.usage.cached_tokens)
        assert runtime._process is not None
        family = [psutil.Process(runtime._process.process_id), engine_of(runtime)]
        streams.run(end(runtime))
        wait_until(lambda family=family: not any(map(psutil.Process.is_running, family)), "a process goes on")
    assert cached == [0, 0, 192]


def test_two_runtimes_live_side_by_side() -> None:
    with Runtime("oracle") as first, Runtime("oracle") as second:
        answers = {
            str(each.final_of("hello", {"max_tokens": 8, "temperature": 0}).completions) for each in (first, second)
        }
        assert len(answers) == 1
        assert folder_of(first) != folder_of(second)
        first.shutdown()
        assert second.final_of("hello", {"max_tokens": 1}).usage.cached_tokens == len("hello")  # BOS + hell


def test_no_network_socket_listens_and_the_folder_is_private(runtime: Runtime) -> None:
    runtime.wait_ready()
    for process in children():
        assert process.net_connections(kind="inet") == []
    assert folder_of(runtime).stat().st_mode & 0o777 == 0o700


def test_waiting_threads_of_the_engine_sleep(runtime: Runtime) -> None:
    runtime.wait_ready()
    assert engine_of(runtime).environ()["OMP_WAIT_POLICY"] == "PASSIVE"


def test_a_failed_start_raises_the_original_error_and_leaves_nothing() -> None:
    runtime = Runtime("no-such-model")
    for _ in range(2):  # the second try is as good as the first
        with pytest.raises(ModelError, match="no-such-model"):
            runtime.wait_ready()
        assert runtime._process is None


def test_an_engine_that_always_dies_while_starting_is_given_up_with_the_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UMBEL_FAULT", "engine.start:1")
    runtime = Runtime("oracle")
    with pytest.raises(EngineError, match="status 70"):
        runtime.wait_ready()
    runtime.shutdown()


@pytest.mark.nightly
def test_a_start_that_hangs_ends_by_its_startup_timeout_and_says_in_which_phase(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("UMBEL_FAULT", "engine.start:1:hang")
    runtime = Runtime("oracle", startup_timeout=8.0)  # longer than any silence that counts later
    with pytest.raises(DeadlineError, match=r"of 8 s: it has been starting the (engine|gateway) for \d s"):
        runtime.wait_ready()
    assert runtime._process is None


def test_no_start_of_an_engine_takes_longer_than_the_startup_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UMBEL_FAULT", "engine.start:1:hang")
    process = GatewayProcess(RuntimeOptions(model="oracle"), 0.5)

    async def start() -> None:
        link = Link(process, lambda _: None)
        with pytest.raises(EngineError, match=r"not become ready within the startup_timeout of 0\.5 s; it consumed"):
            await asyncio.wait_for(link.ready(PATIENCE), 2 * PATIENCE)
        await link.close()

    try:
        asyncio.run(start())
    finally:
        process.close()


@pytest.mark.parametrize(
    ("point", "kind", "says"),
    [
        ("engine.forward:6:hang", EngineError, "no sign of life"),
        pytest.param(*("gateway.send:1:hang", ConnectionLostError, "it has not answered"), marks=pytest.mark.nightly),
    ],
)
@pytest.mark.nightly
def test_a_process_that_sleeps_with_the_interpreter_lock_is_found_and_replaced(
    point: str, kind: type[UmbelError], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It hangs at the same point again and again, so that the request ends with both findings."""
    monkeypatch.setenv("UMBEL_FAULT", point)
    with Runtime("oracle") as runtime:
        with pytest.raises(kind, match=says) as caught:
            runtime.complete("hello", max_tokens=50, temperature=0, ignore_eos=True)
        assert str(caught.value).count(says) == 2


@pytest.mark.parametrize(
    ("point", "kind", "says"),
    [("engine.forward:6", EngineError, "it was asked again"), ("gateway.send:1", ConnectionLostError, "a second one")],
)
def test_a_request_that_ends_two_processes_ends_with_an_error_that_says_so(
    point: str, kind: type[UmbelError], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UMBEL_FAULT", point)
    with Runtime("oracle") as runtime, pytest.raises(kind, match=says) as caught:
        runtime.complete("hello", max_tokens=50, temperature=0, ignore_eos=True)
    assert str(caught.value).count("status 70") == 2


def folder_like_ours(place: Path, name: str) -> Path:
    folder = place / f"umbel-runtime-{name}"
    folder.mkdir(mode=0o700)
    (folder / "lock").touch()
    return folder


def test_a_folder_left_by_a_killed_gateway_is_removed_at_the_next_start(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    stale = folder_like_ours(tmp_path, "stale")
    for name in ("engine-1", "pulse-1", "ranks-1"):  # the last of a runtime with tensor_parallel
        (stale / name).touch()
    kept = {
        folder_like_ours(tmp_path, "without-lock") / "lock": Path.unlink,
        folder_like_ours(tmp_path, "of-somebody") / "thesis.tex": Path.touch,
        folder_like_ours(tmp_path, "not-private"): lambda path: path.chmod(0o755),
    }
    for path, act in kept.items():
        act(path)
    folders = set(tmp_path.iterdir()) - {stale}
    first = GatewayProcess(RuntimeOptions(model="oracle"), 900.0)
    try:
        assert not stale.exists()
        GatewayProcess(RuntimeOptions(model="oracle"), 900.0).close()
        assert first.folder.exists()  # the living one holds its lock
    finally:
        first.close()
    assert set(tmp_path.iterdir()) == folders


def test_a_temporary_folder_with_a_long_path_is_not_used_for_sockets(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    process = GatewayProcess(RuntimeOptions(model="oracle"), 900.0)
    try:
        assert len(process.address) < 80
        assert list(long.iterdir()) == []
    finally:
        process.close()
    assert not process.folder.exists()
