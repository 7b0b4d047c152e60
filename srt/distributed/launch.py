"""Builds a runner of all ranks: starts the other processes, connects to them, loads this rank's part of the model.

The death of a rank ends the engine: a rank that waits for it in an exchange may wait forever. The end of rank 0 ends
the others: their standard input closes, and the system signals them, see lang/transport/lifeline.py.
"""

import logging
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec
import torch

from ...lang.errors import WIRE_ERRORS, EngineError, ParameterError, UmbelError
from ...lang.runtime_options import RuntimeOptions
from ..core.batch import Runner
from ..core.cards import chosen_device, cuda_devices, resolve_device
from .communicator import Communicator, TorchCommunicator
from .ranks import LeaderRunner, RankFailed, RankReady, RankStart, ToRank, encode, from_rank, lead
from .symmetric import peer_obstacle, symmetric_sums

log = logging.getLogger("umbel.engine")

MODULE = "umbel.srt.engine.rank_process"
NOTICE = 60.0  # seconds that rank 0 has to read why another cannot start: it may first wait for that rank
LAST_WORDS = 1.0  # seconds to wait for the last messages of a process that has ended


class RankProcess:
    """Starts one other rank. Its pair of sockets has no name, so no other process can write to it.

    Raises:
        OSError: no process can be started.
    """

    def __init__(self, rank: int, options: RuntimeOptions, rendezvous: Path, replica: int) -> None:
        self.rank = rank
        self.answered = threading.Event()  # it is ready, has failed, or has ended
        self.ready: RankReady | None = None
        self.failure: RankFailed | None = None
        self._end, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", MODULE],
                stdin=subprocess.PIPE,
                stdout=2,  # what libraries print is no part of the program's output
                pass_fds=[theirs.fileno()],
            )
            start = RankStart(os.getpid(), rank, str(rendezvous), theirs.fileno(), options, replica)
            assert self._process.stdin is not None
            self._process.stdin.write(msgspec.json.encode(start) + b"\n")
            self._process.stdin.flush()

    def send(self, content: bytes) -> None:
        self._end.sendall(content)

    def listen(self) -> None:
        """Reads its messages until it has ended."""
        try:
            for message in from_rank(self._end):
                match message:
                    case RankReady():
                        self.ready = message
                    case RankFailed():
                        self.failure = message
                self.answered.set()
        except (OSError, ValueError, msgspec.MsgspecError) as error:
            log.debug("rank %d is as good as gone: %s", self.rank, error)
        self.answered.set()

    def end(self) -> None:
        """Kills it, and waits until it has ended."""
        self._process.kill()
        self._process.wait()
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._end.close()


class RankProcesses:
    """Starts all ranks but this one: the `OtherRanks` of ranks.py.

    Made in the main thread, whose death ends them. They read the model while this process does.

    Args:
        rendezvous: see communicator.TorchCommunicator.
        replica: number of the engine.
        on_lost: called in a thread when one of them ends unexpectedly.
    """

    def __init__(
        self, options: RuntimeOptions, rendezvous: Path, replica: int = 0, *, on_lost: Callable[[str], None]
    ) -> None:
        self.ranks = options.tensor_parallel
        self._on_lost = on_lost
        self._ending = False
        self._noticed = threading.Event()
        self._processes: list[RankProcess] = []
        for rank in range(1, self.ranks):
            self._processes.append(RankProcess(rank, options, rendezvous, replica))
        for process in self._processes:
            threading.Thread(target=self._watch, args=(process,), name=f"rank {process.rank}", daemon=True).start()

    def send(self, message: ToRank) -> None:
        """Sends to all of them, in the order of the calls. Raises OSError when one has ended."""
        content = encode(message)
        for process in self._processes:
            process.send(content)

    def require_ready(self, num_slots: int) -> None:
        """Waits until all have loaded their part.

        Raises:
            UmbelError: one of them cannot; the message says which, and why.
        """
        for process in self._processes:
            process.answered.wait()
            if process.ready is None:
                self.raise_failure()
                raise EngineError(f"rank {process.rank} ended while it started")
            assert process.ready.num_slots == num_slots, "ranks that were told the same have pools of one size"

    def raise_failure(self) -> None:
        """Raises why another rank cannot start, if one says so: an error of this process may be its consequence.

        Raises:
            UmbelError: the other rank's error.
        """
        for process in self._processes:
            process.answered.wait(LAST_WORDS)
            if process.failure is not None:
                self._noticed.set()
                error = WIRE_ERRORS.get(process.failure.kind, EngineError)
                raise error(f"rank {process.rank}: {process.failure.message}")

    def end(self) -> None:
        """Kills them, and returns when they have ended."""
        self._ending = True
        for process in self._processes:
            process.end()

    def _watch(self, process: RankProcess) -> None:
        process.listen()
        if process.failure is not None:
            self._noticed.wait(NOTICE)
        if not (self._ending or self._noticed.is_set()):
            self._on_lost(f"rank {process.rank} is gone")


