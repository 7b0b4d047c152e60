"""The CUDA engine on two processes over gloo, with graphs that know addresses and exchanges only."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import torch
from umbel.srt.core.environment import engine_environment

from ..runners.cuda.engines import in_torch, tiny_model
from ..runners.cuda.test_scheduling import answers, traffic
from .gloo_rank import FAMILY, PATIENCE, QUESTIONS, Asked, Told

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[3]


def told_by_ranks(folder: Path, *, graphs: bool, overlap: bool, lacking: int | None = None) -> list[Told]:
    """Runs two processes to their ends. lacking: the one that cannot capture graphs."""
    environment = {**os.environ, **engine_environment(), "OMP_NUM_THREADS": "1"}
    running = []
    for rank, end in enumerate(socket.socketpair()):
        with end:
            asked = Asked(rank, str(folder / "meeting"), end.fileno(), graphs, overlap, lacking)
            running.append(
                subprocess.Popen(
                    [sys.executable, "-m", "tests.srt.distributed.gloo_rank", msgspec.json.encode(asked).decode()],
                    cwd=ROOT,
                    env=environment,
                    stdout=subprocess.PIPE,
                    pass_fds=[end.fileno()],
                )
            )
    try:
        printed = [process.communicate(timeout=PATIENCE)[0] for process in running]
    finally:
        for process in running:
            process.kill()
            process.wait()
    return [msgspec.json.decode(lines.splitlines()[-1], type=Told) for lines in printed]


@pytest.fixture(scope="module")
def truth() -> list[list[int]]:
    torch.set_num_threads(1)
    texts, _ = answers(in_torch(*tiny_model(FAMILY)), traffic(QUESTIONS), radix_cache=False, max_running=1)
    return texts


@pytest.mark.parametrize(
    ("graphs", "overlap"),
    [(True, True), *(pytest.param(*ways, marks=pytest.mark.nightly) for ways in ((True, False), (False, True)))],
)
@pytest.mark.nightly
def test_two_processes_give_the_tokens_of_one_with_graphs_and_without(
    tmp_path: Path, truth: list[list[int]], graphs: bool, overlap: bool
) -> None:
    first, other = told_by_ranks(tmp_path, graphs=graphs, overlap=overlap)
    assert first.texts == truth
    assert first.facts["graphs"] == other.facts["graphs"] == (4 if graphs else 0)
    assert first.facts["graph_replays"] == other.facts["graph_replays"]
    assert (int(first.facts["graph_replays"]) > 5) is graphs
    assert (first.overlapped > 3) is overlap
    assert first.logged == other.logged == []


@pytest.mark.nightly
def test_a_capture_that_fails_on_one_process_leaves_both_without_graphs(tmp_path: Path, truth: list[list[int]]) -> None:
    first, other = told_by_ranks(tmp_path, graphs=True, overlap=True, lacking=1)
    assert first.texts == truth
    assert first.facts["graphs"] == other.facts["graphs"] == 0
    assert first.logged == []
    assert other.logged == [
        "steps are launched kernel by kernel, not as graphs: rank 1: steps of 4 rows: "
        "OutOfMemoryError: no room for a graph"
    ]
