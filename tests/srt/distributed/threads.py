"""A communicator whose ranks are threads of one process: what needs no transport is tested without any."""

import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import torch
from umbel.srt.core.batch import Runner
from umbel.srt.distributed.ranks import LeaderRunner, ToRank, encode, follow, lead, to_rank

PATIENCE = 60.0  # seconds for which a rank waits for the others

Result = TypeVar("Result")


class Meeting:
    """Where all ranks put something down, and all read it."""

    def __init__(self, ranks: int) -> None:
        self._things: list[object] = [None] * ranks
        self._barrier = threading.Barrier(ranks, timeout=PATIENCE)

    def exchange(self, rank: int, thing: object) -> list[object]:
        """What every rank brings to this call, in the order of the ranks."""
        self._things[rank] = thing
        self._barrier.wait()
        things = list(self._things)
        self._barrier.wait()
        return things

    def give_up(self) -> None:
        """Whoever waits is told that nobody comes."""
        self._barrier.abort()


class ThreadCommunicator:
    """A `communicator.Communicator`."""

    def __init__(self, rank: int, ranks: int, meeting: Meeting) -> None:
        self.rank = rank
        self.ranks = ranks
        self._meeting = meeting

    def all_reduce(self, part: torch.Tensor) -> torch.Tensor:
        parts = self._tensors(part)
        return torch.stack(parts).sum(0)

    def gather(self, part: torch.Tensor) -> list[torch.Tensor]:
        parts = self._tensors(part)
        return parts if self.rank == 0 else []

    def broadcast(self, values: torch.Tensor) -> None:
        values.copy_(self._tensors(values)[0])

    def minimum(self, number: int) -> int:
        return min(int(part) for part in self._tensors(torch.tensor(number)))

    def _tensors(self, part: torch.Tensor) -> list[torch.Tensor]:
        assert part.is_contiguous(), "transports take contiguous tensors"
        things = self._meeting.exchange(self.rank, part.clone())
        parts = [thing for thing in things if isinstance(thing, torch.Tensor)]
        assert {other.shape for other in parts} == {part.shape}, "all ranks make the same calls"
        return parts


def on_ranks(ranks: int, work: Callable[[ThreadCommunicator], Result]) -> list[Result]:
    """What each rank makes of a communicator. The first exception of any of them is raised."""
    meeting = Meeting(ranks)

    def one(rank: int) -> Result:
        try:
            return work(ThreadCommunicator(rank, ranks, meeting))
        except BaseException:
            meeting.give_up()
            raise

    with ThreadPoolExecutor(ranks) as threads:
        futures = [threads.submit(one, rank) for rank in range(ranks)]
        errors = [error for future in futures if (error := future.exception()) is not None]
        for error in sorted(errors, key=lambda error: isinstance(error, threading.BrokenBarrierError)):
            raise error
        return [future.result() for future in futures]


class ThreadRanks:
    """A `ranks.OtherRanks`: what is said goes through sockets, as between processes."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.sent: list[ToRank] = []
        pairs = [socket.socketpair() for _ in range(1, ranks)]
        self._ends = [end for end, _ in pairs]
        self._theirs = [theirs for _, theirs in pairs]

    def send(self, message: ToRank) -> None:
        self.sent.append(message)
        for end in self._ends:
            end.sendall(encode(message))

    def received_by(self, rank: int) -> Iterator[ToRank]:
        """What is told to a rank, until the end."""
        with self._theirs[rank - 1] as theirs:
            yield from to_rank(theirs)

    def close(self) -> None:
        for end in self._ends:
            end.close()


@contextmanager
def led(ranks: int, build: Callable[[ThreadCommunicator], Runner]) -> Iterator[tuple[LeaderRunner, ThreadRanks]]:
    """A runner of all ranks; those but the first are threads that follow until the end."""
    meeting, others = Meeting(ranks), ThreadRanks(ranks)

    def one(rank: int) -> None:
        try:
            follow(build(ThreadCommunicator(rank, ranks, meeting)), others.received_by(rank))
        except BaseException:
            meeting.give_up()
            raise

    with ThreadPoolExecutor(ranks) as threads:
        futures = [threads.submit(one, rank) for rank in range(1, ranks)]
        try:
            yield lead(build(ThreadCommunicator(0, ranks, meeting)), others, sums="threads"), others
        finally:
            others.close()
        for future in futures:
            future.result()