def launch_ranks(
    options: RuntimeOptions, rendezvous: Path, replica: int, build: Callable[[Communicator], Runner]
) -> LeaderRunner:
    """Starts the other ranks and builds rank 0. Afterwards the death of another rank ends this process.

    Args:
        rendezvous: see communicator.TorchCommunicator.
        replica: number of this engine.
        build: a rank's part of the model. The others call their own at the same time.

    Raises:
        ModelError, ParameterError: what `build` raises, or a device too few.
        EngineError: another rank cannot start; the message says which, and why.
    """
    device = device_of(options, 0, replica)
    processes = RankProcesses(options, rendezvous, replica, on_lost=_end_process)
    try:
        communicator = connect(options, 0, rendezvous, device)
        runner = build(communicator)
        processes.require_ready(runner.num_slots)
    except Exception as error:
        try:
            if not isinstance(error, UmbelError):  # such as a connection that another has closed
                processes.raise_failure()
            raise
        finally:
            processes.end()
    return lead(runner, processes, sums=communicator.sums)


def connect(options: RuntimeOptions, rank: int, rendezvous: Path, device: torch.device) -> TorchCommunicator:
    """Connects a rank to the others. Raises as `TorchCommunicator`.

    rendezvous: see communicator.TorchCommunicator.
    """
    symmetric = options.debug.symmetric_sums and device.type == "cuda"
    small_sums = partial(symmetric_sums, obstacle=peer_obstacle) if symmetric else None
    return TorchCommunicator(rank, options.tensor_parallel, rendezvous=rendezvous, device=device, small_sums=small_sums)


def device_of(options: RuntimeOptions, rank: int, replica: int = 0) -> torch.device:
    """Returns the device of a rank of an engine: a CUDA device of its own, or the CPU, which all share.

    Raises:
        ParameterError: there are fewer devices than ranks of all engines.
        ModelError: torch cannot use the device that `options` name.
    """
    first = resolve_device(chosen_device(options.device))
    ranks, replicas = options.tensor_parallel, options.replicas
    if first.type == "cpu" or ranks * replicas == 1:
        return first
    start = first.index or 0
    devices = torch.cuda.device_count() - start
    there = cuda_devices(devices) + (f" from cuda:{start} on" if start else "")
    if ranks > devices:
        raise ParameterError(
            f"tensor_parallel={ranks}: this machine has {there}, and each rank needs one of its own; "
            f'write at most tensor_parallel={devices}, or device="cpu"'
        )
    if replicas * ranks > devices:
        each = f"{ranks} of its own (tensor_parallel)" if ranks > 1 else "one of its own"
        raise ParameterError(
            f"replicas={replicas}: this machine has {there}, and each replica needs {each}; "
            f'write at most replicas={devices // ranks}, or device="cpu"'
        )
    return torch.device("cuda", start + replica * ranks + rank)


def _end_process(reason: str) -> None:
    """Ends at once: this process may be waiting for the rank that is gone. The gateway then fails all requests."""
    log.error("the engine ends: %s", reason)
    os._exit(1)
