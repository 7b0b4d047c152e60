"""Chooses the instruction set to compile the kernels for: the widest of this CPU, or the one in UMBEL_CPU_ISA."""

import os
import platform
from collections.abc import Mapping
from enum import Enum
from pathlib import Path

from ....lang.errors import ParameterError


class Isa(Enum):
    """Instruction sets, slowest first. `AMX_EMULATED` runs the tile code of AMX on any CPU with AVX2, for tests."""

    PORTABLE = "portable"
    AVX2 = "avx2"
    AVX512 = "avx512"
    AMX = "amx"
    AMX_EMULATED = "amx-emulated"

    @property
    def compiler_flags(self) -> tuple[str, ...]:
        return _FLAGS[self]


_AVX512 = ("avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni")  # as /proc/cpuinfo spells them
_NEEDS: dict[Isa, tuple[str, ...]] = {
    Isa.PORTABLE: (),
    Isa.AVX2: ("avx2", "fma", "f16c"),
    Isa.AVX512: ("avx2", "fma", "f16c", *_AVX512),
    Isa.AMX: ("avx2", "fma", "f16c", *_AVX512, "avx512_bf16", "amx_tile", "amx_bf16", "amx_int8"),
}
_WIDEST_FIRST = (Isa.AMX, Isa.AVX512, Isa.AVX2, Isa.PORTABLE)
_VECTOR_512 = ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx512vnni", "-mprefer-vector-width=512")
_FLAGS: dict[Isa, tuple[str, ...]] = {
    Isa.PORTABLE: (),
    Isa.AVX2: ("-mavx2", "-mfma", "-mf16c"),
    Isa.AVX512: ("-mavx2", "-mfma", "-mf16c", *_VECTOR_512),
    Isa.AMX: (
        *("-mavx2", "-mfma", "-mf16c", *_VECTOR_512, "-mavx512bf16"),
        *("-mamx-tile", "-mamx-bf16", "-mamx-int8", "-DUMBEL_AMX"),
    ),
    Isa.AMX_EMULATED: ("-mavx2", "-mfma", "-mf16c", "-DUMBEL_AMX", "-DUMBEL_AMX_EMULATED"),
}


def cpu_flags() -> frozenset[str]:
    """Returns the features that the operating system lists; empty if it lists none (not Linux)."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace")
    except OSError:
        return frozenset()
    for line in text.splitlines():
        if line.startswith("flags"):
            return frozenset(line.split(":", 1)[1].split())
    return frozenset()


def usable(isa: Isa, flags: frozenset[str]) -> bool:
    """Returns whether a CPU with these features runs it. The emulation needs AVX2."""
    return flags.issuperset(_NEEDS[Isa.AVX2 if isa is Isa.AMX_EMULATED else isa])


def narrower(isa: Isa, flags: frozenset[str] | None = None) -> Isa | None:
    """Returns the next one to try when `isa` does not work here; None after the last."""
    here = cpu_flags() if flags is None else flags
    below = _WIDEST_FIRST[_WIDEST_FIRST.index(isa) + 1 :] if isa in _WIDEST_FIRST else ()
    return next((other for other in below if usable(other, here)), None)


def choose_isa(environment: Mapping[str, str] | None = None, flags: frozenset[str] | None = None) -> Isa:
    """Returns `$UMBEL_CPU_ISA`, or the fastest that this CPU runs.

    Raises:
        ParameterError: the variable names none, or one that this CPU does not run.
    """
    here = cpu_flags() if flags is None else flags
    asked = (os.environ if environment is None else environment).get("UMBEL_CPU_ISA", "")
    if asked:
        names = ", ".join(isa.value for isa in Isa)
        if asked not in {isa.value for isa in Isa}:
            raise ParameterError(f"UMBEL_CPU_ISA={asked}: write one of {names}, or unset it")
        if not usable(Isa(asked), here):
            raise ParameterError(f"UMBEL_CPU_ISA={asked}: this CPU ({platform.machine()}) does not run it; unset it")
        return Isa(asked)
    return next(isa for isa in _WIDEST_FIRST if usable(isa, here))
