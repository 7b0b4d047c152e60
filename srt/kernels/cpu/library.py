"""The loaded library: one per process. Each family of kernels declares its own functions beside its torch twins."""

import ctypes
from functools import cache

from .build import library_path
from .isa import Isa, choose_isa


@cache
def load_library(isa: Isa | None = None) -> ctypes.CDLL:
    """The kernels, compiled on first use, for `isa` or else the fastest instruction set of this CPU.

    Raises:
        NoKernels: they cannot be had here.
        ParameterError: `UMBEL_CPU_ISA` asks for what this CPU does not run.
    """
    library = ctypes.CDLL(str(library_path(isa or choose_isa())))
    library.umbel_set_threads.argtypes = [ctypes.c_int]
    library.umbel_set_threads.restype = None
    library.umbel_threads.restype = ctypes.c_int
    return library
