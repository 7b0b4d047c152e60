"""Programmatic dependent launch (PDL), from Hopper on: programs are there before the kernel in front of them is done.

    without     kernel 1 ─────────┤ drain, launch ├─ kernel 2 ─────────
    PDL         kernel 1 ─────────┤─ kernel 2 ─────────
                     └ programs of kernel 2 are there, their first weights on their way

A kernel that is launched with PDL may read what no kernel writes, weights for one, before it waits. It reads and writes
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
def pdl_options(device: torch.device) -> dict[str, Any]:
    """Options for the launch of a kernel that calls `wait_for_previous_kernels`, on devices of all kinds."""
    return {"PDL": True, "launch_pdl": True} if supports_pdl(device) else {"PDL": False}


@cache
def supports_pdl(device: torch.device) -> bool:
    if device.type != "cuda" or triton.knobs.runtime.interpret:
        return False
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= CAPABILITY


@jit
def wait_for_previous_kernels(PDL: tl.constexpr):  # type: ignore[no-untyped-def]
    """Waits until all that was launched before is done; from then on the kernel after this one may be there."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
