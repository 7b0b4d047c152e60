"""The ranks that compute one model together, as its layers see them.

    Team    Alone   one rank that has all: nothing to exchange
            Ranks   a process for each, over torch.distributed: NCCL between CUDA devices, gloo between CPUs

Every rank makes the same calls in the same order; a call returns when the others have made theirs. Both transports
connect through ports of the loopback (`config.engine_environment`). Those of gloo do not ask who connects: where users
of one machine do not trust each other, a model is better left to one rank.
"""

from datetime import timedelta
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist

MEETING = timedelta(minutes=10)  # how long one rank waits for the others: one may read its weights that much later


class Team(Protocol):
    """`rank` is one of 0 … `ranks` − 1. Rank 0 schedules and samples, the others compute their part."""

    rank: int
    ranks: int

    def sum(self, part: torch.Tensor) -> torch.Tensor:
        """What all ranks have, added up, on every rank. It may be written to the part itself, which is contiguous."""

    def gather(self, part: torch.Tensor) -> list[torch.Tensor]:
        """On rank 0 the parts of all ranks, in their order; elsewhere none. All parts have one shape."""

    def follow(self, values: torch.Tensor) -> None:
        """In place: every rank gets what rank 0 has."""

    def least(self, number: int) -> int:
        """The smallest of the ranks' numbers, on every rank."""


class Alone:
    """A `Team` of one."""

    rank = 0
    ranks = 1

    def sum(self, part: torch.Tensor) -> torch.Tensor:
        return part

    def gather(self, part: torch.Tensor) -> list[torch.Tensor]:
        return [part]

    def follow(self, values: torch.Tensor) -> None:
        """Rank 0 has what it has."""

    def least(self, number: int) -> int:
        return number


ALONE: Team = Alone()


class Ranks:
    """A `Team` of processes. This process may be in one such team only.

    Args:
        rendezvous: a file that all of them can write, in a folder of theirs alone; nobody has used it before.
        device: where this rank computes.

    Raises:
        RuntimeError: the others did not come, or this torch has no such transport.
    """

    def __init__(self, rank: int, ranks: int, *, rendezvous: Path, device: torch.device) -> None:
        self.rank = rank
        self.ranks = ranks
        self._device = device
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            # A TCP store would listen on all interfaces.
            store=dist.FileStore(str(rendezvous), ranks),  # type: ignore[attr-defined]  # it is, at run time
            rank=rank,
            world_size=ranks,
            timeout=MEETING,
            device_id=device if device.type == "cuda" else None,
        )

    def sum(self, part: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(part)
        return part

    def gather(self, part: torch.Tensor) -> list[torch.Tensor]:
        parts = [torch.empty_like(part) for _ in range(self.ranks)] if self.rank == 0 else []
        dist.gather(part, parts or None, dst=0)
        return parts

    def follow(self, values: torch.Tensor) -> None:
        dist.broadcast(values, src=0)

    def least(self, number: int) -> int:
        smallest = torch.tensor(number, device=self._device)
        dist.all_reduce(smallest, op=dist.ReduceOp.MIN)
        return int(smallest)
