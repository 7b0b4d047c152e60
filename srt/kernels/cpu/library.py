"""Loads the libraries, one of each per process. Each family of kernels declares its own functions."""

import ctypes
import logging
from functools import cache

from .build import NoKernels, WrongKernels, library_path, walk_path
from .isa import Isa, choose_isa, narrower

_log = logging.getLogger("umbel.engine")


def load_library(isa: Isa | None = None) -> ctypes.CDLL:
    """Loads the kernels, compiled on first use, for `isa` or else the fastest instruction set that works on this CPU.

    Raises:
        NoKernels: they are not available here. It is not tried again in this process.
        ParameterError: `UMBEL_CPU_ISA` names an instruction set that this CPU does not run.
    """
    return _loaded(_kernels(isa))


def load_walk() -> ctypes.CDLL:
    """Loads the library of the trie walk only, compiled on first use.

    Raises:
        NoKernels: it is not available here. It is not tried again in this process.
    """
    return _loaded(_walk())


def _loaded(found: ctypes.CDLL | str) -> ctypes.CDLL:
    if isinstance(found, str):
        raise NoKernels(found)
    return found


# Both cache the reason of a failure as text: a cached exception would keep its frames alive, and with them a model that
# was being loaded.


@cache
def _kernels(isa: Isa | None) -> ctypes.CDLL | str:
    try:
        library = ctypes.CDLL(str(library_path(isa)) if isa else _widest())
    except NoKernels as error:
        return str(error)
    library.umbel_set_threads.argtypes = [ctypes.c_int]
    library.umbel_set_threads.restype = None
    library.umbel_threads.restype = ctypes.c_int
    library.umbel_isa.restype = ctypes.c_char_p
    return library


@cache
def _walk() -> ctypes.CDLL | str:
    try:
        return ctypes.CDLL(str(walk_path()))
    except NoKernels as error:
        return str(error)


def isa_of(library: ctypes.CDLL) -> Isa:
    """Returns the instruction set that the library was compiled for."""
    return Isa(library.umbel_isa().decode())


def _widest() -> str:
    """Returns the path of the widest library that passes its self-check: a listed CPU feature may still not work."""
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
