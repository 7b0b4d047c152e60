"""The process of one of two ranks over gloo, for test_gloo.py: the CUDA engine on the host, with recorded graphs.

`python -m tests.srt.distributed.gloo_rank ASKED`, ASKED as JSON; prints what it has done, as JSON.
"""

import logging
import socket
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import torch
from umbel.srt.distributed import communicator as transports
from umbel.srt.distributed.communicator import TorchCommunicator
from umbel.srt.distributed.ranks import ToRank, encode, follow, lead, to_rank
from umbel.srt.models.sharding import ShardedTensors, shard_config
from umbel.srt.runners.cuda.device import CaptureFailed, Graph
from umbel.srt.runners.cuda.runner import CudaRunner

from ..runners.cuda.engines import on_host, tiny_model
from ..runners.cuda.recording import Recorder, RecordingAccelerator, recorded_parts
from ..runners.cuda.test_scheduling import answers, traffic

FAMILY = "llama, biases everywhere"
PATIENCE = 120.0  # seconds until a process that must answer counts as lost
QUESTIONS = 7


class Asked(msgspec.Struct, frozen=True):
    """Says what a rank is to do."""

    rank: int
    rendezvous: str
    socket: int  # its end of the pair
    graphs: bool
    overlap: bool
    lacking: int | None  # the rank that cannot capture


class Told(msgspec.Struct, frozen=True):
    """Describes what a rank has done."""

    texts: list[list[int]]  # tokens, of rank 0
    facts: dict[str, str | int | float]
    overlapped: int
    logged: list[str]


class RecordedCommunicator(TorchCommunicator):
    """Each exchange of a step is one operation of a graph that is being recorded."""

    def all_reduce(self, part: torch.Tensor) -> torch.Tensor:
        return self._noted(super().all_reduce, part)

    def gather(self, part: torch.Tensor) -> list[torch.Tensor]:
        parts: list[torch.Tensor] = self._noted(super().gather, part)
        return parts

    def _noted(self, exchange: Callable[[torch.Tensor], Any], part: torch.Tensor) -> Any:
        recorder = Recorder.active
        return exchange(part) if recorder is None else recorder.alone(exchange, part)


class NoCapture(RecordingAccelerator):
    """Runs the work of a capture, as CUDA does before it captures, and captures no step of four rows."""

    def __init__(self) -> None:
        super().__init__()
        self._captures = 0

    def capture(self, work: Callable[[], None]) -> Graph:
        graph = super().capture(work)
        self._captures += 1
        if self._captures == 2:
            raise CaptureFailed("OutOfMemoryError: no room for a graph")
        return graph


class Logged(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


class OneOther:
    """Implements `ranks.OtherRanks` for one other process."""

    ranks = 2

    def __init__(self, end: socket.socket) -> None:
        self._end = end

    def send(self, message: ToRank) -> None:
        self._end.sendall(encode(message))


def main(asked: Asked) -> Told:
    torch.set_num_threads(1)
    transports.MEETING = timedelta(seconds=PATIENCE)
    logged = Logged()
    logging.getLogger("umbel").addHandler(logged)
    communicator = RecordedCommunicator(asked.rank, 2, rendezvous=Path(asked.rendezvous), device=torch.device("cpu"))
    runner = rank_runner(asked, communicator)
    texts: list[list[int]] = []
    overlapped = 0
    with socket.socket(fileno=asked.socket) as end:
        if asked.rank == 0:
            texts, scheduler = answers(
                lead(runner, OneOther(end), sums=communicator.sums),
                traffic(QUESTIONS),
                max_running=4,
                overlap=asked.overlap,
            )
            overlapped = scheduler.counters["overlapped_steps"]
        else:
            follow(runner, to_rank(end))
    return Told(texts, dict(runner.facts()), overlapped, logged.messages)


def rank_runner(asked: Asked, communicator: RecordedCommunicator) -> CudaRunner:
    config, tensors = tiny_model(FAMILY)
    runner = on_host(
        shard_config(config, 2),
        ShardedTensors(tensors, config, communicator),
        accelerator=NoCapture() if asked.lacking == asked.rank else RecordingAccelerator(),
        parts=recorded_parts(),
        communicator=communicator,  # type: ignore[arg-type]  # it is no switch
        cuda_graphs=asked.graphs,
        max_running=8,
    )
    runner.capture_graphs()
    return runner


if __name__ == "__main__":
    print(msgspec.json.encode(main(msgspec.json.decode(sys.argv[1], type=Asked))).decode())
    torch.distributed.destroy_process_group()
