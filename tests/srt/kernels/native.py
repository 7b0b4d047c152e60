"""The instruction sets that the kernels' tests run on: all that this machine can execute, emulated tiles included."""

import warnings
from functools import cache

from umbel.srt.kernels.cpu.library import Isa, WrongKernels, cpu_flags, library_path, usable

WIDE = (Isa.AVX512, Isa.AMX)  # a machine that lists them may still fail their self-check; the runtime then goes without


@cache
def native_isas() -> tuple[Isa, ...]:
    here = cpu_flags()
    return tuple(isa for isa in Isa if usable(isa, here) and (isa not in WIDE or _works(isa)))


def _works(isa: Isa) -> bool:
    try:
        library_path(isa)
    except WrongKernels as error:
        warnings.warn(f"not tested here: {error}", stacklevel=2)
        return False
    return True
