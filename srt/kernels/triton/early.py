"""Programs that are there before the kernel in front of them is done: programmatic dependent launch, from Hopper on.

    without     kernel 1 ─────────┤ drain, launch ├─ kernel 2 ─────────
    early       kernel 1 ─────────┤─ kernel 2 ─────────
                     └ programs of kernel 2 are there, their first weights on their way

A kernel that is launched early may read what no kernel writes, weights for one, before it waits. It reads and writes
nothing else before. Every program waits: only so is all that came before the kernel in front done, too.
"""

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .jit import jit

CAPABILITY = (9, 0)  # of devices that can


# Any: a switch that the kernel is compiled for, and an option of the launch.
def launched_early(device: torch.device) -> dict[str, Any]:
    """What a launch of a kernel that calls `wait_for_kernels_before` is given, on devices of all kinds."""
    return {"EARLY": True, "launch_pdl": True} if can_launch_early(device) else {"EARLY": False}


@cache
def can_launch_early(device: torch.device) -> bool:
    if device.type != "cuda" or triton.knobs.runtime.interpret:
        return False
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= CAPABILITY


@jit
def wait_for_kernels_before(EARLY: tl.constexpr):  # type: ignore[no-untyped-def]
    """Go on when all that was launched before is done; from then on the kernel behind this one may be there."""
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
