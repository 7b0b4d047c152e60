"""Small parts are added up in another way where all ranks can, and by the communicator where one cannot.

The ranks are threads, and the kernels of torch are sums of the communicator.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from umbel.lang.runtime_options import DebugOptions, RuntimeOptions
from umbel.srt.core.environment import engine_environment
from umbel.srt.distributed import launch, symmetric
from umbel.srt.distributed.communicator import Communicator, TorchCommunicator
from umbel.srt.distributed.symmetric import MOST_BYTES, ONE_SHOT_BYTES, SymmetricSums, peer_obstacle, symmetric_sums

from .threads import ThreadCommunicator, on_ranks

CPU = torch.device("cpu")


class HostKernels:
    """Implements `symmetric.SumKernels`, and notes what is called. wrong: what it adds to each sum."""

    def __init__(self, communicator: Communicator, wrong: float = 0.0) -> None:
        self.called: list[str] = []
        self._communicator = communicator
        self._wrong = wrong

    def one_shot_all_reduce_copy(
        self, buffer: torch.Tensor, part: torch.Tensor, operation: str, group: str
    ) -> torch.Tensor:
        assert (operation, group) == ("sum", "all")
        self.called.append("one-shot")
        buffer.copy_(part)
        return self._communicator.all_reduce(buffer) + self._wrong

    def two_shot_all_reduce_out(
        self, buffer: torch.Tensor, operation: str, group: str, out: torch.Tensor
    ) -> torch.Tensor:
        assert (operation, group) == ("sum", "all")
        self.called.append("two-shot")
        return out.copy_(self._communicator.all_reduce(buffer) + self._wrong)


def no_obstacle(communicator: Communicator, device: torch.device) -> None:
    return None


def connected(communicator: Communicator, kernels: HostKernels) -> SymmetricSums:
    return SymmetricSums(torch.zeros(MOST_BYTES, dtype=torch.uint8), "all", communicator.ranks, kernels)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_sums_are_those_of_the_communicator_at_every_size(ranks: int) -> None:
    sizes = [64, ONE_SHOT_BYTES[ranks], min(ONE_SHOT_BYTES[ranks] + 64, MOST_BYTES)]

    def work(communicator: ThreadCommunicator) -> list[str]:
        kernels = HostKernels(communicator)
        sums = connected(communicator, kernels)
        for size in sizes:
            part = torch.full((2, size // 8), 1.0 + communicator.rank)
            assert sums.takes(part)
            assert torch.equal(sums.all_reduce(part), torch.full((2, size // 8), ranks * (ranks + 1) / 2))
        return kernels.called

    expected = ["one-shot" if size <= ONE_SHOT_BYTES[ranks] else "two-shot" for size in sizes]
    assert on_ranks(ranks, work) == [expected] * ranks


@pytest.mark.parametrize(
    ("part", "taken"),
    [
        (torch.zeros(8, dtype=torch.bfloat16), True),
        (torch.zeros(MOST_BYTES // 4), True),
        (torch.zeros(MOST_BYTES // 4 + 4), False),
        (torch.zeros(7, dtype=torch.bfloat16), False),
        (torch.zeros(8, dtype=torch.float16), False),
        (torch.zeros(0), False),
    ],
    ids=["few", "most", "more", "no multiple of 16 bytes", "float16", "none"],
)
def test_the_kernels_take_small_parts_of_some_dtypes(part: torch.Tensor, taken: bool) -> None:
    (sums, _) = on_ranks(2, lambda communicator: connected(communicator, HostKernels(communicator)))
    assert sums.takes(part) is taken


def agreed(
    connect: Callable[[Communicator, torch.device], SymmetricSums],
    obstacle: Callable[[Communicator, torch.device], str | None] = no_obstacle,
) -> list[bool]:
    """Returns for each of two ranks whether it adds in symmetric memory."""

    def work(communicator: ThreadCommunicator) -> bool:
        return symmetric_sums(communicator, CPU, obstacle=obstacle, connect=connect) is not None

    return on_ranks(2, work)


def test_ranks_that_all_can_add_in_symmetric_memory() -> None:
    assert agreed(lambda communicator, _: connected(communicator, HostKernels(communicator))) == [True, True]


def test_a_rank_that_cannot_leaves_all_sums_to_nccl(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)

    def connect(communicator: Communicator, device: torch.device) -> SymmetricSums:
        if communicator.rank:
            raise RuntimeError("CUDA driver error: no memory handles\nwhere it was")
        return connected(communicator, HostKernels(communicator))

    assert agreed(connect) == [False, False]
    assert [record.getMessage() for record in caplog.records] == [
        "ranks add up with NCCL: rank 1: RuntimeError: CUDA driver error: no memory handles"
    ]


def test_sums_that_are_wrong_on_one_rank_are_not_used(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)

    def connect(communicator: Communicator, device: torch.device) -> SymmetricSums:
        return connected(communicator, HostKernels(communicator, wrong=0.5 * communicator.rank))

    assert agreed(connect) == [False, False]
    assert [record.getMessage() for record in caplog.records] == [
        "ranks add up with NCCL: rank 1: a sum of 16 bytes is not that of NCCL"
    ]


def test_devices_that_cannot_lock_each_others_memory_are_not_connected(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(symmetric, "_has_atomics", lambda own, other: abs(own - other) < 2)

    def work(communicator: ThreadCommunicator) -> bool:
        device = torch.device("cuda", 3 + communicator.rank)

        def connect(communicator: Communicator, device: torch.device) -> SymmetricSums:
            raise AssertionError("no rank begins where one cannot")

        return symmetric_sums(communicator, device, obstacle=peer_obstacle, connect=connect) is not None

    assert on_ranks(4, work) == [False] * 4
    assert [record.getMessage() for record in caplog.records] == [
        "ranks add up with NCCL: rank 0: cuda:3 has no atomic operations on the memory of cuda:5 (NVLink has)"
    ]
    assert on_ranks(3, work) == [False] * 3
    assert caplog.records[-1].getMessage().endswith("torch's kernels are made for 2, 4, 8 ranks")


@dataclass
class Doubled:
    """Implements `communicator.SmallSums` for parts of four numbers."""

    name: str = "twice up to 4 numbers"

    def takes(self, part: torch.Tensor) -> bool:
        return len(part) <= 4

    def all_reduce(self, part: torch.Tensor) -> torch.Tensor:
        return 2 * part


def test_small_parts_go_another_way_and_all_others_through_the_transport(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in engine_environment().items():
        monkeypatch.setenv(name, value)
    met: list[int] = []

    def small_sums(communicator: Communicator, device: torch.device) -> Doubled:
        met.append(communicator.minimum(3))
        return Doubled()

    communicator = TorchCommunicator(0, 1, rendezvous=tmp_path / "meeting", device=CPU, small_sums=small_sums)
    try:
        assert met == [3], "the ranks are connected when it is made"
        assert communicator.sums == "twice up to 4 numbers, else gloo"
        sums = [communicator.all_reduce(torch.ones(count)).tolist() for count in (4, 5)]
        assert sums == [[2.0] * 4, [1.0] * 5]
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize(
    ("device", "debug", "tried"),
    [("cuda:1", {}, True), ("cuda:1", {"symmetric_sums": False}, False), ("cpu", {}, False)],
)
def test_a_switch_leaves_all_sums_to_the_transport(
    device: str, debug: dict[str, bool], tried: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    given: list[object] = []
    monkeypatch.setattr(launch, "TorchCommunicator", lambda *ranks, small_sums, **_: given.append(small_sums))
    options = RuntimeOptions(tensor_parallel=2, debug=DebugOptions(**debug))
    launch.connect(options, 1, tmp_path / "meeting", torch.device(device))
    assert [one is not None for one in given] == [tried]
