"""Reads the environment of a process, and makes those of its children.

It imports nothing of the language: the gateway needs it before it has imported anything else.
"""

import ctypes
import os
import sys

from .instruments import FaultHook, no_faults


def engine_environment() -> dict[str, str]:
    """Returns the environment of an engine process.

    OpenMP threads that wait by spinning starve each other as soon as other processes use the cores, such as the gateway
    and the program: a decode step of the default model took 1,350 ms instead of 78 ms on two busy cores.
    Sleeping costs little on idle ones. What the user has set stays.

    The ranks of tensor_parallel are on this machine, and their transports listen on its loopback only, whatever the
    user has set for programs on several machines.
    """
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    transports = {"GLOO_SOCKET_IFNAME": loopback, "NCCL_SOCKET_IFNAME": loopback}
    return {"OMP_WAIT_POLICY": "PASSIVE", **os.environ, **transports}


def worker_environment() -> dict[str, str]:
    """Returns the environment of processes with a memory limit: libraries reserve memory for each thread."""
    return {**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


def fault_hook() -> FaultHook:
    """Makes the hook for the fault point in UMBEL_FAULT, `point:k`: the process dies at the k-th visit, as if killed.

    As `point:k:hang` it sleeps there for ever, and keeps the interpreter lock. For tests of supervision: they wait for
    the point, not for time.
    """
    text = os.environ.get("UMBEL_FAULT", "")
    if not text:
        return no_faults
    point, _, rest = text.partition(":")
    count, _, action = rest.partition(":")
    wanted = int(count or "1")
    visits = 0

    def fail(visited: str) -> None:
        nonlocal visits
        if visited != point:
            return
        visits += 1
        if visits == wanted:
            if action == "hang":
                ctypes.PyDLL(None).pause()  # until a signal
            os._exit(70)

    return fail
