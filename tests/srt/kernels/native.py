"""The instruction sets that the kernels' tests run on: all that this machine can execute, emulated tiles included. And
the teams of threads that must not change a bit of what kernels compute.
"""

import ctypes
import warnings
from collections.abc import Callable
from functools import cache
from typing import TypeVar

from umbel.srt.kernels.cpu.library import Isa, WrongKernels, cpu_flags, library_path, usable

BLOCKS_ONLY = Isa.AVX_VNNI  # differs from AVX2 in the products of blocks alone, see test_elsewhere.py
TEAMS = (1, 2, 3, 8)  # threads, more than this machine may have cores
WIDE = (Isa.AVX512, Isa.AMX)  # a machine that lists them may still fail their self-check; the runtime then goes without

Result = TypeVar("Result")


@cache
def native_isas() -> tuple[Isa, ...]:
    here = cpu_flags()
    known = [isa for isa in Isa if isa is not BLOCKS_ONLY and usable(isa, here)]
    return tuple(isa for isa in known if isa not in WIDE or _works(isa))


def _works(isa: Isa) -> bool:
    try:
        library_path(isa)
    except WrongKernels as error:
        warnings.warn(f"not tested here: {error}", stacklevel=2)
        return False
    return True


def with_each_team(library: ctypes.CDLL, compute: Callable[[], Result]) -> list[Result]:
    """Returns what each of `TEAMS` computes. The library has the threads that it had before, then."""
    before = library.umbel_threads()
    try:
        results = []
        for threads in TEAMS:
            library.umbel_set_threads(threads)
            results.append(compute())
        return results
    finally:
        library.umbel_set_threads(before)
