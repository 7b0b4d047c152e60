"""Builds a runner of all ranks: starts the other processes, connects to them, loads this rank's part of the model."""

import logging
import os
from collections.abc import Callable
from pathlib import Path

import torch

from ...lang.errors import ParameterError, UmbelError
from ...lang.runtime_options import RuntimeOptions
from ..core.batch import Runner
from .communicator import Communicator, TorchCommunicator
from .leader import LeaderRunner, lead
from .processes import RankProcesses

log = logging.getLogger("umbel.engine")


def launch_ranks(options: RuntimeOptions, rendezvous: Path, build: Callable[[Communicator], Runner]) -> LeaderRunner:
    """Starts the other ranks and builds rank 0. Afterwards the death of another rank ends this process.

    Args:
        rendezvous: see communicator.TorchCommunicator.
        build: a rank's part of the model. The others call their own at the same time.

    Raises:
        ModelError, ParameterError: what `build` raises, or a device too few.
        EngineError: another rank cannot start; the message says which, and why.
    """
    device = device_of(options, 0)
    processes = RankProcesses(options, rendezvous, on_lost=_end_process)
    try:
        runner = build(TorchCommunicator(0, options.tensor_parallel, rendezvous=rendezvous, device=device))
        processes.require_ready(runner.num_slots)
    except Exception as error:
        try:
            if not isinstance(error, UmbelError):  # such as a connection that another has closed
                processes.raise_failure()
            raise
        finally:
            processes.end()
    return lead(runner, processes)


def device_of(options: RuntimeOptions, rank: int) -> torch.device:
    """Returns the device of a rank: a CUDA device of its own, or the CPU, which all share.

    Raises:
        ParameterError: there are fewer devices than ranks.
    """
    on_cuda = options.device == "cuda" or (options.device == "auto" and torch.cuda.is_available())
    if not on_cuda:
        return torch.device("cpu")
    devices, ranks = torch.cuda.device_count(), options.tensor_parallel
    if ranks > 1 and ranks > devices:
        raise ParameterError(
            f"tensor_parallel={ranks}: this machine has {devices} CUDA devices, and each rank needs one of its own; "
            f'write at most tensor_parallel={max(devices, 1)}, or device="cpu"'
        )
    return torch.device("cuda", rank)


def _end_process(reason: str) -> None:
    """Ends at once: this process may be waiting for the rank that is gone. The gateway then fails all requests."""
    log.error("the engine ends: %s", reason)
    os._exit(1)
