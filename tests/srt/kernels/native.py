"""The instruction sets that the kernels' tests run on: the widest that this machine executes and the portable one, and
in nightly runs all that it executes, emulated tiles included. Each is compiled first, in 40 seconds of a core. And the
teams of threads that must not change a bit of what kernels compute.
"""

import ctypes
import warnings
from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar

import pytest
from hypothesis import settings
from umbel.srt.kernels.cpu.library import Isa, WrongKernels, choose_isa, cpu_flags, library_path, narrower, usable

BLOCKS_ONLY = Isa.AVX_VNNI  # differs from AVX2 in the products of blocks alone, see test_elsewhere.py
TEAMS = (1, 2, 3, 8)  # threads, more than this machine may have cores
WIDE = (Isa.AVX512, Isa.AMX)  # a machine that lists them may still fail their self-check; the runtime then goes without

Result = TypeVar("Result")


def native_isas() -> tuple[Isa, ...]:
    """Returns those that this run tests."""
    return _everyday() if settings.get_current_profile_name() != "nightly" else tuple(filter(_works, _known()))


def isa_cases() -> list[Any]:  # Any: the class of pytest.param is pytest's own
    """Returns all as parameters: those of nightly runs are marked so."""
    everyday, tested = _everyday(), native_isas()
    others = [isa for isa in _known() if isa not in everyday and (isa in tested or isa not in WIDE)]
    return [
        *(pytest.param(isa, id=isa.value) for isa in everyday),
        *(pytest.param(isa, id=isa.value, marks=pytest.mark.nightly) for isa in others),
    ]


def _known() -> list[Isa]:
    here = cpu_flags()
    return [isa for isa in Isa if isa is not BLOCKS_ONLY and usable(isa, here)]


@cache
def _everyday() -> tuple[Isa, ...]:
    widest: Isa | None = choose_isa({})
    while widest is not None and (widest is BLOCKS_ONLY or not _works(widest)):
        widest = narrower(widest)
    return tuple(dict.fromkeys((Isa.PORTABLE, widest or Isa.PORTABLE)))


@cache
def _works(isa: Isa) -> bool:
    if isa not in WIDE:
        return True
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
