"""Ranks as processes, under a whole runtime: their texts, their ends, and what they listen to."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import torch
import umbel as ul
from umbel.lang.errors import EngineError, ModelError, ParameterError
from umbel.lang.runtime_options import RuntimeOptions
from umbel.srt.core.environment import engine_environment
from umbel.srt.core.instruments import SystemClock, no_faults
from umbel.srt.distributed import launch
from umbel.srt.distributed.communicator import TorchCommunicator
from umbel.srt.distributed.launch import device_of
from umbel.srt.in_process import LocalBackend
from umbel.srt.launch import open_engine

from ..fake_cards import L4, FakeMachine
from ..models.vision.test_seeing_runtime import SIZES, ask, write
from ..models.vision.tiny import gemma3, noise
from ..weights.tiny import BY_NAME, write_folder

pytestmark = pytest.mark.processes

PATIENCE = 60.0  # seconds until a condition that must come counts as missing
OPTIONS = {"dtype": "float32", "kernels": "torch", "pool_tokens": 4000, "device": "cpu", "log_level": "error"}


@ul.function
def story(s: ul.State, about: str, tokens: int = 12) -> None:
    s += "A story about " + about + ul.gen("text", max_tokens=tokens, temperature=0.0, ignore_eos=True)
    s += ul.gen("more", max_tokens=tokens, temperature=1.0, seed=3, ignore_eos=True)


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    write(folder, gemma3(**SIZES))
    return folder


def stories(runtime: ul.Runtime | LocalBackend) -> list[str]:
    states = story.run_batch([{"about": about} for about in ("a fox", "two foxes", "the sea")], backend=runtime)
    return [state["text"] + state["more"] for state in states]


def answers(runtime: ul.Runtime | LocalBackend) -> list[str]:
    """To two questions about a picture."""
    questions = [{"image": noise(50, 31), "question": question} for question in (" what is it?", " and where?")]
    return [state["answer"] for state in ask.run_batch(questions, backend=runtime)]


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[str]:
    backend = LocalBackend(str(folder), **OPTIONS)
    return stories(backend) + answers(backend)


@pytest.fixture(scope="module")
def on_two(folder: Path) -> Iterator[ul.Runtime]:
    with ul.Runtime(str(folder), tensor_parallel=2, **OPTIONS) as runtime:
        yield runtime


def ranks_of(runtime: ul.Runtime) -> list[psutil.Process]:
    """Those but the first, which is the engine."""
    assert runtime._process is not None
    return [
        process
        for process in psutil.Process(runtime._process.process_id).children(recursive=True)
        if process.status() != psutil.STATUS_ZOMBIE and launch.MODULE in process.cmdline()
    ]


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


def test_two_ranks_write_the_texts_of_one(on_two: ul.Runtime, expected: list[str]) -> None:
    assert stories(on_two) + answers(on_two) == expected
    status = on_two.get_server_info()
    assert (status["ranks"], status["sums"]) == (2, "gloo")


def test_nothing_listens_but_on_the_loopback(on_two: ul.Runtime) -> None:
    assert on_two._process is not None
    gateway = psutil.Process(on_two._process.process_id)
    processes = [gateway, *gateway.children(recursive=True)]
    listening = [
        connection.laddr.ip
        for process in processes
        for connection in process.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    ]
    assert len(ranks_of(on_two)) == 1
    assert set(listening) <= {"127.0.0.1", "::1"}


def test_a_killed_rank_ends_the_engine_which_is_started_again(on_two: ul.Runtime, expected: list[str]) -> None:
    (rank,) = ranks_of(on_two)
    state = story.run(about="all foxes", tokens=200, backend=on_two, stream=True)  # what has begun is not asked again
    for _ in state.text_iter("text"):
        rank.kill()
        break
    with pytest.raises(EngineError):
        state["more"]
    assert stories(on_two) + answers(on_two) == expected


def test_a_rank_ends_with_its_engine(on_two: ul.Runtime) -> None:
    (rank,) = ranks_of(on_two)
    engine = rank.parent()
    assert engine is not None
    engine.kill()
    wait_until(lambda: not rank.is_running() or rank.status() == psutil.STATUS_ZOMBIE, "a rank outlived its engine")


@pytest.mark.nightly
def test_four_ranks_leave_nothing_behind(tmp_path: Path) -> None:
    """Two key heads: ranks 0 and 1 hold the same one."""
    write_folder(tmp_path / "model", BY_NAME["qwen3"])
    expected = stories(LocalBackend(str(tmp_path / "model"), **OPTIONS))
    with ul.Runtime(str(tmp_path / "model"), tensor_parallel=4, **OPTIONS) as runtime:
        assert stories(runtime) == expected
        assert runtime._process is not None
        place = runtime._process.folder
        ranks = ranks_of(runtime)
        assert len(ranks) == 3
    wait_until(lambda: not any(rank.is_running() for rank in ranks), "ranks outlived their runtime")
    assert not place.exists()


def opened(folder: Path, ranks: int, rendezvous: Path | None) -> None:
    options = RuntimeOptions(model=str(folder), tensor_parallel=ranks, **OPTIONS)
    open_engine(options, clock=SystemClock(), faults=no_faults, phase=lambda _: None, rendezvous=rendezvous)


def test_what_cannot_be_dealt_out_fails_the_start_with_the_remedy(folder: Path, tmp_path: Path) -> None:
    says = "its 4 attention heads cannot be dealt out to 3 ranks evenly; write tensor_parallel=1 or 2 or 4"
    with pytest.raises(ParameterError, match=says):
        opened(folder, 3, tmp_path / "meeting")


def test_without_processes_there_are_no_ranks(folder: Path) -> None:
    with pytest.raises(ParameterError, match=r"ranks are processes, which only umbel.Runtime starts"):
        opened(folder, 2, None)


def test_the_oracle_has_nothing_to_deal_out() -> None:
    with pytest.raises(ParameterError, match="tensor_parallel=2: the oracle has no weights"):
        ul.Runtime("oracle", tensor_parallel=2)


def test_a_rank_that_cannot_start_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in engine_environment().items():
        monkeypatch.setenv(name, value)
    lost: list[str] = []
    options = RuntimeOptions(model="/nowhere", tensor_parallel=2, device="cpu")
    others = launch.RankProcesses(options, tmp_path / "meeting", on_lost=lost.append)
    try:
        TorchCommunicator(0, 2, rendezvous=tmp_path / "meeting", device=torch.device("cpu"))
        with pytest.raises(ModelError, match="rank 1: there is no model, folder or file '/nowhere'"):
            others.require_ready(100)
    finally:
        others.end()
        torch.distributed.destroy_process_group()
    assert lost == []


def test_devices_too_few_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    FakeMachine(monkeypatch, tmp_path).sees(L4, L4)
    options = RuntimeOptions(tensor_parallel=4, device="cuda")
    with pytest.raises(ParameterError, match=r"this machine has 2 CUDA devices, .*; write at most tensor_parallel=2"):
        device_of(options, 0)
    assert device_of(RuntimeOptions(tensor_parallel=2, device="cuda"), 1) == torch.device("cuda", 1)
