"""From options to a runner of all ranks: other processes, a meeting with them, this rank's part of the model."""

import logging
import os
from collections.abc import Callable
from pathlib import Path

import torch

from ...lang.errors import ParameterError, UmbelError
from ...lang.runtime_options import RuntimeOptions
from ..core.batch import Runner
from .communicator import Ranks, Team
from .leader import LeadingRunner, leading
from .processes import Crew

log = logging.getLogger("umbel.engine")


def open_ranks(options: RuntimeOptions, rendezvous: Path, build: Callable[[Team], Runner]) -> LeadingRunner:
    """Rank 0's side. From now on the death of another rank ends this process.

    Args:
        rendezvous: see team.Ranks.
        build: a rank's part of the model. The others call their own at the same time.

    Raises:
        ModelError, ParameterError: what `build` raises, or a device too few.
        EngineError: another rank cannot start; the message says which, and why.
    """
    device = device_of(options, 0)
    crew = Crew(options, rendezvous, lost=_end_process)
    try:
        runner = build(Ranks(0, options.tensor_parallel, rendezvous=rendezvous, device=device))
        crew.require_ready(runner.num_slots)
    except Exception as error:
        try:
            if not isinstance(error, UmbelError):  # such as a connection that another has closed
                crew.explain()
            raise
        finally:
            crew.end()
    return leading(runner, crew)


def device_of(options: RuntimeOptions, rank: int) -> torch.device:
    """Where a rank computes: on a CUDA device of its own, or on the CPU with all others.

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
    """At once: this process may be waiting for the one that is gone. The gateway sees it, and tells every request."""
    log.error("the engine ends: %s", reason)
    os._exit(1)
