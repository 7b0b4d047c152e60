"""The instruction sets that the kernels' tests run on: all that this machine can execute, emulated tiles included."""

import warnings
from functools import cache

from umbel.srt.kernels.cpu.library import Isa, WrongKernels, cpu_flags, library_path, usable

BLOCKS_ONLY = Isa.AVX_VNNI  # differs from AVX2 in the products of blocks alone, see test_elsewhere.py
WIDE = (Isa.AVX512, Isa.AMX)  # a machine that lists them may still fail their self-check; the runtime then goes without


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
