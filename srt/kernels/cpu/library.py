"""The loaded library: one per process. Each family of kernels declares its own functions beside its torch twins."""

import ctypes
import logging
from functools import cache

from .build import WrongKernels, library_path
from .isa import Isa, choose_isa, narrower

_log = logging.getLogger("umbel.engine")


@cache
def load_library(isa: Isa | None = None) -> ctypes.CDLL:
    """The kernels, compiled on first use, for `isa` or else the fastest instruction set that works on this CPU.

    Raises:
        NoKernels: they cannot be had here.
        ParameterError: `UMBEL_CPU_ISA` asks for what this CPU does not run.
    """
    library = ctypes.CDLL(str(library_path(isa)) if isa else _widest())
    library.umbel_set_threads.argtypes = [ctypes.c_int]
    library.umbel_set_threads.restype = None
    library.umbel_threads.restype = ctypes.c_int
    library.umbel_isa.restype = ctypes.c_char_p
    return library


def isa_of(library: ctypes.CDLL) -> Isa:
    """The instruction set it was compiled for."""
    return Isa(library.umbel_isa().decode())


def _widest() -> str:
    """The path of the widest that passes its self-check: what a CPU lists may still not work."""
    isa = choose_isa()
    while True:
        try:
            return str(library_path(isa))
        except WrongKernels as error:
            next_isa = narrower(isa)
            if next_isa is None:
                raise
            _log.warning("%s; the %s kernels are taken", error, next_isa.value)
            isa = next_isa
