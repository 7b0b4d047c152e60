"""Connects the ranks that compute one model together, for the model's layers.

    Communicator    SingleRank          one rank that has all: nothing to exchange
                    TorchCommunicator   a process for each, over torch.distributed: NCCL between CUDA devices, gloo
                                        between CPUs
                      SmallSums         adds up small parts where devices read each other's memory (symmetric.py)

Every rank makes the same calls in the same order; a call returns when the others have made theirs. Both transports
connect through ports of the loopback (`config.engine_environment`). gloo does not authenticate connections: where users
of one machine do not trust each other, run a model on one rank.
"""

import zlib
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist

MEETING = timedelta(minutes=10)  # a rank waits this long for the others, which may read their weights more slowly


class Communicator(Protocol):
    """Exchanges tensors between ranks 0 … `ranks` − 1. Rank 0 schedules and samples; the others compute their part."""

    rank: int
    ranks: int

    def all_reduce(self, part: torch.Tensor) -> torch.Tensor:
        """Adds up the parts of all ranks, on every rank. May write the sum to the part itself, which is contiguous."""

    def gather(self, part: torch.Tensor) -> list[torch.Tensor]:
        """Returns the parts of all ranks on rank 0, in their order; elsewhere none. All parts have one shape."""

    def broadcast(self, values: torch.Tensor) -> None:
        """Overwrites the values of every rank with those of rank 0."""

    def minimum(self, number: int) -> int:
        """Returns the smallest of the ranks' numbers, on every rank."""


class SingleRank:
    """Implements `Communicator` for one rank."""

    rank = 0
    ranks = 1

    def all_reduce(self, part: torch.Tensor) -> torch.Tensor:
        return part

    def gather(self, part: torch.Tensor) -> list[torch.Tensor]:
        return [part]

    def broadcast(self, values: torch.Tensor) -> None:
        """Does nothing: rank 0 has its values."""

    def minimum(self, number: int) -> int:
        return number


SINGLE_RANK: Communicator = SingleRank()


def alike(communicator: Communicator, text: str) -> bool:
    """Returns whether all ranks call this with the same text, by its checksum; the same on every rank."""
    number = zlib.crc32(text.encode())
    least, most = communicator.minimum(number), -communicator.minimum(-number)
    return least == most


def first_failed(communicator: Communicator, *, failed: bool) -> int | None:
    """Returns the first rank that has failed at what all of them have tried; None: none has. The same on every rank."""
    first = communicator.minimum(communicator.rank if failed else communicator.ranks)
    return first if first < communicator.ranks else None


class SmallSums(Protocol):
    """Adds up the parts of all ranks faster than a transport, where they are small: `symmetric.SymmetricSums`."""

    name: str  # in the status of the runtime

    def takes(self, part: torch.Tensor) -> bool:
        """Returns whether parts of this form are added here; the same on all ranks."""

    def all_reduce(self, part: torch.Tensor) -> torch.Tensor:
        """As `Communicator.all_reduce`, of a part that `takes` accepts."""


class TorchCommunicator:
    """Implements `Communicator` for several processes. A process may have only one.

    Args:
        rendezvous: a new file that all ranks can write, in a folder that only they use.
        device: the device of this rank.
        small_sums: connects what adds up small parts in another way, once all ranks have met; it returns the same on
            all of them. None, also returned: the transport adds all.

    Raises:
        RuntimeError: the others did not connect, or this torch lacks the transport.
    """

    def __init__(
        self,
        rank: int,
        ranks: int,
        *,
        rendezvous: Path,
        device: torch.device,
        small_sums: Callable[[Communicator, torch.device], SmallSums | None] | None = None,
    ) -> None:
        self.rank = rank
        self.ranks = ranks
        self._device = device
        self._small_sums: SmallSums | None = None
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            # A TCP store would listen on all interfaces.
            store=dist.FileStore(str(rendezvous), ranks),  # type: ignore[attr-defined]  # it is, at run time
            rank=rank,
            world_size=ranks,
            timeout=MEETING,
            device_id=device if device.type == "cuda" else None,
        )
        if small_sums is not None:
            self._small_sums = small_sums(self, device)

    @property
    def sums(self) -> str:
        """Returns in words how parts are added up, for the status of the runtime."""
        transport = str(dist.get_backend())
        return transport if self._small_sums is None else f"{self._small_sums.name}, else {transport}"

    def all_reduce(self, part: torch.Tensor) -> torch.Tensor:
        if self._small_sums is not None and self._small_sums.takes(part):
            return self._small_sums.all_reduce(part)
        dist.all_reduce(part)
        return part

    def gather(self, part: torch.Tensor) -> list[torch.Tensor]:
        parts = [torch.empty_like(part) for _ in range(self.ranks)] if self.rank == 0 else []
        dist.gather(part, parts or None, dst=0)
        return parts

    def broadcast(self, values: torch.Tensor) -> None:
        dist.broadcast(values, src=0)

    def minimum(self, number: int) -> int:
        smallest = torch.tensor(number, device=self._device)
        dist.all_reduce(smallest, op=dist.ReduceOp.MIN)
        return int(smallest)
